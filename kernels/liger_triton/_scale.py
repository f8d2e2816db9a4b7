"""grad * factor, rounded to another dtype: the last step of a gradient computed before its upstream gradient was known.

Shapes  grad (n, ...) with unit stride in the last dimension; factor () or (n,), fp32, on the device of grad.
Dtypes  any of bf16, fp16, fp32 in and out. The product is computed in fp32 and rounded once.
Bytes   reads grad and writes the result. Where the dtypes agree, the result takes the memory of grad, and a factor of 1
        costs nothing. The factor is read on the device, so that the host does not wait for it.
"""

import torch

from ._dispatch import _device_guard, jit, launcher, tl, use_triton
from ._launch import next_power_of_2
from .sizes import computes_nothing


@jit
def _scale_kernel(
    G, OUT, FACTOR, g_stride, out_stride, factor_stride, columns, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr
):
    """Row `program_id(0)` of G times its factor."""
    row = tl.program_id(0).to(tl.int64)  # int64: 262144 rows of 8192 are 2**31 elements
    factor = tl.load(FACTOR + row * factor_stride)
    if IN_PLACE:
        if factor == 1.0:
            return
    G += row * g_stride
    OUT += row * out_stride
    for start in range(0, columns, BLOCK):
        off = start + tl.arange(0, BLOCK)
        g = tl.load(G + off, mask=off < columns, other=0.0).to(tl.float32)
        tl.store(OUT + off, g * factor, mask=off < columns)


def scaled(grad: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype, keep: bool = False) -> torch.Tensor:
    """grad * factor in `dtype`. It is written over grad where the dtypes agree, except with `keep` or in a trace."""
    # The factor must not be 0-dimensional: PyTorch would round it to the dtype of grad first.
    rows = factor.reshape(-1, *[1] * (grad.ndim - 1))
    if torch.compiler.is_compiling():
        return (grad.float() * rows).to(dtype)
    out = grad if grad.dtype == dtype and not keep else torch.empty_like(grad, dtype=dtype)
    # On a CPU, Triton's interpreter would truncate to bf16 instead of rounding.
    if not use_triton(grad) or (grad.device.type == "cpu" and not computes_nothing()) or grad.numel() == 0:
        return torch.mul(grad, rows, out=out)
    launch_scale(grad, factor, out)
    return out


def launch_scale(grad: torch.Tensor, factor: torch.Tensor, out: torch.Tensor) -> None:
    """The kernel behind `scaled`, into `out`, which may be `grad`."""
    g, o = (t.view(1, -1) if t.ndim < 2 else t for t in (grad, out))
    if factor.ndim == 0 and grad.is_contiguous() and out.is_contiguous() and grad.numel() % 2048 == 0:
        g, o = (t.view(-1, 2048) for t in (g, o))  # now all rows start at a multiple of 16 bytes
    with _device_guard(grad):
        launcher(_scale_kernel, (g.shape[0],))(
            g, o, factor, g.stride(0), o.stride(0), factor.stride(0) if factor.ndim else 0, g.shape[1],
            IN_PLACE=out is grad, BLOCK=min(2048, next_power_of_2(g.shape[1])), num_warps=8,
        )  # fmt: skip


def scaled_in_turn(
    grads: list[torch.Tensor | None], factor: torch.Tensor, dtypes: list[torch.dtype | None], keep: bool
) -> list[torch.Tensor | None]:
    """`scaled` of each gradient, and None in place of one that is None. Takes them out of `grads`, so that a sum in
    fp32 is freed before the next one is rounded."""
    out = []
    for k, dtype in enumerate(dtypes):
        out.append(None if grads[k] is None else scaled(grads[k], factor, dtype, keep))
        grads[k] = None
    return out


def one_number(g, counted):
    """The one value, (), that g (T,) has in all counted rows. It is NaN if they differ, and 0 if no row is counted."""
    if g.shape[0] == 0:
        return g.new_zeros(())
    if g.stride(0) == 0 and not torch.compiler.is_compiling():
        return torch.where(counted.any(), g[0], 0.0)  # one number, expanded by the backward pass of a sum
    low = torch.where(counted, g, torch.inf).amin()
    high = torch.where(counted, g, -torch.inf).amax()
    value = torch.where(low == high, low, torch.nan)
    return torch.where(counted.any(), value, 0.0)
