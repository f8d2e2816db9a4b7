"""Divergence between the distributions of two LM heads over one vocabulary, without the logits of all rows.

    z = softcap * tanh(logit_scale * l / softcap) / temperature, l = x W^T + bias + LoRA, of student and teacher each
    p = softmax(z_student), q = softmax(z_teacher), m = (1 - beta) p + beta q

    beta = 0      D = KL(q || p)                                dD/dz = p - q
    beta = 1      D = KL(p || q)                                dD/dz = p (log p - log q - D)
    0 < beta < 1  D = beta KL(q || m) + (1 - beta) KL(p || m)   dD/dz = (1 - beta) p (log p - log m - KL(p || m))

z is the student's; only the student gets gradients. This is generalised knowledge distillation, arXiv:2306.13649. The
ends beta = 0 and 1 follow TRL: the formula for the middle would give 0 there.

Rows that do not count are dropped first. Logits are always fp32, because a divergence is a small difference of large
numbers; dl is rounded to the compute dtype before its products. `linear_head.py` explains the modes. A chunk takes four
products, one of them for the teacher, if gradients are computed with the values, and six with a second walk. Memory
beyond inputs and gradients: about six fp32 tensors of C * V.

Shapes  student x (T, H), W (V, H); teacher x (T, H'), W (V, H'); logits of a chunk (C, V); results (T,).
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from . import reference
from ._autograd import once_differentiable
from ._chunks import Chunks, HeadGradients
from ._dispatch import on_cuda, takes_twin
from ._head_inputs import DB, DBIAS, DU, DW, DX, Head, prepare
from .known_gradients import one_number, split_pow2_scale, stash_grads, take_scaled_grads
from .results import Divergence


class _Transform(NamedTuple):
    """Map l to z. `scale` and `softcap` (0.0: no cap) are already divided by the temperature."""

    scale: float
    softcap: float
    dtype: torch.dtype  # dtype of the factors of the product

    def tensors(self, head: Head) -> Head:
        """Return the parameters as factors of products, converted once for all chunks.

        fp32 logits need fp32 factors, except on CUDA: its mm takes 16-bit factors too.
        """
        wide = self.dtype if on_cuda(head.x) else torch.float32
        return Head(head.x, *(None if t is None else t.to(wide) for t in head[1:]))

    def z(self, head: Head, rows):
        """Return z of `rows` in fp32, and the tanh of the softcap (None without one)."""
        z = _product(head.x[rows], head.weight)
        if head.bias is not None:
            z += head.bias
        if head.u is not None:
            z += _product(head.u[rows], head.lora_b)
        z *= self.scale
        if not self.softcap:
            return z, None
        tanh = z.div_(self.softcap).tanh_()
        return tanh * self.softcap, tanh

    def dl(self, dz, tanh):
        """Compute dD/dl from dD/dz, in place."""
        if tanh is not None:
            dz *= torch.addcmul(torch.ones_like(tanh), tanh, tanh, value=-1)
        return dz.mul_(self.scale)


def _product(a, b):
    """Return a b^T in fp32."""
    a = a.to(b.dtype)
    if b.dtype == torch.float32:
        return torch.mm(a, b.t())
    return torch.mm(a, b.t(), out_dtype=torch.float32)


def _log_softmax(z):
    """Apply log_softmax in place. The maximum is subtracted first, so log p of a likely token keeps its digits."""
    z.sub_(z.amax(-1, keepdim=True))
    return z.sub_(z.exp().sum(-1, keepdim=True).log_())


def _row_divergence(z, z_teacher, beta, want_dz):
    """Return (D, entropy of p, dD/dz or None) of rows (C, V). Both arguments are written over."""
    log_p, log_q = _log_softmax(z), _log_softmax(z_teacher)
    p = log_p.exp()
    entropy = -(p * log_p).sum(-1)
    if beta == 0.0:
        q = log_q.exp()
        divergence = (q * log_q.sub_(log_p)).sum(-1)
        return divergence, entropy, p.sub_(q) if want_dz else None
    if beta == 1.0:
        gap = log_p.sub_(log_q)
        divergence = (p * gap).sum(-1)
        return divergence, entropy, gap.sub_(divergence.unsqueeze(-1)).mul_(p) if want_dz else None
    # With s = log(beta q) - log((1 - beta) p): log p - log m = -log(1 - beta) - softplus(s), and log q - log m =
    # -log(beta) - softplus(-s). dD/dz leaves out the constants: where p and q hardly overlap, everything else in it is
    # tiny.
    q = log_q.exp()
    s = log_q.sub_(log_p).add_(math.log(beta / (1 - beta)))
    kl_q = -math.log(beta) - (q * F.softplus(-s)).sum(-1)
    overlap = F.softplus(s)
    mean_overlap = (p * overlap).sum(-1)
    divergence = beta * kl_q + (1 - beta) * (-math.log(1 - beta) - mean_overlap)
    if not want_dz:
        return divergence, entropy, None
    return divergence, entropy, overlap.sub_(mean_overlap.unsqueeze(-1)).mul_(p).mul_(beta - 1)


class _Spec(NamedTuple):
    beta: float
    student: _Transform
    teacher: _Transform
    needs: int
    lean: bool
    chunk_rows: int | None


def _walk(student: Head, teacher: Head, kept, spec: _Spec, needs: int, g=None):
    """Return divergence (T,), entropy (T,) and the gradients in `needs` of sum(g * divergence). g is (T,) or None."""
    total = student.x.shape[0]
    vocab = student.weight.shape[0]
    dtype = spec.student.dtype
    chunks = Chunks(total, kept, spec.chunk_rows, 2 * vocab, torch.float32, student.x.device.type)  # two heads
    # Two tensors: halves of one would be views, and autograd forbids changing those in place.
    divergence, entropy = (torch.zeros(total, dtype=torch.float32, device=student.x.device) for _ in range(2))
    gradients = HeadGradients(student, needs, spec.lean, chunks.number, fill=False)
    wide = spec.student.tensors(student)
    wide_teacher = spec.teacher.tensors(teacher)
    w = student.weight.to(dtype) if needs & DX else None
    lb = student.lora_b.to(dtype) if needs & DU else None

    for rows in chunks.each():
        z, tanh = spec.student.z(wide, rows)
        z_teacher, _ = spec.teacher.z(wide_teacher, rows)
        divergence[rows], entropy[rows], dz = _row_divergence(z, z_teacher, spec.beta, bool(needs))
        if not needs:
            continue
        del z, z_teacher
        dl = spec.student.dl(dz, tanh)
        del dz, tanh
        if g is not None:
            dl *= g[rows].unsqueeze(-1)
        gradients.add_bias(dl)
        dl = dl.to(dtype)
        gradients.add(dl, rows, w, lb, product=torch.mm)  # of the whole vocabulary at once
        del dl
    return divergence, entropy, list(gradients.all())


class _LinearDivergence(torch.autograd.Function):
    """Return (divergence, entropy), each (T,). `linear_head.py` explains the modes."""

    @staticmethod
    def forward(ctx, x, weight, bias, u, lora_b, teacher, kept, mode, spec):
        ctx.set_materialize_grads(False)
        ctx.mode, ctx.spec = mode, spec
        student = Head(x, weight, bias, u, lora_b)
        dtypes = [None if t is None else t.dtype for t in student]
        with torch.autocast(x.device.type, enabled=False):
            if mode == "recompute":
                divergence, entropy, _ = _walk(student, teacher, kept, spec, 0)
                ctx.save_for_backward(kept, *student, *teacher)
                ctx.dtypes = dtypes
            else:
                factor, later = split_pow2_scale(None, spec.student.scale, spec.student.dtype, x[:, 0])
                divergence, entropy, grads = _walk(student, teacher, kept, spec, spec.needs, factor)
                stash_grads(ctx, grads, dtypes, kept, later)
        ctx.mark_non_differentiable(entropy)
        return divergence, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, g, _):
        if g is None:
            return (None,) * 9
        spec, g = ctx.spec, g.float()
        kept, *tensors = saved = ctx.saved_tensors  # PyTorch raises if an earlier backward did not keep the graph
        if ctx.mode == "recompute":
            with torch.autocast(g.device.type, enabled=False):
                _, _, grads = _walk(Head(*tensors[:5]), Head(*tensors[5:]), kept, spec, spec.needs, g)
            out = [None if t is None else t.to(d) for t, d in zip(grads, ctx.dtypes, strict=True)]
            return *out, None, None, None, None
        counted = torch.ones_like(g, dtype=torch.bool)
        if kept is not None:
            counted = torch.zeros_like(counted).index_fill_(0, kept, True)
        factor = one_number(g, counted) if ctx.mode == "uniform" else torch.where(counted, g, 0.0)
        later = tensors[0]
        return *take_scaled_grads(ctx, saved, factor if later is None else factor * later), None, None, None, None


def linear_divergence(
    hidden: torch.Tensor,  # (..., H)
    weight: torch.Tensor,  # (V, H)
    teacher_hidden: torch.Tensor,  # (..., H')
    teacher_weight: torch.Tensor,  # (V, H')
    bias: torch.Tensor | None = None,  # (V,)
    teacher_bias: torch.Tensor | None = None,  # (V,)
    *,
    beta: float,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    lora: tuple[torch.Tensor, torch.Tensor, float] | None = None,  # A (r, H), B (V, r), scaling
    lora_input: torch.Tensor | None = None,  # (..., H)
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_lora: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    teacher_lora_input: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,  # (...)
    uniform_grad: bool = False,
    accumulate: str = "fp32",
    chunk_rows: int | None = None,
) -> Divergence:
    """Compute forward KL, reverse KL or generalised Jensen-Shannon divergence of each row between student and teacher,
    in nats, and the student's entropy. Neither head ever holds the logits of all rows.

    Only the student's tensors get gradients. A frozen weight costs neither its product nor its memory.

    Args:
        hidden, weight, bias, lora, lora_input, accumulate: The student's, as in `linear_cross_entropy`.
        teacher_hidden, teacher_weight, teacher_bias, teacher_lora, teacher_lora_input: The teacher's. Width H' and
            dtype may differ from the student's. They get no gradient. If either is float64, everything is computed in
            float64.
        beta (`float`): In [0, 1]. 0 is KL(teacher || student), and 1 is KL(student || teacher). Between them it is
            beta * KL(teacher || m) + (1 - beta) * KL(student || m) with m = (1 - beta) * student + beta * teacher.
        temperature (`float`, *optional*, defaults to 1.0): Divides the logits of both, after the softcap. The result is
            not multiplied by its square.
        softcap, logit_scale, teacher_softcap, teacher_logit_scale: As in `linear_cross_entropy`, for each head.
        mask (`torch.Tensor`, *optional*): Bool, (...): True for rows that count. Other rows are dropped before the
            products.
        uniform_grad (`bool`, *optional*, defaults to `False`): Promise that all rows that count get the same upstream
            gradient. This saves a second walk over the logits. If the promise is broken, every gradient is NaN.
        chunk_rows (`int`, *optional*): Rows of logits alive at once. Unset: as many as fit 640 MiB (CPU: 64).

    Returns:
        `Divergence`: `divergence` (differentiable) and `entropy`.

    Raises:
        ValueError: Shapes, vocabularies, dtypes or devices disagree, or an option is out of its range.
    """
    rows = hidden.shape[:-1]
    if teacher_hidden.shape[:-1] != rows:
        raise ValueError(
            f"hidden is {tuple(hidden.shape)}, teacher_hidden {tuple(teacher_hidden.shape)}; expected the same "
            "dimensions but the last: the hidden states of both models for the same tokens."
        )
    if weight.ndim == 2 == teacher_weight.ndim and weight.shape[0] != teacher_weight.shape[0]:
        raise ValueError(
            f"weight has a vocabulary of {weight.shape[0]}, teacher_weight of {teacher_weight.shape[0]}; a divergence "
            "needs one vocabulary. Use a teacher of the student's vocabulary, or slice off padding rows of the larger."
        )
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta is {beta}; expected a number from 0 (forward KL) to 1 (reverse KL).")
    if not temperature > 0.0:
        raise ValueError(f"temperature is {temperature}; expected a positive number.")
    for name, value in (("softcap", softcap), ("teacher_softcap", teacher_softcap)):
        if value is not None and not value > 0.0:
            raise ValueError(f"{name} is {value}; expected a positive number, or None for no softcap.")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != rows):
        raise ValueError(f"mask is {mask.dtype} {tuple(mask.shape)}; expected torch.bool {tuple(rows)}.")
    target = torch.zeros(rows, dtype=torch.int64, device=hidden.device)  # `prepare` requires a target
    student, _, dtype = prepare(hidden, weight, target, bias, lora, lora_input, accumulate, chunk_rows)
    try:
        with torch.no_grad():
            teacher, _, teacher_dtype = prepare(
                teacher_hidden, teacher_weight, target, teacher_bias, teacher_lora, teacher_lora_input, "fp32", None
            )
    except ValueError as error:
        raise ValueError(f"Of the teacher's head: {error}") from None
    if takes_twin(*student, *teacher, mask):
        return reference.linear_divergence(
            hidden,
            weight,
            teacher_hidden,
            teacher_weight,
            bias,
            teacher_bias,
            beta=float(beta),
            temperature=temperature,
            softcap=softcap,
            logit_scale=logit_scale,
            lora=lora,
            lora_input=lora_input,
            teacher_softcap=teacher_softcap,
            teacher_logit_scale=teacher_logit_scale,
            teacher_lora=teacher_lora,
            teacher_lora_input=teacher_lora_input,
            mask=None if mask is None else mask.to(hidden.device),
        )
    teacher = Head(*(None if t is None else t.detach() for t in teacher))
    needs = student.needs()
    spec = _Spec(
        float(beta),
        _Transform(logit_scale / temperature, (softcap or 0.0) / temperature, dtype),
        _Transform(teacher_logit_scale / temperature, (teacher_softcap or 0.0) / temperature, teacher_dtype),
        needs,
        accumulate == "lean",
        chunk_rows,
    )
    kept = None if mask is None else mask.reshape(-1).to(hidden.device).nonzero().squeeze(1)
    if uniform_grad:
        mode = "uniform"
    elif needs & (DW | DBIAS | DB):
        mode = "recompute"
    else:
        mode = "rows"  # dx and du have rows of their own, so each can be scaled later
    divergence, entropy = _LinearDivergence.apply(*student, teacher, kept, mode, spec)
    return Divergence(divergence.view(rows), entropy.view(rows))
