"""Forward KL of rows of student logits from rows of teacher logits, and its gradient, written over the student's
logits.

For both, z = scale * l, or z = softcap * tanh(scale * l / softcap) with a softcap. With m = max z, a its first
position, rest = sum of exp(z_v - m) over v != a, log_s = log(1 + rest) and p_v = exp(z_v - m) / (1 + rest); p is that
of the student, q that of the teacher, and x_v = log(p_v / q_v):

    KL(q || p) = sum_v q_v log(q_v / p_v) = sum_v q_v (exp(x_v) - 1 - x_v)        since the p_v and the q_v sum to 1
    dz_v       = w * (p_v - q_v) = w * q_v * (exp(x_v) - 1)                       w: the weight of the row

The gradient with respect to l is dz_v * scale, times (1 - tanh**2) with a softcap.

Exactness. No term of the second sum is negative, so that nothing cancels. Where |x_v| < 1/2, exp(x) - 1 - x comes from
its series (relative error 4e-8). Two nearly equal rows then have an exact small KL, and two rows that are sure of the
same token an exact gradient, where p - q would cancel. rest leaves out the largest logit, so that log_s of such a row
keeps its digits. Differences are taken against m. A token that has probability 0 under the teacher adds p_v; if only
the student gives it 0, the KL is infinite. A NaN in either row makes its loss and gradient NaN.

Shapes  student (n, V), over which its gradient is written; teacher (m, V); rows of any stride. `teacher_row` (n,) int64
        is the row of the teacher that belongs to a row of the student, so that several heads share one row of teacher
        logits.
Bytes   b per element. The statistics of the teacher read mVb, once. The pass over the student reads 2nVb of it and nVb
        of the teacher, and with the gradient writes nVb.
"""

import torch

from ._dispatch import jit, tl, use_triton
from ._launch import launch, next_power_of_2
from ._row_pass import LOWEST, transform

MAX_BLOCK = 4096  # three vectors of a block live in registers: 8 elements a thread with 16 warps


@jit
def _largest_and_rest(X, V, scale, softcap, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr):
    """(m, rest, a) of a row. Every lane keeps numbers of its own until the end. The lane that holds a is then the one
    whose largest logit is left out of rest. m_v begins finite, so that no difference is inf - inf, with a logit that is
    not in the row: the -1 in rest_v takes it out, unless the row has this number after all, in its first column."""
    lane = tl.arange(0, BLOCK)
    m_v = tl.full((BLOCK,), LOWEST, tl.float32)
    rest_v = tl.full((BLOCK,), -1.0, tl.float32)
    at_v = lane
    for start in range(0, V, BLOCK):
        off = start + lane
        z, _ = transform(tl.load(X + off, mask=off < V, other=0.0).to(tl.float32), scale, softcap, SOFTCAP)
        z = tl.where(off < V, z, float("-inf"))
        d = z - m_v
        grows = z > m_v  # not d > 0, since the compiler may have left out the rounding of z in d
        e = tl.exp(-tl.abs(d))
        rest_v = tl.where(grows, (rest_v + 1.0) * e, rest_v + e)  # the former largest joins the rest
        at_v = tl.where(grows, off, at_v)
        m_v = tl.where(grows, z, m_v)
    m = tl.max(m_v, axis=0)
    at = tl.min(tl.where(m_v == m, at_v, V), axis=0)
    others = tl.where((m_v == m) & (at_v == at), 0.0, 1.0)
    return m, tl.sum((rest_v + others) * tl.exp(m_v - m), axis=0), at


@jit
def _log1p(r):
    """log(1 + r) as log(u) * r / (u - 1) with u = 1 + r."""
    u = 1.0 + r
    return tl.where(u == 1.0, r, tl.log(u) * (r / tl.where(u == 1.0, 1.0, u - 1.0)))


@jit
def _teacher_kernel(X, STATS, TOP, x_stride, V, scale, softcap, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr):
    """Writes m and rest of row `program_id(0)` to STATS (n, 2), and a to TOP (n,)."""
    row = tl.program_id(0).to(tl.int64)  # int64: row * stride passes 2**31
    m, rest, at = _largest_and_rest(X + row * x_stride, V, scale, softcap, SOFTCAP, BLOCK)
    tl.store(STATS + 2 * row, m)
    tl.store(STATS + 2 * row + 1, rest)
    tl.store(TOP + row, at)


@jit
def _kl_kernel(
    X, Q, STATS, TEACHER_ROW, WEIGHT, LOSS, TOP, x_stride, q_stride, V, scale, softcap,
    DO_GRAD: tl.constexpr, HAS_WEIGHT: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes LOSS and TOP (n,) of row `program_id(0)` of X, and with DO_GRAD the gradient of the row over it."""
    row = tl.program_id(0).to(tl.int64)
    teacher = tl.load(TEACHER_ROW + row)
    X += row * x_stride
    Q += teacher * q_stride
    m, rest, at = _largest_and_rest(X, V, scale, softcap, SOFTCAP, BLOCK)
    tl.store(TOP + row, at)
    m_q = tl.load(STATS + 2 * teacher)
    rest_q = tl.load(STATS + 2 * teacher + 1)
    shift = _log1p(rest_q) - _log1p(rest)
    inv = 1.0 / (1.0 + rest)
    inv_q = 1.0 / (1.0 + rest_q)
    w = 1.0
    if HAS_WEIGHT:
        w = tl.load(WEIGHT + row)
    lane = tl.arange(0, BLOCK)
    kl_v = tl.zeros((BLOCK,), tl.float32)
    last = (V - 1) // BLOCK * BLOCK
    for back in range(0, V, BLOCK):  # backwards, because what was read last is still in a cache
        off = last - back + lane
        inside = off < V
        z, slope = transform(tl.load(X + off, mask=inside, other=0.0).to(tl.float32), scale, softcap, SOFTCAP)
        z_q, _ = transform(tl.load(Q + off, mask=inside, other=0.0).to(tl.float32), scale, softcap, SOFTCAP)
        z = tl.where(z == m, 0.0, z - m)  # the compiler may leave out the rounding of z before the difference
        z_q = tl.where(z_q == m_q, 0.0, z_q - m_q)
        p = tl.exp(z) * inv
        q = tl.exp(z_q) * inv_q
        x = (z - z_q) + shift
        series = 1.0 / 5040 + x * (1.0 / 40320)
        series = 1.0 / 24 + x * (1.0 / 120 + x * (1.0 / 720 + x * series))
        series = x * x * (0.5 + x * (1.0 / 6 + x * series))  # exp(x) - 1 - x
        near = tl.abs(x) < 0.5
        d = tl.where(near, q * (x + series), p - q)
        kl_v += tl.where(inside, tl.where(near, q * series, d - tl.where(q > 0, q * x, 0.0)), 0.0)
        if DO_GRAD:
            tl.store(X + off, (w * d * slope).to(X.dtype.element_ty), mask=inside)
    tl.store(LOSS + row, tl.sum(kl_v, axis=0))


def _block(vocab):
    """(BLOCK, num_warps)."""
    block = min(MAX_BLOCK, next_power_of_2(vocab))
    return {"BLOCK": block, "num_warps": max(4, block // 256)}


def _torch_z(logits, scale, softcap):
    """z and dz/dl in fp32; 1 - tanh**2 by exp(-2|x|), as in `_row_pass._transform`."""
    z = logits.float() * scale
    if not softcap:
        return z, scale
    e = torch.exp(z.abs() * (-2.0 / softcap))
    return torch.copysign((1 - e) / (1 + e), z) * softcap, 4.0 * scale * e / (1 + e).square()


def _torch_largest_and_rest(z):
    m, at = z.max(1)
    e = torch.exp(z - m.unsqueeze(1)).scatter_(1, at.unsqueeze(1), 0.0)
    return m, e.sum(1), at


def teacher_pass(teacher, scale: float, softcap: float):
    """(stats (m, 2) fp32, argmax (m,)) of teacher logits (m, V). `softcap` 0.0: none."""
    n, vocab = teacher.shape
    if not use_triton(teacher):
        m, rest, at = _torch_largest_and_rest(_torch_z(teacher, scale, softcap)[0])
        return torch.stack((m, rest), 1), at
    stats = torch.empty((n, 2), dtype=torch.float32, device=teacher.device)
    top = torch.empty(n, dtype=torch.int32, device=teacher.device)
    launch(
        _teacher_kernel, (n,), teacher, stats, top, teacher.stride(0), vocab, scale, softcap,
        SOFTCAP=softcap != 0.0, **_block(vocab),
    )  # fmt: skip
    return stats, top


def kl_pass(student, teacher, stats, teacher_row, row_weight, scale: float, softcap: float, want_grad: bool):
    """(KL (n,) fp32, argmax (n,)) of the student's rows; with `want_grad` their gradient over `student`.

    `stats`: what `teacher_pass` found. `row_weight` (n,) fp32 is a factor of the gradient alone; None: 1.
    """
    n, vocab = student.shape
    if not use_triton(student):
        return _torch_kl_pass(student, teacher, stats, teacher_row, row_weight, scale, softcap, want_grad)
    loss = torch.empty(n, dtype=torch.float32, device=student.device)
    top = torch.empty(n, dtype=torch.int32, device=student.device)
    launch(
        _kl_kernel, (n,), student, teacher, stats, teacher_row, loss if row_weight is None else row_weight, loss, top,
        student.stride(0), teacher.stride(0), vocab, scale, softcap,
        DO_GRAD=want_grad, HAS_WEIGHT=row_weight is not None, SOFTCAP=softcap != 0.0, **_block(vocab),
    )  # fmt: skip
    return loss, top


def _torch_kl_pass(student, teacher, stats, teacher_row, row_weight, scale, softcap, want_grad):
    """`_kl_kernel` in plain PyTorch. It takes whole rows at once, and holds about eight fp32 copies of `student`."""
    z, slope = _torch_z(student, scale, softcap)
    m, rest, at = _torch_largest_and_rest(z)
    m_q, rest_q = stats[teacher_row].unbind(1)
    shift = torch.log1p(rest_q) - torch.log1p(rest)
    z = z.sub_(m.unsqueeze(1))
    z_q = _torch_z(teacher[teacher_row], scale, softcap)[0].sub_(m_q.unsqueeze(1))
    p = z.exp().mul_((1.0 / (1.0 + rest)).unsqueeze(1))
    q = z_q.exp().mul_((1.0 / (1.0 + rest_q)).unsqueeze(1))
    x = z.sub_(z_q).add_(shift.unsqueeze(1))
    near = x.abs() < 0.5
    d = torch.where(near, q * torch.expm1(x), p.sub_(q))
    kl_terms = torch.where(near, q * _expm1_minus(x), d - torch.where(q > 0, q * x, 0.0))
    if want_grad:
        student.copy_((d if row_weight is None else d.mul_(row_weight.unsqueeze(1))).mul_(slope))
    return kl_terms.sum(1), at


def _expm1_minus(x):
    """exp(x) - 1 - x for |x| < 1/2, by its series."""
    series = torch.full_like(x, 1.0 / 40320)
    for k in (5040, 720, 120, 24, 6, 2):
        series.mul_(x).add_(1.0 / k)
    return series.mul_(x).mul_(x)
