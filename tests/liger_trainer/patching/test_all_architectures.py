"""Every causal LM of transformers that can be built tiny trains a step as it does unpatched, all parts and the head on.

The comparisons are slow, `make test-all` runs them; docs/architectures.md is made of the same results.
"""

import re

import pytest
import torch
import transformers
from architectures import LIMIT, MODEL_TYPES, PAGE, build, compare, step
from parity_models import largest_difference

from liger_trainer import apply_liger
from liger_trainer.head import deferred
from liger_triton import reference

# The head returns a stand-in, and then the model's own code needs real logits.
IN_FULL = {
    "chameleon",  # writes over the logits of image tokens
    "prophetnet",  # has no cross_entropy: log_softmax and nll_loss of two streams at once
}
PAGE_IS_OF = re.search(r"transformers ([\d.]+\w*)", PAGE.read_text())[1]


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_one_step(model_type):
    """The same loss and gradients, the head fused where the report says so, and the page says what was found."""
    result = compare(model_type)
    assert result.verdict in ("same", "does not run", "not built"), result.detail
    assert result.head != "in full" or model_type in IN_FULL
    listed = f"| {model_type} | same |" in PAGE.read_text()  # not where a package was missing, say
    if PAGE_IS_OF == transformers.__version__ and listed:
        assert result.line in PAGE.read_text().splitlines(), f"write docs/architectures.md anew: {result.line}"


SPOILED = {
    "linear_cross_entropy": ("llama", "gemma2", "bert"),
    "rms_norm": ("qwen3", "gemma3_text"),
    "layer_norm": ("cohere2", "bert"),
    "rope": ("glm4", "deepseek_v3"),
    "swiglu": ("llama", "qwen3_moe"),
    "geglu": ("gemma2",),
}


@pytest.mark.parametrize("name, model_type", [(name, one) for name, types in SPOILED.items() for one in types])
def test_an_operation_that_is_two_percent_off_is_seen(name, model_type, monkeypatch):
    """The control: the comparison can fail, for each of the operations."""
    model, _ = build(model_type)
    want, _ = step(model)
    apply_liger(model)
    module = deferred if name == "linear_cross_entropy" else reference
    own = getattr(module, name)

    def spoiled(x, *args, **kwargs):
        return own(x * torch.linspace(0.98, 1.0, x.shape[-1]), *args, **kwargs)

    monkeypatch.setattr(module, name, spoiled)
    assert largest_difference(step(model)[0], want) > 10 * LIMIT


def test_the_page_has_every_model_type():
    """And of those that ran and have an operation, four fifths have all of it swapped."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if not line.startswith("| model type |")]
    if PAGE_IS_OF == transformers.__version__:
        assert {row[0] for row in rows} == set(MODEL_TYPES)
    ran = [row for row in rows if row[1] not in ("does not run", "not built")]
    assert len(ran) >= 240 and {row[1] for row in ran} == {"same"}
    for column in range(2, 7):
        having = [row[column] for row in ran if row[column]]
        assert sum(cell in ("all", "fused") for cell in having) >= 0.8 * len(having) > 40, column
