"""Every operation of the package in plain PyTorch. These twins define the operations, the tests compare with them, and
they run where Triton does not.

Signatures and results match the kernels: arithmetic in fp32 (float64 for float64 inputs), with one rounding where the
operation's docstring says. Arguments are not checked: the public functions do that.

Shapes  as in the kernels' files: rows T or (..., N), hidden width H, vocabulary V, experts E, rank r.
"""

import math

import torch
import torch.nn.functional as F

from .results import Divergence, HeadsLoss, LogProbs


def wide_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype of the arithmetic: fp32, or float64 if an input is float64."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def rms_norm(x, weight, eps, *, offset=0.0, cast="llama"):
    """See `liger_triton.rms_norm`."""
    wide = wide_dtype(x.dtype) if weight is None else wide_dtype(x.dtype, weight.dtype)
    x_wide = x.to(wide)
    rstd = torch.rsqrt(x_wide.pow(2).mean(-1, keepdim=True) + eps)
    normed = x_wide * (rstd.to(x.dtype) if cast == "rstd" else rstd)
    if cast in ("llama", "rstd"):
        normed = normed.to(x.dtype)
        if weight is None:
            return normed
        return (weight + offset if offset else weight) * normed
    if weight is None:
        return normed.to(x.dtype)
    out_dtype = x.dtype if cast == "gemma" else torch.promote_types(x.dtype, weight.dtype)
    return (normed * (weight.to(wide) + offset)).to(out_dtype)


def add_rms_norm(x, residual, weight, eps, *, offset=0.0, cast="llama"):
    """See `liger_triton.add_rms_norm`."""
    total = x + residual
    return rms_norm(total, weight, eps, offset=offset, cast=cast), total


def gated_rms_norm(
    x, gate, weight, eps, *, activation="silu", gate_first=False, group_size=None, offset=0.0, cast="llama"
):
    """See `liger_triton.gated_rms_norm`."""
    wide = wide_dtype(*(t.dtype for t in (x, gate, weight) if t is not None))
    h, factor = x.to(wide), None
    if gate is not None:
        factor = (F.silu if activation == "silu" else torch.sigmoid)(gate.to(wide))
        h = h * factor if gate_first else h
    groups = h.unflatten(-1, (-1, x.shape[-1] if group_size is None else group_size))
    normed = (groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)).flatten(-2)
    if cast == "llama":
        normed = (weight + offset if offset else weight) * normed.to(x.dtype)
    else:
        normed = normed * (weight.to(wide) + offset)
    if factor is None or gate_first:
        return normed if cast == "llama" else normed.to(x.dtype)
    return (normed * factor).to(x.dtype)


def layer_norm(x, weight, bias, eps, *, offset=0.0):
    """See `liger_triton.layer_norm`."""
    weight = weight + offset if offset else weight
    wide = wide_dtype(*(t.dtype for t in (x, weight, bias) if t is not None))
    weight, bias = (None if p is None else p.to(wide) for p in (weight, bias))
    return F.layer_norm(x.to(wide), x.shape[-1:], weight, bias, eps).to(x.dtype)


def short_conv(x, weight, bias=None, *, cu_seqlens=None, activation=None, split=None):
    """See `liger_triton.short_conv`."""
    wide = wide_dtype(*(t.dtype for t in (x, weight, bias) if t is not None))
    tokens, taps = len(x), weight.flatten(1).to(wide).unbind(1)
    at = torch.arange(tokens, device=x.device)
    starts = torch.zeros_like(at)
    if cu_seqlens is not None:
        before = torch.searchsorted(cu_seqlens, at, right=True) - 1  # -1: the token is before the first row
        starts = torch.where(before < 0, 0, cu_seqlens[before.clamp(min=0)])
    y = x.new_zeros(x.shape, dtype=wide)
    if bias is not None:
        y = y + bias.to(wide)
    for back, tap in enumerate(reversed(taps)):
        moved = F.pad(x.to(wide), (0, 0, back, 0))[:tokens]
        y = y + tap * torch.where((at - back >= starts)[:, None], moved, 0.0)
    y = (y if activation is None else F.silu(y)).to(x.dtype)
    return y if split is None else tuple(part.contiguous() for part in y.split(list(split), dim=1))


def row_attention(q, k, v, offsets, longest, *, scale=None, window=None, softcap=None, sinks=None):
    """See `liger_triton.row_attention`."""
    wide = wide_dtype(q.dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    ends, done = offsets.tolist(), [q[:0]]
    for start, end in zip(ends, ends[1:], strict=False):
        row = slice(start, end)
        keys, values = (x[row].transpose(0, 1).repeat_interleave(q.shape[1] // k.shape[1], 0) for x in (k, v))
        scores = q[row].transpose(0, 1).to(wide) @ keys.mT.to(wide) * scale
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        at = torch.arange(end - start, device=q.device)
        distance = at[:, None] - at
        seen = (distance >= 0) & (distance < (end - start if window is None else window))
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.to(wide)[:, None, None].expand(-1, len(at), 1)), -1)
        weights = scores.softmax(-1)[..., : len(at)]
        done.append((weights.to(q.dtype) @ values).transpose(0, 1))
    return torch.cat(done)


def rollout_attention(q, k, v, own_keys, own_values, offsets, longest, *, scale=None, places=None):
    """See `liger_triton.rollout_attention`."""
    if places is not None:
        q, *own = (x.new_zeros(len(k), *x.shape[1:]).index_copy(0, places, x) for x in (q, *own_keys, *own_values))
        half = len(own_keys)
        return rollout_attention(q, k, v, own[:half], own[half:], offsets, longest, scale=scale)[places]
    wide = wide_dtype(q.dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    shared = q.shape[1] // k.shape[1]
    ends = offsets.tolist()
    done = [q[:0]]
    for start, end in zip(ends, ends[1:], strict=False):
        row = slice(start, end)
        keys, values = (x[row].repeat_interleave(shared, 1).to(wide) for x in (k, v))
        queries = q[row].to(wide)
        scores = torch.einsum("thd,uhd->htu", queries, keys) * scale
        at = torch.arange(end - start, device=q.device)
        scores = scores.masked_fill(at[:, None] < at, float("-inf"))
        own_values_of_row = [x[row].repeat_interleave(shared, 1).to(wide) for x in own_values]
        own_scores = []
        for x in own_keys:
            key = x[row].repeat_interleave(shared, 1).to(wide)
            own_scores.append((queries * key).sum(-1).t().unsqueeze(-1) * scale)  # (H, t, 1)
        weights = torch.cat([scores, *own_scores], -1).softmax(-1)
        out = torch.einsum("htu,uhd->thd", weights[..., : len(at)], values)
        for i, value in enumerate(own_values_of_row, len(at)):
            out = out + weights[..., i].t().unsqueeze(-1) * value
        done.append(out.to(q.dtype))
    return torch.cat(done)


def _rotate(x, cos, sin, interleaved, out_interleaved, rotate_last, cast):
    """Rotate x (..., D) by the angles of cos and sin (..., R/2). They broadcast against the leading dimensions of x."""
    wide = wide_dtype(x.dtype, cos.dtype, sin.dtype)
    out_dtype = x.dtype if cast == "input" else torch.promote_types(x.dtype, torch.promote_types(cos.dtype, sin.dtype))
    rot = 2 * cos.shape[-1]
    rest = x.shape[-1] - rot
    turned = x
    if rest != 0:  # a slice of all of x would cost its backward pass a copy
        turned = x[..., rest:] if rotate_last else x[..., :rot]
    turned = turned.to(wide)
    x1, x2 = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    cos, sin = cos.to(wide), sin.to(wide)
    y1, y2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    y = torch.stack((y1, y2), dim=-1).flatten(-2) if out_interleaved else torch.cat((y1, y2), dim=-1)
    y = y.to(out_dtype)
    if rest == 0:
        return y
    passed = (x[..., :rest] if rotate_last else x[..., rot:]).to(out_dtype)
    return torch.cat((passed, y) if rotate_last else (y, passed), dim=-1)


def rope(
    q,
    k,
    cos,
    sin,
    *,
    interleaved=False,
    out_interleaved=None,
    cos_layout="half",
    rotate_last=False,
    cast="promote",
    unsqueeze_dim=1,
):
    """See `liger_triton.rope`."""
    if cos_layout == "half":
        half = cos.shape[-1] // 2
        cos, sin = cos[..., :half], sin[..., :half]
    elif cos_layout == "interleaved":
        cos, sin = cos[..., 0::2], sin[..., 0::2]
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    out_interleaved = interleaved if out_interleaved is None else out_interleaved
    turn = (interleaved, out_interleaved, rotate_last, cast)
    return _rotate(q, cos, sin, *turn), None if k is None else _rotate(k, cos, sin, *turn)


def swiglu(gate, up, *, limit=None, alpha=1.0, up_offset=0.0, gate_scale=1.0):
    """See `liger_triton.swiglu`."""
    wide = wide_dtype(gate.dtype)
    g, u = gate.to(wide), up.to(wide)
    if gate_scale != 1:
        g = g * gate_scale
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(min=-limit, max=limit)
    if up_offset:
        u = u + up_offset
    return ((F.silu(g) if alpha == 1 else g * torch.sigmoid(alpha * g)) * u).to(gate.dtype)


def geglu(gate, up, *, approximate="tanh"):
    """See `liger_triton.geglu`."""
    wide = wide_dtype(gate.dtype)
    return (F.gelu(gate.to(wide), approximate=approximate) * up.to(wide)).to(gate.dtype)


def gated(gate, up, activation, **form):
    """Compute act(gate) * up for the named activation. `form` are options of `swiglu`."""
    if activation == "silu":
        return swiglu(gate, up, **form)
    return geglu(gate, up, approximate="tanh" if activation == "gelu_tanh" else "none")


def experts(
    hidden,
    expert_ids,
    weights,
    gate_up,
    down,
    gate_up_bias=None,
    down_bias=None,
    *,
    activation="silu",
    limit=None,
    alpha=1.0,
    up_offset=0.0,
    gate_scale=1.0,
    interleaved=False,
    transposed=False,
    gate_up_lora=None,
    down_lora=None,
):
    """See `liger_triton.experts`. This twin computes one expert after another."""
    gate_up, down = (t if isinstance(t, torch.Tensor) else t.unpack() for t in (gate_up, down))

    def linear(x, e, weight, bias, lora):
        y = F.linear(x, weight[e].t() if transposed else weight[e], None if bias is None else bias[e])
        return y if lora is None else y + lora.scaling * F.linear(F.linear(x, lora.lora_a[e]), lora.lora_b[e])

    tokens, top_k = expert_ids.shape
    wide = wide_dtype(hidden.dtype, weights.dtype)
    ids = expert_ids.flatten()
    parts = []
    pairs = []
    for e in range(gate_up.shape[0]):
        here = (ids == e).nonzero().flatten()
        h = linear(hidden[here // top_k], e, gate_up, gate_up_bias, gate_up_lora)
        g, u = (h[..., ::2], h[..., 1::2]) if interleaved else h.chunk(2, dim=-1)
        a = gated(g, u, activation, limit=limit, alpha=alpha, up_offset=up_offset, gate_scale=gate_scale)
        y = linear(a, e, down, down_bias, down_lora)
        parts.append(y.to(wide) * weights.flatten()[here].to(wide).unsqueeze(1))
        pairs.append(here)
    out = hidden.new_zeros((tokens * top_k, hidden.shape[1]), dtype=wide)
    out = out.index_put((torch.cat(pairs),), torch.cat(parts))
    return out.view(tokens, top_k, hidden.shape[1]).sum(1).to(hidden.dtype)


def lora_linear(x, weight, bias=None, *, lora, lora_input=None):
    """See `liger_triton.lora_linear`, which also runs without Triton."""
    y = F.linear(x, weight, bias)
    if lora is None:
        return y
    lora_a, lora_b, scaling = lora
    wide = wide_dtype(y.dtype)
    source = (x if lora_input is None else lora_input).to(lora_a.dtype)
    low = F.linear(F.linear(source, lora_a), lora_b).to(wide)
    return (y.to(wide) + scaling * low).to(y.dtype)


def lora_mlp(x, gate, up, down, *, activation="silu"):
    """See `liger_triton.lora_mlp`, which also runs without Triton."""
    g, u = (lora_linear(x, weight, bias, lora=lora) for weight, bias, lora in (gate, up))
    weight, bias, lora = down
    return lora_linear(gated(g, u, activation), weight, bias, lora=lora)


def float8_maxima(x):
    """Return (1,), int32: the bits of max|x|."""
    return x.abs().amax().float().view(torch.int32).view(1)


def float8_cast(x, dtype, rows=True, columns=False, power_of_2=False, maxima=None):
    """Return the four parts of `liger_triton.float8_cast.Float8`. Zeros pad the transpose to a multiple of 16."""
    maxima = float8_maxima(x) if maxima is None else maxima
    q, inverse = _to_fp8(x, maxima.amax(), dtype, power_of_2)
    return q if rows else None, _turned(q) if columns else None, inverse, maxima


def _to_fp8(x, maxima, dtype, power_of_2, least=1e-12):
    """Return x in fp8, and the factor that restores it. `maxima` are bits, in a shape that broadcasts against x."""
    largest = torch.finfo(dtype).max
    scale = (largest / maxima.view(torch.float32).double().clamp(min=least)).float()
    scale = scale.log2().floor().exp2() if power_of_2 else scale
    return (x.float() * scale).clamp(-largest, largest).to(dtype), scale.reciprocal()


def _turned(q):
    turned = q.new_zeros((q.shape[1], -(-q.shape[0] // 16) * 16))
    turned[:, : q.shape[0]] = q.t()
    return turned


def float8_rows(x, power_of_2=True, maxima=False):
    """Return the three parts of `liger_triton.float8_cast.Float8Rows`."""
    bits = x.abs().float().view(torch.int32)
    q, inverse = _to_fp8(x, bits.amax(1, keepdim=True), torch.float8_e4m3fn, power_of_2)
    return q, inverse.view(-1), bits.amax(0) if maxima else None


def float8_columns(x, maxima, power_of_2=True):
    """See `liger_triton.float8_cast.float8_columns`."""
    q, inverse = _to_fp8(x, maxima, torch.float8_e4m3fn, power_of_2)
    return _turned(q), inverse


def float8_row_cast(parts, factors=None):
    """See `liger_triton.frozen_float8.row_cast`."""
    wide = [part.to(torch.float32) for part in parts]
    if factors is not None:
        wide = [part * factor for part, factor in zip(wide, factors, strict=True)]
    x = torch.cat(wide, 1)
    return _to_fp8(x, x.abs().amax(1, keepdim=True).view(torch.int32), torch.float8_e4m3fn, False, least=1e-30)


def float8_product(a, a_inverse, b, b_inverse, dtype):
    """Return a b for two fp8 matrices, computed in fp32 and rounded once."""
    return (torch.mm(a.float(), b.float()) * (a_inverse * b_inverse)).to(dtype)


def transformed(logits, softcap, logit_scale, temperature=1.0):
    """Return z of the vocabulary losses, in the dtype of the arithmetic."""
    z = logits.to(wide_dtype(logits.dtype)) * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    return z if temperature == 1.0 else z / temperature


def head_logits(hidden, weight, bias, lora, lora_input):
    """Return the logits of a head with or without a LoRA, rounded as the model's own head rounds them."""
    logits = F.linear(hidden, weight, bias)
    if lora is not None:
        lora_a, lora_b, scaling = lora
        source = (hidden if lora_input is None else lora_input).to(lora_a.dtype)
        logits = logits + (scaling * F.linear(F.linear(source, lora_a), lora_b)).to(logits.dtype)
    return logits


def cross_entropy(
    logits,
    target,
    *,
    ignore_index=-100,
    reduction="mean",
    label_smoothing=0.0,
    softcap=None,
    logit_scale=1.0,
    z_loss=0.0,
    token_weights=None,
):
    """See `liger_triton.cross_entropy`. It does not change the logits. For `token_weights` see
    `linear_cross_entropy`."""
    z = transformed(logits, softcap, logit_scale)
    rows = F.cross_entropy(z, target, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing)
    if z_loss:
        rows = rows + torch.where(target == ignore_index, 0.0, z_loss * z.logsumexp(-1).square())
    share = torch.ones_like(rows) if token_weights is None else token_weights.to(rows.dtype)
    share = torch.where(target == ignore_index, 0.0, share)
    rows = torch.where(target == ignore_index, 0.0, rows * share)
    if reduction == "none":
        return rows
    divisor = share.sum() if reduction == "mean" else torch.ones((), device=rows.device, dtype=rows.dtype)
    return torch.where(divisor == 0, 0.0, rows.sum() / torch.where(divisor == 0, 1.0, divisor))


def linear_cross_entropy(
    hidden,
    weight,
    target,
    bias=None,
    *,
    ignore_index=-100,
    reduction="mean",
    label_smoothing=0.0,
    softcap=None,
    logit_scale=1.0,
    z_loss=0.0,
    token_weights=None,
    lora=None,
    lora_input=None,
    accumulate="fp32",
    chunk_rows=None,
):
    """See `liger_triton.linear_cross_entropy`, which also runs without Triton. This twin computes all logits."""
    logits = head_logits(hidden, weight, bias, lora, lora_input).flatten(0, -2)
    loss = cross_entropy(
        logits,
        target.flatten(),
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        softcap=softcap,
        logit_scale=logit_scale,
        z_loss=z_loss,
        token_weights=None if token_weights is None else token_weights.flatten(),
    )
    return loss.view(target.shape) if reduction == "none" else loss


def linear_logprobs(
    hidden,
    weight,
    target,
    bias=None,
    *,
    temperature=1.0,
    softcap=None,
    logit_scale=1.0,
    label_smoothing=0.0,
    ignore_index=-100,
    lora=None,
    lora_input=None,
    outputs=("log_probs",),
    uniform_grad=False,
    accumulate="fp32",
    chunk_rows=None,
):
    """See `liger_triton.linear_logprobs`, which also runs without Triton. This twin computes all logits."""
    z = transformed(head_logits(hidden, weight, bias, lora, lora_input), softcap, logit_scale, temperature)
    return LogProbs(**logprobs(z, target, outputs, label_smoothing, ignore_index))


def logprobs(z, target, outputs, label_smoothing=0.0, ignore_index=-100):
    """Return the fields `outputs` of `liger_triton.linear_logprobs` from logits z (..., V) in wide dtype."""
    ignored = target == ignore_index
    y = torch.where(ignored, 0, target).unsqueeze(-1)
    log_p = z.log_softmax(-1)

    def log_probs():
        target_log_p = log_p.gather(-1, y).squeeze(-1)
        return torch.lerp(target_log_p, log_p.mean(-1), label_smoothing) if label_smoothing else target_log_p

    ways = {
        "log_probs": log_probs,
        # 0 where p is 0, not NaN
        "entropy": lambda: -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1),
        "log_sum_sq_probs": lambda: torch.logsumexp(2 * log_p.detach(), -1),
        "mean_logits": lambda: z.detach().mean(-1),
        "is_top1": lambda: z.argmax(-1, keepdim=True).eq(y).squeeze(-1),
    }
    return {name: ways[name]().masked_fill(ignored, 0) for name in outputs}


def linear_divergence(
    hidden,
    weight,
    teacher_hidden,
    teacher_weight,
    bias=None,
    teacher_bias=None,
    *,
    beta,
    temperature=1.0,
    softcap=None,
    logit_scale=1.0,
    lora=None,
    lora_input=None,
    teacher_softcap=None,
    teacher_logit_scale=1.0,
    teacher_lora=None,
    teacher_lora_input=None,
    mask=None,
    uniform_grad=False,
    accumulate="fp32",
    chunk_rows=None,
):
    """See `liger_triton.linear_divergence`. This twin computes all logits of both heads at once."""
    wide = wide_dtype(hidden.dtype, teacher_hidden.dtype)

    def log_softmax(head, cap, scale):
        *tensors, lora, lora_input = head
        logits = head_logits(*(None if t is None else t.to(wide) for t in tensors), lora, lora_input)
        return transformed(logits, cap, scale, temperature).log_softmax(-1)

    def kl(log_a, log_b):
        return (log_a.exp() * (log_a - log_b)).sum(-1)

    log_p = log_softmax((hidden, weight, bias, lora, lora_input), softcap, logit_scale)
    teacher = (teacher_hidden, teacher_weight, teacher_bias, teacher_lora, teacher_lora_input)
    with torch.no_grad():
        log_q = log_softmax(teacher, teacher_softcap, teacher_logit_scale)
    if beta in (0.0, 1.0):
        divergence = kl(log_p, log_q) if beta else kl(log_q, log_p)
    else:
        log_m = torch.logaddexp(log_p + math.log(1 - beta), log_q + math.log(beta))
        divergence = beta * kl(log_q, log_m) + (1 - beta) * kl(log_p, log_m)
    entropy = -(log_p.exp() * log_p).sum(-1).detach()
    ignored = torch.zeros(divergence.shape, dtype=torch.bool, device=divergence.device) if mask is None else ~mask
    return Divergence(divergence.masked_fill(ignored, 0), entropy.masked_fill(ignored, 0))


def _heads_loss(hidden, weight, rows_of_head, row_weight, counted):
    """Return the `HeadsLoss` of several heads.

    `rows_of_head(k, logits)` gives loss and top-1 for the rows of head k. `counted` (K, T) is True for rows that count.
    """
    weights = weight if isinstance(weight, list | tuple) else [weight] * len(hidden)
    per_head = [rows_of_head(k, F.linear(x, w)) for k, (x, w) in enumerate(zip(hidden, weights, strict=True))]
    loss, top1 = (torch.stack(t) for t in zip(*per_head, strict=True))
    loss = torch.where(counted, loss, 0.0)
    share = torch.ones_like(loss) if row_weight is None else row_weight.to(loss.dtype).view(len(hidden), -1)
    total = torch.where(counted, loss * share, 0.0).sum()
    return HeadsLoss(total, loss.detach().sum(1), (top1 & counted).sum(1), counted.sum(1))


def linear_heads_cross_entropy(
    hidden,
    weight,
    target,
    *,
    row_weight=None,
    ignore_index=-100,
    softcap=None,
    logit_scale=1.0,
    accumulate="fp32",
    chunk_rows=None,
):
    """See `liger_triton.linear_heads_cross_entropy`, which also runs without Triton. This twin computes all logits."""

    def rows(k, logits):
        z = transformed(logits, softcap, logit_scale)
        loss = F.cross_entropy(z, target[k], ignore_index=ignore_index, reduction="none")
        return loss, z.argmax(-1) == target[k]

    return _heads_loss(hidden, weight, rows, row_weight, target != ignore_index)


def linear_heads_kl(
    hidden,
    weight,
    teacher_hidden,
    teacher_weight,
    valid,
    *,
    row_weight=None,
    target=None,
    softcap=None,
    logit_scale=1.0,
    accumulate="fp32",
    chunk_rows=None,
):
    """See `liger_triton.linear_heads_kl`, which also runs without Triton. This twin computes all logits."""
    n = teacher_hidden.shape[0]
    log_q = transformed(F.linear(teacher_hidden, teacher_weight), softcap, logit_scale).log_softmax(-1).detach()
    valid = torch.stack([v & (torch.arange(n, device=v.device) + k < n) for k, v in enumerate(valid, 1)])

    def rows(k, logits):
        log_p = transformed(logits, softcap, logit_scale).log_softmax(-1)
        ahead = log_q.roll(-k - 1, 0)  # rows that wrap around do not count
        loss = F.kl_div(log_p, ahead, reduction="none", log_target=True).sum(-1)
        return loss, log_p.argmax(-1) == (ahead.argmax(-1) if target is None else target[k])

    return _heads_loss(hidden, weight, rows, row_weight, valid)
