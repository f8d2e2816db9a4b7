"""Causal attention over rows of uneven length that lie one after the other, in PyTorch alone.

transformers' models ask one registry for their attention function and another for its mask. `head/masks.py` registers
`varlen_attention` and `row_mask` there under the name `sdpa`, which configs keep. While the rows of a call are known
(`rows_known`), the mask is a `RowMask`, which says where each row ends. Attention is then the kernel under
`torch.nn.attention.varlen`. On CPUs, and for dropout, dtypes and head sizes that the kernel does not know, it is one
call of PyTorch's SDPA with the rows padded on the right, or one call for each row where that would be mostly padding.
Every other call is transformers' own.
"""

import contextlib
import contextvars
import functools

import torch
import torch.nn.functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function

from liger_trainer.varlen.host_copies import sent

_MOST_HEAD_DIM = 256  # of the kernel
_MOST_ROOM = 4  # places for each token, up to which rows are padded to attend in one call
_NOT_KNOWN = ("position_bias", "softcap", "s_aux", "cache")  # arguments that it cannot answer


class NotForRows(Exception):
    """A layer wants attention that is more than causal over rows of uneven length."""


class Rows:
    """Rows that lie one after the other in one row of tokens.

    Args:
        lengths (`list[int]`): Tokens of each row.
        device (`torch.device`): Where their tokens are.

    Attributes:
        offsets (`torch.Tensor`): int32 (rows + 1,), on the device: where each row begins, and the end.
        tokens (`int`): Of all rows together.
        longest (`int`): Tokens of the longest row.
    """

    def __init__(self, lengths: list[int], device: torch.device):
        self.lengths, self.tokens, self.longest = lengths, sum(lengths), max(lengths)
        self.offsets = sent(torch.tensor([0, *lengths], device="cpu").cumsum(0).int(), device)

    @property
    def room(self) -> int:
        """Places of all rows, each padded to the longest."""
        return len(self.lengths) * self.longest

    @functools.cached_property
    def places(self) -> torch.Tensor:
        """int64 (T,), on the device: where each token is among these places."""
        places = [torch.arange(n, device="cpu") + row * self.longest for row, n in enumerate(self.lengths)]
        return sent(torch.cat(places), self.offsets.device)


class RowMask:
    """The mask that layers get: a token sees the tokens of its own row up to itself, and at most `window` of them.

    It is opaque to whatever handles the arguments of layers on their way (checkpointing, FSDP, hooks of accelerate).
    `unknown` says why the mask that was asked for is another one; some models ask for masks that no layer uses.
    """

    def __init__(self, rows: Rows, window: int | None = None, unknown: str | None = None):
        self.rows, self.window, self.unknown = rows, window, unknown


_rows: contextvars.ContextVar[Rows | None] = contextvars.ContextVar("rows of the running call", default=None)


@contextlib.contextmanager
def rows_known(rows: Rows):
    """Within it, masks that a model asks for are `RowMask`s over `rows`."""
    token = _rows.set(rows)
    try:
        yield
    finally:
        _rows.reset(token)


def row_mask(args: tuple, kwargs: dict) -> RowMask | None:
    """The mask of one kind of layer, from the arguments of transformers' `sdpa_mask`; None where no rows are known."""
    rows = None if torch.compiler.is_compiling() else _rows.get()
    if rows is None:
        return None
    return RowMask(rows, unknown="its mask is asked for in an unknown way") if args else _row_mask(rows, **kwargs)


def _row_mask(
    rows, *, q_length, kv_length, mask_function=causal_mask_function, local_size=None, allow_is_causal_skip=True,
    use_vmap=False, q_offset=0, kv_offset=0, **_,
) -> RowMask:  # fmt: skip
    """`row_mask` of the arguments of a function of `AttentionMaskInterface`."""
    if not (q_length == kv_length == rows.tokens and q_offset == kv_offset == 0):
        return RowMask(rows, unknown="it attends to more than the tokens of the call")
    if use_vmap or not allow_is_causal_skip or (local_size is None and mask_function is not causal_mask_function):
        return RowMask(rows, unknown="its mask is more than causal")
    if local_size is not None and not _is_sliding(mask_function, int(local_size)):
        return RowMask(rows, unknown="its local attention is no sliding window")
    return RowMask(rows, None if local_size is None else int(local_size))


def _is_sliding(mask_function, window: int) -> bool:
    """Return whether a mask function lets a token see `window` tokens up to itself: asked at the edges."""
    query = torch.tensor([window, window, 0, 2 * window - 1], device="cpu")
    key = torch.tensor([1, 0, 1, window], device="cpu")
    zero = torch.zeros((), dtype=torch.long, device="cpu")
    return mask_function(zero, zero, query, key).tolist() == [True, False, False, True]


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attention for `AttentionInterface`: over the rows of a `RowMask`, else transformers' own for SDPA.

    Args:
        module (`nn.Module`): The attention layer.
        query (`torch.Tensor`): (1, Hq, T, D), all rows one after the other.
        key (`torch.Tensor`): (1, Hkv, T, D), Hq a multiple of Hkv.
        value (`torch.Tensor`): (1, Hkv, T, Dv).
        attention_mask (`RowMask`, `torch.Tensor` or None): As `row_mask` has made it, or any other.
        dropout (`float`, *optional*, defaults to 0.0): Of the weights of attention.
        scaling (`float`, *optional*): Factor of the scores; 1 / sqrt(D) by default.

    Returns (1, T, Hq, Dv), and None for the weights of attention. Raises `NotForRows` where the rows of the call are
    known, and the mask is neither causal nor a sliding window, or the scores are changed (a bias, a cap, sinks).
    """
    if not isinstance(attention_mask, RowMask):
        if not torch.compiler.is_compiling() and _rows.get() is not None:
            raise NotForRows("a layer attends with a mask of its own")
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )  # fmt: skip
    if attention_mask.unknown is not None:
        raise NotForRows(attention_mask.unknown)
    for name in _NOT_KNOWN:
        if kwargs.get(name) is not None:
            raise NotForRows(f"its attention has a {name}")
    device = query.device.type
    if torch.is_autocast_enabled(device):  # as of PyTorch's SDPA
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    rows = attention_mask.rows
    if _kernel_takes(query, key, value, dropout):
        attend = _by_kernel
    else:
        attend = _all_rows if rows.room <= _MOST_ROOM * rows.tokens else _row_by_row
    return attend(query, key, value, attention_mask, dropout, scaling), None


def _kernel_takes(query, key, value, dropout) -> bool:
    dim = query.shape[-1]
    return (
        query.is_cuda
        and _device_has_the_kernel(query.device)
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.dtype == key.dtype == value.dtype
        and dropout == 0.0
        and dim % 8 == 0
        and value.shape[-1] <= dim <= _MOST_HEAD_DIM
    )


@functools.cache
def _device_has_the_kernel(device: torch.device) -> bool:
    """Return whether PyTorch was built with the kernel, and for this GPU."""
    built = torch.version.hip is None and torch.backends.cuda.is_flash_attention_available()
    return built and torch.cuda.get_device_capability(device) >= (8, 0)


def _by_kernel(query, key, value, mask: RowMask, dropout, scaling):
    """Call the op under `torch.nn.attention.varlen.varlen_attn`, which itself takes the host longer than all else."""
    width = value.shape[-1]
    if width < query.shape[-1]:  # multi-head latent attention; the kernel wants one size
        value = F.pad(value, (0, query.shape[-1] - width))
    # Not x[0], whose gradient is filled with zeros and then copied into.
    query, key, value = (x.squeeze(0).transpose(0, 1).contiguous() for x in (query, key, value))
    offsets, longest = mask.rows.offsets.to(query.device), mask.rows.longest  # layers may be spread over devices
    before = -1 if mask.window is None else mask.window - 1
    out, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, offsets, offsets, longest, longest, 0.0, mask.window is None, False,
        scale=scaling, window_size_left=before, window_size_right=0,
    )  # fmt: skip
    return (out if width == out.shape[-1] else out[..., :width]).unsqueeze(0)


def _near(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """(S, S), which tokens of a row each of its tokens sees; None where that is all before it."""
    if window is None or length <= window:
        return None
    position = torch.arange(length, device=device)
    distance = position[:, None] - position
    return (distance >= 0) & (distance < window)


def _all_rows(query, key, value, mask: RowMask, dropout, scaling):
    rows = mask.rows
    places = rows.places.to(query.device)
    q, k, v = (
        x.new_zeros(rows.room, x.shape[1], x.shape[3])
        .index_copy(0, places, x[0].transpose(0, 1))
        .unflatten(0, (-1, rows.longest))
        .transpose(1, 2)
        for x in (query, key, value)
    )
    near = _near(rows.longest, mask.window, query.device)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=near, dropout_p=dropout, is_causal=near is None, scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return out.transpose(1, 2).flatten(0, 1).index_select(0, places).unsqueeze(0)


def _row_by_row(query, key, value, mask: RowMask, dropout, scaling):
    grouped = query.shape[1] != key.shape[1]
    done, start = [], 0
    for length in filter(None, mask.rows.lengths):
        q, k, v = (x[:, :, start : start + length] for x in (query, key, value))
        start += length
        near = _near(length, mask.window, query.device)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=near, dropout_p=dropout, is_causal=near is None, scale=scaling, enable_gqa=grouped
        )
        done.append(out.transpose(1, 2))
    return torch.cat(done, dim=1)
