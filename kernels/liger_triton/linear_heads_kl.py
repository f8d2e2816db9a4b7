"""Forward KL of K heads from a teacher with the same vocabulary, k rows ahead (EAGLE-3, self-distilled Medusa heads).
Logits exist for a window of rows at a time.

    teacher of head k at row t (k = 1 ... K):  q = softmax(z(teacher_hidden[t + k] @ teacher_weight.T))
    student:                                   p = softmax(z(hidden[k - 1, t] @ weight[k - 1].T))

For both, z = scale * l, or z = softcap * tanh(scale * l / softcap) with a softcap. With m = max z, a its first
position, rest = sum of exp(z_v - m) over v != a, log_s = log(1 + rest) and p_v = exp(z_v - m) / (1 + rest); p is the
student's, q the teacher's, and x_v = log(p_v / q_v):

    KL(q || p) = sum_v q_v log(q_v / p_v) = sum_v q_v (exp(x_v) - 1 - x_v)        since the p_v and the q_v sum to 1
    dz_v       = w * (p_v - q_v) = w * q_v * (exp(x_v) - 1)                       w: the weight of the row

The gradient with respect to l is dz_v * scale, times (1 - tanh**2) with a softcap.

Exactness. No term of the second sum is negative, so nothing cancels. For |x_v| < 1/2, exp(x) - 1 - x comes from its
series (relative error 4e-8). Two nearly equal rows then get an exact small KL. Two rows that are sure of the same token
get an exact gradient, where p - q would cancel. rest excludes the largest logit, so log_s of such a row keeps its
digits. Differences are taken against m. A token that has probability 0 under the teacher adds p_v; if only the student
gives it 0, the KL is infinite. A NaN in either row makes its loss and gradient NaN.

The rows t are cut into windows of consecutive rows; windows overlap by K - 1 rows of the teacher. In each window, the
teacher's rows that any head needs are projected once. Then the heads' rows that count are projected (one product for
tied heads), turned into KL and gradient in place, and multiplied by the weight and by the hidden states. So a token
costs one projection of the teacher and one of each head, instead of two of each head.

Memory beyond inputs and gradients: the logits of a window in the compute dtype, 640 MiB in all on a GPU whatever K (64
MiB of fp32 on a CPU; plain PyTorch takes about eight times its rows of the student); the fp32 sums of the gradients of
trained weights, until the backward pass rounds them; and converted weights under autocast.

Shapes  student (n, V), over which its gradient is written; teacher (m, V); rows of any stride. `teacher_row` (n,) int64
        is the teacher's row for a row of the student: several heads share one row of teacher logits.
Bytes   b per element. The statistics of the teacher read mVb, once. The pass over the student reads 2nVb of it and nVb
        of the teacher, and with the gradient writes nVb.
"""

from collections.abc import Sequence

import torch

from . import reference
from ._chunks import Accumulator, chunk_size, logits_buffer, sum_dtype
from ._dispatch import jit, kernel_op, takes_twin, tl, use_triton
from ._head_inputs import check_chunking, check_heads, check_options, check_per_row, check_target, compute_dtype, spread
from ._launch import launch, next_power_of_2
from ._products import back, project
from ._row_pass import LOWEST, transform
from .known_gradients import split_pow2_scale, with_gradients
from .results import HeadsLoss

MAX_BLOCK = 4096  # three vectors of a block live in registers: 8 elements a thread with 16 warps


@jit
def _largest_and_rest(X, V, scale, softcap, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr):
    """Return (m, rest, a) of a row. Each lane keeps its own numbers until the end. Then the lane that holds a removes
    its largest logit from rest. m_v starts at a finite number, so no difference is inf - inf. That number is not a
    logit of the row, so the -1 in rest_v cancels it, unless the first column of the row has it."""
    lane = tl.arange(0, BLOCK)
    m_v = tl.full((BLOCK,), LOWEST, tl.float32)
    rest_v = tl.full((BLOCK,), -1.0, tl.float32)
    at_v = lane
    for start in range(0, V, BLOCK):
        off = start + lane
        z, _ = transform(tl.load(X + off, mask=off < V, other=0.0).to(tl.float32), scale, softcap, SOFTCAP)
        z = tl.where(off < V, z, float("-inf"))
        d = z - m_v
        grows = z > m_v  # d > 0 would be wrong: the compiler may leave out the rounding of z in d
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
    """Return log(1 + r), as log(u) * r / (u - 1) with u = 1 + r."""
    u = 1.0 + r
    return tl.where(u == 1.0, r, tl.log(u) * (r / tl.where(u == 1.0, 1.0, u - 1.0)))


@jit
def _teacher_kernel(X, STATS, TOP, x_stride, V, scale, softcap, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr):
    """Write m and rest of row `program_id(0)` to STATS (n, 2), and a to TOP (n,)."""
    row = tl.program_id(0).to(tl.int64)  # int64: row * stride passes 2**31
    m, rest, at = _largest_and_rest(X + row * x_stride, V, scale, softcap, SOFTCAP, BLOCK)
    tl.store(STATS + 2 * row, m)
    tl.store(STATS + 2 * row + 1, rest)
    tl.store(TOP + row, at)


@jit
def _kl_kernel(
    X,
    Q,
    STATS,
    TEACHER_ROW,
    WEIGHT,
    LOSS,
    TOP,
    x_stride,
    q_stride,
    V,
    scale,
    softcap,
    DO_GRAD: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write LOSS and TOP (n,) of row `program_id(0)` of X. With DO_GRAD, overwrite the row with its gradient."""
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
    for read in range(0, V, BLOCK):  # backwards: the blocks read last are still in a cache
        off = last - read + lane
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
    """Return (BLOCK, num_warps)."""
    block = min(MAX_BLOCK, next_power_of_2(vocab))
    return {"BLOCK": block, "num_warps": max(4, block // 256)}


def _torch_z(logits, scale, softcap):
    """Return z and dz/dl in fp32; 1 - tanh**2 comes from exp(-2|x|), as in `_row_pass.transform`."""
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
    """Return (stats (m, 2) fp32, argmax (m,)) of teacher logits (m, V). `softcap` 0.0 means no cap."""
    n, vocab = teacher.shape
    if not use_triton(teacher):
        m, rest, at = _torch_largest_and_rest(_torch_z(teacher, scale, softcap)[0])
        return torch.stack((m, rest), 1), at
    stats = torch.empty((n, 2), dtype=torch.float32, device=teacher.device)
    top = torch.empty(n, dtype=torch.int32, device=teacher.device)
    launch(
        _teacher_kernel,
        (n,),
        teacher,
        stats,
        top,
        teacher.stride(0),
        vocab,
        scale,
        softcap,
        SOFTCAP=softcap != 0.0,
        **_block(vocab),
    )
    return stats, top


def kl_pass(student, teacher, stats, teacher_row, row_weight, scale: float, softcap: float, want_grad: bool):
    """Return (KL (n,) fp32, argmax (n,)) of the student's rows. With `want_grad`, overwrite `student` with the
    gradient.

    `stats` comes from `teacher_pass`. `row_weight` (n,) fp32 is a factor of the gradient alone; None: 1.
    """
    n, vocab = student.shape
    if not use_triton(student):
        return _torch_kl_pass(student, teacher, stats, teacher_row, row_weight, scale, softcap, want_grad)
    loss = torch.empty(n, dtype=torch.float32, device=student.device)
    top = torch.empty(n, dtype=torch.int32, device=student.device)
    launch(
        _kl_kernel,
        (n,),
        student,
        teacher,
        stats,
        teacher_row,
        loss if row_weight is None else row_weight,
        loss,
        top,
        student.stride(0),
        teacher.stride(0),
        vocab,
        scale,
        softcap,
        DO_GRAD=want_grad,
        HAS_WEIGHT=row_weight is not None,
        SOFTCAP=softcap != 0.0,
        **_block(vocab),
    )
    return loss, top


def _torch_kl_pass(student, teacher, stats, teacher_row, row_weight, scale, softcap, want_grad):
    """Run `_kl_kernel` in plain PyTorch: whole rows at once, with about eight fp32 copies of `student`."""
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
    """Return exp(x) - 1 - x for |x| < 1/2, by its series."""
    series = torch.full_like(x, 1.0 / 40320)
    for k in (5040, 720, 120, 24, 6, 2):
        series.mul_(x).add_(1.0 / k)
    return series.mul_(x).mul_(x)


def _windows(valid, size):
    """Yield for each window: teacher rows, head rows, the teacher's place for each head row, and the count per head.

    Teacher rows are (m,), m <= size. Head rows t are (n,), head 1 first. Places (n,) index the m teacher rows. The
    counts say how many of the n rows belong to head 1, 2 ... K. `valid` (K, T) is a bool tensor on the CPU, False where
    the teacher would lie past the last row; size >= K.
    """
    heads, rows = valid.shape
    needed = torch.zeros(rows, dtype=torch.bool)
    for k in range(heads):
        needed[k + 1 :] |= valid[k, : max(0, rows - k - 1)]
    place = needed.cumsum(0) - 1
    wanted = needed.nonzero().squeeze(1)
    counted = valid.any(0).nonzero().squeeze(1)
    end, total = 0, wanted.shape[0]
    while True:
        nearest = int(torch.searchsorted(counted, end))
        if nearest >= counted.shape[0]:
            return
        begin = int(counted[nearest])
        low = int(torch.searchsorted(wanted, begin + 1))
        end = rows if low + size >= total else int(wanted[low + size]) - heads
        high = int(torch.searchsorted(wanted, end + heads))
        of_heads = [valid[k, begin:end].nonzero().squeeze(1) + begin for k in range(heads)]
        places = torch.cat([place[t + k + 1] for k, t in enumerate(of_heads)]) - low
        yield wanted[low:high], torch.cat(of_heads), places, [t.shape[0] for t in of_heads]


@kernel_op("linear_heads_kl")
def _kl_op(
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    hidden: list[torch.Tensor],
    weights: list[torch.Tensor],
    valid: torch.Tensor,
    row_weight: torch.Tensor | None,
    target: torch.Tensor | None,
    scale: float,
    softcap: float,
    want_dx: bool,
    want_dw: list[bool],
    lean: bool,
    chunk_rows: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return KL (K, T), top-1 hits (K, T), dx (K, T, H), and dW of each weight that needs one.

    A hit means that the student's argmax equals the target, or the teacher's argmax without targets. `weights` is one
    for all heads, or one for each.
    """
    heads = len(hidden)
    rows, width = hidden[0].shape
    vocab = teacher_weight.shape[0]
    device = valid.device
    on_cpu = valid.cpu()  # only here does the host wait for the device
    tied = len(weights) == 1
    groups = [range(heads)] if tied else [range(k, k + 1) for k in range(heads)]
    most = max(len(group) for group in groups)  # the most student rows per teacher row
    rounded = [
        w.numel() * w.element_size()
        for w, want in zip(weights, want_dw, strict=True)
        if want and sum_dtype(w, lean) != w.dtype
    ]
    size = chunk_rows or chunk_size(rows, (1 + most) * vocab, dtype, device.type, max(rounded, default=0))
    size = max(min(size, rows), heads)

    factors = [w.to(dtype) for w in weights]
    shared = teacher_weight.dtype == weights[0].dtype and teacher_weight.data_ptr() == weights[0].data_ptr()
    teacher_factor = factors[0] if shared else teacher_weight.to(dtype)
    kl, agree = (torch.zeros((heads, rows), dtype=torch.float32, device=device) for _ in range(2))
    dx = torch.zeros((heads, rows, width) if want_dx else 0, dtype=hidden[0].dtype, device=device)
    counts = [int(on_cpu[group.start : group.stop].any()) for group in groups]
    sums = [Accumulator(w, lean, n) if want else None for w, want, n in zip(weights, want_dw, counts, strict=True)]
    buffer = logits_buffer((1 + most) * size, vocab, dtype, valid)
    want_grad = want_dx or any(want_dw)

    for of_teacher, of_heads, places, per_head in _windows(on_cpu, size):
        index = torch.cat((of_teacher, of_heads, places)).to(device, non_blocking=True)
        of_teacher, of_heads, places = index.split([len(of_teacher), len(of_heads), len(places)])
        teacher = buffer[: of_teacher.shape[0], :vocab]
        project(teacher_hidden[of_teacher].to(dtype), teacher_factor, teacher)
        stats, teacher_top = teacher_pass(teacher, scale, softcap)
        head_rows = of_heads.split(per_head)
        head_places = places.split(per_head)
        for group, factor, dw in zip(groups, factors, sums, strict=True):
            mine = [k for k in group if per_head[k]]
            if not mine:
                continue
            x_c = torch.cat([hidden[k][head_rows[k]] for k in mine]).to(dtype)
            teacher_row = torch.cat([head_places[k] for k in mine])
            flat = torch.cat([head_rows[k] + k * rows for k in mine])  # places in (K * T)
            logits = buffer[of_teacher.shape[0] :][: flat.shape[0], :vocab]
            project(x_c, factor, logits)
            w_c = None if row_weight is None else row_weight.view(-1)[flat]
            kl.view(-1)[flat], top = kl_pass(
                logits, teacher, stats, teacher_row, w_c, scale, softcap, want_grad and (want_dx or dw is not None)
            )
            wanted = teacher_top[teacher_row] if target is None else target.reshape(-1)[flat]
            agree.view(-1)[flat] = (top == wanted).float()
            if want_dx:
                dx.view(-1, width)[flat] = back(logits, factor).to(dx.dtype)
            if dw is not None:
                dw.add(logits, x_c)
    return kl, agree, dx, [dw.sum for dw in sums if dw is not None]


@_kl_op.register_fake
def _(
    teacher_hidden,
    teacher_weight,
    hidden,
    weights,
    valid,
    row_weight,
    target,
    scale,
    softcap,
    want_dx,
    want_dw,
    lean,
    chunk_rows,
    dtype,
):
    kl, agree = (valid.new_empty(valid.shape, dtype=torch.float32) for _ in range(2))
    dx = hidden[0].new_empty((*valid.shape, hidden[0].shape[1]) if want_dx else 0)
    sums = [w.new_empty(w.shape, dtype=sum_dtype(w, lean)) for w, want in zip(weights, want_dw, strict=True) if want]
    return kl, agree, dx, sums


def linear_heads_kl(
    hidden: torch.Tensor | Sequence[torch.Tensor],  # (K, T, H), or K of (T, H)
    weight: torch.Tensor | Sequence[torch.Tensor],  # (V, H), or K of (V, H)
    teacher_hidden: torch.Tensor,  # (T, H')
    teacher_weight: torch.Tensor,  # (V, H')
    valid: torch.Tensor,  # (K, T)
    *,
    row_weight: torch.Tensor | None = None,  # (K,) or (K, T)
    target: torch.Tensor | None = None,  # (K, T)
    softcap: float | None = None,
    logit_scale: float = 1.0,
    accumulate: str = "fp32",
    chunk_rows: int | None = None,
) -> HeadsLoss:
    """Sum row_weight * KL(q || p) over heads k = 1 ... K and rows t, in nats and fp32. p is the distribution of head k
    at row t; q is the teacher's at row t + k. Only one window of logits exists at a time, for any K, and each teacher
    row is projected once for all heads.

    Only `hidden` and `weight` get gradients, computed with the loss. Any upstream gradient is honoured. A frozen weight
    costs neither a product nor memory. The gradient of each trained weight is summed in fp32 and rounded once, after
    the multiplication by the upstream gradient. The sums take K * V * H * 4 bytes for K untied weights, half of that
    with `accumulate="lean"`. Logits are computed as in F.linear, in the dtype of the inputs. In bf16 their rounding is
    most of the error, as without fusing: 0.3% of a gradient for logits of standard deviation 1, and 1% for standard
    deviation 4.

    Args:
        hidden, weight, row_weight, softcap, logit_scale: As in `linear_heads_cross_entropy`. softcap and logit_scale
            transform the teacher's logits too.
        teacher_hidden (`torch.Tensor`): (T, H'), the base model's last hidden states of the same rows, not shifted.
        teacher_weight (`torch.Tensor`): (V, H'), its LM head. It may be `weight` itself.
        valid (`torch.Tensor`): Bool (K, T): True for rows that count. Rows with t + k past the last row never count. If
            the rows hold several sequences or documents, the last k rows of each must be False for head k.
        target (`torch.Tensor`, *optional*): Class ids (K, T) for `head_top1`, read where `valid`. Unset: the argmax of
            the teacher.
        accumulate (`str`, *optional*, defaults to `"fp32"`): Where the gradient of a weight is summed over the windows.
            `"lean"` sums it in its own dtype, which for bf16 halves that memory and rounds once per window.
        chunk_rows (`int`, *optional*): Rows of teacher logits alive at once, at least K. Tied heads have K times as
            many rows of student logits, untied heads equally many. Unset: as many as fit into 640 MiB (64 MiB on a CPU)
            together.

    Returns:
        `HeadsLoss`. If no row counts: 0 with zero gradients.

    Raises:
        ValueError: Shapes, vocabularies, dtypes or devices disagree, or an option is out of its range.
    """
    heads, rows, tied = check_heads(hidden, weight)
    first = hidden[0]
    weights = [weight] if tied else list(weight)
    check_per_row("valid", valid, heads, rows, first)
    if valid.dtype != torch.bool:
        raise ValueError(f"valid is {valid.dtype}; expected torch.bool: which rows count, such as target != -100.")
    dtype = _check_teacher(first, weights, teacher_hidden, teacher_weight, rows)
    if target is not None:
        check_per_row("target", target, heads, rows, first)
        check_target("hidden", first, target)
    check_options("hidden", first, valid.long() if target is None else target, "sum", 0.0, softcap, logit_scale, 0.0)
    check_chunking(accumulate, chunk_rows)

    ahead = torch.arange(rows, device=valid.device) + torch.arange(1, heads + 1, device=valid.device).unsqueeze(1)
    valid = valid & (ahead < rows)
    share = spread(row_weight, valid, first)
    if takes_twin(*hidden, *weights, teacher_hidden, teacher_weight, valid, share):
        return reference.linear_heads_kl(
            hidden,
            weight,
            teacher_hidden,
            teacher_weight,
            valid,
            row_weight=share,
            target=target,
            softcap=softcap,
            logit_scale=logit_scale,
        )
    inputs = [hidden] if isinstance(hidden, torch.Tensor) else list(hidden)
    grads_on = torch.is_grad_enabled()
    want_dx = grads_on and any(t.requires_grad for t in inputs)
    want_dw = [grads_on and w.requires_grad for w in weights]
    with torch.no_grad(), torch.autocast(first.device.type, enabled=False):
        factor, later = split_pow2_scale(share, logit_scale, dtype, valid)
        kl, agree, dx, dws = _kl_op(
            teacher_hidden,
            teacher_weight,
            list(hidden),
            weights,
            valid,
            factor,
            target,
            float(logit_scale),
            float(softcap or 0.0),
            want_dx,
            want_dw,
            accumulate == "lean",
            chunk_rows or 0,
            dtype,
        )
        loss = (kl if share is None else kl * share).sum()
        grads = []
        if want_dx:
            grads = [dx] if isinstance(hidden, torch.Tensor) else list(dx)
    if not want_dx:
        inputs = []
    inputs += [w for w, want in zip(weights, want_dw, strict=True) if want]
    loss = with_gradients(loss, inputs, [*grads, *dws], later)
    return HeadsLoss(loss, kl.sum(1), agree.sum(1).long(), valid.sum(1))


def _check_teacher(first, weights, teacher_hidden, teacher_weight, rows) -> torch.dtype:
    """Return the dtype of logits and products. Raise ValueError unless the teacher fits the heads."""
    if teacher_hidden.ndim != 2 or teacher_hidden.shape[0] != rows:
        raise ValueError(f"teacher_hidden is {tuple(teacher_hidden.shape)}; expected ({rows}, H): the heads' rows.")
    vocab = weights[0].shape[0]
    if teacher_weight.shape != (vocab, teacher_hidden.shape[1]):
        raise ValueError(
            f"teacher_weight is {tuple(teacher_weight.shape)}, teacher_hidden {tuple(teacher_hidden.shape)}, weight "
            f"{tuple(weights[0].shape)}; expected ({vocab}, {teacher_hidden.shape[1]}): one vocabulary for all."
        )
    given = [("teacher_hidden", teacher_hidden), ("teacher_weight", teacher_weight)]
    return compute_dtype(first, *given, *(("weight", w) for w in weights))
