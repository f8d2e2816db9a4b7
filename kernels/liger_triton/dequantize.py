"""Frozen weights that are stored in few bits, and the numbers (N, K) that four bits stand for.

    w_i = code[q_i] * m_b                            b = i // blocksize, each code of four bits
    m_b = nested.code[absmax_b] * nested.absmax_c + nested.offset     c = b // nested.blocksize, if there is a `nested`

in fp32, each operation rounded by itself, and w rounded once to the dtype that is asked for: to the bit what
bitsandbytes makes of NF4 and FP4, with double quantisation or without.

Shapes  packed (N * K / 2,) bytes, the first number of each in its upper half; absmax (blocks,); code (16,).
Dtypes  bf16, fp16, fp32.
Bytes   read half a byte a number, and one or four a block; write b a number. Nothing is kept.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from ._dispatch import jit, runs_triton, tl
from ._launch import MAX_INT32, cdiv, launch

BLOCK, WARPS = 512, 8  # words of eight numbers each


class PackedWeight(NamedTuple):
    """A frozen weight W (N, K) in another form than a matrix, from which the matrix is made each time that it is used.

    Attributes:
        shape: (N, K).
        dtype: Of the numbers that it stands for.
        device: Where the matrix is made.
        unpack: Returns a new matrix in the dtype that it is given.
        stored: The tensors that it is made from.
        product: Returns x W^T + b of x (T, K), where that is not a product with the matrix.
        scale: (N,), what each row of the matrix is still to be multiplied by; only with `product`.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    unpack: Callable[[torch.dtype], torch.Tensor]
    stored: tuple[torch.Tensor, ...]
    product: Callable[[torch.Tensor], torch.Tensor] | None = None
    scale: torch.Tensor | None = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        w = self.unpack(dtype)
        return w if self.scale is None else w.mul_(self.scale[:, None])

    def of_gradient(self, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The factors of dy W. A scale multiplies dy (T, N), so that no weight is rounded."""
        return (dy if self.scale is None else dy * self.scale.to(dy.dtype)), self.unpack(dy.dtype)


class Nested(NamedTuple):
    """The scales of blocks, in eight bits.

    Attributes:
        code: (256,), fp32.
        absmax: (blocks of scales,), fp32.
        blocksize: Scales in such a block.
        offset: (), fp32.
    """

    code: torch.Tensor
    absmax: torch.Tensor
    blocksize: int
    offset: torch.Tensor


@jit
def _dequantize_4bit_kernel(
    PACKED, CODE, ABSMAX, NESTED_CODE, NESTED_ABSMAX, OFFSET, OUT, words,
    BLOCKSIZE: tl.constexpr, NESTED_BLOCKSIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """OUT = the eight numbers of each word of PACKED. NESTED_BLOCKSIZE 0: ABSMAX is not nested."""
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = word < words
    packed = tl.load(PACKED + word, mask=mask, other=0)
    block = word // (BLOCKSIZE // 8)
    absmax = tl.load(ABSMAX + block, mask=mask, other=0)
    if NESTED_BLOCKSIZE:
        scale = tl.load(NESTED_ABSMAX + block // NESTED_BLOCKSIZE, mask=mask, other=0.0)
        absmax = tl.load(NESTED_CODE + absmax.to(tl.int32)) * scale + tl.load(OFFSET)
    k = tl.arange(0, 8)
    number = (packed[:, None] >> ((k ^ 1) * 4)[None]) & 15  # the upper half of a byte comes first
    w = tl.load(CODE + number) * absmax[:, None]
    tl.store(OUT + word[:, None] * 8 + k[None], w.to(OUT.dtype.element_ty), mask=mask[:, None])


def _twin(packed, code, absmax, blocksize, shape, nested, dtype) -> torch.Tensor:
    """`dequantize_4bit` in plain PyTorch."""
    if nested is not None:
        blocks = torch.arange(absmax.numel(), device=absmax.device) // nested.blocksize
        absmax = nested.code[absmax.int()] * nested.absmax[blocks] + nested.offset
    pairs = packed.view(torch.uint8).int()
    numbers = code[torch.stack((pairs >> 4, pairs & 15), -1).flatten()][: shape.numel()]
    blocks = torch.arange(shape.numel(), device=packed.device) // blocksize
    return (numbers * absmax[blocks]).to(dtype).view(shape)


def dequantize_4bit(
    packed: torch.Tensor,
    code: torch.Tensor,
    absmax: torch.Tensor,
    blocksize: int,
    shape: torch.Size,
    nested: Nested | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """W (N, K) in `dtype`, in new memory.

    Args:
        packed: The bytes, of any dtype, contiguous.
        code: (16,), fp32.
        absmax: (blocks,), fp32, or uint8 with `nested`.
        blocksize: Numbers in a block.
        shape: (N, K).
        nested (`Nested`, *optional*): Of the scales, if they are in eight bits.
    """
    packed, count = packed.view(-1), shape.numel()
    aligned = count % 8 == 0 and blocksize % 8 == 0 and packed.storage_offset() * packed.itemsize % 4 == 0
    if not (aligned and count <= MAX_INT32 and dtype != torch.float64 and runs_triton(code)):
        return _twin(packed, code, absmax, blocksize, shape, nested, dtype)
    out = torch.empty(shape, dtype=dtype, device=packed.device)
    tensors = (code,) * 3 if nested is None else (nested.code, nested.absmax, nested.offset)
    launch(
        _dequantize_4bit_kernel, (cdiv(count // 8, BLOCK),),
        packed.view(torch.int32), code, absmax, *tensors, out, count // 8,
        BLOCKSIZE=blocksize, NESTED_BLOCKSIZE=0 if nested is None else nested.blocksize, BLOCK=BLOCK,
        num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out
