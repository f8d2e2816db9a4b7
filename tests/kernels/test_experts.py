import importlib
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from liger_triton import MXFP4Weight, reference
from liger_triton._dispatch import runs_triton
from liger_triton.experts import ExpertLoRA, experts
from liger_triton.frozen_float8 import quantized_matrices

DTYPES = [
    torch.float32,
    torch.bfloat16 if torch.cuda.is_available() else torch.float16,
]  # the interpreter truncates bf16
GPT_OSS = {"limit": 7.0, "alpha": 1.702, "up_offset": 1.0, "interleaved": True, "transposed": True}
FORMS = {
    "qwen": {},
    "gpt-oss": GPT_OSS,
    "transposed": {"transposed": True},
    "interleaved": {"interleaved": True, "activation": "gelu_tanh"},
    "gelu": {"activation": "gelu"},
}


def inputs(
    device, dtype, tokens=23, hidden=40, inner=24, experts=5, top_k=3, transposed=False, bias=False, rank=0, **_
):
    """With five experts, expert 1 gets no token, and some others get more than one tile of the interpreter."""

    def randn(*shape, scale=1.0):
        return (scale * torch.randn(*shape)).to(device, dtype).requires_grad_()

    scores = torch.randn(tokens, experts)
    if experts > top_k + 1:
        scores[:, 1] = -torch.inf
    values, ids = scores.topk(top_k)
    x = randn(tokens, hidden)
    shares = values.softmax(-1).to(device).requires_grad_()
    w = randn(experts, 2 * inner, hidden, scale=hidden**-0.5)
    v = randn(experts, hidden, inner, scale=inner**-0.5)
    if transposed:
        w, v = (t.detach().mT.contiguous().requires_grad_() for t in (w, v))
    biases = [randn(experts, 2 * inner), randn(experts, hidden)] if bias else [None, None]
    sizes = ((rank, hidden), (2 * inner, rank), (rank, inner), (hidden, rank)) if rank else ()
    loras = [randn(experts, *size, scale=size[1] ** -0.5) for size in sizes]
    return ids.to(device), [x, shares, w, v, *biases, *loras]


def call(function, ids, options):
    def run(x, shares, w, v, b, c, *loras):
        named = dict(options)
        if loras:
            named["gate_up_lora"] = ExpertLoRA(*loras[:2], 0.5)
            named["down_lora"] = ExpertLoRA(*loras[2:], 2.0)
        return function(x, ids, shares, w, v, b, c, **named)

    return run


PAIRS = [  # the first has each option; the interpreter takes 4 s a case and runs only that one
    pytest.param(3, True, id="bias-lora"),
    pytest.param(0, False, id="plain"),
    pytest.param(0, True, id="bias"),
    pytest.param(3, False, id="lora"),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(("rank", "bias"), PAIRS if torch.cuda.is_available() else PAIRS[:1])
def test_matches_float64(options, rank, bias, dtype, device, check_close):
    ids, given = inputs(device, dtype, bias=bias, rank=rank, **options)
    check_close(call(experts, ids, options), call(reference.experts, ids, options), given)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_numbers_at_the_limit(interleaved, device, check_close):
    """The first product returns its input, and much of it is at the limit: gradients follow torch.clamp."""
    ids, (x, shares, w, v, *_) = inputs(device, torch.float32, hidden=16, inner=8, experts=4, top_k=2)
    values = torch.tensor([-9.0, -7.0, -7.0, 0.5, 7.0, 7.0, 9.0], device=device)
    numbers = values[torch.randint(len(values), x.shape, device=device)].requires_grad_()
    identity = torch.eye(16, device=device).expand_as(w).contiguous().requires_grad_()
    options = {"limit": 7.0, "alpha": 1.702, "up_offset": 1.0, "interleaved": interleaved}
    given = [numbers, shares, identity, v, None, None]
    check_close(call(experts, ids, options), call(reference.experts, ids, options), given)


def small(device, dtype=torch.float32, **options):
    ids, given = inputs(device, dtype, tokens=5, hidden=16, inner=8, experts=4, top_k=2, **options)
    return ids, given


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda ids: torch.full_like(ids, 2), id="all-tokens-to-one-expert"),
        pytest.param(lambda ids: torch.where(ids == 0, 4, ids), id="an-id-beyond-the-last-expert"),
        pytest.param(lambda ids: torch.where(ids == 0, -1, ids), id="a-negative-id"),
        pytest.param(lambda ids: torch.full_like(ids, 9), id="no-expert-at-all"),
        pytest.param(lambda ids: ids.int(), id="int32"),
    ],
)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_unusual_ids(change, bias, device, check_close):
    ids, given = small(device, bias=bias)
    ids = change(ids)
    check_close(call(experts, ids, {}), call(reference.experts, ids, {}), given)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"tokens": 1, "experts": 3, "top_k": 3}, id="one-token-all-experts"),
        pytest.param({"tokens": 40, "experts": 1, "top_k": 1}, id="one-expert"),
        pytest.param({"tokens": 6, "experts": 512, "top_k": 3, "hidden": 8, "inner": 8}, id="more-experts-than-pairs"),
    ],
)
def test_sizes(sizes, device, check_close):
    ids, given = inputs(device, torch.float32, **sizes)
    check_close(call(experts, ids, {}), call(reference.experts, ids, {}), given)


@pytest.mark.gpu
@pytest.mark.parametrize(("hidden", "inner"), [(64, 512), (1024, 64)], ids=["wide-gate", "wide-result"])
def test_more_than_2_31_elements(hidden, inner, device):
    """2,200,000 pairs have 1024 columns. The last tokens equal a separate call; so do weights with gradients from them
    only."""
    ids, given = inputs(device, torch.bfloat16, tokens=1_100_000, hidden=hidden, inner=inner, experts=4, top_k=2)
    x, shares, w, v = given[:4]
    few = [t.detach()[-50:].clone().requires_grad_() for t in (x, shares)]
    dy = torch.zeros_like(x)
    dy[-50:].normal_()
    y, want = (experts(*args, w, v) for args in ((x, ids, shares), (few[0], ids[-50:], few[1])))
    got = [y[-50:], *torch.autograd.grad(y, [x, shares, w, v], dy)]
    got[1:3] = [g[-50:] for g in got[1:3]]
    for g, one in zip(got, [want, *torch.autograd.grad(want, [*few, w, v], dy[-50:])], strict=True):
        assert (g.double() - one.double()).norm() <= 1e-2 * one.double().norm()


def test_no_tokens(device):
    ids, given = inputs(device, torch.float32, tokens=0)
    y = call(experts, ids, {})(*given)
    assert y.shape == (0, 40)
    y.sum().backward()


def test_factors_of_an_adapter_are_cast_and_turned_in_one_copy(device, triton_only, monkeypatch):
    """PEFT stores B as fp32 (out, r E), experts fastest. The kernels read contiguous outputs."""
    module, found = importlib.import_module("liger_triton.experts"), []
    stock = module._gate
    monkeypatch.setattr(module, "_gate", lambda *args: found.append(args[5]) or stock(*args))
    ids, (x, shares, w, v, *_) = inputs(device, DTYPES[1])
    a = 0.1 * torch.randn(5, 4, 40, device=device)
    b = 0.3 * torch.randn(48, 4 * 5, device=device)
    lora = ExpertLoRA(a, b.view(48, 4, 5).permute(2, 0, 1), 0.5)
    with torch.no_grad(), Copies() as copies:
        experts(x, ids, shares, w, v)
        without, copies.count = copies.count, 0
        y = experts(x, ids, shares, w, v, gate_up_lora=lora)
    assert copies.count - without == 2 and found[1].stride() == (4 * 48, 48, 1)
    want = reference.experts(x, ids, shares, w, v, gate_up_lora=ExpertLoRA(*(t.to(x.dtype) for t in lora[:2]), 0.5))
    torch.testing.assert_close(y, want, atol=2e-2, rtol=2e-2)


class Copies(TorchDispatchMode):
    """Count casts and copies."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)
        return function(*args, **(kwargs or {}))


def test_only_what_is_trained_gets_a_gradient(device, triton_only):
    """Frozen weights get no gradient; all factors of a LoRA on them do."""
    ids, given = small(device, rank=3)
    frozen = [t if t is None or i not in (2, 3) else t.detach() for i, t in enumerate(given)]
    y = call(experts, ids, {})(*frozen)
    dy = torch.randn_like(y)
    want = torch.autograd.grad(call(experts, ids, {})(*given), [t for t in given if t is not None], dy)
    y.backward(dy)
    got = [t.grad for t in frozen if t is not None]
    assert [g is None for g in got] == [False, False, True, True, False, False, False, False]
    for a, b in zip(got, want, strict=True):
        assert a is None or torch.equal(a, b)


def test_kept_and_repeated(device, triton_only):
    """Only the inputs and h are saved. A second backward over a kept graph gives the same gradients."""
    ids, given = small(device)
    x, shares, w, v, *_ = given
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = experts(x, ids, shares, w, v)
    own = {t.untyped_storage().data_ptr() for t in (x, ids, shares, w, v)}
    others = [t for t in kept if t.is_floating_point() and t.untyped_storage().data_ptr() not in own and t.numel()]
    assert [tuple(t.shape) for t in others] == [(10, 16)]
    dy = torch.randn_like(y)
    first = torch.autograd.grad(y, (x, shares, w, v), dy, retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(y, (x, shares, w, v), dy), strict=True):
        assert torch.equal(a, b)


@pytest.fixture
def noted(monkeypatch):
    """Record the calls of products in `experts`, (name, shape of the weight), with weak references to their results."""
    module = importlib.import_module("liger_triton.experts")
    calls = []
    results = []

    def note(name, function):
        def run(x, weight, *args, **named):
            calls.append((name, weight.shape))
            out = function(x, weight, *args, **named)
            results.extend(weakref.ref(t) for t in (out if isinstance(out, tuple) else (out,)))
            return out

        monkeypatch.setattr(module, name, run)

    for name in ("product", "gated_product", "combine"):
        note(name, getattr(module, name))
    return calls, results


@pytest.mark.parametrize("rank", [0, 3], ids=["plain", "lora"])
@pytest.mark.parametrize("keeps", [False, True], ids=["", "result-is-kept"])
def test_recomputation_ends_at_the_gate(keeps, rank, device, triton_only, noted):
    """A checkpoint recomputes h, and the result only if something saves it. Gradients are bit-equal."""
    calls, _ = noted
    ids, given = small(device, rank=rank)
    leaves = [t for t in given if t is not None]

    def layer(*given):
        y = call(experts, ids, {})(*given)
        return y.square() if keeps else 2 * y

    y = layer(*given)
    dy, forward = torch.randn_like(y), [*calls]
    calls.clear()
    want, backward = torch.autograd.grad(y, leaves, dy), [*calls]
    y = checkpoint(layer, *given, use_reentrant=False)
    calls.clear()
    got = torch.autograd.grad(y, leaves, dy)
    last = len(forward) if keeps else 1 + [name for name, _ in forward].index("gated_product")
    assert calls == forward[:last] + backward
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("trained", [True, False])
def test_the_gated_tensor_is_not_kept(trained, device, triton_only, noted):
    """After forward only h is left, and without gradients nothing is."""
    ids, given = small(device)
    with torch.set_grad_enabled(trained):
        y = call(experts, ids, {})(*given)
    left = [t() for t in noted[1] if t() is not None]
    assert [t.shape for t in left if t.untyped_storage().data_ptr() != y.untyped_storage().data_ptr()] == (
        [(10, 16)] if trained else []
    )


def test_upstream_strides(device, check_upstream_strides):
    ids, given = small(device)
    check_upstream_strides(lambda x, shares, w, v: experts(x, ids, shares, w, v), given[:4])


def test_compiled(device, check_compiled, triton_only):
    ids, given = small(device, rank=3, bias=True)
    check_compiled(call(experts, ids, {}), given)


def test_hidden_of_another_dtype(device):
    """Computed in the dtype of the weights and returned in hidden's, as in transformers' grouped products."""
    ids, (x, shares, w, v, *_) = small(device, torch.float16)
    y = experts(x.float(), ids, shares, w, v)
    assert y.dtype == torch.float32 and torch.equal(y, experts(x, ids, shares, w, v).float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate_up": (4, 10, 16)}, r"expected \(E, 2 I, H\) and \(E, H, I\)"),
        ({"hidden": (5, 15)}, r"hidden is \(5, 15\); expected \(T, 16\)"),
        ({"expert_ids": (5, 3)}, r"expert_ids is \(5, 3\), weights \(5, 2\); expected both \(5, K\)"),
        ({"gate_up_bias": (4, 8)}, r"gate_up_bias is \(4, 8\); expected \(4, 16\)"),
    ],
)
def test_bad_shapes(change, message):
    shapes = {"hidden": (5, 16), "expert_ids": (5, 2), "weights": (5, 2), "gate_up": (4, 16, 16), "down": (4, 16, 8)}
    given = {name: torch.zeros(shape) for name, shape in (shapes | change).items()}
    with pytest.raises(ValueError, match=message):
        experts(**given)


def test_bad_options():
    ids, (x, shares, w, v, *_) = small("cpu")
    with pytest.raises(ValueError, match="activation is 'relu'; expected one of 'silu', 'gelu_tanh', 'gelu'"):
        experts(x, ids, shares, w, v, activation="relu")
    with pytest.raises(ValueError, match="limit is 0; expected a number above 0"):
        experts(x, ids, shares, w, v, limit=0)
    with pytest.raises(ValueError, match="activation is 'gelu', which has no limit"):
        experts(x, ids, shares, w, v, activation="gelu", limit=7.0)


def in_mxfp4(weight):
    *rows, k = weight.shape
    blocks = torch.randint(256, (*rows, k // 2), dtype=torch.uint8, device=weight.device)
    scales = torch.randint(122, 126, (*rows, k // 32), dtype=torch.uint8, device=weight.device)
    return MXFP4Weight(blocks, scales, torch.float32)


@pytest.mark.parametrize(("rank", "interleaved"), [(0, False), (3, True)], ids=["plain-halves", "lora-pairs"])
@pytest.mark.parametrize("pack", [in_mxfp4, quantized_matrices], ids=["mxfp4", "float8"])
def test_packed_weights(pack, rank, interleaved, device):
    """Results are bit-equal to unpacked matrices, and nothing of their size is saved."""
    ids, given = inputs(device, torch.float32, 7, hidden=64, inner=32, experts=3, top_k=2, bias=True, rank=rank)
    packed = [pack(given[2]), pack(given[3])]
    results, kept = [], []
    for w, v in ([t.unpack() for t in packed], packed):
        kept.clear()
        leaves = [t.detach().requires_grad_() for i, t in enumerate(given) if i not in (2, 3)]
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            y = call(experts, ids, {"interleaved": interleaved})(*leaves[:2], w, v, *leaves[2:])
        results.append([y, *torch.autograd.grad(y, leaves, torch.ones_like(y))])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)
    if runs_triton(given[0]):
        numbers = [t for t in kept if t.is_floating_point() and t.itemsize > 1]
        assert not any(t.numel() == packed[0].shape.numel() for t in numbers)


@pytest.mark.parametrize("pack", [lambda w: w, in_mxfp4], ids=["plain", "mxfp4"])
def test_packed_is_both_or_neither(pack, device):
    ids, given = inputs(device, torch.float32, hidden=64, inner=32)
    with pytest.raises(ValueError, match="expected two tensors, or both packed alike"):
        experts(given[0], ids, given[1], quantized_matrices(given[2]), pack(given[3]))
