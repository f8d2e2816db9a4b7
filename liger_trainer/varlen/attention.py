"""Causal attention over rows of uneven length that lie one after the other.

transformers' models ask one registry for their attention function and another for its mask. `registry.py` registers
`attend_by_rows` and `row_mask` there under the name `sdpa`, which configs keep. While the rows of a call are known
(`use_rows`), the mask is a `RowMask`, which says where each row ends. What runs then is a fixed rule:

- plain causal attention over rows of one length: PyTorch's SDPA, the fastest there
- rows of several lengths, and sliding windows: the kernel under `torch.nn.attention.varlen`, which skips what is not
  seen
- rows of several lengths with heads of more than 256: SDPA's memory-efficient kernel, which takes offsets too
- on CPUs, and for dropout and dtypes that neither knows, SDPA for each row by itself
- sinks and soft caps: `liger_triton.row_attention`
- a window at least as long as the longest row is plain causal, and each chunk becomes a row

Every other call is transformers' own. `registry.py` hands models that have no SDPA `attend_by_rows` in the same way.
"""

import functools
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F

from liger_trainer._logging import logger
from liger_trainer.varlen.rows import AttentionKind, NotForRows, RowMask, Rows, current_rows
from liger_triton import row_attention
from liger_triton.row_attention import flash_is_built

_MOST_HEAD_DIM = 256  # of the kernel
_NOT_KNOWN = ("position_bias", "cache")  # arguments that it cannot answer


def attend_by_rows(
    own,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask,
    *args,
    **kwargs,
):
    """Attend over the rows of a `RowMask`; for any other mask, call `own`, a function of `AttentionInterface`.

    Args:
        own (`Callable`): The function that would run without ours.
        module (`nn.Module`): The attention layer.
        query (`torch.Tensor`): (B, Hq, S, D). Its B * S tokens are all rows one after the other.
        key (`torch.Tensor`): (B, Hkv, S, D), Hq a multiple of Hkv.
        value (`torch.Tensor`): (B, Hkv, S, Dv).
        attention_mask (`RowMask`, `torch.Tensor` or None): As `row_mask` has made it, or any other.

    Returns (B, S, Hq, Dv), and None for the weights of attention.

    Raises:
        NotForRows: The rows of the call are known, and the mask is neither causal nor local, or the scores are changed
            in an unknown way (a bias of positions).
    """
    if isinstance(attention_mask, RowMask):
        if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
            raise NotForRows("is_causal is False, so that SDPA would see later tokens where it has no mask")
        return _by_rows(query, key, value, attention_mask, *args, **kwargs), None
    if current_rows() is not None:
        raise NotForRows("a layer attends with a mask of its own")
    return own(module, query, key, value, attention_mask, *args, **kwargs)


def refuse_rows(own, *args, **kwargs):
    """Call `own`, a function of the user's, which has to see masks. Raises `NotForRows` where the mask has rows."""
    if current_rows() is not None or any(isinstance(x, RowMask) for x in (*args, *kwargs.values())):
        raise NotForRows("the attention function of its layers is not transformers' own")
    return own(*args, **kwargs)


def _by_rows(query, key, value, mask: RowMask, dropout=0.0, scaling=None, softcap=None, s_aux=None, **others):
    if mask.unknown is not None:
        raise NotForRows(mask.unknown)
    for name in _NOT_KNOWN:
        if others.get(name) is not None:
            raise NotForRows(f"its attention has a {name}")
    query, key, value = as_autocast(query, key, value)
    rows, window = mask.rows, mask.window
    if rows.attend is not None:  # before all else: a prefix and a private part may be of one length by chance
        out = rows.attend(query, key, value, mask, dropout, scaling, softcap, s_aux)
        return out.view(query.shape[0], -1, *out.shape[1:])
    if window is not None and window >= rows.longest:
        window = None  # plain causal attention has the faster kernels
    if softcap is not None or s_aux is not None:
        return _capped(query, key, value, rows, window, dropout, scaling, softcap, s_aux)
    rows.attention_kinds.add(mask.attention_kind)
    # The order is by speed. Rows of one length are a batch, which SDPA takes with any dtype, head size and dropout.
    if window is None and rows.equal:
        out = _by_sdpa(query, key, value, rows, dropout, scaling)
    elif kernel_takes(query, key, value, dropout):
        left = -1 if window is None else window - 1
        out = by_kernel(query, key, value, rows.offsets, rows.longest, scaling, window is None, (left, 0))
    elif window is None and large_kernel_takes(query, key, value, dropout):
        out = by_large_kernel(query, key, value, rows.offsets, rows.longest, scaling)
    else:
        out = _row_by_row(query, key, value, rows, window, dropout, scaling)
    # Some models take a view of it, and SDPA's result for one row, or a slice of wider heads, is not contiguous.
    return out.contiguous().view(query.shape[0], -1, *out.shape[1:])


def as_autocast(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Cast queries, keys and values as autocast does for PyTorch's SDPA, which leaves float64 as it is."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [x if x.dtype in (dtype, torch.float64) else x.to(dtype) for x in tensors]


def flat(x: torch.Tensor) -> torch.Tensor:
    """Return (B, H, S, D) as (B * S, H, D). The gradient of x[0] would be filled with zeros and then copied into."""
    return x.transpose(1, 2).flatten(0, 1)


def _by_sdpa(query, key, value, rows: Rows, dropout, scaling):
    """Attend causally in rows of one length: (T, Hq, Dv)."""
    if not rows.is_whole_batch:
        laid = map(flat, (query, key, value))
        query, key, value = (x.view(-1, rows.longest, *x.shape[1:]).transpose(1, 2) for x in laid)
    key, value, grouped = _grouped(query, key, value)
    out = F.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=grouped
    )
    return out.transpose(1, 2).flatten(0, 1)


def _grouped(query, key, value) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """(keys, values, whether SDPA has to know of groups), of (B, H, S, D), expanded where no fast kernel has groups.

    That is transformers' rule too. Of heads of more than 256 (Gemma 4's have 512) only the memory-efficient kernel
    stores no scores, and it takes as many heads of keys as of queries.
    """
    groups = query.shape[1] // key.shape[1]
    if groups == 1 or key.shape[-1] == value.shape[-1] <= _MOST_HEAD_DIM:
        return key, value, groups > 1
    return key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), False


def _capped(query, key, value, rows: Rows, window, dropout, scaling, softcap, sinks):
    """Return (B, S, Hq, Dv), with a soft cap of the scores, or with sinks (Hq,)."""
    rows.attention_kinds.add(AttentionKind.SINKS if softcap is None else AttentionKind.SOFT_CAP)
    batch, heads, _, dim = query.shape
    if dropout or not value.shape[-1] <= dim <= _MOST_HEAD_DIM or (sinks is not None and sinks.shape != (heads,)):
        raise NotForRows("its attention has sinks or a soft cap, and dropout, sinks for each token or large heads")
    width = value.shape[-1]
    value = F.pad(value, (0, dim - width)) if width < dim else value
    offsets = rows.offsets.to(query.device)
    out = row_attention(
        flat(query),
        flat(key),
        flat(value),
        offsets,
        rows.longest,
        scale=scaling,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
    return (out if width == dim else out[..., :width].contiguous()).unflatten(0, (batch, -1))


def kernel_takes(query, key, value, dropout) -> bool:
    dim = query.shape[-1]
    return (
        query.is_cuda
        and flash_is_built(query.device)
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.dtype == key.dtype == value.dtype
        and dropout == 0.0
        and dim % 8 == 0
        and value.shape[-1] <= dim <= _MOST_HEAD_DIM
    )


def by_kernel(query, key, value, offsets, longest: int, scaling, causal: bool, window=(None, None)):
    """(T, Hq, Dv), of rows that begin at `offsets`, the end included; `window` is how far a token sees to each side.

    It calls the op under `torch.nn.attention.varlen.varlen_attn`, which itself takes the host longer than all else.
    """
    width = value.shape[-1]
    if width < query.shape[-1]:  # multi-head latent attention; the kernel wants one size
        value = F.pad(value, (0, query.shape[-1] - width))
    query, key, value = (flat(x).contiguous() for x in (query, key, value))
    offsets = offsets.to(query.device)  # layers may be spread over devices
    out, *_ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        offsets,
        offsets,
        longest,
        longest,
        0.0,
        causal,
        False,
        scale=scaling,
        window_size_left=window[0],
        window_size_right=window[1],
    )
    return out if width == out.shape[-1] else out[..., :width]


def large_kernel_takes(query, key, value, dropout) -> bool:
    """Return whether `by_large_kernel` attends to these tensors, as far as PyTorch may choose that kernel for SDPA."""
    if (
        query.shape[-1] <= _MOST_HEAD_DIM
        or not query.is_cuda
        or torch.version.hip is not None
        or query.dtype not in (torch.bfloat16, torch.float16)
        or not query.dtype == key.dtype == value.dtype
        or dropout != 0.0
    ):
        return False
    heads, widths = (query.shape[1], key.shape[1]), (query.shape[-1], value.shape[-1])
    key, value, _ = _grouped(query, key[:, :, :1], value[:, :, :1])  # whether it takes them, one token says too
    asked = torch.backends.cuda.SDPAParams(query[:, :, :1], key, value, None, 0.0, True, False)
    if not torch.backends.cuda.can_use_efficient_attention(asked):
        return False
    return large_kernel_agrees(query.device, query.dtype, heads, widths)


@functools.cache
def large_kernel_agrees(
    device: torch.device, dtype: torch.dtype, heads: tuple[int, int], widths: tuple[int, int]
) -> bool:
    """Return whether `by_large_kernel` gives what SDPA gives for each row, outputs and gradients, on a small batch.

    It calls an operator that PyTorch keeps to itself and may change, so each device, dtype and shape of heads is tried
    once. That happens in a thread of its own: there, no autocast, mode or hook of the training is on.

    Args:
        device (`torch.device`): Where to try it.
        dtype (`torch.dtype`): Of queries, keys and values.
        heads (`tuple[int, int]`): The numbers of query heads and key heads.
        widths (`tuple[int, int]`): The widths of keys and values.
    """
    with ThreadPoolExecutor(1) as pool:
        reason = pool.submit(_why_large_kernel_differs, device, dtype, heads, widths).result()
    if reason is not None:
        logger.warning(
            f"rows of several lengths attend one after the other, with heads of {widths[0]}: PyTorch's attention with "
            f"offsets for such heads {reason}. Results are right. Steps are slower and not captured."
        )
    return reason is None


def _why_large_kernel_differs(device, dtype, heads, widths) -> str | None:
    lengths = [40, 1, 70]
    tokens = sum(lengths)
    given = []
    for number, (count, width) in enumerate(((heads[0], widths[0]), (heads[1], widths[0]), (heads[1], widths[1]))):
        # No random numbers: the state of the generator belongs to the training.
        x = torch.arange(tokens * count * width, dtype=torch.float32, device=device)
        x = torch.sin(x * (0.37 + number)).to(dtype)
        given.append(x.view(1, tokens, count, width).transpose(1, 2).requires_grad_())
    offsets = torch.tensor([0, 40, 41, 111, 111], dtype=torch.int32, device=device)  # the last row is empty
    scaling = widths[0] ** -0.5
    query, key, value = given
    wanted = _row_by_row(query, key, value, Rows(lengths, device), None, 0.0, scaling)
    upstream = wanted.detach()
    try:
        out = by_large_kernel(query, key, value, offsets, 128, scaling)
        got = [out, *torch.autograd.grad(out, given, upstream)]
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError) as error:
        return f"fails ({str(error).splitlines()[0]})"
    for mine, theirs in zip(got, [wanted, *torch.autograd.grad(wanted, given, upstream)], strict=True):
        if not bool((mine - theirs).float().norm() <= 0.02 * theirs.float().norm()):
            return "gives other numbers"
    return None


def by_large_kernel(query, key, value, offsets, longest: int, scaling):
    """(T, Hq, Dv), causal in rows that begin at `offsets`, the end included, with heads of more than 256.

    It is the kernel that SDPA chooses for rows of one length with such heads.
    """
    groups = query.shape[1] // key.shape[1]
    query, key, value = (flat(x)[None] for x in (query, key, value))
    if groups > 1:  # the kernel takes as many heads of keys as of queries
        key, value = (x.repeat_interleave(groups, 2) for x in (key, value))
    offsets = offsets.to(query.device)
    longest = min(longest, query.shape[1])  # a captured size has room for more; the kernel refuses that
    causal_from_top_left = 1
    out, *_ = torch.ops.aten._efficient_attention_forward(
        query,
        key,
        value,
        None,
        offsets,
        offsets,
        longest,
        longest,
        0.0,
        causal_from_top_left,
        torch.is_grad_enabled(),
        scale=scaling,
    )
    return out[0]


def _near(length: int, window: int, device: torch.device) -> torch.Tensor | None:
    """Return (S, S), which tokens of a row each of its tokens sees; None where that is all before it."""
    if length <= window:
        return None
    position = torch.arange(length, device=device)
    distance = position[:, None] - position
    return (distance >= 0) & (distance < window)


def _row_by_row(query, key, value, rows: Rows, window, dropout, scaling):
    key, value, grouped = _grouped(query, key, value)
    # (H, B * S, D): the tokens of a row lie side by side
    query = query.transpose(0, 1).flatten(1, 2)
    key = key.transpose(0, 1).flatten(1, 2)
    value = value.transpose(0, 1).flatten(1, 2)
    lengths = rows.lengths
    queries = query.split(lengths, 1)
    keys = key.split(lengths, 1)
    values = value.split(lengths, 1)
    done = []
    for q, k, v in zip(queries, keys, values, strict=True):
        if q.shape[1] == 0:  # rows after the last one of a captured batch
            continue
        near = None if window is None else _near(q.shape[1], window, query.device)
        out = F.scaled_dot_product_attention(
            q[None],
            k[None],
            v[None],
            attn_mask=near,
            dropout_p=dropout,
            is_causal=near is None,
            scale=scaling,
            enable_gqa=grouped,
        )
        done.append(out[0].transpose(0, 1))
    return torch.cat(done)
