"""Rotary position embedding of q and k in one launch. Su et al. 2021, RoFormer, arXiv:2104.09864, section 3.2.

In a head of D numbers, R <= D are rotary and form R/2 pairs (x1, x2). The angle of (t, i) rotates pair i of token t:

    y1 = x1 * cos - x2 * sin
    y2 = x2 * cos + x1 * sin        backward: the same with -sin, with input and output layouts swapped

Shapes  q, k and results have up to three leading dimensions in any order, with any strides, and then D. For cos and sin
        see `rope`.
Dtypes  bf16, fp16, fp32, each tensor its own. Arithmetic in fp32, one rounding at the store. Eager PyTorch in bf16 also
        rounds both products, so 16-bit results agree only up to rounding.
Bytes   b per element, n elements of q and k together. Forward and backward each read and write them once: 2nb. Kept for
        backward: cos, sin.
"""

import torch

from . import reference
from ._autograd import once_differentiable
from ._dispatch import jit, kernel_op, runs_triton, tl
from ._launch import broadcasts, launch, not_among
from ._rope_plan import dense_strides, plan

CASTS = ("promote", "input")
COS_LAYOUTS = ("half", "interleaved", "single")


@jit
def _turn_tile(
    X,
    Y,
    COS,
    SIN,
    tile,
    rows,
    n1,
    n2,
    x0,
    x1,
    x2,
    y0,
    y1,
    y2,
    c0,
    c1,
    c2,
    c3,
    s0,
    s1,
    s2,
    s3,
    sign,
    D: tl.constexpr,
    HALF: tl.constexpr,
    FIRST: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    OUT_PAIRS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Rotate the BLOCK_R rows of X from tile * BLOCK_R on, into Y. A row is one head of one token; the last leading
    dimension varies fastest."""
    row = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    live = (row < rows)[:, None]
    i2 = (row % n2).to(tl.int64)  # int64: offsets pass 2**31, the number of rows does not
    i1 = (row // n2 % n1).to(tl.int64)
    i0 = (row // n2 // n1).to(tl.int64)
    x_row = X + (i0 * x0 + i1 * x1 + i2 * x2)[:, None]
    y_row = Y + (i0 * y0 + i1 * y1 + i2 * y2)[:, None]

    half = tl.arange(0, BLOCK_HALF)[None, :]
    mask = live & (half < HALF)
    cos = tl.load(COS + (i0 * c0 + i1 * c1 + i2 * c2)[:, None] + half * c3, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(SIN + (i0 * s0 + i1 * s1 + i2 * s2)[:, None] + half * s3, mask=mask, other=0.0).to(tl.float32) * sign

    both = tl.arange(0, 2 * BLOCK_HALF)[None, :]
    if IN_PAIRS:  # read as one run and split: two loads with stride 2 would each fetch the whole run
        x = tl.load(x_row + FIRST + both, mask=live & (both < 2 * HALF), other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, [BLOCK_R, BLOCK_HALF, 2]))
    else:
        a = tl.load(x_row + FIRST + half, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(x_row + FIRST + HALF + half, mask=mask, other=0.0).to(tl.float32)
    u = a * cos - b * sin
    v = b * cos + a * sin
    if OUT_PAIRS:
        y = tl.reshape(tl.join(u, v), [BLOCK_R, 2 * BLOCK_HALF])
        tl.store(y_row + FIRST + both, y, mask=live & (both < 2 * HALF))
    else:
        tl.store(y_row + FIRST + half, u, mask=mask)
        tl.store(y_row + FIRST + HALF + half, v, mask=mask)

    if D > 2 * HALF:  # non-rotary numbers pass through
        rest = tl.arange(0, BLOCK_REST)[None, :]
        rest_mask = live & (rest < D - 2 * HALF)
        rest += 0 if FIRST > 0 else 2 * HALF
        tl.store(y_row + rest, tl.load(x_row + rest, mask=rest_mask), mask=rest_mask)


@jit(do_not_specialize=["q_tiles", "q_rows", "q_n1", "q_n2", "k_rows", "k_n1", "k_n2"])
def _rope_kernel(
    Q,
    QY,
    K,
    KY,
    COS,
    SIN,
    q_tiles,
    q_rows,
    q_n1,
    q_n2,
    q0,
    q1,
    q2,
    qy0,
    qy1,
    qy2,
    k_rows,
    k_n1,
    k_n2,
    k0,
    k1,
    k2,
    ky0,
    ky1,
    ky2,
    c0,
    c1,
    c2,
    c3,
    s0,
    s1,
    s2,
    s3,
    sign,
    D: tl.constexpr,
    HALF: tl.constexpr,
    FIRST: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    OUT_PAIRS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    pid = tl.program_id(0)
    if pid < q_tiles:
        _turn_tile(
            Q,
            QY,
            COS,
            SIN,
            pid,
            q_rows,
            q_n1,
            q_n2,
            q0,
            q1,
            q2,
            qy0,
            qy1,
            qy2,
            c0,
            c1,
            c2,
            c3,
            s0,
            s1,
            s2,
            s3,
            sign,
            D,
            HALF,
            FIRST,
            IN_PAIRS,
            OUT_PAIRS,
            BLOCK_R,
            BLOCK_HALF,
            BLOCK_REST,
        )
    else:
        _turn_tile(
            K,
            KY,
            COS,
            SIN,
            pid - q_tiles,
            k_rows,
            k_n1,
            k_n2,
            k0,
            k1,
            k2,
            ky0,
            ky1,
            ky2,
            c0,
            c1,
            c2,
            c3,
            s0,
            s1,
            s2,
            s3,
            sign,
            D,
            HALF,
            FIRST,
            IN_PAIRS,
            OUT_PAIRS,
            BLOCK_R,
            BLOCK_HALF,
            BLOCK_REST,
        )


def _empty_in_order(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(x.shape, dense_strides(x.shape, x.stride()), dtype=dtype, device=x.device)


@kernel_op("rope")
def _rotate(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    out_interleaved: bool,
    cos_layout: str,
    rotate_last: bool,
    q_dtype: torch.dtype,
    k_dtype: torch.dtype,
    unsqueeze_dim: int,
    sign: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and k, rotated. The second is empty if k is None. A sign of -1.0 rotates back."""
    other = q if k is None else k
    q_memory, k_memory = q.stride(), other.stride()
    q, other = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, other))
    (q_out, k_out), tiles, integers, half, (block_r, block_half, block_rest) = plan(
        q.shape,
        q_memory,
        q.stride(),
        other.shape,
        k_memory,
        other.stride(),
        cos.shape,
        cos.stride(),
        sin.stride(),
        cos_layout,
        unsqueeze_dim,
    )
    qy = torch.empty_strided(q.shape, q_out, dtype=q_dtype, device=q.device)
    ky = q.new_empty(0) if k is None else torch.empty_strided(k.shape, k_out, dtype=k_dtype, device=k.device)
    d = q.shape[-1]
    launch(
        _rope_kernel,
        (tiles[0] if k is None else sum(tiles),),
        q,
        qy,
        other,
        qy if k is None else ky,
        cos,
        sin,
        *integers,
        sign,
        D=d,
        HALF=half,
        FIRST=d - 2 * half if rotate_last else 0,
        IN_PAIRS=interleaved,
        OUT_PAIRS=out_interleaved,
        BLOCK_R=block_r,
        BLOCK_HALF=block_half,
        BLOCK_REST=block_rest,
    )
    return qy, ky


@_rotate.register_fake
def _(q, k, cos, sin, interleaved, out_interleaved, cos_layout, rotate_last, q_dtype, k_dtype, unsqueeze_dim, sign):
    return _empty_in_order(q, q_dtype), q.new_empty(0) if k is None else _empty_in_order(k, k_dtype)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, interleaved, out_interleaved, cos_layout, rotate_last, q_dtype, k_dtype, at):
        ctx.save_for_backward(cos, sin)
        k_in = q.dtype if k is None else k.dtype
        ctx.layouts = (out_interleaved, interleaved, cos_layout, rotate_last, q.dtype, k_in, at)
        ctx.has_k = k is not None
        layouts = (interleaved, out_interleaved, cos_layout, rotate_last, q_dtype, k_dtype, at)
        qy, ky = _rotate(q, k, cos, sin, *layouts, 1.0)
        return qy, ky if k is not None else None

    @staticmethod
    @once_differentiable
    def backward(ctx, dqy, dky):
        dky = dky if ctx.has_k else None
        dq, dk = _rotate(dqy, dky, *ctx.saved_tensors, *ctx.layouts, -1.0)
        return dq, dk if ctx.has_k else None, *(None,) * 9


def misfit(q, k, cos, sin, cos_layout, unsqueeze_dim) -> str | None:
    """Return why `rope` does not take these tensors, or None if it does.

    Callers with another way to compute the same use this check too.
    """
    ndim = q.ndim
    given = {"q": q, "k": k, "cos": cos, "sin": sin}

    def shapes() -> str:
        return ", ".join(f"{name} is {None if t is None else tuple(t.shape)}" for name, t in given.items())

    if not 2 <= ndim <= 4 or (k is not None and (k.ndim != ndim or k.shape[-1] != q.shape[-1])):
        return f"{shapes()}; expected q and k of 2 to 4 dimensions, as many in both, and of one head size."
    if cos.shape != sin.shape or cos.ndim == 0:
        return f"{shapes()}; expected cos and sin of one shape."
    for name, t in given.items():
        if t is not None and (t.device != q.device or not t.is_floating_point()):
            return f"{name} is {t.dtype} on {t.device}, q on {q.device}; expected floats on one device."
    rot = cos.shape[-1] * (2 if cos_layout == "single" else 1)
    if rot % 2 or not 0 < rot <= q.shape[-1]:
        return (
            f"{shapes()}: with cos_layout={cos_layout!r}, {rot} numbers of a head are rotary; expected an even number "
            f"from 2 to {q.shape[-1]}. cos of one angle per pair needs cos_layout='single'."
        )
    if not -cos.ndim - 1 <= unsqueeze_dim < cos.ndim or unsqueeze_dim == -1:
        return (
            f"unsqueeze_dim is {unsqueeze_dim}, cos {tuple(cos.shape)}; expected the place of the heads, in front of "
            f"the angles: 0 to {cos.ndim - 1}, or {-cos.ndim - 1} to -2."
        )
    lead = list(cos.shape[:-1])
    lead.insert(unsqueeze_dim if unsqueeze_dim >= 0 else unsqueeze_dim + cos.ndim + 1, 1)
    for name, t in (("q", q), ("k", k)):
        if t is not None and (cos.ndim >= ndim or not broadcasts(lead, t.shape[ndim - 1 - len(lead) : -1])):
            return (
                f"{shapes()}: cos.unsqueeze({unsqueeze_dim}) has leading dimensions {tuple(lead)}, which do not "
                f"broadcast to the {tuple(t.shape[:-1])} of {name}. unsqueeze_dim is where the heads are: 1 in "
                "(B, H, S, D), 2 in (B, S, H, D)."
            )
    return None


def rope(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    out_interleaved: bool | None = None,
    cos_layout: str = "half",
    rotate_last: bool = False,
    cast: str = "promote",
    unsqueeze_dim: int = 1,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate each pair of rotary numbers of q and k by its angle, in one launch; differentiable in q and k.

    With R rotary numbers in a head, h = R/2 and i = 0 ... h-1, in offsets from the first rotary number:

    - pair i of the input: x1, x2 = x[i], x[h + i]; `interleaved`: x[2i], x[2i + 1]
    - y1 = x1 * cos_i - x2 * sin_i and y2 = x2 * cos_i + x1 * sin_i
    - pair i of the result: y[i], y[h + i] = y1, y2; `out_interleaved`: y[2i], y[2i + 1]
    - cos_i, of C = cos.shape[-1] numbers: `"half"`: cos[i], R = C; `"interleaved"`: cos[2i], R = C; `"single"`: cos[i],
      R = 2C. The other half of a doubled cos holds the same angles and is never read.

    | as in | arguments |
    |---|---|
    | llama, gpt_neox (partial) | |
    | modernbert-decoder, vision towers (fp32 inside) | `cast="input"` |
    | gpt_oss | `cos_layout="single"` |
    | deepseek_v3 interleave | `interleaved=True, out_interleaved=False` |
    | glm4, helium; ernie4_5 | `interleaved=True`; and `cast="input"` |
    | blt, glm4v; cohere | `interleaved=True, cos_layout="interleaved"`; and `cast="input"` |
    | gptj, codegen (B, S, H, D) | `interleaved=True, cos_layout="single", unsqueeze_dim=2` |
    | deepseek_v4 | `interleaved=True, cos_layout="single", rotate_last=True`, `cast="input"` |
    | deepseek_v2 | as gptj, but `unsqueeze_dim=1, cast="input"`; cos, sin = `freqs_cis.real, freqs_cis.imag` |
    | rotation by the negative angle | `-sin` |

    Args:
        q (`torch.Tensor`): (B, H, S, D) or, with `unsqueeze_dim=2`, (B, S, H, D); both also without B. bf16, fp16, fp32
            (float64: the PyTorch twin). Any strides: the transposed view of a projection is not copied.
        k (`torch.Tensor` or `None`): As `q`, with its own number of heads and dtype.
        cos, sin (`torch.Tensor`): (B, S, C) or (1, S, C); more generally, `cos.unsqueeze(unsqueeze_dim)` broadcasts
            against q and k. Any floating dtype and strides. If one requires a gradient, the PyTorch twin computes it.
        interleaved (`bool`, *optional*, defaults to `False`): The two numbers of a pair of the input are neighbours,
            not half a head apart.
        out_interleaved (`bool`, *optional*): The same for the results. Unset: as `interleaved`.
        cos_layout (`str`, *optional*, defaults to `"half"`): `"half"`, `"interleaved"` or `"single"`; see above.
        rotate_last (`bool`, *optional*, defaults to `False`): If R < D, the last R numbers of a head are rotary instead
            of the first. The others pass through.
        cast (`str`, *optional*, defaults to `"promote"`): Dtype of the results. `"promote"`: the common dtype of q (or
            k), cos and sin, as in `q * cos`. `"input"`: the dtype of q (or k), as in models that cast to fp32 and back.
        unsqueeze_dim (`int`, *optional*, defaults to 1): Where cos and sin get the dimension of the heads.

    Returns:
        `tuple` of two new tensors, in the memory order of q and k; the second is `None` if `k` is.

    Raises:
        ValueError: Shapes do not fit, devices differ, or `cos_layout` or `cast` is unknown.
    """
    if cast not in CASTS:
        raise not_among("cast", cast, CASTS)
    if cos_layout not in COS_LAYOUTS:
        raise not_among("cos_layout", cos_layout, COS_LAYOUTS)
    message = misfit(q, k, cos, sin, cos_layout, unsqueeze_dim)
    if message is not None:
        raise ValueError(message)
    out_interleaved = interleaved if out_interleaved is None else out_interleaved
    return rope_unchecked(q, k, cos, sin, interleaved, out_interleaved, cos_layout, rotate_last, cast, unsqueeze_dim)


def rope_unchecked(q, k, cos, sin, interleaved, out_interleaved, cos_layout, rotate_last, cast, unsqueeze_dim):
    """Compute `rope` for arguments about which `misfit` has been asked: it costs the host as much as the launch."""
    k_rows = 1 if k is None else k.numel() // k.shape[-1]
    fits = 0 < q.numel() // q.shape[-1] < 2**31 and 0 < k_rows < 2**31  # the kernel counts rows in int32
    if not fits or cos.requires_grad or sin.requires_grad or not runs_triton(q, k, cos, sin):
        return reference.rope(
            q,
            k,
            cos,
            sin,
            interleaved=interleaved,
            out_interleaved=out_interleaved,
            cos_layout=cos_layout,
            rotate_last=rotate_last,
            cast=cast,
            unsqueeze_dim=unsqueeze_dim,
        )
    dtypes = [q.dtype, q.dtype if k is None else k.dtype]
    if cast == "promote":
        dtypes = [torch.promote_types(dtype, torch.promote_types(cos.dtype, sin.dtype)) for dtype in dtypes]
    return _Rope.apply(q, k, cos, sin, interleaved, out_interleaved, cos_layout, rotate_last, *dtypes, unsqueeze_dim)
