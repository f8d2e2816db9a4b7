"""A case of `operations.py`: inputs, providers, an exact reference, and the bytes or FLOP of its floor."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from _measure import DEVICE

# The largest relative error of ours against float64. A peer may round more often. If its error is more than MISMATCH
# times as large, it computes something else and is not timed.
LIMITS = {torch.bfloat16: 5e-3, torch.float16: 5e-3, torch.float32: 1e-5}
MISMATCH = 5


@dataclass
class Case:
    """One operation at one size. `inputs` are the leaf tensors, `upstream` the gradients given to the backward pass.

    If no input requires a gradient, only the forward pass runs. With `graph`, the case is timed as a CUDA graph. Losses
    cannot be, because the host waits for the device in peers' losses. `overwrites` says that the first input is
    overwritten.
    """

    operation: str
    size: str
    inputs: tuple
    providers: dict[str, Callable]
    reference: Callable  # case -> float64 outputs and gradients, as one list
    dtype: torch.dtype
    bytes: float = 0.0
    flop: float = 0.0
    upstream: tuple | None = None
    graph: bool = True
    overwrites: bool = False

    @property
    def leaves(self):
        return [x for x in self.inputs if isinstance(x, torch.Tensor) and x.requires_grad]


def _outputs_and_grads(fn, inputs, leaves, upstream):
    out = fn(*inputs)
    out = out if isinstance(out, tuple) else (out,)
    if not leaves:
        return list(out)
    upstream = upstream or tuple(torch.ones_like(o) for o in out)
    return [*out, *torch.autograd.grad(out, leaves, [u.to(o.dtype) for u, o in zip(upstream, out, strict=True)])]


def forward_backward(fn, case):
    return lambda: _outputs_and_grads(fn, case.inputs, case.leaves, case.upstream)


def float64(fn):
    """The reference of a small case: `fn` on float64 copies of the inputs."""

    def run(case):
        copies = [
            x.detach().double().requires_grad_(x.requires_grad)
            if isinstance(x, torch.Tensor) and x.is_floating_point()
            else x
            for x in case.inputs
        ]
        leaves = [x for x in copies if isinstance(x, torch.Tensor) and x.requires_grad]
        return _outputs_and_grads(fn, copies, leaves, case.upstream)

    return run


def randn(*shape, dtype, scale=1.0, grad=True):
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype).requires_grad_(grad)


def compiled(fn):
    """`fn`, compiled for the current shapes. Without `dynamic=False`, a second size would get kernels for any size."""
    return torch.compile(fn, dynamic=False)


def liger(name):
    """A function of liger_kernel.transformers.functional.

    The call imports it, so a peer that is not installed only gives a row that says so.
    """

    def call(*args, **kwargs):
        import liger_kernel.transformers.functional as functional

        return getattr(functional, name)(*args, **kwargs)

    return call
