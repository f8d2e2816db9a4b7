"""Models with logits that differ from TRL's head: found by scoring with both, and listed in the docs."""

import inspect
import re

import pytest
import torch
import transformers
from architectures import MODEL_TYPES, build, left_padded_batch
from checkout import ROOT
from trl.trainer.utils import add_fused_lm_head

from liger_trainer.head.calls import install_fused_head

SECTION = (ROOT / "docs" / "trainers.md").read_text().partition("## Where losses differ")[2].partition("\n## ")[0]
QUICK = ("llama", "granite", "gemma2", "gemma3", "modernbert-decoder", "opt", "gemma3_text")
OTHER_LOGITS = set(re.findall(r"`([^`]+)`", SECTION)) - {"use_liger=False"}
# These models ignore a scale or cap in their config. Nothing differs where it is not set.
NOT_APPLIED = {
    "aya_vision": "logit_scale",
    "cohere2_vision": "logit_scale",
    "mpt": "logit_scale",
    "gemma3": "final_logit_softcapping",
    "shieldgemma2": "final_logit_softcapping",
}


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
        differs = True  # rembert, for example: its head takes vectors of another size
    except AttributeError:
        pytest.skip("TRL finds no backbone")
    listed = model_type in OTHER_LOGITS
    field = NOT_APPLIED.get(model_type)
    if field:
        listed = listed and getattr(model.config.get_text_config(), field, None) not in (None, 1)
    assert listed == differs
