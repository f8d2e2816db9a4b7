"""Gates of gated MLPs, y = act(g) * u, alone or with the rank-r products that a LoRA adds to g, u and dy.

    du = dy * act(g),  dg = dy * u * act'(g)

    "silu"       act(g) = g * s,  act'(g) = s * (1 + g * (1 - s)),  s = sigmoid(g)
    "gelu"       act(g) = g * Phi(g),  act'(g) = Phi(g) + g * phi(g), of the standard normal distribution
    "gelu_tanh"  act(g) = g * s,  act'(g) = s + g * s * (1 - s) * z',  s = sigmoid(z)
                 z = 2 * sqrt(2 / pi) * (g + 0.044715 * g^3).  It equals the usual form, since (1 + tanh(z / 2)) / 2 is
                 sigmoid(z), but 1 + tanh would cancel for negative g.
    "clamped"    c = min(gate_scale * g, limit),  v = clamp(u, -limit, limit) + up_offset,  y = v * c * sigmoid(alpha c)
                 (gpt-oss, DeepSeek V4, MiniMax M3, Falcon-H1). Clamped numbers get gradient 0. A number equal to the
                 limit gets what the installed `torch.clamp` passes: all until 2.14, nothing since 2.15. Such ties are
                 common: in 10 * randn in bf16, 1 of 800 numbers is 7.
    a LoRA       g' = g + h_g F_g,  u' = u + h_u F_u,  dy' = dy + h_y F_y  take the places of g, u and dy

SwiGLU and GeGLU: Shazeer 2020, arXiv:2002.05202, section 2. gelu: Hendrycks and Gimpel 2016, arXiv:1606.08415.

Shapes  g, u, y and their gradients (..., I). g and u may be the halves of one tensor (..., 2I). With a LoRA they are
        contiguous (T, I), h (T, r) and F (r, I), r at most `LARGEST_RANK`. Ranks may differ, and each product is
        optional.
Dtypes  bf16, fp16, fp32; with a LoRA 16 bits. Arithmetic in fp32, one rounding per store. Eager PyTorch also rounds
        act(g), so 16-bit results are not bit-equal to it; on average they are closer to float64.
Bytes   b per element. Forward 3nb (eager 5nb, clamped 9nb). Backward 5nb (eager 9nb, clamped 17nb), and 6nb with y.
        A pass for each product of a LoRA would be 7nb and 8nb. Kept for backward: g, u (eager also keeps act(g)).
"""

import math

import torch

from . import reference
from ._autograd import graph_is_kept, is_of_leaf, once_differentiable, records_graph
from ._dispatch import INTERPRET, jit, kernel_op, runs_as_op, runs_triton, tl, use_triton
from ._launch import as_rows, cdiv, launch, next_power_of_2, not_among
from .halves import joined

APPROXIMATIONS = ("tanh", "none")
UNCHANGED = (math.inf, 1.0, 0.0, 1.0)  # limit, alpha, up_offset, gate_scale
LARGEST_RANK = 64
# The fastest of eleven tiles on an H200: 0.226 and 0.484 ms at 8192 x 14336, rank 16. The floors are 0.164 and 0.328.
BLOCK_T = 16
BLOCK_I = 128
WARPS = 4
Product = tuple[torch.Tensor, torch.Tensor]


def _clamp_passes_at_limit() -> bool:
    """Return whether `torch.clamp` passes the gradient of a number equal to its limit. It does up to torch 2.14.

    The autograd node is called directly: `backward` would start autograd's threads, and then a process must not fork.
    Nor could torch.compile trace the check in a later call.
    """
    with torch.inference_mode(False), torch.enable_grad():
        at_limit = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)
        clamped = at_limit.clamp(max=0.0)
    gradient = clamped.grad_fn(torch.ones((), dtype=torch.float32, device="cpu"))
    return bool(gradient)


# With the wrong answer, gates of 10 * randn in bf16 had a dg off by 8.4% of its norm, and by 0.4% with the right one.
PASSES_AT_LIMIT = _clamp_passes_at_limit()
ACTIVATIONS = ("silu", "gelu_tanh", "gelu")


@jit
def _act(g, ACT: tl.constexpr):
    """Return (act(g), act'(g))."""
    if ACT == "silu":
        s = tl.sigmoid(g)
        slope = s * (1.0 + g * (1.0 - s))
    elif ACT == "gelu_tanh":
        s = tl.sigmoid(1.5957691216057308 * g * (1.0 + 0.044715 * g * g))  # 2 * sqrt(2 / pi)
        # Beyond |g| = 15, s is 0 or 1 in fp32 and its derivative 0. Without the clamp, g * g could be inf and 0 * inf
        # NaN.
        b = tl.minimum(tl.maximum(g, -15.0), 15.0)
        slope = s + b * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * b * b)  # 3 * 0.044715
    else:
        s = 0.5 + 0.5 * tl.erf(0.7071067811865476 * g)  # 1 / sqrt(2)
        slope = s + g * 0.3989422804014327 * tl.exp(-0.5 * g * g)  # 1 / sqrt(2 * pi)
    return g * s, slope


@jit
def gate_value(g, u, limit, alpha, up_offset, gate_scale, ACT: tl.constexpr):
    """Return y for fp32 g and u."""
    if ACT == "clamped":
        g *= gate_scale
        g = tl.where(g > limit, limit, g)  # tl.minimum would hide a NaN
        u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u)) + up_offset
        y = g * tl.sigmoid(alpha * g) * u
    else:
        value, _ = _act(g, ACT)
        y = value * u
    return y


@jit
def gate_slopes(dy, g, u, limit, alpha, up_offset, gate_scale, ACT: tl.constexpr, AT_LIMIT: tl.constexpr):
    """Return (dg, du, y) for fp32 dy, g and u. AT_LIMIT is `PASSES_AT_LIMIT`."""
    if ACT == "clamped":
        g *= gate_scale
        if AT_LIMIT:
            g_cut = g > limit
            u_cut = (u > limit) | (u < -limit)
        else:
            has_limit = limit < float("inf")  # without a limit, even infinity is not clamped
            g_cut = (g >= limit) & has_limit
            u_cut = ((u >= limit) | (u <= -limit)) & has_limit
        g = tl.where(g_cut, limit, g)
        u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u)) + up_offset
        s = tl.sigmoid(alpha * g)
        value = g * s
        du = tl.where(u_cut, 0.0, dy * value)
        dg = tl.where(g_cut, 0.0, dy * u * (s * (1.0 + alpha * g * (1.0 - s))) * gate_scale)
    else:
        value, slope = _act(g, ACT)
        du = dy * value
        dg = dy * u * slope
    return dg, du, value * u


@jit(do_not_specialize=["tiles_per_row"])
def _gate_fwd_kernel(
    G,
    U,
    Y,
    g_stride,
    u_stride,
    n,
    tiles_per_row,
    limit,
    alpha,
    up_offset,
    gate_scale,
    ACT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    row = (pid // tiles_per_row).to(tl.int64)
    col = (pid % tiles_per_row).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # int64: a contiguous input is one row
    g = tl.load(G + row * g_stride + col, mask=col < n, other=0.0).to(tl.float32)
    u = tl.load(U + row * u_stride + col, mask=col < n, other=0.0).to(tl.float32)
    y = gate_value(g, u, limit, alpha, up_offset, gate_scale, ACT)
    tl.store(Y + row * n + col, y, mask=col < n)


@jit(do_not_specialize=["tiles_per_row"])
def _gate_bwd_kernel(
    DY,
    G,
    U,
    DG,
    DU,
    dy_stride,
    g_stride,
    u_stride,
    d_stride,
    n,
    tiles_per_row,
    limit,
    alpha,
    up_offset,
    gate_scale,
    ACT: tl.constexpr,
    AT_LIMIT: tl.constexpr,
    PRODUCT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store dg and du. With PRODUCT, DY is overwritten with y."""
    pid = tl.program_id(0)
    row = (pid // tiles_per_row).to(tl.int64)
    col = (pid % tiles_per_row).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = col < n
    dy = tl.load(DY + row * dy_stride + col, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(G + row * g_stride + col, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(U + row * u_stride + col, mask=mask, other=0.0).to(tl.float32)
    dg, du, y = gate_slopes(dy, g, u, limit, alpha, up_offset, gate_scale, ACT, AT_LIMIT)
    tl.store(DU + row * d_stride + col, du, mask=mask)
    tl.store(DG + row * d_stride + col, dg, mask=mask)
    if PRODUCT:
        tl.store(DY + row * dy_stride + col, y, mask=mask)


@jit
def _load_with_product(
    X,
    H,
    F,
    row,
    column,
    rows,
    columns,
    rank,
    h_stride,
    f_stride_r,
    f_stride_i,
    BLOCK_R: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Load a tile of X and its parts of H and F. Without a product, its block is 0."""
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
    """Return X + H F in fp32."""
    x = x.to(tl.float32)
    if BLOCK_R > 0:
        x = tl.dot(h, f, x)
    return x


@jit(do_not_specialize=["rows"])
def _lora_gate_fwd_kernel(
    G,
    U,
    Y,
    GH,
    GF,
    UH,
    UF,
    rows,
    columns,
    tiles_per_row,
    g_rank,
    gh_stride,
    gf_stride_r,
    gf_stride_i,
    u_rank,
    uh_stride,
    uf_stride_r,
    uf_stride_i,
    ACT: tl.constexpr,
    BLOCK_GR: tl.constexpr,
    BLOCK_UR: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_I: tl.constexpr,
    WIDEN: tl.constexpr,
):
    pid = tl.program_id(0)
    row = (pid // tiles_per_row).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = (pid % tiles_per_row).to(tl.int64) * BLOCK_I + tl.arange(0, BLOCK_I)
    # All loads come before the first product, so that they wait for memory together.
    g, gh, gf = _load_with_product(
        G, GH, GF, row, column, rows, columns, g_rank, gh_stride, gf_stride_r, gf_stride_i, BLOCK_GR, WIDEN
    )
    u, uh, uf = _load_with_product(
        U, UH, UF, row, column, rows, columns, u_rank, uh_stride, uf_stride_r, uf_stride_i, BLOCK_UR, WIDEN
    )
    value, _ = _act(_sum(g, gh, gf, BLOCK_GR), ACT)
    mask = (row < rows)[:, None] & (column < columns)[None]
    y = value * _sum(u, uh, uf, BLOCK_UR)
    tl.store(Y + row[:, None] * columns + column[None], y.to(Y.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["rows"])
def _lora_gate_bwd_kernel(
    DA,
    G,
    U,
    DG,
    DU,
    AH,
    AF,
    GH,
    GF,
    UH,
    UF,
    rows,
    columns,
    tiles_per_row,
    a_rank,
    ah_stride,
    af_stride_r,
    af_stride_i,
    g_rank,
    gh_stride,
    gf_stride_r,
    gf_stride_i,
    u_rank,
    uh_stride,
    uf_stride_r,
    uf_stride_i,
    ACT: tl.constexpr,
    BLOCK_AR: tl.constexpr,
    BLOCK_GR: tl.constexpr,
    BLOCK_UR: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_I: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Store dg and du, and overwrite DA with a."""
    pid = tl.program_id(0)
    row = (pid // tiles_per_row).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = (pid % tiles_per_row).to(tl.int64) * BLOCK_I + tl.arange(0, BLOCK_I)
    da, ah, af = _load_with_product(
        DA, AH, AF, row, column, rows, columns, a_rank, ah_stride, af_stride_r, af_stride_i, BLOCK_AR, WIDEN
    )
    g, gh, gf = _load_with_product(
        G, GH, GF, row, column, rows, columns, g_rank, gh_stride, gf_stride_r, gf_stride_i, BLOCK_GR, WIDEN
    )
    u, uh, uf = _load_with_product(
        U, UH, UF, row, column, rows, columns, u_rank, uh_stride, uf_stride_r, uf_stride_i, BLOCK_UR, WIDEN
    )
    value, slope = _act(_sum(g, gh, gf, BLOCK_GR), ACT)
    u, da = _sum(u, uh, uf, BLOCK_UR), _sum(da, ah, af, BLOCK_AR)
    place = row[:, None] * columns + column[None]
    mask = (row < rows)[:, None] & (column < columns)[None]
    tl.store(DU + place, (da * value).to(DU.dtype.element_ty), mask=mask)
    tl.store(DG + place, (da * u * slope).to(DG.dtype.element_ty), mask=mask)
    tl.store(DA + place, (value * u).to(DA.dtype.element_ty), mask=mask)


def _check(gate: torch.Tensor, up: torch.Tensor) -> None:
    """Raise ValueError unless both are floating point of one shape, dtype and device."""
    if (gate.shape, gate.dtype, gate.device) != (up.shape, up.dtype, up.device) or not gate.is_floating_point():
        raise ValueError(
            f"gate is {tuple(gate.shape)} {gate.dtype} on {gate.device}, up is {tuple(up.shape)} {up.dtype} on "
            f"{up.device}; expected floating-point tensors of one shape, dtype and device."
        )


def gate_gradients(gate: torch.Tensor, up: torch.Tensor, reuse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for the gradients of a gate: halves of one tensor if `gate` and `up` are.

    If `reuse` allows it and the backward pass cannot run again, the gradients overwrite `gate` and `up`: a program of
    the kernel reads all its elements before it writes any. A function that has saved the two then gets an error.
    """
    if runs_as_op():  # the results of an op must not share memory
        return _new_like(gate), _new_like(up)
    new = not reuse or graph_is_kept()
    gate_first = joined(gate, up)
    up_first = joined(up, gate) if gate_first is None else None
    if gate_first is not None:
        dg, du = (_new_like(gate_first) if new else gate_first).chunk(2, -1)
    elif up_first is not None:
        du, dg = (_new_like(up_first) if new else up_first).chunk(2, -1)
    else:
        apart = gate.untyped_storage()._cdata != up.untyped_storage()._cdata
        new = new or not (apart and gate.is_contiguous() and up.is_contiguous())
        dg = _new_like(gate) if new else gate.detach()
        du = _new_like(up) if new else up.detach()
    if not new:
        # The gradients overwrite what other functions may have saved: let autograd notice.
        for t in (gate, up):
            torch.autograd.graph.increment_version(t)
    return dg, du


def _new_like(t: torch.Tensor) -> torch.Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device=t.device)


def _tiles(*given: torch.Tensor):
    """Return (tensors as rows, row length, tiles per row, grid, BLOCK). Contiguous tensors become one long row each."""
    if all(t.is_contiguous() for t in given):
        rows = [t.view(1, -1) for t in given]
    else:
        rows = [as_rows(t) if t.ndim else t.view(1, 1) for t in given]
    m, n = rows[0].shape
    block = min(2048, next_power_of_2(n))  # 16 elements a thread with 4 warps: two 16-byte loads of bf16
    tiles_per_row = cdiv(n, block)
    return rows, n, tiles_per_row, (m * tiles_per_row,), block


@kernel_op("gate_fwd")
def _forward(
    gate: torch.Tensor, up: torch.Tensor, act: str, limit: float, alpha: float, up_offset: float, gate_scale: float
) -> torch.Tensor:
    y = _new_like(gate)
    (_, g, u), n, tiles_per_row, grid, block = _tiles(y, gate, up)
    launch(
        _gate_fwd_kernel,
        grid,
        g,
        u,
        y,
        g.stride(0),
        u.stride(0),
        n,
        tiles_per_row,
        limit,
        alpha,
        up_offset,
        gate_scale,
        ACT=act,
        BLOCK=block,
    )
    return y


@_forward.register_fake
def _(gate, up, *form):
    return _new_like(gate)


@kernel_op("gate_bwd")
def _backward(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    act: str,
    limit: float,
    alpha: float,
    up_offset: float,
    gate_scale: float,
    reuse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    dg, du = gate_gradients(gate, up, reuse)  # never over dy: another branch may read it
    _launch_backward(dy, gate, up, dg, du, act, limit, alpha, up_offset, gate_scale)
    return dg, du


def _launch_backward(dy, gate, up, dg, du, act, limit, alpha, up_offset, gate_scale, product=False) -> None:
    (dy, g, u, dg, du), n, tiles_per_row, grid, block = _tiles(dy, gate, up, dg, du)
    launch(
        _gate_bwd_kernel,
        grid,
        dy,
        g,
        u,
        dg,
        du,
        dy.stride(0),
        g.stride(0),
        u.stride(0),
        dg.stride(0),
        n,
        tiles_per_row,
        limit,
        alpha,
        up_offset,
        gate_scale,
        ACT=act,
        AT_LIMIT=PASSES_AT_LIMIT,
        PRODUCT=product,
        BLOCK=block,
    )


@_backward.register_fake
def _(dy, gate, up, *form):
    return _new_like(gate), _new_like(up)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, reuse, *form):
        ctx.save_for_backward(gate, up)
        ctx.reuse = reuse and not (is_of_leaf(gate) or is_of_leaf(up))
        ctx.form = form
        return _forward(gate, up, *form)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return *_backward(dy, *ctx.saved_tensors, *ctx.form, ctx.reuse), None, None, None, None, None, None


def _gated(gate: torch.Tensor, up: torch.Tensor, reuse: bool, *form) -> torch.Tensor:
    return _Gate.apply(gate, up, reuse, *form) if records_graph() else _forward(gate, up, *form)


def swiglu(
    gate: torch.Tensor,
    up: torch.Tensor,
    *,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    gate_scale: float = 1.0,
    reuse_inputs: bool = False,
) -> torch.Tensor:
    """Compute silu(gate) * up in one pass, differentiable in both. With other options, it is c * sigmoid(alpha * c) *
    (clamp(up, -limit, limit) + up_offset), c = min(gate_scale * gate, limit).

    Args:
        gate (`torch.Tensor`): (..., I); bf16, fp16 or fp32 (float64: the PyTorch twin). Rows may have gaps, as in the
            halves of a fused projection; they are not copied.
        up (`torch.Tensor`): Shape, dtype and device of `gate`.
        limit (`float`, *optional*): Clamps the gate from above and `up` on both sides; 7 in gpt-oss. Unset: neither.
        alpha (`float`, *optional*, defaults to 1.0): Factor inside the sigmoid; 1.702 in gpt-oss.
        up_offset (`float`, *optional*, defaults to 0.0): Added to up; 1 in gpt-oss.
        gate_scale (`float`, *optional*, defaults to 1.0): Multiplies the gate before anything else.
        reuse_inputs (`bool`, *optional*, defaults to `False`): Let backward write the gradients over `gate` and `up` if
            they are contiguous or halves of a contiguous tensor. This saves two tensors of their size. Allow it only if
            nothing reads the two again: neither later code nor the backward of the operations that made them. Ignored
            with `retain_graph=True`, for leaf tensors, under torch.compile and on the PyTorch twin.

    Returns:
        `torch.Tensor`, contiguous, of the shape and dtype of `gate`.

    Raises:
        ValueError: Shape, dtype or device of the two disagree, they are not floating point, or `limit` is not above 0.
    """
    _check(gate, up)
    if limit is not None and not limit > 0:
        raise ValueError(f"limit is {limit}; expected a number above 0, or None for no limit.")
    if not runs_triton(gate, up):
        return reference.swiglu(gate, up, limit=limit, alpha=alpha, up_offset=up_offset, gate_scale=gate_scale)
    form = (math.inf if limit is None else float(limit), float(alpha), float(up_offset), float(gate_scale))
    return _gated(gate, up, reuse_inputs, "silu" if form == UNCHANGED else "clamped", *form)


def geglu(
    gate: torch.Tensor, up: torch.Tensor, *, approximate: str = "tanh", reuse_inputs: bool = False
) -> torch.Tensor:
    """Compute gelu(gate) * up in one pass, differentiable in both.

    Args:
        gate (`torch.Tensor`): (..., I); bf16, fp16 or fp32 (float64: the PyTorch twin). Rows may have gaps, as in the
            halves of a fused projection; they are not copied.
        up (`torch.Tensor`): Shape, dtype and device of `gate`.
        approximate (`str`, *optional*, defaults to `"tanh"`): `"tanh"`, or `"none"` for the exact gelu; as in `F.gelu`.
        reuse_inputs (`bool`, *optional*, defaults to `False`): As in `swiglu`.

    Returns:
        `torch.Tensor`, contiguous, of the shape and dtype of `gate`.

    Raises:
        ValueError: Shape, dtype or device of the two disagree, they are not floating point, or `approximate` is
        unknown.
    """
    _check(gate, up)
    if approximate not in APPROXIMATIONS:
        raise not_among("approximate", approximate, APPROXIMATIONS)
    if not runs_triton(gate, up):
        return reference.geglu(gate, up, approximate=approximate)
    return _gated(gate, up, reuse_inputs, "gelu_tanh" if approximate == "tanh" else "gelu", *UNCHANGED)


def takes(dtype: torch.dtype, device_of: torch.Tensor, ranks: list[int]) -> bool:
    """Return whether the kernels add products of these ranks. Rank 0 stands for a missing product."""
    return use_triton(device_of) and dtype.itemsize == 2 and 0 < max(ranks) <= LARGEST_RANK


def _arguments(product: Product | None, like: torch.Tensor) -> tuple[list[torch.Tensor], list[int], int]:
    """Return the two tensors, the rank, the strides and the block of a product."""
    if product is None:
        return [like, like], [0, 0, 0, 0], 0
    h, f = product
    return [h, f], [h.shape[1], h.stride(0), f.stride(0), f.stride(1)], max(16, next_power_of_2(h.shape[1]))


def gate_of_sums(
    g: torch.Tensor, u: torch.Tensor, to_g: Product | None, to_u: Product | None, act: str
) -> torch.Tensor:
    """Return y from contiguous g and u (T, I) and the products to add to them, in the dtype of g."""
    if to_g is None and to_u is None:
        return _forward(g, u, act, *UNCHANGED) if runs_triton(g, u) else reference.gated(g, u, act)
    a, (rows, columns) = torch.empty_like(g), g.shape
    tensors_g, of_g, block_g = _arguments(to_g, g)
    tensors_u, of_u, block_u = _arguments(to_u, g)
    tiles_per_row = cdiv(columns, BLOCK_I)
    launch(
        _lora_gate_fwd_kernel,
        (cdiv(rows, BLOCK_T) * tiles_per_row,),
        g,
        u,
        a,
        *tensors_g,
        *tensors_u,
        rows,
        columns,
        tiles_per_row,
        *of_g,
        *of_u,
        ACT=act,
        BLOCK_GR=block_g,
        BLOCK_UR=block_u,
        BLOCK_T=BLOCK_T,
        BLOCK_I=BLOCK_I,
        WIDEN=INTERPRET,
        num_warps=WARPS,
    )
    return a


def gradients_of_sums(
    dy: torch.Tensor,
    g: torch.Tensor,
    u: torch.Tensor,
    to_dy: Product | None,
    to_g: Product | None,
    to_u: Product | None,
    act: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (dg, du, y) from contiguous dy, g and u (T, I) and the products to add to them, in one pass.

    y overwrites `dy`, and dg and du overwrite `g` and `u`, unless the backward pass may run again or PyTorch computes
    it.
    """
    if to_dy is None and to_g is None and to_u is None:
        if not (runs_triton(dy, g, u) and dy.is_contiguous()):
            with torch.enable_grad():
                leaves = [t.detach().requires_grad_() for t in (g, u)]
                y = reference.gated(leaves[0], leaves[1], act)
            return *torch.autograd.grad(y, leaves, dy), y.detach()
        dg, du = gate_gradients(g, u, reuse=True)
        _launch_backward(dy, g, u, dg, du, act, *UNCHANGED, product=True)
        return dg, du, dy
    rows, columns = g.shape
    factors_y, numbers_y, block_y = _arguments(to_dy, g)
    factors_g, numbers_g, block_g = _arguments(to_g, g)
    factors_u, numbers_u, block_u = _arguments(to_u, g)
    dg, du = gate_gradients(g, u, reuse=True)
    tiles_per_row = cdiv(columns, BLOCK_I)
    launch(
        _lora_gate_bwd_kernel,
        (cdiv(rows, BLOCK_T) * tiles_per_row,),
        dy,
        g,
        u,
        dg,
        du,
        *factors_y,
        *factors_g,
        *factors_u,
        rows,
        columns,
        tiles_per_row,
        *numbers_y,
        *numbers_g,
        *numbers_u,
        ACT=act,
        BLOCK_AR=block_y,
        BLOCK_GR=block_g,
        BLOCK_UR=block_u,
        BLOCK_T=BLOCK_T,
        BLOCK_I=BLOCK_I,
        WIDEN=INTERPRET,
        num_warps=WARPS,
    )
    return dg, du, dy
