"""grad * factor, rounded to another dtype: the last step of a gradient computed before its upstream gradient was known.

Shapes  grad (n, ...) with unit stride in the last dimension; factor () or (n,), fp32, on the device of grad.
Dtypes  any of bf16, fp16, fp32 in and out; the product in fp32, one rounding.
Bytes   reads grad, writes the result, in the memory of grad where the dtypes agree; there a factor of 1 costs nothing.
        The factor is read on the device: the host does not wait for it.
"""

import torch

from ._dispatch import _device_guard, jit, tl, use_triton
from ._launch import next_power_of_2


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
    """grad * factor in `dtype`; written over grad where the dtypes agree, unless `keep` or while a call is traced."""
    rows = factor.reshape(
        -1, *[1] * (grad.ndim - 1)
    )  # not 0-dim: PyTorch would round such a factor to the dtype of grad first
    if torch.compiler.is_compiling():
        return (grad.float() * rows).to(dtype)
    out = grad if grad.dtype == dtype and not keep else torch.empty_like(grad, dtype=dtype)
    if not use_triton(grad) or grad.device.type == "cpu" or grad.numel() == 0:  # Triton's interpreter truncates to bf16
        return torch.mul(grad, rows, out=out)
    launch_scale(grad, factor, out)
    return out


def launch_scale(grad: torch.Tensor, factor: torch.Tensor, out: torch.Tensor) -> None:
    """The kernel behind `scaled`, into `out`, which may be `grad`."""
    g, o = (t.view(1, -1) if t.ndim < 2 else t for t in (grad, out))
    if factor.ndim == 0 and grad.is_contiguous() and out.is_contiguous() and grad.numel() % 2048 == 0:
        g, o = (t.view(-1, 2048) for t in (g, o))  # rows that start at 16 bytes, whatever their length was
    with _device_guard(grad):
        _scale_kernel[(g.shape[0],)](
            g, o, factor, g.stride(0), o.stride(0), factor.stride(0) if factor.ndim else 0, g.shape[1],
            IN_PLACE=out is grad, BLOCK=min(2048, next_power_of_2(g.shape[1])), num_warps=8,
        )  # fmt: skip
