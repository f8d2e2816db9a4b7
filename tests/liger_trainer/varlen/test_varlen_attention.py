"""Attention over concatenated rows equals SDPA with the mask written out."""

import pytest
import torch
import torch.nn.functional as F
from transformers.masking_utils import chunked_causal_mask_function, or_masks, sliding_window_causal_mask_function

from liger_trainer.varlen import attention
from liger_trainer.varlen.registry import sdpa_attention
from liger_trainer.varlen.rows import NotForRows, RowMask, Rows, row_mask, use_rows

LENGTHS = (5, 1, 9, 0, 2)
TOKENS = sum(LENGTHS)


def rows():
    return Rows(list(LENGTHS), torch.device("cpu"))


def seen(window=None):
    """(T, T): the tokens that each token sees."""
    row = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    at = torch.arange(TOKENS)
    distance = at[:, None] - at
    near = (distance >= 0) & (row[:, None] == row)
    return near if window is None else near & (distance < window)


def inputs(kv_heads=2, dim=8, value_dim=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = (4, dim), (kv_heads, dim), (kv_heads, value_dim)
    return [
        torch.randn(1, heads, TOKENS, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for heads, width in shapes
    ]


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("kv_heads, dim, value_dim, scale", [(4, 8, 8, None), (2, 8, 8, 0.3), (1, 12, 8, None)])
def test_values_and_gradients(window, kv_heads, dim, value_dim, scale, monkeypatch):
    calls, attend = [], F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: calls.append(a) or attend(*a, **k))
    query, key, value = inputs(kv_heads, dim, value_dim)
    got, weights = sdpa_attention(torch.nn.Module(), query, key, value, RowMask(rows(), window), scaling=scale)
    assert len(calls) == 4, "the empty row needs none"
    want = attend(query, key, value, attn_mask=seen(window), scale=scale, enable_gqa=kv_heads != 4).transpose(1, 2)
    assert weights is None and got.is_contiguous() and got.shape == (1, TOKENS, 4, value_dim)
    torch.testing.assert_close(got, want)
    upstream = torch.randn(got.shape, generator=torch.Generator().manual_seed(1), dtype=got.dtype)
    for mine, theirs in zip(
        torch.autograd.grad(got, (query, key, value), upstream),
        torch.autograd.grad(want, (query, key, value), upstream),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_autocast_rounds_as_it_does_for_sdpa():
    query, key, value = inputs(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got, _ = sdpa_attention(torch.nn.Module(), query, key, value, RowMask(rows()))
    assert got.dtype == torch.bfloat16


def test_masks_are_known_by_their_code():
    made = {"q_length": TOKENS, "kv_length": TOKENS, "batch_size": 1}
    with use_rows(rows()):
        causal = row_mask((), made)
        sliding = row_mask((), made | {"mask_function": sliding_window_causal_mask_function(3), "local_size": 3})
        one = row_mask((), made | {"mask_function": sliding_window_causal_mask_function(1), "local_size": 1})
        chunks = chunked_causal_mask_function(3, torch.zeros(1, dtype=torch.long))
        chunked = row_mask((), made | {"mask_function": chunks, "local_size": 3})
        more = row_mask((), made | {"mask_function": lambda *at: at[2] >= at[3]})
        window = sliding_window_causal_mask_function(4)
        widened = or_masks(window, lambda b, h, q, k: (k == 2) & (q >= k))  # at the edges of a window it looks like one
        also = row_mask((), made | {"mask_function": widened, "local_size": 4})
        longer = row_mask((), made | {"kv_length": TOKENS + 1})
    assert (causal.window, causal.unknown) == (None, None)
    assert (sliding.window, one.window, sliding.unknown, one.unknown) == (3, 1, None, None)
    assert chunked.chunked and chunked.unknown is None and chunked.rows.longest == 3
    for mask in (more, also, longer):
        assert mask.unknown is not None
        with pytest.raises(NotForRows, match=mask.unknown):
            sdpa_attention(torch.nn.Module(), *inputs(), mask)
    assert row_mask((), made) is None, "no rows now"


@pytest.mark.parametrize(
    "given, message",
    [
        ({"position_bias": torch.ones(1)}, "position_bias"),
        ({"softcap": 2.0, "dropout": 0.1}, "dropout"),
        ({"s_aux": torch.ones(3)}, "sinks for each token"),
    ],
)
def test_options_that_change_scores_are_refused_for_rows(given, message):
    with pytest.raises(NotForRows, match=message):
        sdpa_attention(torch.nn.Module(), *inputs(), RowMask(rows()), **given)


@pytest.mark.parametrize("rows_of", [rows, lambda: Rows([TOKENS // 2 + 1, TOKENS // 2], torch.device("cpu"))])
def test_chunks_are_rows_of_their_own(rows_of):
    given, whole = rows_of(), inputs()
    chunks = given.in_chunks(3)
    assert chunks.lengths == [n for length in given.lengths for n in ([3] * (length // 3) + [length % 3]) if n]
    assert given.in_chunks(3) is chunks and chunks.attention_kinds is given.attention_kinds
    got, _ = sdpa_attention(torch.nn.Module(), *whole, RowMask(chunks, chunked=True))
    start = given.lengths[0] // 3 * 3
    alone = [x[:, :, start : given.lengths[0]] for x in whole]
    want = F.scaled_dot_product_attention(*alone, is_causal=True, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(got[:, start : given.lengths[0]], want)


def test_rows_of_a_batch():
    """A batch of two rows gives the numbers of one concatenated row, in the shape of the batch."""
    query, key, value = (x[:, :, :16] for x in inputs())
    batch = [x[0].unflatten(1, (2, 8)).transpose(0, 1) for x in (query, key, value)]
    lengths = [5, 3, 8]
    for window in (None, 3):
        in_one, _ = sdpa_attention(torch.nn.Module(), query, key, value, RowMask(Rows(lengths, query.device), window))
        in_two, _ = sdpa_attention(torch.nn.Module(), *batch, RowMask(Rows(lengths, query.device, 2), window))
        assert in_two.shape == (2, 8, 4, 8)
        torch.testing.assert_close(in_two.flatten(0, 1), in_one[0])


def test_without_rows_it_is_transformers_own_attention():
    query, key, value = inputs(kv_heads=4)
    got, _ = sdpa_attention(torch.nn.Module(), query, key, value, None, is_causal=True)
    want = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
    assert torch.equal(got, want)


def test_the_kernel_is_asked_for_what_it_knows(monkeypatch):
    """PyTorch has no such kernel for CPUs. Checks a substitute's arguments and the gradients that come back."""
    handed, returned = {}, []

    def attended(query, key, value, window):
        near = None if window < 0 else window + 1
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        scale = query.shape[-1] ** -0.5
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen(near), scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1).contiguous()

    def forward(
        query,
        key,
        value,
        starts,
        ends,
        longest,
        longest_key,
        dropout,
        is_causal,
        debug,
        *,
        scale=None,
        window_size_left=None,
        window_size_right=None,
    ):
        handed.update(shapes=(query.shape, key.shape, value.shape), longest=(longest, longest_key))
        handed.update(window=(is_causal, window_size_left, window_size_right), rest=(dropout, debug, scale))
        assert query.is_contiguous() and starts.dtype == torch.int32 and starts.data_ptr() == ends.data_ptr()
        rest = (query.new_empty(query.shape[1], len(query), dtype=torch.float32), *(query.new_empty(0),) * 3)
        return attended(query, key, value, window_size_left), *rest

    def backward(
        gradient,
        query,
        key,
        value,
        out,
        sums,
        starts,
        ends,
        longest,
        longest_key,
        dropout,
        is_causal,
        state,
        unused,
        *,
        scale=None,
        window_size_left=None,
        window_size_right=None,
    ):
        returned.append((is_causal, window_size_left, window_size_right))
        return 2 * query, 3 * key, 4 * value

    monkeypatch.setattr(attention, "kernel_takes", lambda *given: True)
    for window, asked in ((3, (False, 2, 0)), (None, (True, -1, 0))):
        with torch.library._scoped_library("aten", "IMPL") as library:
            library.impl("_flash_attention_forward", forward, "CPU")
            library.impl("_flash_attention_backward", backward, "CPU")
            query, key, value = (x.requires_grad_() for x in inputs(kv_heads=2, dim=12, value_dim=8))
            got, _ = sdpa_attention(torch.nn.Module(), query, key, value, RowMask(rows(), window))
            grads = torch.autograd.grad(got.sum(), (query, key, value))
        assert handed == {
            "shapes": ((TOKENS, 4, 12), (TOKENS, 2, 12), (TOKENS, 2, 12)),
            "longest": (9, 9),
            "window": asked,
            "rest": (0.0, False, None),
        }
        assert returned.pop() == asked
        want = F.scaled_dot_product_attention(query, key, value, attn_mask=seen(window), enable_gqa=True)
        want = want.transpose(1, 2)
        torch.testing.assert_close(got, want)
        assert all(map(torch.equal, grads, (2 * query, 3 * key, 4 * value)))
