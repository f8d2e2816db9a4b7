"""Every causal LM of the installed transformers, with SDPA if it has it: a padded batch with `varlen_attention` equals
the same batch in stock. It takes minutes:

    pytest -s -m slow tests/liger_trainer/varlen/test_all_decoders.py
"""

import re

import pytest
import torch
import transformers
from architectures import LIMIT, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_TYPES, step
from attentions import decoder_in, documented, with_own_attention, written
from tiny_models import largest_difference
from varlen_batches import ON

from liger_trainer import apply_liger
from liger_trainer.varlen import unpad_plan

QUICK = ("llama", "gemma3_text", "bamba", "bloom")  # two that take it, one with a state, one that stays eager


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    ],
)
def test_a_padded_batch_equals_stock(model_type, monkeypatch):
    if model_type in QUICK:
        monkeypatch.setattr(pytest, "skip", pytest.fail)  # these are known to run
    model, reason = with_own_attention(model_type)
    if model is None:
        pytest.skip(f"not built: {reason}")
    try:
        want, _ = step(model)
    except Exception as error:  # noqa: BLE001 - what stock cannot train is not ours to train
        pytest.skip(f"does not run: {error}")
    whole = apply_liger(model, ON)
    report, said = whole["varlen_attention"], documented(model_type)
    assert said in (None, decoder_in(whole)), "write the table of docs/padding.md again"
    used, packed = [], unpad_plan.UnpadPlan.unpad
    monkeypatch.setattr(unpad_plan.UnpadPlan, "unpad", lambda self, *given: used.append(self) or packed(self, *given))
    got, _ = step(model)
    print(f"\n{model_type}: {'real tokens' if used else 'padded'}, {report.skipped or report.swapped}")
    proven = any(text.startswith("runs on real tokens") for text in report.swapped.values())
    assert bool(used) == proven, "what is proven is used"
    assert bool(used) or model_type not in ("llama", "gemma3_text")
    assert set(got[1]) == set(want[1])
    finite = torch.stack([grad.isfinite().all() for grad in want[1].values()]).all()
    if finite:  # in some models, rows padded on the left make stock NaN
        assert largest_difference(got, want) <= LIMIT


def test_the_table_has_the_model_types_that_can_be_built():
    """It lists each once; `tests/support/attentions.py --write` finds their entries.

    The tests above check the entries.
    """
    listed = re.findall(r"`([\w.-]+)`", "".join(line.split(" | ")[1] for line in written().splitlines()[2:]))
    assert len(listed) == len(set(listed)) >= 240
    if f"of transformers {transformers.__version__} |" in written():
        assert set(listed) <= set(MODEL_TYPES)
