"""The pass over rows of logits behind the vocabulary losses: first the statistics, then the gradient.

For a row of logits l (V,): z = scale * l, or with a softcap c: z = c * tanh(scale * l / c). With y the target,
m = max z, rest = sum of exp(z_v - m) over v != y, s = rest + exp(z_y - m), log_s = log s, lse = m + log_s and
p_v = exp(z_v - m) / s:

    loss  = nll - smoothing * mean_v(z_v - z_y) + z_loss * lse**2,   nll = log(s / exp(z_y - m)) = -log p_y
    H     = log_s - sum_v p_v (z_v - m)                              entropy
    dz_v  = g * (p_v * (1 + 2 * z_loss * lse) - (1 - smoothing) * [v == y] - smoothing / V) - g_H * p_v * (log p_v + H)

The first line is (1 - smoothing) * nll + smoothing * mean_v(-log p_v), which is the label smoothing of F.cross_entropy.
The gradient with respect to l is dz_v * scale, times (1 - tanh**2) with a softcap.

Exactness. Differences are taken against m or z_y, never against lse, so a common offset of the logits cancels. p_y - 1
is computed as -rest / s: rest excludes the target, so a confident token (p_y = 0.9999) keeps a gradient that 1 - p_y
would cancel. A NaN in the row, or a target outside [0, V), makes its loss and gradient NaN.

Shapes  logits and grad (n, V), with rows of any stride; grad may be logits itself; target (n,) int64; stats (7, n)
        fp32, one row for each constant below. All are 0 for rows with the target `ignore_index`.
Bytes   b per element. The statistics read nVb. The gradient reads another nVb (from L2, if a row fits) and writes nVb.
"""

from typing import NamedTuple

import torch

from . import _dispatch
from ._dispatch import jit, tl
from ._launch import MAX_WARPS, launch, next_power_of_2

LOSS, MAX, REST, ENTROPY, LOG_SUM_SQ, MEAN_LOGITS, IS_TOP1 = range(7)  # rows of `stats`
N_STATS = 7
MAX_BLOCK = 8192  # elements of a row that one program takes at a time
LOWEST = tl.constexpr(-3.4028234663852886e38)  # the least number of fp32: a row of logits may have no larger one


def _tile(vocab: int, itemsize: int, do_stats: bool, do_grad: bool) -> tuple[int, int]:
    """Return (BLOCK, num_warps), the fastest on an H200.

    A row that is read twice is partly in the L2 cache the second time. For wide rows that only works if few rows are in
    flight, so they get larger blocks.
    """
    block, num_warps = 4096, 16 if do_grad else 8
    if do_stats and do_grad and vocab * itemsize > 1 << 17:
        block, num_warps = 8192, MAX_WARPS
    block = min(MAX_BLOCK, block, max(128, next_power_of_2(vocab)))
    return block, max(4, min(num_warps, block // 256))


class RowSpec(NamedTuple):
    """Options of the pass over a row. `softcap` 0.0: no cap. `extras` has the bit 1 << k for each extra statistic k."""

    ignore_index: int = -100
    scale: float = 1.0
    softcap: float = 0.0
    smoothing: float = 0.0
    z_loss: float = 0.0
    extras: int = 0


@jit
def transform(v, scale, softcap, SOFTCAP: tl.constexpr):
    """Return z and dz/dl of logits v; `scale` None is 1. tanh from exp(-2|x|) keeps 1 - tanh**2 exact at saturation."""
    if scale is None:
        z = v
        slope = 1.0
    else:
        z = v * scale
        slope = scale
    if SOFTCAP:
        x = z / softcap
        e = tl.exp(-2.0 * tl.abs(x))
        t = (1.0 - e) / (1.0 + e)
        z = tl.where(x < 0, -t, t) * softcap
        slope = scale * 4.0 * e / ((1.0 + e) * (1.0 + e))
    return z, slope


@jit
def _loaded(start, vector, lane, end, W, LEAD: tl.constexpr):
    """Return the mask of a load: one condition for a vector. Otherwise its elements would be loaded one by one."""
    if LEAD:
        return tl.broadcast_to(start + vector < end, lane.shape)
    return start + lane < W


@jit
def _store(D, value, start, lane, lead, end, W, LEAD: tl.constexpr, BLOCK: tl.constexpr, CACHE: tl.constexpr):
    """Store `value` to a block of D; with LEAD, mask the ends of neighbouring rows. CACHE is an eviction policy."""
    off = start + lane
    value = value.to(D.dtype.element_ty)
    if LEAD:
        if (start < lead) | (start + BLOCK > end):
            tl.store(D + off, value, mask=(off >= lead) & (off < end), eviction_policy=CACHE)
        else:
            tl.store(D + off, value, eviction_policy=CACHE)
    else:
        tl.store(D + off, value, mask=off < W, eviction_policy=CACHE)


@jit(do_not_specialize=["stats_stride"])
def _row_kernel(
    X,
    D,
    TARGET,
    STATS,
    GLOSS,
    GENT,
    x_stride,
    d_stride,
    stats_stride,
    V,
    W,
    ignore_index,
    scale,
    softcap,
    smoothing,
    z_loss,
    DO_STATS: tl.constexpr,
    DO_GRAD: tl.constexpr,
    HAS_GLOSS: tl.constexpr,
    HAS_GENT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SMOOTH: tl.constexpr,
    ENTROPY_: tl.constexpr,
    SUMSQ: tl.constexpr,
    MEAN: tl.constexpr,
    TOP1: tl.constexpr,
    LEAD: tl.constexpr,
    BLOCK: tl.constexpr,
    VEC: tl.constexpr,
):
    """Process one row per program; see the module docstring for the formulas. Without DO_STATS, MAX, REST and ENTROPY
    are read from STATS.

    A block is (BLOCK / VEC, VEC). VEC elements are the 16 bytes that a thread loads at once, so sums over the last
    dimension stay in a thread. Masks and the target's own term are computed only in the last block and in the target's
    block: the pass is bound by instructions as much as by bytes.

    With LEAD, a row starts `lead` elements after a multiple of 16 bytes, and its blocks begin at that multiple. The
    vectors at both ends are loaded whole; elements of neighbouring rows are masked and never overwritten.
    """
    row = tl.program_id(0).to(tl.int64)  # int64: row * stride passes 2**31
    lead = 0
    if LEAD:
        lead = (row * x_stride % VEC).to(tl.int32)
        X += row * x_stride // VEC * VEC
        D += row * d_stride // VEC * VEC
    else:
        X += row * x_stride
        D += row * d_stride
    STATS += row
    y = tl.load(TARGET + row)
    vector = tl.arange(0, BLOCK // VEC)[:, None] * VEC
    lane = vector + tl.arange(0, VEC)[None, :]
    end = V + lead
    if y == ignore_index:
        if DO_STATS:
            for k in tl.static_range(7):  # a kernel cannot read the constants above: LOSS is 0, IS_TOP1 is 6
                tl.store(STATS + k * stats_stride, 0.0)
        if DO_GRAD:
            for start in range(0, end, BLOCK):
                _store(D, tl.zeros((BLOCK // VEC, VEC), tl.float32), start, lane, lead, end, W, LEAD, BLOCK, "")
        return

    y_ok = (y >= 0) & (y < V)
    y = y.to(tl.int32) + lead  # counts from the start of the first block, like `off`
    zy, slope_y = transform(tl.load(X + y, mask=y_ok, other=float("nan")).to(tl.float32), scale, softcap, SOFTCAP)

    if DO_STATS:
        # Each thread keeps its own maximum and sums: threads exchange nothing inside the loop.
        m_v = tl.full((BLOCK // VEC,), LOWEST, tl.float32)  # finite, so that no difference below is inf - inf
        rest_v = tl.zeros((BLOCK // VEC,), tl.float32)
        dot_v = tl.zeros((BLOCK // VEC,), tl.float32)
        sq_v = tl.zeros((BLOCK // VEC,), tl.float32)
        diff_v = tl.zeros((BLOCK // VEC,), tl.float32)
        for start in range(0, end, BLOCK):
            off = start + lane
            x = tl.load(X + off, mask=_loaded(start, vector, lane, end, W, LEAD), other=0.0).to(tl.float32)
            z, _ = transform(x, scale, softcap, SOFTCAP)
            z_other = z
            if (start < lead) | (start + BLOCK > end) | ((y >= start) & (y < start + BLOCK)):
                other = (off >= lead) & (off < end) & (off != y)
                z_other = tl.where(other, z, float("-inf"))
                if MEAN:
                    diff_v += tl.sum(tl.where(other, z - zy, 0.0), axis=1)
            elif MEAN:
                diff_v += tl.sum(z - zy, axis=1)
            grown = tl.maximum(m_v, tl.max(z_other, axis=1))
            corr = tl.exp(m_v - grown)
            d = z_other - grown[:, None]
            e = tl.exp(d)
            if ENTROPY_:  # sum of exp(z - m) * (z - m): changes by m - grown per unit of rest_v
                grew = tl.maximum(m_v - grown, -1e4)  # where it is cut off, corr is 0, and 0 * inf would be NaN
                dot_v = corr * (dot_v + rest_v * grew) + tl.sum(tl.where(e > 0, e * d, 0.0), axis=1)
            if SUMSQ:
                sq_v = sq_v * corr * corr + tl.sum(e * e, axis=1)
            rest_v = rest_v * corr + tl.sum(e, axis=1)
            m_v = grown
        m_other = tl.max(m_v, axis=0)
        m = tl.maximum(m_other, zy)
        corr_v = tl.exp(m_v - m)
        if ENTROPY_:
            dot_v = corr_v * (dot_v + rest_v * tl.maximum(m_v - m, -1e4))
        if SUMSQ:
            sq_v *= corr_v * corr_v
        rest = tl.sum(rest_v * corr_v, axis=0)
    else:
        m = tl.load(STATS + 1 * stats_stride)
        rest = tl.load(STATS + 2 * stats_stride)

    ey = tl.exp(zy - m)
    s = rest + ey
    log_s = tl.log(s)
    lse = m + log_s
    entropy = 0.0
    if DO_STATS:
        # log1p(ratio) as log(u) * ratio / (u - 1) with u = 1 + ratio, which keeps the small loss of a confident token
        ratio = rest / ey
        u = 1.0 + ratio
        small = tl.where(u == 1.0, ratio, tl.log(u) * (ratio / tl.where(u == 1.0, 1.0, u - 1.0)))
        loss = tl.where(rest < ey, small, (m - zy) + log_s)
        if MEAN:
            mean_diff = tl.sum(diff_v, axis=0) / V
            tl.store(STATS + 5 * stats_stride, zy + mean_diff)
            if SMOOTH:
                loss -= smoothing * mean_diff
        loss += z_loss * lse * lse
        tl.store(STATS, loss)
        tl.store(STATS + 1 * stats_stride, m)
        tl.store(STATS + 2 * stats_stride, rest)
        if ENTROPY_:
            entropy = log_s - (tl.sum(dot_v, axis=0) + tl.where(ey > 0, ey * (zy - m), 0.0)) / s
            tl.store(STATS + 3 * stats_stride, entropy)
        if SUMSQ:
            tl.store(STATS + 4 * stats_stride, tl.log(tl.sum(sq_v, axis=0) + ey * ey) - 2.0 * log_s)
        if TOP1:
            first = zy >= m
            if first & (zy == m_other):  # in a tie, the first of the largest counts
                for start in range(0, y, BLOCK):
                    off = start + lane
                    before = (off >= lead) & (off < y)
                    z, _ = transform(tl.load(X + off, mask=before, other=0.0).to(tl.float32), scale, softcap, SOFTCAP)
                    first = first & (tl.max(tl.where(before, z, float("-inf"))) < zy)
            tl.store(STATS + 6 * stats_stride, first.to(tl.float32))
    elif HAS_GENT:
        entropy = tl.load(STATS + 3 * stats_stride)

    if DO_GRAD:
        g = 1.0
        if HAS_GLOSS:
            g = tl.load(GLOSS + row)
        g_entropy = 0.0
        if HAS_GENT:
            g_entropy = tl.load(GENT + row)
        inv_s = 1.0 / s
        p_factor = g * (1.0 + 2.0 * z_loss * lse)
        smooth_share = g * smoothing / V
        py = ey * inv_s
        gy = g * (smoothing - rest * inv_s + 2.0 * z_loss * lse * py) - smooth_share
        # A block is not needed after its second read, so its place in the L2 cache goes to rows that will be read
        # again. This has not been measured for rows that share a cache line.
        CACHE: tl.constexpr = "evict_first" if DO_STATS and not LEAD else ""
        last = (end - 1) // BLOCK * BLOCK
        for back in range(0, end, BLOCK):  # backwards: the blocks read last are still in the L2 cache
            start = last - back
            off = start + lane
            mask = _loaded(start, vector, lane, end, W, LEAD)
            x = tl.load(X + off, mask=mask, other=0.0, eviction_policy=CACHE).to(tl.float32)
            z, slope = transform(x, scale, softcap, SOFTCAP)
            e = tl.exp(z - m)
            if HAS_GENT:
                p = e * inv_s
                d = tl.where(off == y, gy, p * p_factor - smooth_share)
                d -= tl.where(p > 0, g_entropy * p * ((z - m) - log_s + entropy), p * g_entropy)
            else:
                d = e * (p_factor * inv_s) - smooth_share
                if (y >= start) & (y < start + BLOCK):
                    d = tl.where(off == y, gy, d)
            _store(D, d * slope, start, lane, lead, end, W, LEAD, BLOCK, CACHE)


def _triton_pass(logits, grad, target, stats, g_loss, g_entropy, spec, do_stats, width):
    n, vocab = logits.shape
    block, num_warps = _tile(vocab, logits.element_size(), do_stats, grad is not None)
    out = logits if grad is None else grad
    vec = 16 // logits.element_size()
    # LEAD handles rows that do not start or end at multiples of 16 bytes (50257 columns, say). It needs both tensors to
    # start at such a multiple, and strides that differ by one.
    lead = width is None and (logits.stride(0) % vec != 0 or vocab % vec != 0)
    lead = lead and (logits.stride(0) - out.stride(0)) % vec == 0
    lead = lead and logits.data_ptr() % 16 == out.data_ptr() % 16 == 0
    scale = None if spec.scale == 1.0 and not spec.softcap else spec.scale
    launch(
        _row_kernel,
        (n,),
        logits,
        out,
        target,
        stats,
        stats if g_loss is None else g_loss,
        stats if g_entropy is None else g_entropy,
        logits.stride(0),
        out.stride(0),
        stats.stride(0),
        vocab,
        width or vocab,
        spec.ignore_index,
        scale,
        spec.softcap,
        spec.smoothing,
        spec.z_loss,
        DO_STATS=do_stats,
        DO_GRAD=grad is not None,
        HAS_GLOSS=g_loss is not None,
        HAS_GENT=g_entropy is not None,
        SOFTCAP=spec.softcap != 0.0,
        SMOOTH=spec.smoothing != 0.0,
        ENTROPY_=bool(spec.extras >> ENTROPY & 1),
        SUMSQ=bool(spec.extras >> LOG_SUM_SQ & 1),
        TOP1=bool(spec.extras >> IS_TOP1 & 1),
        MEAN=spec.smoothing != 0.0 or bool(spec.extras >> MEAN_LOGITS & 1),
        LEAD=lead,
        BLOCK=block,
        VEC=vec,
        num_warps=num_warps,
    )


def _torch_pass(logits, grad, target, stats, g_loss, g_entropy, spec, do_stats, width):
    """Run `_row_kernel` in plain PyTorch: whole rows at once, with up to four fp32 copies of `logits`."""
    vocab = logits.shape[1]
    z, slope = logits.float(), spec.scale
    if spec.softcap:
        e = torch.exp(z.abs() * (-2.0 * abs(spec.scale) / spec.softcap))
        slope = e / (1 + e).square_() * (4.0 * spec.scale)
        z = torch.copysign((1 - e) / (1 + e), z * spec.scale).mul_(spec.softcap)
    elif spec.scale != 1.0:
        z = z * spec.scale
    ignored = target == spec.ignore_index
    in_range = (target >= 0) & (target < vocab)
    column = torch.where(in_range, target, 0).unsqueeze(1)
    zy = torch.where(in_range | ignored, z.gather(1, column).squeeze(1), torch.nan)
    m = z.amax(1) if do_stats else stats[MAX]
    d = z - m.unsqueeze(1)
    e = d.exp() if spec.extras >> ENTROPY & 1 or g_entropy is not None else d.exp_()
    e.scatter_(1, column, 0.0)
    ey = torch.exp(zy - m)
    rest = e.sum(1) if do_stats else stats[REST]
    s = rest + ey
    log_s = s.log()
    lse = m + log_s
    if do_stats:
        loss = torch.where(rest < ey, torch.log1p(rest / ey), (m - zy) + log_s)
        if spec.smoothing or spec.extras >> MEAN_LOGITS & 1:
            mean_diff = (z - zy.unsqueeze(1)).mean(1)
            stats[MEAN_LOGITS] = zy + mean_diff
            loss -= spec.smoothing * mean_diff
        stats[LOSS] = loss + spec.z_loss * lse * lse
        stats[MAX] = m
        stats[REST] = rest
        if spec.extras >> ENTROPY & 1:
            dot = torch.where(e > 0, e * d, 0.0).sum(1) + torch.where(ey > 0, ey * (zy - m), 0.0)
            stats[ENTROPY] = log_s - dot / s
        if spec.extras >> LOG_SUM_SQ & 1:
            stats[LOG_SUM_SQ] = torch.log(e.square().sum(1) + ey.square()) - 2.0 * log_s
        if spec.extras >> IS_TOP1 & 1:
            stats[IS_TOP1] = (z.argmax(1) == target) & ~zy.isnan()
        stats.masked_fill_(ignored, 0.0)
    if grad is not None:
        g = torch.ones_like(s) if g_loss is None else g_loss
        smooth_share = g * (spec.smoothing / vocab)
        py = ey / s
        gy = g * (spec.smoothing - rest / s + 2.0 * spec.z_loss * lse * py) - smooth_share
        p = e.mul_((1.0 / s).unsqueeze(1))
        if g_entropy is not None:
            log_p = d.sub_(log_s.unsqueeze(1))
            entropy_term = torch.where(p > 0, p * (log_p + stats[ENTROPY].unsqueeze(1)), 0.0)
            entropy_term.scatter_(1, column, (py * ((zy - m - log_s) + stats[ENTROPY])).unsqueeze(1))
        dz = p.mul_((g * (1.0 + 2.0 * spec.z_loss * lse)).unsqueeze(1))
        if spec.smoothing:
            dz.sub_(smooth_share.unsqueeze(1))
        dz.scatter_(1, column, gy.unsqueeze(1))
        if g_entropy is not None:
            dz.sub_(entropy_term.mul_(g_entropy.unsqueeze(1)))
        grad.copy_(dz.mul_(slope).masked_fill_(ignored.unsqueeze(1), 0.0))


def row_pass(logits, grad, target, stats, g_loss, g_entropy, spec: RowSpec, do_stats=True, width=None) -> None:
    """Fill `stats` (or read it if `do_stats` is False), and fill `grad` unless it is None.

    `g_loss` and `g_entropy`, (n,) in fp32, are the gradients of each row's loss and entropy. `g_loss` None means ones.
    `g_entropy` None drops that term; with it, `stats` must hold the entropy. `width` is the number of columns in
    memory, V or more; all of them may be read and overwritten. If it is a multiple of 16, any vocabulary gets
    full-width loads.
    """
    if logits.shape[0] == 0:
        return
    run = _triton_pass if _dispatch.use_triton(logits) else _torch_pass
    run(logits, grad, target, stats, g_loss, g_entropy, spec, do_stats, width)
