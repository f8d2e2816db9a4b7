"""Causal attention over rows of uneven length that lie one after the other, in PyTorch alone.

transformers' models ask one registry for their attention function and another for its mask. `head/masks.py` registers
`varlen_attention` and `row_mask` there under the name `sdpa`, which configs keep. While the rows of a call are known
(`rows_known`), the mask is a `RowMask`, which says where each row ends. What runs then is a fixed rule:

- plain causal attention over rows of one length: PyTorch's SDPA, the fastest there
- rows of several lengths, and sliding windows: the kernel under `torch.nn.attention.varlen`, which skips what is not
  seen. On CPUs, and for dropout, dtypes and head sizes that it does not know, SDPA for each row by itself
- sinks and soft caps: `liger_triton.row_attention`
- a window that is no shorter than the longest row is plain causal, and chunks are rows of their own

Every other call is transformers' own. `head/masks.py` hands models that have no SDPA `attend_by_rows` in the same way.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from liger_trainer.varlen.host_copies import sent
from liger_triton import row_attention
from liger_triton.row_attention import flash_is_built

_MOST_HEAD_DIM = 256  # of the kernel
_NOT_KNOWN = ("position_bias", "cache")  # arguments that it cannot answer


class NotForRows(Exception):
    """A layer wants attention that is more than causal over rows of uneven length."""


class Rows:
    """Rows that lie one after the other in one row of tokens, or in a batch that has no padding.

    Args:
        lengths (`list[int]`): Tokens of each row.
        device (`torch.device`): Where their tokens are.
        batch (`int`, *optional*, defaults to 1): Rows of the batch, of as many tokens each, in which they lie.

    Attributes:
        offsets (`torch.Tensor`): int32 (rows + 1,), on the device: where each row begins, and the end.
        tokens (`int`): Of all rows together.
        longest (`int`): Tokens of the longest row.
        kinds (`set[str]`): What the layers were found to attend by: causal, sliding window, chunks, sinks, soft cap;
            and state, where they keep one.
        attend (`Callable` or None): What attends in place of this module, for rows that share prompts.
    """

    attend: Callable | None = None

    def __init__(self, lengths: list[int], device: torch.device, batch: int = 1):
        self.lengths: list[int] = lengths
        self.tokens, self.longest = sum(lengths), max(lengths)
        self.batch, self.kinds, self._chunks = batch, set[str](), dict[int, Rows]()
        self.offsets = sent(torch.tensor([0, *lengths], device="cpu").cumsum(0).int(), device)

    @property
    def full(self) -> bool:
        """Return whether they are the rows of the batch."""
        return len(self.lengths) == self.batch

    @property
    def equal(self) -> bool:
        """Return whether all are of one length."""
        return min(self.lengths) == self.longest

    @functools.cached_property
    def side_by_side(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For rows that lie side by side, padded on the right, on the device: where each token is in (rows * longest),
        int64 (tokens,), and the mask of real tokens, int64 (rows, longest)."""
        lengths = torch.tensor(self.lengths, device="cpu")
        real = torch.arange(self.longest, device="cpu") < lengths[:, None]
        places = real.flatten().nonzero()[:, 0]
        return sent(places, self.offsets.device), sent(real.long(), self.offsets.device)

    def in_chunks(self, size: int) -> "Rows":
        """Cut these rows into rows of `size` tokens, from the beginning of each."""
        if size not in self._chunks:
            cut = [min(size, n - done) for n in self.lengths for done in range(0, n, size)]
            self._chunks[size] = Rows(cut, self.offsets.device, self.batch)
            self._chunks[size].kinds = self.kinds
        return self._chunks[size]


class StaticRows(Rows):
    """Rows whose lengths change from one replay of a captured backbone to the next, within bounds.

    Args:
        offsets (`torch.Tensor`): int32 (rows + 1,), a buffer that is written before each replay. Rows after the last
            one are empty.
        tokens (`int`): Of all rows together, the same in every replay.
        longest (`int`): Tokens that a row may have.
    """

    def __init__(self, offsets: torch.Tensor, tokens: int, longest: int):
        self.offsets, self.tokens, self.longest = offsets, tokens, longest
        self.batch, self.kinds, self._chunks = 1, set[str](), dict[int, Rows]()

    @property
    def lengths(self) -> list[int]:  # type: ignore[override]
        """The lengths now, on a CPU. `NotForRows` on a GPU, where reading them would bake them into a capture."""
        if self.offsets.device.type != "cpu":
            raise NotForRows("its attention needs lengths on the host (dtype, head size or dropout)")
        return self.offsets.diff().tolist()

    @property
    def full(self) -> bool:
        return False

    @property
    def equal(self) -> bool:
        """Not even if they are now: one kernel attends in all replays."""
        return False

    def in_chunks(self, size: int) -> Rows:
        raise NotForRows("its layers attend in chunks, whose number depends on the lengths of rows")


class RowMask:
    """The mask that layers get: a token sees the tokens of its own row up to itself, and at most `window` of them.
    `chunked` says that the rows are chunks.

    It is opaque to whatever handles the arguments of layers on their way (checkpointing, FSDP, hooks of accelerate).
    `unknown` says why the mask that was asked for is another one; some models ask for masks that no layer uses.
    """

    def __init__(
        self, rows: Rows, window: int | None = None, unknown: str | None = None, chunked: bool = False
    ):  # fmt: skip
        self.rows, self.window, self.unknown, self.chunked = rows, window, unknown, chunked

    def __getitem__(self, index: object) -> "RowMask":
        """The mask itself for slices that take all of it, as Gemma 4 asks for before layers that reuse keys."""
        parts = index if isinstance(index, tuple) else (index,)
        if all(isinstance(part, slice) and part in (slice(None), slice(0, None)) for part in parts):
            return self
        raise TypeError("'RowMask' object is not subscriptable")


_rows: contextvars.ContextVar[Rows | None] = contextvars.ContextVar("rows of the running call", default=None)


@contextlib.contextmanager
def rows_known(rows: Rows):
    """Within it, masks that a model asks for are `RowMask`s over `rows`."""
    token = _rows.set(rows)
    try:
        yield
    finally:
        _rows.reset(token)


def rows_of_call() -> Rows | None:
    """The rows of the running call of a backbone. None in a call that has no plan, and in a recomputation."""
    return None if torch.compiler.is_compiling() else _rows.get()


def row_mask(args: tuple, kwargs: dict) -> RowMask | None:
    """The mask of one kind of layer, from the arguments of transformers' `sdpa_mask`; None where no rows are known."""
    rows = rows_of_call()
    if rows is None:
        return None
    return RowMask(rows, unknown="its mask is asked for in an unknown way") if args else _row_mask(rows, **kwargs)


def _row_mask(
    rows, *, q_length, kv_length, mask_function=causal_mask_function, local_size=None, allow_is_causal_skip=True,
    use_vmap=False, q_offset=0, kv_offset=0, **_,
) -> RowMask:  # fmt: skip
    """`row_mask` of the arguments of a function of `AttentionMaskInterface`."""
    if not (q_length * rows.batch == kv_length * rows.batch == rows.tokens and q_offset == kv_offset == 0):
        return RowMask(rows, unknown="it attends to more than the tokens of the call")
    if use_vmap or not allow_is_causal_skip or (local_size is None and mask_function is not causal_mask_function):
        return RowMask(rows, unknown="its mask is more than causal")
    if local_size is None:
        return RowMask(rows)
    size, no_padding = int(local_size), torch.zeros(1, dtype=torch.long, device="cpu")
    if _is_same(mask_function, sliding_window_causal_mask_function(size)):
        return RowMask(rows, size)
    if _is_same(mask_function, chunked_causal_mask_function(size, no_padding)):
        return RowMask(rows.in_chunks(size), chunked=True)
    return RowMask(rows, unknown="its local attention is neither a sliding window nor chunks")


def _is_same(given, own) -> bool:
    """Whether two mask functions are of one code and hold the same functions and numbers.

    What they answer is not compared: chunks read a tensor on the device, the padding on the left of each row, which is
    zero in a call whose rows are known.
    """
    if not callable(own):
        return isinstance(own, torch.Tensor) or given == own
    if given is own or getattr(given, "__code__", None) is not own.__code__:
        return given is own
    held = [_held(function) for function in (given, own)]
    return len(held[0]) == len(held[1]) and all(map(_is_same, *held))


def _held(function) -> list:
    """What a function of transformers' masks holds: the functions of `and_masks`, or the size of a window or chunk."""
    values = [cell.cell_contents for cell in function.__closure__ or ()]
    return [*values[0]] if len(values) == 1 and isinstance(values[0], tuple) else values


def attend_by_rows(
    own, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask,
    *args, **kwargs,
):  # fmt: skip
    """Attend over the rows of a `RowMask`; for any other mask, call `own`, a function of `AttentionInterface`.

    Args:
        own (`Callable`): The function that would run without ours.
        module (`nn.Module`): The attention layer.
        query (`torch.Tensor`): (B, Hq, S, D), whose B * S tokens are all rows one after the other.
        key (`torch.Tensor`): (B, Hkv, S, D), Hq a multiple of Hkv.
        value (`torch.Tensor`): (B, Hkv, S, Dv).
        attention_mask (`RowMask`, `torch.Tensor` or None): As `row_mask` has made it, or any other.

    Returns (B, S, Hq, Dv), and None for the weights of attention. Raises `NotForRows` where the rows of the call are
    known, and the mask is neither causal nor local, or the scores are changed in an unknown way (a bias of positions).
    """
    if isinstance(attention_mask, RowMask):
        if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
            raise NotForRows("is_causal is False, with which SDPA sees later tokens where it has no mask")
        return _by_rows(query, key, value, attention_mask, *args, **kwargs), None
    if not torch.compiler.is_compiling() and _rows.get() is not None:
        raise NotForRows("a layer attends with a mask of its own")
    return own(module, query, key, value, attention_mask, *args, **kwargs)


def refuse_rows(own, *args, **kwargs):
    """Call `own`, a function of the user's, which has to see masks. Raises `NotForRows` where the mask has rows."""
    if _rows.get() is not None or any(isinstance(x, RowMask) for x in (*args, *kwargs.values())):
        raise NotForRows("the attention function of its layers is not transformers' own")
    return own(*args, **kwargs)


def varlen_attention(*args, **kwargs):
    """Attend over the rows of a `RowMask`, else as transformers does for SDPA."""
    return attend_by_rows(sdpa_attention_forward, *args, **kwargs)


def _by_rows(query, key, value, mask: RowMask, dropout=0.0, scaling=None, softcap=None, s_aux=None, **others):
    if mask.unknown is not None:
        raise NotForRows(mask.unknown)
    for name in _NOT_KNOWN:
        if others.get(name) is not None:
            raise NotForRows(f"its attention has a {name}")
    query, key, value = as_autocast(query, key, value)
    rows, window = mask.rows, mask.window
    if rows.attend is not None:  # before all else: a prefix and a private part may be of one length by chance
        out = rows.attend(query, key, value, window, dropout, scaling, softcap, s_aux)
        return out.view(query.shape[0], -1, *out.shape[1:])
    if window is not None and window >= rows.longest:
        window = None
    if softcap is not None or s_aux is not None:
        return _capped(query, key, value, rows, window, dropout, scaling, softcap, s_aux)
    rows.kinds.add("chunks" if mask.chunked else "causal" if mask.window is None else "sliding window")
    if window is None and rows.equal:
        out = _by_sdpa(query, key, value, rows, dropout, scaling)
    elif kernel_takes(query, key, value, dropout):
        left = -1 if window is None else window - 1
        out = by_kernel(query, key, value, rows.offsets, rows.longest, scaling, window is None, (left, 0))
    else:
        out = _row_by_row(query, key, value, rows, window, dropout, scaling)
    # Some models take a view of it. SDPA's result for one row, and a slice of wider heads, are no contiguous tensors.
    return out.contiguous().view(query.shape[0], -1, *out.shape[1:])


def as_autocast(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Cast queries, keys and values as autocast does for PyTorch's SDPA."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [x if x.dtype == dtype else x.to(dtype) for x in tensors]


def flat(x: torch.Tensor) -> torch.Tensor:
    """(B, H, S, D) as (B * S, H, D). Not x[0], whose gradient is filled with zeros and then copied into."""
    return x.transpose(1, 2).flatten(0, 1)


def _by_sdpa(query, key, value, rows: Rows, dropout, scaling):
    """(T, Hq, Dv), of rows of one length, in which every token sees all before it."""
    if not rows.full:
        laid = map(flat, (query, key, value))
        query, key, value = (x.view(-1, rows.longest, *x.shape[1:]).transpose(1, 2) for x in laid)
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and not key.shape[-1] == value.shape[-1] <= _MOST_HEAD_DIM:  # as transformers: no fast kernel has it
        key, value, groups = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), 1
    out = F.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=groups > 1
    )  # fmt: skip
    return out.transpose(1, 2).flatten(0, 1)


def _capped(query, key, value, rows: Rows, window, dropout, scaling, softcap, sinks):
    """(B, S, Hq, Dv), with a soft cap of the scores, or with sinks (Hq,)."""
    rows.kinds.add("sinks" if softcap is None else "soft cap")
    batch, heads, _, dim = query.shape
    if dropout or not value.shape[-1] <= dim <= _MOST_HEAD_DIM or (sinks is not None and sinks.shape != (heads,)):
        raise NotForRows("its attention has sinks or a soft cap, and dropout, sinks for each token or large heads")
    width = value.shape[-1]
    value = F.pad(value, (0, dim - width)) if width < dim else value
    offsets = rows.offsets.to(query.device)
    out = row_attention(
        flat(query), flat(key), flat(value), offsets, rows.longest, scale=scaling, window=window, softcap=softcap,
        sinks=sinks,
    )  # fmt: skip
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
        query, key, value, offsets, offsets, longest, longest, 0.0, causal, False, scale=scaling,
        window_size_left=window[0], window_size_right=window[1],
    )  # fmt: skip
    return out if width == out.shape[-1] else out[..., :width]


def _near(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """(S, S), which tokens of a row each of its tokens sees; None where that is all before it."""
    if window is None or length <= window:
        return None
    position = torch.arange(length, device=device)
    distance = position[:, None] - position
    return (distance >= 0) & (distance < window)


def _row_by_row(query, key, value, rows: Rows, window, dropout, scaling):
    grouped = query.shape[1] != key.shape[1]
    laid, done, start = [flat(x).transpose(0, 1) for x in (query, key, value)], [], 0
    for length in filter(None, rows.lengths):
        q, k, v = (x[None, :, start : start + length] for x in laid)
        start += length
        near = _near(length, window, query.device)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=near, dropout_p=dropout, is_causal=near is None, scale=scaling, enable_gqa=grouped
        )
        done.append(out[0].transpose(0, 1))
    return torch.cat(done)
