"""Rotary functions at the limits: widths of 0, odd widths, widths past the head, no tokens, a single token."""

import importlib
import itertools

import pytest
import torch
from tiny_models import VOCAB
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.cohere import modeling_cohere
from transformers.models.glm4 import modeling_glm4
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama

from liger_trainer import apply_liger
from liger_trainer.patching import rotary
from liger_trainer.patching.rotary_proof import Signature, prove
from liger_triton.rope import misfit


def gpt_neox(rotary_pct, heads=4):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gpt_neox",
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=heads,
        rotary_pct=rotary_pct,
    )
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.diagonal
@pytest.mark.parametrize("ids", [(2, 7), (2, 1), (1, 7)], ids=str)
@pytest.mark.parametrize("rotary_pct, heads, width", [(0.25, 4, 0), (1.0, 4, 2), (0.5, 2, 2)])
def test_gpt_neox_of_a_tiny_head(rotary_pct, heads, width, ids):
    """A quarter of a head of 2 is a rotary width of 0: nothing is rotated, and the model runs as unpatched."""
    model = gpt_neox(rotary_pct, heads)
    cos, _ = model.gpt_neox.rotary_emb(torch.zeros(1), torch.arange(3)[None])
    assert cos.shape[-1] == width
    rows, results = torch.randint(0, VOCAB, ids), []
    for patched in (False, True):
        if patched:
            report = apply_liger(model)
            assert bool(report["rope"].swapped) == (width > 0)
            assert width > 0 or "a rotary width of 0" in str(report["rope"].skipped)
        model.zero_grad()
        loss = model(rows).logits.square().mean()
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for got, want in zip(*results[::-1], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


FUNCTIONS = {
    "llama": modeling_llama.apply_rotary_pos_emb,
    "gpt_neox": modeling_gpt_neox.apply_rotary_pos_emb,
    "glm4": modeling_glm4.apply_rotary_pos_emb,
    "cohere": modeling_cohere.apply_rotary_pos_emb,
    "gpt_oss": modeling_gpt_oss.apply_rotary_pos_emb,
}


def outcome(function, *tensors):
    """Values and gradients, or the type of the error."""
    leaves = [t.clone().requires_grad_() for t in tensors[:2]]
    try:
        out = function(*leaves, *tensors[2:])
    except (RuntimeError, IndexError, ValueError) as error:
        return type(error)
    return [*out, *torch.autograd.grad([t.sum() for t in out], leaves)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_replacement_gives_the_same_results_for_many_shapes(name, monkeypatch):
    """For many shapes: wherever the original returns a result, the replacement returns the same."""
    function = FUNCTIONS[name]
    proofs, _ = prove(function)
    assert proofs
    # Whatever the size of cos: in the layout that each proof needs
    plans = tuple((proof, None) for proof in proofs)
    ours = rotary.replacement(function, Signature.of(function), plans)
    calls = []
    monkeypatch.setattr(
        rotary,
        "rope_unchecked",
        lambda *args, kernel=rotary.rope_unchecked, **kwargs: calls.append(1) or kernel(*args, **kwargs),
    )
    layout = {proof.layout for proof in proofs}
    compared = 0
    for batch, heads, tokens, head, width in itertools.product(
        (0, 1, 2), (1, 3), (0, 1, 4), (2, 5, 8), (0, 1, 2, 3, 4, 8, 12)
    ):
        for cos_batch, cos_tokens in itertools.product({1, batch}, {1, tokens, 5}):
            half = torch.randn(cos_batch, cos_tokens, width // 2)
            if "half" in layout:
                cos = torch.cat((half, half, torch.randn(cos_batch, cos_tokens, width % 2)), -1)
            else:
                cos = torch.cat((half.repeat_interleave(2, -1), torch.randn(cos_batch, cos_tokens, width % 2)), -1)
            if layout == {None}:
                cos = torch.randn(cos_batch, cos_tokens, width)
            given = torch.randn(batch, heads, tokens, head), torch.randn(batch, 1, tokens, head), cos, cos.flip(1)
            want, got = outcome(function, *given), outcome(ours, *given)
            where = f"q {tuple(given[0].shape)}, cos {tuple(cos.shape)}"
            if isinstance(want, type):
                assert got is want, where
                continue
            assert not isinstance(got, type), f"{where}: {got}"
            compared += 1
            for a, b in zip(got, want, strict=True):
                assert a.shape == b.shape and a.dtype == b.dtype, where
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=where)
    assert compared > 50 and len(calls) > 20


def test_a_proof_is_of_the_code_that_was_proven(monkeypatch):
    """A second model reuses it. It is made again once a function that the first model calls has other code."""
    from transformers.models.glm.modeling_glm import rotate_half as interleaved

    function = modeling_llama.apply_rotary_pos_emb
    proofs = []
    proven = []
    monkeypatch.setattr(rotary, "prove", lambda one: proven.append(one) or prove(one))
    rotary._proven_at.cache_clear()
    for owner, name, value in (
        (modeling_llama, "rotate_half", modeling_llama.rotate_half),
        (modeling_llama, "rotate_half", interleaved),
        (modeling_llama.rotate_half, "__code__", interleaved.__code__),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(owner, name, value)
            proofs.append(rotary._proven(function)[0])
            assert rotary._proven(function)[0] is proofs[-1]
    assert len(proven) == 3 and proofs[1] == proofs[2] != proofs[0]
    rotary._proven(lambda q, k, cos, sin: (q, k))
    rotary._proven(lambda q, k, cos, sin: (q, k))
    assert len(proven) == 5, "code that is not known is not remembered"


def test_proofs_are_on_the_cpu_whatever_the_default_device():
    model = gpt_neox(1.0)
    want = {name: part.swapped for name, part in apply_liger(model).operations.items()}
    rotary._proven_at.cache_clear()
    with torch.device("meta"):
        got = {name: part.swapped for name, part in apply_liger(model).operations.items()}
    assert got == want and want["rope"] and want["layer_norm"]


def test_the_shapes_of_a_call_are_checked_once(monkeypatch):
    asked = []

    def counted(*tensors):
        asked.append(tensors)
        return misfit(*tensors)

    model = gpt_neox(1.0)
    report = apply_liger(model)
    assert len(report["rope"].swapped) == 2
    monkeypatch.setattr(rotary, "misfit", counted)
    monkeypatch.setattr(importlib.import_module("liger_triton.rope"), "misfit", counted)
    model(torch.randint(0, VOCAB, (2, 7)))
    assert len(asked) == model.config.num_hidden_layers
