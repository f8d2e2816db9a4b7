"""Cases of one layer's attention over full rows, to choose the function that a layer should use (docs/padding.md).

The floor is the larger of two: seven products over the pairs of tokens that see each other (two forward, five backward,
as in every flash attention), or the bytes of queries, keys, values, outputs and their gradients. Masks and offsets are
made once, because a model makes them once for all layers. Queries, keys and values have a layer's memory layout.
"""

from types import SimpleNamespace

import torch
from _cases import Case
from _measure import DEVICE

from liger_trainer.varlen import attention as ours
from liger_trainer.varlen.rows import RowMask, Rows

_MOST_SCORES = 8 << 30  # bytes of the eager attention


def attention(rows, length, heads, groups, dim, window=None, sinks=False, *, dtype):
    def drawn(count):
        x = torch.randn(rows, length, count, dim, device=DEVICE).to(dtype)
        return x.transpose(1, 2).requires_grad_()

    q = drawn(heads)
    k = drawn(groups)
    v = drawn(groups)
    inputs = (q, k, v, torch.randn(heads, device=DEVICE).to(dtype).requires_grad_()) if sinks else (q, k, v)
    dy = torch.randn(rows, length, heads, dim, device=DEVICE).to(dtype)
    windows = range(1, length + 1) if window is None else [min(i, window) for i in range(1, length + 1)]
    return Case(
        "attention",
        f"{rows}x{length}, {heads}+{groups} heads of {dim}"
        + (f", window {window}" if window is not None else "")
        + (", sinks" if sinks else ""),
        inputs,
        _providers(rows, length, heads, groups, dim, window, sinks, dtype),
        lambda case: _exact(q, k, v, inputs[3:], window, dy),
        dtype,
        bytes=q.nbytes * 4 * 2 + k.nbytes * 2 * 3,
        flop=14 * dim * heads * rows * sum(windows),
        upstream=(dy,),
        graph=False,  # SDPA's backward pass cannot be captured here
    )


def _providers(rows, length, heads, groups, dim, window, sinks, dtype):
    from transformers.integrations.flex_attention import flex_attention_forward
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward
    from transformers.models.llama.modeling_llama import eager_attention_forward as eager_without_sinks

    layer = SimpleNamespace(is_causal=True, training=True, num_key_value_groups=heads // groups)
    known, scale = Rows([length] * rows, torch.device(DEVICE), rows), dim**-0.5
    at = torch.arange(length, device=DEVICE)
    seen = (at[:, None] >= at) & (at[:, None] - at < (window or length))
    short = None if window is None or window >= length else window

    def eager(q, k, v, *sinks):
        layer.sinks = sinks[0] if sinks else None
        mask = torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, torch.finfo(q.dtype).min)
        return (eager_attention_forward if sinks else eager_without_sinks)(layer, q, k, v, mask, scale)[0]

    def by_rule(q, k, v, *sinks):
        mask = RowMask(known, window)
        return ours.attend_by_rows(None, layer, q, k, v, mask, scaling=scale, s_aux=sinks[0] if sinks else None)[0]

    def varlen(q, k, v):
        left = -1 if short is None else short - 1
        out = ours.by_kernel(q, k, v, known.offsets, length, scale, short is None, (left, 0))
        return out.view(rows, length, heads, dim)

    def flex(q, k, v, *sinks):
        return flex_attention_forward(layer, q, k, v, blocks(), scale, s_aux=sinks[0] if sinks else None)[0]

    made = []

    def blocks():
        from torch.nn.attention.flex_attention import create_block_mask

        def near(batch, head, query, key):
            return (query >= key) & (query - key < (window or length))

        made[:] = made or [create_block_mask(near, None, None, length, length, device=DEVICE)]
        return made[0]

    found = {"ours": by_rule}
    if not sinks:
        found["SDPA, mask"] = lambda q, k, v: sdpa_attention_forward(layer, q, k, v, seen[None, None])[0]
        found["varlen"] = varlen
    if not sinks and short is None:
        found["SDPA, causal"] = lambda q, k, v: sdpa_attention_forward(layer, q, k, v, None)[0]
    found["flex"] = flex
    if rows * heads * length**2 * dtype.itemsize <= _MOST_SCORES:
        found["eager"] = eager
    return found


def _exact(q, k, v, sinks, window, dy):
    """Output and gradients in float64, one head of one row after the other."""
    at = torch.arange(q.shape[2], device=q.device)
    hidden = (at[:, None] < at) | (at[:, None] - at >= (window or len(at)))
    per_key, leaves = q.shape[1] // k.shape[1], (q, k, v, *sinks)
    y = torch.empty_like(dy, dtype=torch.float64)
    grads = [torch.zeros_like(x, dtype=torch.float64) for x in leaves]
    for row in range(q.shape[0]):
        for head in range(q.shape[1]):
            places = [(row, head), (row, head // per_key), (row, head // per_key), (head,)][: len(leaves)]
            parts = [x.detach()[place].double().requires_grad_() for x, place in zip(leaves, places, strict=True)]
            scores = (parts[0] @ parts[1].T * q.shape[-1] ** -0.5).masked_fill(hidden, float("-inf"))
            if sinks:
                scores = torch.cat((scores, parts[3].expand(len(at), 1)), 1)
            out = scores.softmax(-1)[:, : len(at)] @ parts[2]
            y[row, :, head] = out.detach()
            found = torch.autograd.grad(out, parts, dy[row, :, head].double())
            for grad, part, place in zip(grads, found, places, strict=True):
                grad[place] += part
    return [y, *grads]
