"""Autograd behaviour of every operation, compared with its PyTorch twin: graphs that run twice, inputs and results
changed in place, graphs that never run."""

import gc
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor

import liger_triton as lt
from liger_triton import reference

T = 13
H = 24
V = 37
Y = torch.randint(0, V, (T,), generator=torch.Generator().manual_seed(0))
Y[::4] = -100


def angles():
    angle = torch.linspace(0, 5, 2 * T * 4).view(2, T, 4).repeat(1, 1, 2)
    return angle.cos(), angle.sin()


YS = torch.stack((Y, Y.roll(1)))
VALID = YS != -100
TEACHER = torch.linspace(-1, 1, T * H).view(T, H), torch.linspace(-1, 1, V * H).view(V, H).sin()


def of_head(name, **options):
    return lambda ops, x, w, b: getattr(ops, name)(x, w, Y.to(x.device), b, **options)


def logprobs(**options):
    return lambda ops, x, w, b: ops.linear_logprobs(x, w, Y.to(x.device), b, **options)


def divergence(**options):
    return lambda ops, x, w, b: (
        ops.linear_divergence(
            x, w, *(t.to(x.device) for t in TEACHER), b, beta=0.3, mask=Y.to(x.device) != -100, **options
        ).divergence
    )


def inplace_cross_entropy(ops, z):
    return lt.cross_entropy(z, Y.to(z.device), inplace=True) if ops is lt else ops.cross_entropy(z, Y.to(z.device))


ROWS = (T, H)
WEIGHT = (V, H)
HEAD = ((T, H), (V, H), (V,))
OPS = {
    "rms_norm": (lambda ops, x, w: ops.rms_norm(x, w, 1e-6), (ROWS, (H,))),
    "add_rms_norm": (lambda ops, x, r, w: ops.add_rms_norm(x, r, w, 1e-6), (ROWS, ROWS, (H,))),
    "gated_rms_norm": (lambda ops, x, z, w: ops.gated_rms_norm(x, z, w, 1e-6), (ROWS, ROWS, (H,))),
    "gated_rms_norm-gate-first": (
        lambda ops, x, z, w: ops.gated_rms_norm(x, z, w, 1e-6, gate_first=True, group_size=H // 2),
        (ROWS, ROWS, (H,)),
    ),
    "layer_norm": (lambda ops, x, w, b: ops.layer_norm(x, w, b, 1e-6), (ROWS, (H,), (H,))),
    "rope": (lambda ops, q, k: ops.rope(q, k, *(t.to(q.device) for t in angles())), ((2, 3, T, 8), (2, 1, T, 8))),
    "swiglu": (lambda ops, g, u: ops.swiglu(g, u), (ROWS, ROWS)),
    "swiglu-clamped": (lambda ops, g, u: ops.swiglu(g, u, limit=0.5, alpha=1.7, up_offset=1.0), (ROWS, ROWS)),
    "geglu": (lambda ops, g, u: ops.geglu(g, u), (ROWS, ROWS)),
    "swiglu-reuse": (lambda ops, g, u: ops.swiglu(g, u, **reuse(ops)), (ROWS, ROWS)),
    "geglu-reuse": (lambda ops, g, u: ops.geglu(g, u, **reuse(ops)), (ROWS, ROWS)),
    "cross_entropy": (lambda ops, z: ops.cross_entropy(z, Y.to(z.device)), ((T, V),)),
    "cross_entropy-none": (lambda ops, z: ops.cross_entropy(z, Y.to(z.device), reduction="none"), ((T, V),)),
    "cross_entropy-inplace": (inplace_cross_entropy, ((T, V),)),
    "linear_cross_entropy": (of_head("linear_cross_entropy"), HEAD),
    "linear_cross_entropy-chunks": (of_head("linear_cross_entropy", chunk_rows=4), HEAD),
    "linear_cross_entropy-none": (of_head("linear_cross_entropy", reduction="none"), HEAD),
    "linear_logprobs": (logprobs(outputs=("log_probs", "entropy")), HEAD),
    "linear_logprobs-chunks": (logprobs(chunk_rows=4), HEAD),
    "linear_logprobs-uniform": (logprobs(uniform_grad=True, chunk_rows=4), HEAD),
    "linear_divergence": (divergence(), HEAD),
    "linear_divergence-uniform": (divergence(uniform_grad=True), HEAD),
    "linear_heads_cross_entropy": (
        lambda ops, *t: ops.linear_heads_cross_entropy(list(t[:2]), list(t[2:]), YS.to(t[0].device)).loss,
        (ROWS, ROWS, WEIGHT, WEIGHT),
    ),
    "linear_heads_kl": (
        lambda ops, *t: (
            ops.linear_heads_kl(
                list(t[:2]), list(t[2:]), *(s.to(t[0].device) for s in TEACHER), VALID.to(t[0].device)
            ).loss
        ),
        (ROWS, ROWS, WEIGHT, WEIGHT),
    ),
}


def reuse(ops):
    return {"reuse_inputs": True} if ops is lt else {}


def made(name, device):
    """Return leaves, and tensors that a model would compute from them: only parameters reach an operation as leaves."""
    torch.manual_seed(0)
    leaves = [torch.randn(shape, device=device).requires_grad_() for shape in OPS[name][1]]
    return leaves, [t * 1.0 for t in leaves]


def outputs(name, ops, tensors):
    out = OPS[name][0](ops, *tensors)
    return [t for t in (out if isinstance(out, tuple) else (out,)) if t is not None]


def upstream(name, out):
    torch.manual_seed(1)
    return [torch.full_like(t, 0.7) if "uniform" in name else torch.randn_like(t) for t in out]


def close(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in OPS if name != "cross_entropy-inplace"])
def test_two_backward_passes_of_a_kept_graph(name, device):
    """The third pass does not keep the graph; the fourth raises PyTorch's own error."""
    results = []
    for ops in (lt, reference):
        leaves, tensors = made(name, device)
        out = outputs(name, ops, tensors)
        grads = upstream(name, out)
        halves = [g * 0.5 for g in grads]
        runs = [torch.autograd.grad(out, leaves, g, retain_graph=True) for g in (grads, halves)]
        runs.append(torch.autograd.grad(out, leaves, grads))
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(out, leaves, grads)
        results.append([g for run in runs for g in run])
    close(*results)


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("name", OPS)
def test_input_changed_before_the_backward_pass(name, at, device):
    """If the twin raises, ours raises too or knew its gradient before. It never returns another gradient."""
    found = []
    for ops in (lt, reference):
        leaves, tensors = made(name, device)
        if at >= len(tensors):
            pytest.skip("has fewer inputs")
        out = outputs(name, ops, tensors)
        with torch.no_grad():
            tensors[at].mul_(2)
        try:
            found.append(torch.autograd.grad(out, leaves, upstream(name, out)))
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            found.append(None)
    leaves, tensors = made(name, device)
    out = outputs(name, reference, tensors)
    want = torch.autograd.grad(out, leaves, upstream(name, out))
    known = "linear" in name and name not in NEEDED_LATER
    needless = name == "layer_norm" and at == 2  # PyTorch also keeps the bias, although no gradient needs it
    if found[0] is not None:
        assert found[1] is not None or known or needless, "the twin raises"
        close(found[0], want)


NEEDED_LATER = ("linear_logprobs", "linear_logprobs-chunks", "linear_cross_entropy-none", "linear_divergence")


@pytest.mark.parametrize("name", OPS)
def test_results_changed_in_place(name, device):
    """Models change results in place. The gradients equal the twin's after the same change, or both raise."""
    found = []
    for ops in (lt, reference):
        leaves, tensors = made(name, device)
        out = outputs(name, ops, tensors)
        for t in out:
            t.mul_(2)
        try:
            found.append([*out, *torch.autograd.grad(out, leaves, upstream(name, out))])
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            found.append(None)
    assert (found[0] is None) == (found[1] is None)
    if found[0] is not None:
        close(*found)


@pytest.mark.parametrize("view", [False, True], ids=["leaf", "view"])
@pytest.mark.parametrize("name", OPS)
def test_a_leaf_is_never_written_over(name, view, device):
    """The owner of a parameter reads it again, even if the caller allowed reuse of its memory."""
    leaves, _ = made(name, device)
    before = [t.detach().clone() for t in leaves]
    out = outputs(name, lt, [t.view(-1).view(t.shape) for t in leaves] if view else leaves)
    got = torch.autograd.grad(out, leaves, upstream(name, out))
    for t, copy, version in zip(leaves, before, [t._version for t in leaves], strict=True):
        assert torch.equal(t, copy) and version == 0
    out = outputs(name, reference, leaves)
    close(got, torch.autograd.grad(out, leaves, upstream(name, out)))


def python_nodes(out):
    """Return the graph nodes of our own functions. Each is the `ctx` that they write on."""
    seen, stack = set(), [t.grad_fn for t in out]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack += [n for n, _ in node.next_functions]
    return [n for n in seen if isinstance(n, torch.autograd.function.BackwardCFunction)]


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("run", [False, True], ids=["without-backward", "after-backward"])
def test_nothing_is_held_without_the_results(name, run, device, triton_only):
    """No reference cycle: the graph's tensors are freed with the results, before any garbage collection."""
    leaves, tensors = made(name, device)
    if device == "cuda":  # Triton compiles in the first call; what its compiler leaves is not ours
        out = outputs(name, lt, tensors)
        torch.autograd.grad(out, leaves, upstream(name, out))
        del out
        gc.collect()
        leaves, tensors = made(name, device)
    gc.disable()
    gc.freeze()  # `get_objects` then lists only objects made from here on
    try:
        out = outputs(name, lt, tensors)
        nodes = python_nodes(out)
        assert nodes or "reuse" in name
        refs = [weakref.ref(t) for t in (*nodes, *tensors, *out)]
        if run:
            torch.autograd.grad(out, leaves, upstream(name, out))
        del out, nodes, tensors
        assert not [r() for r in refs if r() is not None]
        after = [t for t in gc.get_objects() if isinstance(t, torch.Tensor)]
        assert not after, [t.shape for t in after]
    finally:
        gc.unfreeze()
        gc.enable()


@pytest.mark.parametrize("name", OPS)
def test_a_second_derivative_is_right_or_an_error(name, device):
    """With `create_graph=True`, gradients must not count as constants: a gradient penalty would be silently wrong."""
    call, shapes = OPS[name]
    results = []
    for ops in (reference, lt):
        generator = torch.Generator().manual_seed(3)
        leaves = [torch.randn(s, generator=generator).to(device).requires_grad_() for s in shapes]
        inputs = [leaf * 1.5 for leaf in leaves]
        result = call(ops, *inputs)
        loss = result.square().sum() if isinstance(result, torch.Tensor) else result[0].square().sum()
        try:
            first = torch.autograd.grad(loss, leaves, create_graph=True, materialize_grads=True)
            penalty = sum(g.square().sum() for g in first)
            if not penalty.requires_grad:  # rope is linear
                return
            second = torch.autograd.grad(penalty, leaves, allow_unused=True)
        except RuntimeError as error:
            assert ops is lt and "A second derivative was asked for" in str(error)
            return
        results.append([torch.zeros_like(leaf) if g is None else g for g, leaf in zip(second, leaves, strict=True)])
    for got, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4 * want.abs().max().item())


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no-grad"])
@pytest.mark.parametrize("name", OPS)
def test_forward_mode_raises(name, grad, device, triton_only):
    """PyTorch raises for a custom function without a `jvp`. A missing tangent would count as zero."""
    leaves, tensors = made(name, device)
    with torch.set_grad_enabled(grad), forward_ad.dual_level():
        duals = [forward_ad.make_dual(t, torch.ones_like(t)) for t in (tensors if grad else map(torch.detach, tensors))]
        with pytest.raises(NotImplementedError, match="jvp|forward AD"):
            outputs(name, lt, duals)


@pytest.mark.parametrize("which", ["all", "first", "last"])
@pytest.mark.parametrize("name", OPS)
def test_wrappers_take_the_twin(name, which, device):
    """A subclass such as DTensor holds its values elsewhere, so it has no memory for a kernel to read."""
    _, tensors = made(name, device)
    kept = [t.detach() for t in tensors]
    at = {"all": range(len(kept)), "first": [0], "last": [len(kept) - 1]}[which]
    given = [TwoTensor(t, t.clone()) if k in at else t for k, t in enumerate(kept)]
    for got, want in zip(outputs(name, lt, given), outputs(name, reference, kept), strict=True):
        got = got.a if isinstance(got, TwoTensor) else got
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", OPS)
def test_tensors_without_values(name, device):
    """Fake tensors and `meta` tensors give shapes and dtypes, also of gradients, and launch nothing."""
    leaves, tensors = made(name, device)
    want = [(t.shape, t.dtype) for t in outputs(name, reference, tensors)]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(t.detach()).requires_grad_() for t in leaves]
        out = outputs(name, lt, [t * 1.0 for t in fakes])
        assert [(t.shape, t.dtype) for t in out] == want and all(isinstance(t, FakeTensor) for t in out)
        grads = torch.autograd.grad(out, fakes, [torch.ones_like(t) for t in out])
        assert [g.shape for g in grads] == [t.shape for t in leaves]
    on_meta = [t.detach().to("meta") for t in leaves]
    assert [(t.shape, t.dtype) for t in outputs(name, lt, on_meta)] == want
