"""Every causal LM of transformers that can be built tiny trains a step as unpatched, with everything swapped.

The comparisons are slow and run in `make test-all`. A section of docs/architecture.md is made of their results.
"""

import re

import pytest
import torch
import transformers
from architectures import LIMIT, MODEL_TYPES, build, compare, step, written
from tiny_models import largest_difference

from liger_trainer import apply_liger
from liger_trainer.head import deferred
from liger_triton import reference

# The head returns deferred logits, and then the model's own code needs real ones.
IN_FULL = {
    "prophetnet",  # without cross_entropy: log_softmax and nll_loss of two streams at once
}
PAGE = written()
WHOLE, _, REST = PAGE.partition("In these something is not.")
TABLE, _, OTHERS = REST.partition("Not compared")
NAME = re.compile(r"`([\w.-]+)`")
PAGE_IS_OF = re.search(r"transformers ([\d.]+\w*)", PAGE)[1]


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_one_step(model_type):
    """Loss and gradients agree, the head is fused if the report says so, and the page states the result."""
    result = compare(model_type)
    assert result.verdict in ("same", "does not run", "not built"), result.detail
    assert result.head != "in full" or model_type in IN_FULL
    # for example if a package was missing
    if PAGE_IS_OF == transformers.__version__ and f"`{model_type}`" not in OTHERS:
        where, wanted = (WHOLE, f"`{model_type}`") if result.whole else (TABLE, result.line)
        assert wanted in where, f"write docs/architecture.md again: {result.line}"


SPOILED = {
    "linear_cross_entropy": ("llama", "gemma2", "bert"),
    "rms_norm": ("qwen3", "gemma3_text"),
    "layer_norm": ("cohere2", "bert"),
    "rope": ("glm4", "deepseek_v3"),
    "swiglu": ("llama",),
    "experts": ("qwen3_moe",),
    "geglu": ("gemma2",),
}


@pytest.mark.parametrize("name, model_type", [(name, one) for name, types in SPOILED.items() for one in types])
def test_an_operation_that_is_two_percent_off_is_seen(name, model_type, monkeypatch):
    """The control: the comparison can fail, for each operation."""
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
    """Of the types that ran and have an operation, four fifths have it swapped everywhere."""
    whole, others = (NAME.findall(part.partition(":\n")[2].partition("`python ")[0]) for part in (WHOLE, OTHERS))
    rows = re.findall(r"^\| ([\w.-]+) \| (\w+) \|", TABLE, re.MULTILINE)
    listed = [*whole, *others, *(name for name, _ in rows)]
    assert len(listed) == len(set(listed)) and len(whole) + len(rows) >= 240
    assert {verdict for _, verdict in rows} == {"same"}
    if PAGE_IS_OF == transformers.__version__:
        assert set(listed) == set(MODEL_TYPES)
    counts = re.findall(r"[\w ]+ (\d+) of (\d+)[,.]", PAGE.partition("swapped in:")[2].partition("\n\n")[0])
    assert len(counts) == 5
    for swapped, having in counts:
        assert int(swapped) >= 0.8 * int(having) > 40
