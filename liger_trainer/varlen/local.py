"""Recognises mask functions of transformers that let a token see a sliding window or a chunk of its row."""

import torch
from transformers.masking_utils import causal_mask_function, chunked_causal_mask_function


def is_sliding(mask_function, window: int) -> bool:
    """Return whether it lets a token see `window` tokens up to itself: asked at the edges."""
    if is_chunked(mask_function, window):
        return False
    query = torch.tensor([window, window, 0, 2 * window - 1], device="cpu")
    key = torch.tensor([1, 0, 1, window], device="cpu")
    zero = torch.zeros((), dtype=torch.long, device="cpu")
    return mask_function(zero, zero, query, key).tolist() == [True, False, False, True]


def is_chunked(mask_function, size: int) -> bool:
    """Return whether it is transformers' own for chunks of `size` tokens from the beginning of a row.

    Its code is compared, not what it answers: it reads a tensor on the device, the padding on the left of each row,
    which is zero in a call whose rows are known.
    """
    own = chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.long, device="cpu"))
    given_parts, own_parts = (_parts(f) for f in (mask_function, own))
    if getattr(mask_function, "__code__", None) is not own.__code__ or len(given_parts) != len(own_parts):
        return False
    return all(_is_same(given, part, size) for given, part in zip(given_parts, own_parts, strict=True))


def _parts(function) -> tuple:
    """The functions that a function of `and_masks` holds."""
    cells = list(getattr(function, "__closure__", None) or ())
    return cells[0].cell_contents if len(cells) == 1 and isinstance(cells[0].cell_contents, tuple) else ()


def _is_same(given, own, size: int) -> bool:
    if own is causal_mask_function:
        return given is own
    values = [cell.cell_contents for cell in getattr(given, "__closure__", None) or ()]
    return getattr(given, "__code__", None) is own.__code__ and [x for x in values if isinstance(x, int)] == [size]
