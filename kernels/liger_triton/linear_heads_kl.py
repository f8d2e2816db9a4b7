"""Forward KL of K heads from a teacher of the same vocabulary, whose rows lie k places ahead (self-distilled Medusa
heads), without the logits of all rows of any of them. The formulas are in `_kl_pass.py`.

    teacher of head k at row t (k = 1 ... K):  q = softmax(z(teacher_hidden[t + k] @ teacher_weight.T))
    student:                                   p = softmax(z(hidden[k - 1, t] @ weight[k - 1].T))

The rows t are cut into windows of consecutive rows, which overlap by K - 1 rows of the teacher. In each window, the
rows of the teacher that some head needs are projected once. Then the rows of the heads that count are projected, in one
product if the heads are tied, turned into KL and gradient in place, and multiplied by the weight and by the hidden
states. So a token costs one projection of the teacher and one of each head, instead of two of each head.

Memory beyond inputs and gradients: the logits of a window in the compute dtype, 640 MiB in all on a GPU whatever K (64
MiB of fp32 on a CPU; plain PyTorch takes about eight times its rows of the student); the fp32 sums of the gradients of
trained weights, until the backward pass rounds them; and converted weights under autocast.
"""

from collections.abc import Sequence

import torch

from . import reference
from ._chunks import Accumulator, chunk_size, logits_buffer, sum_dtype
from ._dispatch import kernel_op, takes_twin
from ._head_inputs import check_chunking, check_heads, check_options, check_per_row, check_target, compute_dtype, spread
from ._kl_pass import kl_pass, teacher_pass
from ._products import back, project
from .known_gradients import folded, with_gradients
from .results import HeadsLoss


def _windows(valid, size):
    """For each window: the rows of the teacher (m,), with m <= size; the rows t of the heads (n,), those of head 1
    first; the place of the teacher of each among the m rows (n,); and how many of the n belong to head 1, 2 ... K.

    `valid` (K, T) is a bool tensor on the CPU and False where the teacher would lie past the last row; size >= K."""
    heads, rows = valid.shape
    needed = torch.zeros(rows, dtype=torch.bool)
    for k in range(heads):
        needed[k + 1 :] |= valid[k, : max(0, rows - k - 1)]
    place = needed.cumsum(0) - 1
    wanted = needed.nonzero().squeeze(1)
    counted = valid.any(0).nonzero().squeeze(1)
    end, total = 0, wanted.shape[0]
    while (nearest := int(torch.searchsorted(counted, end))) < counted.shape[0]:
        begin = int(counted[nearest])
        low = int(torch.searchsorted(wanted, begin + 1))
        end = rows if low + size >= total else int(wanted[low + size]) - heads
        high = int(torch.searchsorted(wanted, end + heads))
        of_heads = [valid[k, begin:end].nonzero().squeeze(1) + begin for k in range(heads)]
        places = torch.cat([place[t + k + 1] for k, t in enumerate(of_heads)]) - low
        yield wanted[low:high], torch.cat(of_heads), places, [t.shape[0] for t in of_heads]


@kernel_op("linear_heads_kl")
def _kl_op(
    teacher_hidden: torch.Tensor, teacher_weight: torch.Tensor, hidden: list[torch.Tensor],
    weights: list[torch.Tensor], valid: torch.Tensor, row_weight: torch.Tensor | None, target: torch.Tensor | None,
    scale: float, softcap: float, want_dx: bool, want_dw: list[bool], lean: bool, chunk_rows: int, dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:  # fmt: skip
    """KL (K, T), whether the argmax of the student is that of the teacher or the target (K, T), dx (K, T, H), and dW of
    each weight for which it is wanted. `weights` is one for all heads, or one for each."""
    heads, (rows, width), vocab, device = len(hidden), hidden[0].shape, teacher_weight.shape[0], valid.device
    on_cpu = valid.cpu()  # the one place where the host waits for the device
    tied = len(weights) == 1
    groups = [range(heads)] if tied else [range(k, k + 1) for k in range(heads)]
    most = max(len(group) for group in groups)  # how many rows of the student a row of the teacher may have
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
        head_rows, head_places = of_heads.split(per_head), places.split(per_head)
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
    teacher_hidden, teacher_weight, hidden, weights, valid, row_weight, target, scale, softcap, want_dx, want_dw, lean,
    chunk_rows, dtype,
):  # fmt: skip
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
    """Sum over heads k = 1 ... K and rows t of row_weight * KL(q || p), in nats and in fp32, where p is the
    distribution of head k at row t, and q that of the teacher at row t + k. The logits of one window of rows are all
    that ever exists, whatever K, and each row of the teacher is projected once for all heads.

    Only `hidden` and `weight` get gradients, which are computed with the loss. Any upstream gradient is honoured. A
    frozen weight costs neither its product nor its memory. The gradient of each trained weight is summed in fp32 and
    rounded once, after the multiplication by the upstream gradient. The sums take K * V * H * 4 bytes for K untied
    weights, and half of that with `accumulate="lean"`. The logits of both are those of F.linear in the dtype of the
    inputs. In bf16 their rounding is most of the error, as without fusing: 0.3% of a gradient for logits of standard
    deviation 1, and 1% for logits of standard deviation 4.

    Args:
        hidden, weight, row_weight, softcap, logit_scale: As in `linear_heads_cross_entropy`. softcap and logit_scale
            transform the teacher's logits too.
        teacher_hidden (`torch.Tensor`): (T, H'), the base model's last hidden states of the same rows, not shifted.
        teacher_weight (`torch.Tensor`): (V, H'), its LM head, which may be `weight` itself.
        valid (`torch.Tensor`): Bool (K, T), which says which rows count. Rows whose teacher t + k would lie past the
            last row never do. If the rows are several sequences or documents, one after the other, the last k rows of
            each must be False for head k.
        target (`torch.Tensor`, *optional*): Class ids (K, T) for `head_top1`, read where `valid`. Unset: the argmax of
            the teacher.
        accumulate (`str`, *optional*, defaults to `"fp32"`): Where the gradient of a weight is summed over the windows.
            `"lean"` sums it in its own dtype, which for bf16 halves that memory and rounds once per window.
        chunk_rows (`int`, *optional*): Rows of teacher logits alive at once, at least K. Rows of student logits are K
            times as many for tied heads, and as many for untied ones. Unset: as many as fit into 640 MiB (64 MiB on a
            CPU) together.

    Returns:
        `HeadsLoss`. No row that counts: 0 with zero gradients.

    Raises:
        ValueError: Shapes, vocabularies, dtypes or devices disagree, or an option is out of its range.
    """
    heads, rows, tied = check_heads(hidden, weight)
    first, weights = hidden[0], [weight] if tied else list(weight)
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
            hidden, weight, teacher_hidden, teacher_weight, valid, row_weight=share, target=target, softcap=softcap,
            logit_scale=logit_scale,
        )  # fmt: skip
    inputs = [hidden] if isinstance(hidden, torch.Tensor) else list(hidden)
    grads_on = torch.is_grad_enabled()
    want_dx = grads_on and any(t.requires_grad for t in inputs)
    want_dw = [grads_on and w.requires_grad for w in weights]
    with torch.no_grad(), torch.autocast(first.device.type, enabled=False):
        factor, later = folded(share, logit_scale, dtype, valid)
        kl, agree, dx, dws = _kl_op(
            teacher_hidden, teacher_weight, list(hidden), weights, valid, factor, target, float(logit_scale),
            float(softcap or 0.0), want_dx, want_dw, accumulate == "lean", chunk_rows or 0, dtype,
        )  # fmt: skip
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
    """The dtype of logits and products. ValueError unless the teacher fits the heads and the dtypes fit each other."""
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
