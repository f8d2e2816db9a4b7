"""Causal attention over rows of uneven length that lie one after the other, in PyTorch alone.

transformers' models ask a registry for their attention function and another for the mask that goes with it. While a
model whose padding is left out lives, `varlen_attention` stands in the first one under the name `sdpa`, so that configs
keep that name. While the rows of a call are known (`padding.py`), the mask is a `RowMask`, which says where each row
ends (`row_mask`, asked by `head/masks.py`), and attention is the kernel under `torch.nn.attention.varlen`, which reads
the ends. On CPUs, and for dropout, dtypes and head sizes that the kernel does not know, the rows are one call of
PyTorch's SDPA, padded on the right, which a causal mask hides, or one call for each row where that would be mostly
padding. Every other call is transformers' own.
"""

import contextlib
import contextvars
import functools
import weakref

import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_MOST_HEAD_DIM = 256  # of the kernel
_MOST_ROOM = 4  # places for each token, up to which rows are padded to attend in one call
_NOT_KNOWN = ("position_bias", "softcap", "s_aux", "cache")  # what attention may be asked for beside, and cannot do
STANDS_BEFORE = "_liger_stands_before"  # on our function for masks: the function that it asks for all others
_models: weakref.WeakSet = weakref.WeakSet()  # those that have asked for our attention


class NotForRows(Exception):
    """A layer wants attention that is more than causal over rows of uneven length."""


class Rows:
    """Rows that lie one after the other in one row of tokens.

    Args:
        offsets (`torch.Tensor`): int32 (rows + 1,), on the device: where each row begins, and the end.
        tokens (`int`): Of all rows together.
        longest (`int`): Tokens of the longest row.
    """

    def __init__(self, offsets: torch.Tensor, tokens: int, longest: int):
        self.offsets, self.tokens, self.longest = offsets, tokens, longest

    @property
    def room(self) -> int:
        """Places of all rows, each padded to the longest."""
        return (self.offsets.shape[0] - 1) * self.longest

    @functools.cached_property
    def places(self) -> torch.Tensor:
        """int64 (T,): where each token is among these places."""
        starts = self.offsets[:-1].long()
        shift = torch.arange(len(starts), device=starts.device) * self.longest - starts
        tokens = torch.arange(self.tokens, device=starts.device)
        return tokens + shift.repeat_interleave(self.offsets.diff().long(), output_size=self.tokens)

    @functools.cached_property
    def lengths(self) -> list[int]:
        """Tokens of each row, on the host, which waits for the device; the kernel does not ask for it."""
        return self.offsets.diff().tolist()


class RowMask:
    """What the layers get for a mask: a token sees those of its own row up to itself, and at most `window` of them.

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
    """Whether a mask function lets a token see `window` tokens up to itself: asked at the edges."""
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

    Returns:
        `tuple`: (1, T, Hq, Dv), and None for the weights of attention.

    Raises:
        NotForRows: The mask is neither causal nor a sliding window, or the scores are changed (a bias of positions, a
            cap, sinks).
    """
    if not isinstance(attention_mask, RowMask):
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
    """Whether PyTorch was built with the kernel, and for this GPU."""
    built = torch.version.hip is None and torch.backends.cuda.is_flash_attention_available()
    return built and torch.cuda.get_device_capability(device) >= (8, 0)


def _by_kernel(query, key, value, mask: RowMask, dropout, scaling):
    """What `torch.nn.attention.varlen.varlen_attn` calls, called by itself.

    That function is an op of Python, whose two passes take the host longer than all other launches of an attention. The
    op under it has its gradient in C++.
    """
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
    for length in mask.rows.lengths:
        q, k, v = (x[:, :, start : start + length] for x in (query, key, value))
        start += length
        if length == 0:
            continue
        near = _near(length, mask.window, query.device)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=near, dropout_p=dropout, is_causal=near is None, scale=scaling, enable_gqa=grouped
        )
        done.append(out.transpose(1, 2))
    return torch.cat(done, dim=1)


def is_registered_for(model) -> bool:
    """Whether models that ask transformers for `sdpa` get `varlen_attention`, which stays there while `model` lives.

    Not where somebody has put a function of their own there, or one for masks, which are then used as they are.
    """
    if getattr(ALL_MASK_ATTENTION_FUNCTIONS["sdpa"], STANDS_BEFORE, None) is not sdpa_mask:
        return False
    current = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if current is sdpa_attention_forward:
        AttentionInterface.register("sdpa", varlen_attention)
    elif current is not varlen_attention:
        return False
    if model not in _models:
        weakref.finalize(model, _restore_after_last).atexit = False  # runs after the set has let go of the model
        _models.add(model)
    return True


def not_needed_by(model) -> None:
    """Undo `is_registered_for`: after the last model, transformers' registry is as before."""
    _models.discard(model)
    _restore_after_last()


def _restore_after_last() -> None:
    if not _models and ALL_ATTENTION_FUNCTIONS["sdpa"] is varlen_attention:
        AttentionInterface.register("sdpa", sdpa_attention_forward)
