"""Run the kernels on a GPU if there is one, else on the CPU through Triton's interpreter (TRITON_INTERPRET=1)."""

import importlib
import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if os.environ.get("TRITON_INTERPRET") == "1":
    import fast_interpreter  # noqa: F401

# Relative error against float64, see check_close. Triton's interpreter truncates to bf16 where a GPU rounds, so bf16
# gets twice the bound there.
BOUND = {torch.float32: 1e-5, torch.bfloat16: 5e-3 if torch.cuda.is_available() else 1e-2, torch.float16: 1e-3}


def pytest_collection_modifyitems(config, items):
    """Skip cases without a GPU: the interpreter takes minutes for all of them.

    A test with several dtypes runs all its cases in fp32. In 16 bits it runs each value of its other parameters at
    least once.
    """
    if torch.cuda.is_available():
        return
    dtypes = {}
    seen = {}
    for item in items:
        dtypes.setdefault(_function(item), set()).add(_dtype(item))
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        name, dtype = _function(item), _dtype(item)
        if dtype in (torch.bfloat16, torch.float16) and torch.float32 in dtypes[name]:
            here = {(dtype, key, repr(value)) for key, value in item.callspec.params.items()}
            new = here - seen.setdefault(name, set())
            seen[name] |= here
            if not new:
                item.add_marker(pytest.mark.skip(reason="runs on a GPU: in fp32 all cases run here, in 16 bits some"))


def _function(item):
    return item.path, item.originalname


def _dtype(item):
    """Return the dtype that a test is parametrised with, or None."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return params.get("dtype", params.get("x_dtype"))


@pytest.fixture
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def triton_only(device):
    """Skip tests that hold for the kernels but not for the PyTorch twins."""
    if not importlib.import_module("liger_triton._dispatch").use_triton(torch.empty(0, device=device)):
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Pretend to have one multiprocessor, so that persistent programs loop over tiles in small tests too."""
    monkeypatch.setattr(importlib.import_module("liger_triton._launch"), "multiprocessors", lambda device: 1)


@pytest.fixture(autouse=True)
def nan_filled_memory():
    """Fill `torch.empty` with NaN, so that a test fails if a kernel forgets to write an element."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def _check_close(fn, oracle, inputs):
    """Compare values and gradients of `fn` with `oracle` on float64 copies of `inputs`: |got - want| <= bound * |want|.

    The upstream gradients are random: all ones would hide a missing factor. The bound follows the dtype of each result
    and the least precise input. Returns the results of `fn`.
    """

    def run(f, tensors, upstream):
        leaves = [t if t is None else t.detach().requires_grad_(t.requires_grad) for t in tensors]
        out = f(*leaves)
        out = [t for t in (out if isinstance(out, tuple) else (out,)) if t is not None]
        upstream = upstream or [torch.randn(t.shape).to(t.device, t.dtype) for t in out]  # the same on every device
        torch.autograd.backward(out, [g.to(t.dtype) for g, t in zip(upstream, out, strict=True)])
        return out, [t.grad for t in leaves if t is not None and t.requires_grad], upstream

    def double(t):
        return t if t is None else t.detach().double().requires_grad_(t.requires_grad)

    before = [None if t is None else t.detach().clone() for t in inputs]
    out, grads, upstream = run(fn, inputs, None)
    want, want_grads, _ = run(oracle, [double(t) for t in inputs], upstream)
    loosest = max(BOUND[t.dtype] for t in inputs if t is not None)
    assert len(grads) == len(want_grads)
    for got, ref in zip(out + grads, want + want_grads, strict=True):
        assert got.shape == ref.shape
        error, size = (got.double() - ref).norm().item(), ref.norm().item()
        most = max(loosest, BOUND[got.dtype])
        assert error <= most * size, f"{got.dtype} {tuple(got.shape)}: error {error:.2e}, norm {size:.2e}, bound {most}"
    for t, copy in zip(inputs, before, strict=True):
        assert t is None or torch.equal(t, copy), "an input was written over"
    return out


@pytest.fixture
def check_close():
    return _check_close


def _check_upstream_strides(fn, inputs):
    """Check that upstream gradients with gaps between rows give the gradients that contiguous ones give."""
    out = fn(*inputs)
    out = out if isinstance(out, tuple) else (out,)
    views = [torch.randn(*t.shape[:-1], t.shape[-1] + 3 + i, device=t.device)[..., 3 + i :] for i, t in enumerate(out)]
    leaves = [t for t in inputs if t.requires_grad]
    got = torch.autograd.grad(out, leaves, views, retain_graph=True)
    want = torch.autograd.grad(out, leaves, [v.contiguous() for v in views])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.fixture
def check_upstream_strides():
    return _check_upstream_strides


def _check_compiled(fn, inputs):
    """Check that `torch.compile(fullgraph=True)` of `fn` gives the values and gradients of eager, bit for bit."""

    def run(f):
        leaves = [t if t is None else t.detach().requires_grad_(t.requires_grad) for t in inputs]
        out = f(*leaves)
        out = [t for t in (out if isinstance(out, tuple) else (out,)) if t is not None]
        torch.manual_seed(1)
        torch.autograd.backward(out, [torch.randn_like(t) for t in out])
        return out + [t.grad for t in leaves if t is not None and t.requires_grad]

    torch._dynamo.reset()
    for got, want in zip(run(torch.compile(fn, fullgraph=True, backend="aot_eager")), run(fn), strict=True):
        assert got.dtype == want.dtype and got.stride() == want.stride()
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.fixture
def check_compiled():
    return _check_compiled


@pytest.fixture(params=["triton", "torch"])
def row_pass(request, monkeypatch, device):
    """Run the vocabulary losses with their Triton row pass, and with the plain PyTorch one."""
    modules = {
        m: importlib.import_module(f"liger_triton.{m}")
        for m in ("_chunks", "_dispatch", "linear_heads_kl", "cross_entropy", "known_gradients")
    }
    for name in ("_row_pass", "linear_heads_kl"):
        monkeypatch.setattr(importlib.import_module(f"liger_triton.{name}"), "MAX_BLOCK", 128)  # several blocks a row
    if request.param == "torch":
        for module in modules.values():
            monkeypatch.setattr(module, "use_triton", lambda x: False)
    elif not modules["_dispatch"].use_triton(torch.empty(0, device=device)):
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1")
    return request.param


class _Allocations(TorchDispatchMode):
    """Count the matrix products, and list the sizes in elements of the tensors that operations create."""

    def __init__(self):
        super().__init__()
        self.products, self.sizes = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        if func.overloadpacket is torch.ops.aten.set_:
            return out  # existing memory: Triton's interpreter reads its arguments this way
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in before:
                self.sizes.append(t.untyped_storage().nbytes() // t.element_size())
        return out


@pytest.fixture
def allocations():
    return _Allocations
