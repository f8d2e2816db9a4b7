"""A convolution whose result a layer cuts: three contiguous tensors with the same numbers, one for other uses."""

import copy

import pytest
import torch
from installed_packages import install_packages
from tiny_models import step
from transformers import DataCollatorWithFlattening
from varlen_batches import ON, assert_same_with_states, batch, drawn_model, rows_of

from liger_trainer import apply_liger
from liger_trainer.head import calls
from liger_trainer.varlen import state_layers
from liger_trainer.varlen.proof import backbone, convolutions, rules
from liger_trainer.varlen.proof.deferred_convolution import DeferredConvolution, refuse_whole

RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
WIDTHS = (2, 2, 5)


@pytest.fixture
def cut(monkeypatch):
    """What each convolution in parts has got: (rows, tokens of a row, widths)."""
    found, own = [], convolutions.parts_by_kernel

    def parts_by_kernel(x, weight, bias, activation, offsets, widths):
        found.append((x.shape[0], x.shape[2], widths))
        return own(x, weight, bias, activation, offsets, widths)

    monkeypatch.setattr(convolutions, "parts_by_kernel", parts_by_kernel)
    return found


def patched_as_on_a_gpu(model, monkeypatch):
    """Patch a model whose rule a package computes, with the CPU treated as a GPU. Returns the texts of its report."""
    install_packages(monkeypatch, type(model).__module__, RULES)
    monkeypatch.setattr(backbone, "_has_gpu", lambda: True)
    monkeypatch.setattr(convolutions, "_takes", convolutions.fits)
    monkeypatch.setattr(calls, "_continues_by_a_cache", lambda kwargs: False)  # our code in calls with a cache too
    report = apply_liger(model, ON)["varlen_attention"]
    for binding in bindings_of(model):
        binding.on_cpu = True
    return list(report.swapped.values())


def bindings_of(model):
    found = map(state_layers.StateBinding.of, model.modules())
    return [binding for binding in found if binding is not None]


def without_padding():
    call = batch()
    return {name: x[2:, :11] for name, x in call.items()}


@pytest.mark.parametrize(
    "name",
    ["qwen3_5_text", "qwen3_next", pytest.param("olmo_hybrid", marks=pytest.mark.slow)]
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("kimi_linear", "qwen3_5_moe_text")],
)
def test_a_gated_delta_net_gets_three_tensors(name, cut, monkeypatch):
    model = drawn_model(name)
    stock, right, full = copy.deepcopy(model), batch(), without_padding()
    want, want_full = step(stock, right), step(stock, full)
    texts = patched_as_on_a_gpu(model, monkeypatch)
    assert any("three tensors" in text for text in texts)
    packed = dict(DataCollatorWithFlattening()(rows_of(right)))
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for call, wanted in ((right, want), (packed, want), (full, want_full)):
            cut.clear()
            assert_same_with_states(step(model, call), wanted)
            assert cut and all(len(widths) == 3 for _, _, widths in cut)


def test_the_rule_gets_contiguous_tensors(monkeypatch):
    """A package's rule would copy others."""
    model = drawn_model("qwen3_5_text")
    patched_as_on_a_gpu(model, monkeypatch)
    seen, own = [], rules._row_by_row

    def row_by_row(function, rows, args, kwargs):
        seen.extend(args)
        return own(function, rows, args, kwargs)

    monkeypatch.setattr(rules, "_row_by_row", row_by_row)
    step(model, batch())
    assert len(seen) >= 3 and all(x.is_contiguous() for x in seen)


@torch.no_grad()
def test_generation_equals_stock(cut, monkeypatch):
    """Where a cache holds tokens, a layer slices the result before it cuts it."""
    model = drawn_model("qwen3_5_text").eval()
    ids = batch()["input_ids"][3:, :9]

    def in_two_calls():
        first = model(ids[:, :6], use_cache=True)
        return model(ids[:, 6:], past_key_values=first.past_key_values).logits

    given = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    want, want_logits = model.generate(ids, **given), in_two_calls()
    patched_as_on_a_gpu(model, monkeypatch)
    whole, own = [], convolutions.by_kernel
    monkeypatch.setattr(convolutions, "by_kernel", lambda *given: whole.append(given) or own(*given))
    cut.clear()
    assert model.generate(ids, **given).tolist() == want.tolist()
    assert cut and not whole
    torch.testing.assert_close(in_two_calls(), want_logits, rtol=1e-4, atol=1e-4)
    assert whole


def test_without_a_package_nothing_is_cut(cut, monkeypatch):
    """PyTorch's code for the rule copies in any case."""
    model = drawn_model("qwen3_5_text")
    monkeypatch.setattr(backbone, "_has_gpu", lambda: True)
    report = apply_liger(model, ON)["varlen_attention"]
    assert not any("three tensors" in text for text in report.swapped.values())
    assert not any(binding.in_parts for binding in bindings_of(model))


def test_what_is_not_proven_in_parts_keeps_one_tensor(monkeypatch):
    model = drawn_model("qwen3_5_text")
    stock, call = copy.deepcopy(model), batch()
    own = convolutions.parts_by_kernel
    monkeypatch.setattr(convolutions, "parts_by_kernel", lambda *given: own(*given)[::-1])
    want = step(stock, call)
    texts = patched_as_on_a_gpu(model, monkeypatch)
    assert any("one after the other" in text for text in texts) and not any("three tensors" in text for text in texts)
    assert_same_with_states(step(model, call), want)


def test_a_result_that_is_read_in_another_way_is_no_proof():
    standin, _, _ = deferred()
    with refuse_whole():
        standin.transpose(1, 2).split(WIDTHS, dim=-1)
        with pytest.raises(RuntimeError, match="not only cut"):
            standin[:, :, -3:]
    standin[:, :, -3:]


def deferred():
    """A stand-in, the leaves of its result, and the result as (B, C, L)."""
    leaves = [torch.randn(2, 7, 9, requires_grad=True), torch.randn(9, 4, requires_grad=True)]

    def compute(widths):
        given = (leaves[0].transpose(1, 2), leaves[1], None, "silu", None)
        return convolutions.by_kernel(*given) if widths is None else convolutions.parts_by_kernel(*given, widths)

    return DeferredConvolution(compute, torch.Size((2, 9, 7))), leaves, compute(None)


@pytest.mark.parametrize(
    "cut_it",
    [
        lambda y: torch.split(y.transpose(1, 2), [*WIDTHS], dim=-1),
        lambda y: torch.split(y.transpose(-1, -2), WIDTHS, 2),
        lambda y: y.transpose(2, 1).split(WIDTHS, dim=-1),
        lambda y: y[:, :, -7:].transpose(1, 2)[:, :7].split(WIDTHS, dim=-1),
    ],
)
def test_parts_are_contiguous_and_equal_those_of_the_whole(cut_it):
    standin, leaves, whole = deferred()
    parts, want = cut_it(standin), cut_it(whole)
    assert all(part.is_contiguous() for part in parts) and not want[0].is_contiguous()
    for one, other in zip(parts, want, strict=True):
        torch.testing.assert_close(one, other)
    upstream = [torch.randn_like(part) for part in want]
    got, wanted = (torch.autograd.grad(y, leaves, upstream, retain_graph=True) for y in (parts, want))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "use",
    [
        lambda y: y[:, :, -3:],
        lambda y: y.transpose(0, 1),
        lambda y: y.transpose(1, 2).transpose(1, 2) * torch.ones(1),
        lambda y: torch.ones(1) * y,
        lambda y: torch.cat([y, torch.ones(2, 9, 1)], dim=-1),
        lambda y: y.split([4, 5], dim=1)[0],
        lambda y: torch.split(y.transpose(1, 2), [4, 5], dim=-1)[1],
        lambda y: torch.split(y.transpose(1, 2), [2, 2, 3], dim=1)[1],
        lambda y: y.transpose(1, 2).reshape(14, 9).sum(0),
        lambda y: torch.nn.functional.silu(y),
        lambda y: 2 * y - 1,
        lambda y: (y + y) / (1 + abs(-y)),
        lambda y: y == 0,
        lambda y: torch.stack([*y]) * len(y),
    ],
)
def test_other_uses_get_one_tensor(use):
    standin, _, whole = deferred()
    torch.testing.assert_close(use(standin), use(whole))


@pytest.mark.parametrize(
    "write",
    [
        lambda y: y.mul_(2),
        lambda y: y.transpose(1, 2).mul_(2),
        lambda y: torch.nn.functional.relu(y, inplace=True),
        lambda y: y.__setitem__(0, 1.0),
    ],
)
def test_a_write_is_seen_by_the_cut(write):
    standin, _, whole = deferred()
    for y in (standin, whole):
        write(y)
    parts, want = (torch.split(y.transpose(1, 2), WIDTHS, dim=-1) for y in (standin, whole))
    for one, other in zip(parts, want, strict=True):
        torch.testing.assert_close(one, other)


def test_nothing_is_computed_before_it_is_used():
    computed = []
    standin = DeferredConvolution(
        lambda widths: computed.append(widths) or (torch.ones(1, 2, 1),) * 3, torch.Size((1, 3, 2))
    )
    standin = standin.transpose(1, 2)
    assert standin.shape == (1, 2, 3) and hasattr(standin, "__array__") and not computed
    standin.split([1, 1, 1], dim=-1)
    assert computed == [(1, 1, 1)]
