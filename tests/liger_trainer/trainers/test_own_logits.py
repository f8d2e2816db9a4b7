"""Models whose own logits are not those of TRL's head: found by scoring with both, listed in the docs, and said."""

import inspect
import re
from types import SimpleNamespace

import pytest
import torch
import transformers
from architectures import MODEL_TYPES, build, left_padded_batch
from checkout import ROOT
from tiny_models import tiny_model
from transformers import Gemma3Config
from trl.trainer.utils import add_fused_lm_head
from trl_trainers import one, ours

from liger_trainer._logging import logger
from liger_trainer.head.install import install_fused_head
from liger_trainer.trainers.trl import NOT_APPLIED, OTHER_LOGITS, differs_from_trl

SECTION = (ROOT / "docs" / "trainers.md").read_text().partition("## Where losses differ")[2].partition("\n## ")[0]
QUICK = ("llama", "granite", "gemma2", "gemma3", "modernbert-decoder", "opt", "gemma3_text")


def loss(model):
    transformers.set_seed(1)
    batch = left_padded_batch()
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
        batch["mm_token_type_ids"] = torch.zeros_like(batch["input_ids"])
    with torch.no_grad():
        return model(**batch, use_cache=False, fused_lm_head=True).loss


@pytest.mark.parametrize(
    "model_type", [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in MODEL_TYPES]
)
def test_every_model_that_differs_is_recognised(model_type):
    (stock, reason), (model, _) = build(model_type), build(model_type)
    if model is None:
        pytest.skip(reason)
    add_fused_lm_head(stock)
    if install_fused_head(model) is not None:
        pytest.skip("not fused")
    try:
        got = loss(model)
    except Exception as error:  # noqa: BLE001 - needs pixels, audio, ...
        pytest.skip(str(error))
    try:
        differs = not torch.allclose(got, loss(stock), rtol=1e-4)
    except RuntimeError:
        differs = True  # as for rembert, whose head takes vectors of another size
    except AttributeError:
        pytest.skip("TRL finds no backbone")
    assert differs_from_trl(model) == differs


def test_the_docs_list_them():
    assert set(re.findall(r"`([^`]+)`", SECTION)) - {"use_liger=False"} == OTHER_LOGITS | NOT_APPLIED.keys()


def test_a_scale_or_a_cap_that_is_not_set_changes_nothing():
    assert not differs_from_trl(SimpleNamespace(config=Gemma3Config()))


@pytest.mark.parametrize("model_type", ["modernbert-decoder", "llama"])
@pytest.mark.parametrize("method", ["SFT", "DPO"])
def test_it_is_said_when_the_trainer_is_built(method, model_type, tmp_path, caplog):
    logger.warning_once.__func__.cache_clear()
    model = tiny_model("llama") if model_type == "llama" else build(model_type)[0]
    with caplog.at_level("WARNING", "liger_trainer"):
        one(method, ours(method), tmp_path, model)
    said = [record.message for record in caplog.records if "computes other logits than" in record.message]
    assert len(said) == (model_type == "modernbert-decoder"), said
