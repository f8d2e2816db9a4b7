"""Choose where a call runs, and register kernels as ops that `torch.compile(fullgraph=True)` can trace.

Import `triton` and `tl` from here. Without Triton they are stand-ins, so that the kernel files can still be imported,
and `use_triton` sends every call to the plain PyTorch twin.
"""

import contextlib
import functools
import os
import threading

import torch

from .sizes import now

try:
    import triton
    import triton.language as tl
except ImportError:

    class _NoTriton:
        """Stands in for `triton.jit` and `tl.constexpr` while the kernel files are imported. No kernel of them runs."""

        @staticmethod
        def constexpr(value):
            return value

        @staticmethod
        def jit(fn=None, **options):
            return (lambda fn: fn) if fn is None else fn

    triton, tl = None, _NoTriton
    jit = _NoTriton.jit
else:
    jit = triton.jit

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_float64(*tensors: torch.Tensor | None) -> bool:
    """Return whether any tensor is float64. Kernels compute in fp32, so they do not take float64."""
    for t in tensors:
        if t is not None and t.dtype == torch.float64:
            return True
    return False


def is_wrapped(t: torch.Tensor | None) -> bool:
    """Return whether `t` is a subclass that may lack memory for a kernel, such as a fake tensor or a DTensor."""
    if t is None or type(t) in _PLAIN:
        return False
    return not (now.computes_nothing or torch.compiler.is_compiling())


def takes_twin(*tensors: torch.Tensor | None) -> bool:
    """Return whether plain PyTorch computes a call with these tensors, on any device."""
    for t in tensors:
        if t is not None and (t.dtype == torch.float64 or t.is_meta or (type(t) not in _PLAIN and is_wrapped(t))):
            return True
    return False


def on_cuda(x: torch.Tensor) -> bool:
    """Return whether `x` is on a CUDA GPU, or counts as if it were (see `sizes.sizes_only`)."""
    return x.is_cuda or now.computes_nothing


def use_triton(x: torch.Tensor) -> bool:
    """Return whether the Triton kernel runs for `x`: on a GPU, or under `TRITON_INTERPRET=1`; never in float64."""
    if x.dtype == torch.float64:
        return False
    if now.computes_nothing:
        return True
    if triton is None or (type(x) not in _PLAIN and is_wrapped(x)):  # a plain tensor costs no call
        return False
    return x.is_cuda or x.device.type == "xpu" or (INTERPRET and x.device.type == "cpu")


def runs_triton(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Return whether the kernel takes these tensors. The PyTorch twin takes all others."""
    if x.is_cpu and not (INTERPRET or now.computes_nothing):  # a model on the CPU: nothing else need be asked
        return False
    if x.dtype not in KERNEL_DTYPES or not use_triton(x) or x.numel() == 0:
        return False
    for t in others:
        if t is not None and (t.dtype not in KERNEL_DTYPES or (type(t) not in _PLAIN and is_wrapped(t))):
            return False
    return True


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """Return the dtype that autocast computes a product with `x` in. None without autocast and for float64."""
    device = x.device.type
    if x.dtype == torch.float64 or device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def result_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype that a linear layer computes in: the autocast dtype, or the dtype of `x` without autocast."""
    return autocast_dtype(x) or x.dtype


class _WithoutAutocast:
    """Disable autocast. Entering and leaving `torch.autocast(..., enabled=False)` costs the host 10 us."""

    def __init__(self, device_type: str):
        self.device_type = device_type

    def __enter__(self) -> None:
        torch.set_autocast_enabled(self.device_type, False)

    def __exit__(self, *_) -> None:
        torch.set_autocast_enabled(self.device_type, True)


def no_autocast(device_type: str) -> contextlib.AbstractContextManager:
    """Return a context without autocast, for code that chooses the dtypes of its products itself."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return contextlib.nullcontext()
    return _WithoutAutocast(device_type)


_op = threading.local()


def runs_as_op() -> bool:
    """Return whether the calling host function runs as an op. The results of an op must not share memory."""
    return getattr(_op, "running", False)


def kernel_op(name: str, mutates_args=()):
    """Register the decorated function as `torch.ops.liger_triton.<name>`; its first argument is a tensor.

    `torch.compile` traces a call as one opaque op; give its output shapes with `@fn.register_fake`. Eager calls skip
    the dispatcher, because it costs about as much as the launch itself.
    """

    def decorate(fn):
        @functools.wraps(fn)
        def as_op(*args):
            _op.running = True
            try:
                with no_autocast(args[0].device.type):
                    return fn(*args)
            finally:
                _op.running = False

        op = torch.library.custom_op(f"liger_triton::{name}", as_op, mutates_args=mutates_args)

        @functools.wraps(fn)
        def call(*args):
            return op(*args) if torch.compiler.is_compiling() else fn(*args)

        call.register_fake = op.register_fake
        return call

    return decorate
