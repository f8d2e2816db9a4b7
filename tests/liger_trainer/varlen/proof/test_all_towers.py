"""Every image-text model of transformers that can be fed here trains a step with pixels as unpatched.

Towers run as one attention if they take offsets, and the decoder leaves padding out if that is proven:

    pytest -s -m slow tests/liger_trainer/varlen/proof/test_all_towers.py
"""

import pytest
from architectures import LIMIT, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from checkout import ROOT
from image_models import image_batch, image_model, image_step
from tiny_models import largest_difference

from liger_trainer import apply_liger
from liger_trainer.varlen import unpad_plan

TABLE = [line.split("|") for line in (ROOT / "docs" / "images.md").read_text().splitlines() if line.count("|") == 4]
FED = ("qwen2_5_vl", "qwen3_vl", "glm4v", "gemma3", "llava", "internvl", "smolvlm")  # these have to run


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("model_type", sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES))
def test_one_step_with_pixels(model_type, monkeypatch):
    try:
        model = image_model(model_type)
        batch = image_batch(model)
        want = image_step(model, batch)
    except Exception as error:  # noqa: BLE001 - it needs other inputs, or a package
        assert model_type not in FED, error
        pytest.skip(f"not fed: {type(error).__name__} {str(error)[:80]}")
    used, packed = [], unpad_plan.UnpadPlan.unpad
    report = apply_liger(model)["varlen_attention"]
    monkeypatch.setattr(unpad_plan.UnpadPlan, "unpad", lambda self, *given: used.append(self) or packed(self, *given))
    assert largest_difference(image_step(model, batch), want) <= LIMIT
    towers = sum("one attention" in variant for variant in report.swapped.values())
    kept = {*report.skipped.values(), *report.unsuited.values()}
    print(f"\n{model_type}: {'real tokens' if used else 'padded'}, {towers} attentions of towers in one call, {kept}")
    assert bool(used) == any(text.startswith("runs on real tokens") for text in report.swapped.values())
    rows = [row for row in TABLE if f"`{model_type}`" in row[3]]
    cells = [(row[1].strip().startswith("one call"), row[2].strip().startswith("real tokens")) for row in rows]
    assert cells == [(towers > 0, bool(used))], "the table of docs/images.md"
