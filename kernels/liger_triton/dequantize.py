"""Frozen weights in packed formats, and their dequantization from 4-bit to a matrix (N, K).

    w_i = code[q_i] * m_b                            b = i // blocksize, each code is 4-bit
    m_b = nested.code[absmax_b] * nested.absmax_c + nested.offset     c = b // nested.blocksize, if there is a `nested`
    w_i = e2m1(q_i) * 2^(s_b - 127)                  MXFP4, b = i // 32

Each operation is rounded in fp32, and w is rounded once to the requested dtype. The result is bit-equal to bitsandbytes
for NF4 and FP4, with and without double quantization, and to transformers for MXFP4.

Shapes  packed (N * K / 2,) bytes, the first number of each in its upper half; absmax (blocks,); code (16,).
        MXFP4: blocks (E, N, K / 2) bytes, the first number of each in its lower half; scales (E, N, K / 32) bytes.
Dtypes  bf16, fp16, fp32.
Bytes   read half a byte a number, and one or four a block; write b a number. Nothing is kept.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from ._dispatch import KERNEL_DTYPES, jit, runs_triton, tl, use_triton
from ._launch import MAX_INT32, cdiv, launch

BLOCK, WARPS = 512, 8  # a word packs eight numbers


class PackedWeight(NamedTuple):
    """A frozen weight W (N, K) in a packed format. The matrix is made again for each use.

    Attributes:
        shape: (N, K).
        dtype: Dtype of the numbers it represents.
        device: Where the matrix is made.
        unpack: Returns a new matrix in the dtype that it is given.
        stored: The tensors it is made from.
        product: Returns x W^T + b for x (T, K), for formats with a product of their own.
        scale: (N,), still to be multiplied into each row of the matrix; only with `product`.
        by_row (`bool`): Whether a row of the product depends on that row of x alone, so that rows can be multiplied in
            slices.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    unpack: Callable[[torch.dtype], torch.Tensor]
    stored: tuple[torch.Tensor, ...]
    product: Callable[[torch.Tensor], torch.Tensor] | None = None
    scale: torch.Tensor | None = None
    by_row: bool = True

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        w = self.unpack(dtype)
        return w if self.scale is None else w.mul_(self.scale[:, None])

    def of_gradient(self, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the factors of dy W. A scale multiplies dy (T, N) instead of the weight, which is then not rounded."""
        return (dy if self.scale is None else dy * self.scale.to(dy.dtype)), self.unpack(dy.dtype)


class MXFP4Weight(NamedTuple):
    """Frozen matrices W (E, N, K), such as experts, stored as MXFP4: 4.25 bits a number.

    Attributes:
        blocks (`torch.Tensor`): (E, N, K / 2), uint8, contiguous.
        scales (`torch.Tensor`): (E, N, K / 32), uint8, contiguous.
        dtype (`torch.dtype`): Dtype of the numbers it represents, and of products with them.
    """

    blocks: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        *rows, half = self.blocks.shape
        return torch.Size((*rows, 2 * half))

    @property
    def ndim(self) -> int:
        return self.blocks.ndim

    def to(self, dtype: torch.dtype) -> "MXFP4Weight":
        """Return the same weight with another dtype for its products."""
        return self._replace(dtype=dtype)

    def unpack(self) -> torch.Tensor:
        """Return W (E, N, K) in new memory."""
        return dequantize_mxfp4(*self)


class Nested(NamedTuple):
    """The 8-bit scales of blocks, themselves quantized in blocks (double quantization).

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
    PACKED,
    CODE,
    ABSMAX,
    NESTED_CODE,
    NESTED_ABSMAX,
    OFFSET,
    OUT,
    words,
    BLOCKSIZE: tl.constexpr,
    NESTED_BLOCKSIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the eight numbers of each word of PACKED to OUT. NESTED_BLOCKSIZE 0: ABSMAX is not nested."""
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
    """Run `dequantize_4bit` in plain PyTorch."""
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
    """Return W (N, K) in `dtype`, in new memory.

    Args:
        packed: The bytes, of any dtype, contiguous.
        code: (16,), fp32.
        absmax: (blocks,), fp32, or uint8 with `nested`.
        blocksize: Numbers in a block.
        shape: (N, K).
        nested (`Nested`, *optional*): Quantization of the scales, if they are 8-bit.
    """
    packed, count = packed.view(-1), shape.numel()
    aligned = count % 8 == 0 and blocksize % 8 == 0 and packed.storage_offset() * packed.itemsize % 4 == 0
    if not (aligned and count <= MAX_INT32 and dtype != torch.float64 and runs_triton(code)):
        return _twin(packed, code, absmax, blocksize, shape, nested, dtype)
    out = torch.empty(shape, dtype=dtype, device=packed.device)
    tensors = (code,) * 3 if nested is None else (nested.code, nested.absmax, nested.offset)
    launch(
        _dequantize_4bit_kernel,
        (cdiv(count // 8, BLOCK),),
        packed.view(torch.int32),
        code,
        absmax,
        *tensors,
        out,
        count // 8,
        BLOCKSIZE=blocksize,
        NESTED_BLOCKSIZE=0 if nested is None else nested.blocksize,
        BLOCK=BLOCK,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
    return out


@jit
def _dequantize_mxfp4_kernel(BLOCKS, SCALES, OUT, words, BLOCK: tl.constexpr):
    """Write the eight numbers of each word of BLOCKS to OUT. It assembles fp32 bits: a fast exp2 would lose 2^-127."""
    word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = word < words
    packed = tl.load(BLOCKS + word, mask=mask, other=0)
    exponent = tl.load(SCALES + word // 4, mask=mask, other=0).to(tl.int32)
    scale = tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)
    k = tl.arange(0, 8)
    number = (packed[:, None] >> (k * 4)[None]) & 15  # the lower half of a byte comes first
    size = number & 7
    bits = tl.where(size > 1, ((size >> 1) + 126 << 23) | ((size & 1) << 22), size * (126 << 23))
    w = (bits | ((number >> 3) << 31)).to(tl.float32, bitcast=True) * scale[:, None]
    tl.store(OUT + word[:, None] * 8 + k[None], w.to(OUT.dtype.element_ty), mask=mask[:, None])


def _mxfp4_twin(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Run `dequantize_mxfp4` in plain PyTorch."""
    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=blocks.device)
    pairs = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).int()
    numbers = torch.cat((sizes, -sizes))[pairs].unflatten(-1, (-1, 32))
    return (numbers * torch.pow(2.0, scales.int() - 127).unsqueeze(-1)).flatten(-2).to(dtype)


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return W (E, N, K) in `dtype`, in new memory.

    Args:
        blocks (`torch.Tensor`): (E, N, K / 2), uint8, contiguous.
        scales (`torch.Tensor`): (E, N, K / 32), uint8, contiguous, at most 254.
        dtype (`torch.dtype`): bf16, fp16 or fp32 (float64: the PyTorch twin).

    Raises:
        ValueError: The shapes do not belong together, or a tensor is not of bytes.
    """
    if (
        blocks.dtype != torch.uint8
        or scales.dtype != torch.uint8
        or blocks.shape != (*scales.shape[:-1], 16 * scales.shape[-1])
    ):
        raise ValueError(
            f"blocks is {tuple(blocks.shape)} {blocks.dtype}, scales {tuple(scales.shape)} {scales.dtype}; expected "
            "uint8, and 16 bytes of blocks for each scale."
        )
    aligned = blocks.storage_offset() % 4 == 0 and blocks.is_contiguous() and scales.is_contiguous()
    if not (aligned and blocks.numel() and dtype in KERNEL_DTYPES and use_triton(blocks)):
        return _mxfp4_twin(blocks, scales, dtype)
    *rows, half = blocks.shape
    out = torch.empty(*rows, 2 * half, dtype=dtype, device=blocks.device)
    words = blocks.numel() // 4
    launch(
        _dequantize_mxfp4_kernel,
        (cdiv(words, BLOCK),),
        blocks.view(torch.int32),
        scales,
        out,
        words,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return out
