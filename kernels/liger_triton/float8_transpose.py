"""Weights that are in eight bits already, transposed: W (N, K) -> (K, N). dx = dy W sums over N, and the matrix units
want both factors contiguous along the sum.

Shapes  W (N, K), N and K multiples of 16; up to three of one K, whose transposes lie side by side.
Dtypes  e4m3 in and out. Bits are moved, and none is changed.
Bytes   1 read and 1 written, per element.
"""

import torch

from ._dispatch import _device_guard, jit, on_cuda, tl, use_triton
from ._launch import cdiv, launch
from .float8_cast import E4M3

MOST_PARTS = 3  # of one transpose, and of one cast: the gradients of q, k and v
TILE = 32  # words of four numbers in both directions


@jit
def _transposed_kernel(
    A, B, C, COLUMNS, quarters_a, quarters_b, quarters_c, words, stride, tiles_per_row, tiles_a, tiles_b,
    TURN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of one of up to three matrices (N_i, K) in eight bits, written as its transpose, side by side.

    They, (N_i, K / 4), and COLUMNS (K, stride) are int32. Four rows of one word are sixteen numbers, and `TURN` turns
    them into four columns of one word, since single bytes must not change threads (see `_columns_kernel` of
    float8_cast.py).
    """
    pid = tl.program_id(0)
    tile = pid // tiles_per_row
    in_b, in_c = tile >= tiles_a, tile >= tiles_a + tiles_b
    W = tl.where(in_c, C, tl.where(in_b, B, A))
    quarters = tl.where(in_c, quarters_c, tl.where(in_b, quarters_b, quarters_a))
    first = tl.where(in_c, quarters_a + quarters_b, tl.where(in_b, quarters_a, 0))
    tile -= tl.where(in_c, tiles_a + tiles_b, tl.where(in_b, tiles_a, 0))
    quarter = tile.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    word = (pid % tiles_per_row).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (quarter[:, None] < quarters) & (word[None, :] < words)
    places = W + quarter[:, None] * 4 * words + word[None, :]
    a = tl.load(places, mask=inside, other=0)
    b = tl.load(places + words, mask=inside, other=0)
    c = tl.load(places + 2 * words, mask=inside, other=0)
    d = tl.load(places + 3 * words, mask=inside, other=0)
    a, b, c, d = tl.inline_asm_elementwise(
        TURN, "=r,=r,=r,=r,r,r,r,r", [a, b, c, d], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True,
        pack=1,
    )  # fmt: skip
    turned = COLUMNS + word[:, None] * 4 * stride + first + quarter[None, :]
    mask = (quarter[None, :] < quarters) & (word[:, None] < words)
    tl.store(turned, tl.trans(a), mask=mask)
    tl.store(turned + stride, tl.trans(b), mask=mask)
    tl.store(turned + 2 * stride, tl.trans(c), mask=mask)
    tl.store(turned + 3 * stride, tl.trans(d), mask=mask)


# PTX that turns a square of 4 x 4 bytes: first the halves of two rows each, then their halves.
_TURN = """{
    .reg .b32 ab, cd, ef, gh;
    prmt.b32 ab, $4, $5, 0x5140; prmt.b32 cd, $6, $7, 0x5140;
    prmt.b32 ef, $4, $5, 0x7362; prmt.b32 gh, $6, $7, 0x7362;
    prmt.b32 $0, ab, cd, 0x5410; prmt.b32 $1, ab, cd, 0x7632;
    prmt.b32 $2, ef, gh, 0x5410; prmt.b32 $3, ef, gh, 0x7632;
}"""


def transposed(all_bits: list[torch.Tensor]) -> torch.Tensor:
    """The transposes of at most three (N_i, K) in eight bits side by side: (K, N)."""
    if not (on_cuda(all_bits[0]) and use_triton(all_bits[0])):
        return torch.cat([bits.view(torch.uint8).t() for bits in all_bits], 1).contiguous().view(E4M3)
    k, total = all_bits[0].shape[1], sum(bits.shape[0] for bits in all_bits)
    columns = torch.empty((k, total), dtype=E4M3, device=all_bits[0].device)
    missing = MOST_PARTS - len(all_bits)
    quarters = [bits.shape[0] // 4 for bits in all_bits] + [0] * missing
    tiles_per_row, tiles = cdiv(k // 4, TILE), [cdiv(q, TILE) for q in quarters]
    words = [bits.view(torch.int32) for bits in all_bits]
    with _device_guard(columns):
        launch(
            _transposed_kernel, (sum(tiles) * tiles_per_row,),
            *words, *words[:1] * missing, columns.view(torch.int32), *quarters, k // 4, total // 4, tiles_per_row,
            tiles[0], tiles[1], TURN=_TURN, BLOCK_N=TILE, BLOCK_K=TILE, num_warps=4,
        )  # fmt: skip
    return columns
