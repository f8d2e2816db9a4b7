"""The gate between the projections of a gated MLP, where these have a LoRA that has not been added to them yet.

    g' = g + h_g F_g,  u' = u + h_u F_u,  a = act(g') * u'          act is that of `swiglu` or `geglu`
    da' = da + h_a F_a, and from it and g', u' the gradients dg, du

Each h F is a product of rank r, made in registers from factors that are small beside g. Added by a product of its own
it would be a pass that reads and writes g.

Shapes  g, u, a (T, I); h (T, r), F (r, I), with r at most `LARGEST_RANK`. The ranks of the three may differ, and each
        product may be missing.
Dtypes  bf16, fp16. g, u and da are rounded, and what the products add to them is not, in fp32.
Bytes   b per element: forward reads g, u and writes a: 3nb. Backward reads da, g, u and writes dg, du, a: 6nb. With a
        pass for each product that was 7nb and 8nb.
"""

import torch

from ._dispatch import INTERPRET, _device_guard, jit, tl, use_triton
from ._launch import cdiv, gate_gradients, launch, next_power_of_2
from .geglu import _gelu

LARGEST_RANK = 64
# The fastest of eleven tiles on an H200: 0.226 and 0.484 ms at 8192 x 14336, rank 16. The floors are 0.164 and 0.328.
BLOCK_T, BLOCK_I, WARPS = 16, 128, 4
Product = tuple[torch.Tensor, torch.Tensor]


def takes(dtype: torch.dtype, device_of: torch.Tensor, ranks: list[int]) -> bool:
    """Whether the kernels add products of these ranks; 0 is a missing one."""
    return use_triton(device_of) and dtype.itemsize == 2 and 0 < max(ranks) <= LARGEST_RANK


@jit
def _act(g, ACT: tl.constexpr):
    """(act(g), act'(g))"""
    if ACT == "silu":
        s = tl.sigmoid(g)
        return g * s, s * (1.0 + g * (1.0 - s))
    else:
        return _gelu(g, ACT == "gelu_tanh")


@jit
def _load(
    X, H, F, row, column, rows, columns, rank, h_stride, f_stride_r, f_stride_i,
    BLOCK_R: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """A tile of X and the parts of H and F that belong to it. A block of 0: there is no product."""
    mask = (row < rows)[:, None] & (column < columns)[None]
    x = tl.load(X + row[:, None] * columns + column[None], mask=mask, other=0.0)
    h, f = x, x
    if BLOCK_R > 0:
        r = tl.arange(0, BLOCK_R)
        h = tl.load(H + row[:, None] * h_stride + r[None], mask=(row < rows)[:, None] & (r < rank)[None], other=0.0)
        places = F + r[:, None] * f_stride_r + column[None] * f_stride_i
        f = tl.load(places, mask=(r < rank)[:, None] & (column < columns)[None], other=0.0)
        if WIDEN:  # Triton's interpreter multiplies the bits of bf16 as integers
            h, f = h.to(tl.float32), f.to(tl.float32)
    return x, h, f


@jit
def _sum(x, h, f, BLOCK_R: tl.constexpr):
    """X + H F in fp32."""
    x = x.to(tl.float32)
    if BLOCK_R > 0:
        x = tl.dot(h, f, x)
    return x


@jit
def _forward_kernel(
    G, U, Y, GH, GF, UH, UF, rows, columns, tiles_per_row,
    g_rank, gh_stride, gf_stride_r, gf_stride_i, u_rank, uh_stride, uf_stride_r, uf_stride_i,
    ACT: tl.constexpr, BLOCK_GR: tl.constexpr, BLOCK_UR: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    row = (pid // tiles_per_row).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = (pid % tiles_per_row).to(tl.int64) * BLOCK_I + tl.arange(0, BLOCK_I)
    # All loads before the first product, so that the waiting for one is that for all.
    g, gh, gf = _load(
        G, GH, GF, row, column, rows, columns, g_rank, gh_stride, gf_stride_r, gf_stride_i, BLOCK_GR, WIDEN
    )
    u, uh, uf = _load(
        U, UH, UF, row, column, rows, columns, u_rank, uh_stride, uf_stride_r, uf_stride_i, BLOCK_UR, WIDEN
    )
    value, _ = _act(_sum(g, gh, gf, BLOCK_GR), ACT)
    mask = (row < rows)[:, None] & (column < columns)[None]
    y = value * _sum(u, uh, uf, BLOCK_UR)
    tl.store(Y + row[:, None] * columns + column[None], y.to(Y.dtype.element_ty), mask=mask)


@jit
def _backward_kernel(
    DA, G, U, DG, DU, AH, AF, GH, GF, UH, UF, rows, columns, tiles_per_row,
    a_rank, ah_stride, af_stride_r, af_stride_i,
    g_rank, gh_stride, gf_stride_r, gf_stride_i, u_rank, uh_stride, uf_stride_r, uf_stride_i,
    ACT: tl.constexpr, BLOCK_AR: tl.constexpr, BLOCK_GR: tl.constexpr, BLOCK_UR: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """DA is written over with a."""
    pid = tl.program_id(0)
    row = (pid // tiles_per_row).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = (pid % tiles_per_row).to(tl.int64) * BLOCK_I + tl.arange(0, BLOCK_I)
    da, ah, af = _load(
        DA, AH, AF, row, column, rows, columns, a_rank, ah_stride, af_stride_r, af_stride_i, BLOCK_AR, WIDEN
    )
    g, gh, gf = _load(
        G, GH, GF, row, column, rows, columns, g_rank, gh_stride, gf_stride_r, gf_stride_i, BLOCK_GR, WIDEN
    )
    u, uh, uf = _load(
        U, UH, UF, row, column, rows, columns, u_rank, uh_stride, uf_stride_r, uf_stride_i, BLOCK_UR, WIDEN
    )
    value, slope = _act(_sum(g, gh, gf, BLOCK_GR), ACT)
    u, da = _sum(u, uh, uf, BLOCK_UR), _sum(da, ah, af, BLOCK_AR)
    place = row[:, None] * columns + column[None]
    mask = (row < rows)[:, None] & (column < columns)[None]
    tl.store(DU + place, (da * value).to(DU.dtype.element_ty), mask=mask)
    tl.store(DG + place, (da * u * slope).to(DG.dtype.element_ty), mask=mask)
    tl.store(DA + place, (value * u).to(DA.dtype.element_ty), mask=mask)


def _arguments(product: Product | None, like: torch.Tensor) -> tuple[list[torch.Tensor], list[int], int]:
    """The two tensors, rank and strides, and the block of a product."""
    if product is None:
        return [like, like], [0, 0, 0, 0], 0
    h, f = product
    return [h, f], [h.shape[1], h.stride(0), f.stride(0), f.stride(1)], max(16, next_power_of_2(h.shape[1]))


def gate_of_sums(
    g: torch.Tensor, u: torch.Tensor, to_g: Product | None, to_u: Product | None, activation: str
) -> torch.Tensor:
    """a of contiguous g and u (T, I) and the products that belong to them, in the dtype of g."""
    a, (rows, columns) = torch.empty_like(g), g.shape
    (tensors_g, of_g, block_g), (tensors_u, of_u, block_u) = _arguments(to_g, g), _arguments(to_u, g)
    tiles_per_row = cdiv(columns, BLOCK_I)
    with _device_guard(g):
        launch(
            _forward_kernel, (cdiv(rows, BLOCK_T) * tiles_per_row,),
            g, u, a, *tensors_g, *tensors_u, rows, columns, tiles_per_row, *of_g, *of_u,
            ACT=activation, BLOCK_GR=block_g, BLOCK_UR=block_u, BLOCK_T=BLOCK_T, BLOCK_I=BLOCK_I, WIDEN=INTERPRET,
            num_warps=WARPS,
        )  # fmt: skip
    return a


def gradients_of_sums(
    da: torch.Tensor, g: torch.Tensor, u: torch.Tensor, to_da: Product | None, to_g: Product | None,
    to_u: Product | None, activation: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dg, du, a) of contiguous da, g and u (T, I) and the products that belong to them.

    a is in the memory of `da`, and dg and du are in that of `g` and `u`, unless the backward pass may run again.
    """
    rows, columns = g.shape
    parts = [_arguments(product, g) for product in (to_da, to_g, to_u)]
    dg, du = gate_gradients(g, u, reuse=True)
    tiles_per_row = cdiv(columns, BLOCK_I)
    with _device_guard(g):
        launch(
            _backward_kernel, (cdiv(rows, BLOCK_T) * tiles_per_row,),
            da, g, u, dg, du, *[t for tensors, _, _ in parts for t in tensors], rows, columns, tiles_per_row,
            *[number for _, numbers, _ in parts for number in numbers],
            ACT=activation, BLOCK_AR=parts[0][2], BLOCK_GR=parts[1][2], BLOCK_UR=parts[2][2],
            BLOCK_T=BLOCK_T, BLOCK_I=BLOCK_I, WIDEN=INTERPRET, num_warps=WARPS,
        )  # fmt: skip
    return dg, du, da
