"""Where a call runs, and how a kernel becomes an op that `torch.compile(fullgraph=True)` traces.

Import `triton` and `tl` from here: without Triton installed they are stand-ins that let the kernel files be imported,
and `use_triton` sends every call to the plain PyTorch twin. A call in float64 always goes there (`takes_twin`).
"""

import contextlib
import functools
import os
import threading

import torch

from .sizes import computes_nothing

try:
    import triton
    import triton.language as tl
except ImportError:

    class _NoTriton:
        """Stands in for `triton.jit` and `tl.constexpr` while the kernel files are imported. It is never called."""

        constexpr = None

        @staticmethod
        def jit(fn):
            return fn

    triton, tl = None, _NoTriton
    jit = _NoTriton.jit
else:
    jit = triton.jit

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def takes_twin(*tensors: torch.Tensor | None) -> bool:
    """True if one of them is float64. The kernels compute in fp32, so that the PyTorch twin runs, on any device."""
    return any(t is not None and t.dtype == torch.float64 for t in tensors)


def on_cuda(x: torch.Tensor) -> bool:
    """Whether `x` is on a CUDA GPU, or counts as such a tensor."""
    return x.is_cuda or computes_nothing()


def launcher(kernel, grid: tuple[int, ...]):
    """`kernel[grid]`, to be called with the arguments of the kernel."""
    return _nothing if computes_nothing() else kernel[grid]


def _nothing(*args, **constants) -> None:
    pass


def use_triton(x: torch.Tensor) -> bool:
    """True if the Triton kernel runs for `x`: on a GPU, or on a CPU under `TRITON_INTERPRET=1`, and not in float64."""
    if takes_twin(x):
        return False
    if computes_nothing():
        return True
    if triton is None:
        return False
    return x.is_cuda or x.device.type == "xpu" or (INTERPRET and x.device.type == "cpu")


def graph_is_kept() -> bool:
    """Whether the backward pass that is running may be repeated (`retain_graph=True`), so that it may give away nothing
    that a second one would need."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def once_differentiable(backward):
    """Marks the `backward` of an `autograd.Function` whose gradients have no derivative that PyTorch knows.

    It raises under `create_graph=True`. PyTorch's own decorator waits until a second backward pass comes to the
    gradients, which `torch.autograd.grad` never does, and it does nothing where the upstream gradient is the 1 of a
    loss: the gradients would count as constants, and a gradient penalty would be wrong in silence.
    """

    @functools.wraps(backward)
    def once(ctx, *upstream):
        if not torch.is_grad_enabled():  # as in every backward pass that does not build a graph of its own
            return backward(ctx, *upstream)
        if torch.compiler.is_compiling():
            with torch.no_grad():
                return backward(ctx, *upstream)
        raise RuntimeError(
            "A second derivative was asked for (create_graph=True) through a fused kernel of liger_triton, which "
            "has none. Use the plain PyTorch operation there; in a patched model, switch it off in liger_config."
        )

    return once


def _is_elsewhere(x: torch.Tensor) -> bool:
    """Whether `x` is on a GPU that is not the current one, on which Triton launches. With `device_map` it may be."""
    return x.is_cuda and x.get_device() != torch.cuda.current_device()


def _device_guard(x: torch.Tensor):
    """A context in which the device of `x` is the current one."""
    return torch.cuda.device(x.device) if _is_elsewhere(x) else contextlib.nullcontext()


class _WithoutAutocast:
    """`torch.autocast(..., enabled=False)`, which takes the host 10 us to enter and leave, inside an autocast."""

    def __init__(self, device_type: str):
        self.device_type = device_type

    def __enter__(self) -> None:
        torch.set_autocast_enabled(self.device_type, False)

    def __exit__(self, *_) -> None:
        torch.set_autocast_enabled(self.device_type, True)


def no_autocast(device_type: str) -> contextlib.AbstractContextManager:
    """A context without autocast: the products choose their dtypes themselves."""
    return _WithoutAutocast(device_type) if torch.is_autocast_enabled(device_type) else contextlib.nullcontext()


_op = threading.local()


def runs_as_op() -> bool:
    """Whether the host function that asks was called as an op, whose results may not share memory."""
    return getattr(_op, "running", False)


def kernel_op(name: str, mutates_args=()):
    """Register the decorated function as `torch.ops.liger_triton.<name>`; its first argument is a tensor.

    Traced by `torch.compile`, a call is that one opaque op (give its output shapes with `@fn.register_fake`). Eager
    calls skip the dispatcher, which costs about as much as the launch itself, and run on the device of the first
    argument.
    """

    def decorate(fn):
        @functools.wraps(fn)
        def as_op(*args):
            _op.running = True
            try:
                return fn(*args)
            finally:
                _op.running = False

        op = torch.library.custom_op(f"liger_triton::{name}", as_op, mutates_args=mutates_args)

        @functools.wraps(fn)
        def call(*args):
            if torch.compiler.is_compiling():
                return op(*args)
            if _is_elsewhere(args[0]):
                with torch.cuda.device(args[0].device):
                    return fn(*args)
            return fn(*args)

        call.register_fake = op.register_fake
        return call

    return decorate
