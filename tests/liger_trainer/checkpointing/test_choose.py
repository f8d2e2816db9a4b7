"""The arithmetic from measured sizes to a plan, on sizes that one can add up by hand."""

from dataclasses import replace

import pytest

from liger_trainer.checkpointing.choose import choose
from liger_trainer.checkpointing.memory import GIB, RESERVE, limit_of
from liger_trainer.checkpointing.plan import NOTHING, Call, Count, Profile, Size

SIZE = Size(4, 100)
# Four layers: moments 1-4 begin with their forward passes, 5-8 with the backward passes of the last to the first.
# Each layer's gradient is 10, and the head takes 30 at the end of the forward pass, in moment 4.
MOMENTS = (0, 5, 6, 7, 38, 20, 30, 40, 50)
PROFILE = Profile(MOMENTS, tuple(Call(SIZE, 12, i + 1, 8 - i) for i in range(4)))


def peak_by_hand(kept, share=1.0):
    """Walk through the moments and add up what the kept layers hold in each."""
    peaks = list(MOMENTS)
    for layer in kept:
        for moment in range(layer + 1, 8 - layer):
            peaks[moment] += round(12 * share)
    return 100 + max(peaks)


@pytest.mark.parametrize(
    "limit, kept",
    [
        (150, {3}),  # the full peak, which is at the end of the backward pass: 38 + 12 = 50 adds nothing to it
        (161, {3}),
        (162, {2, 3}),
        (174, {1, 2, 3}),
        (185, {1, 2, 3}),
        (186, {0, 1, 2, 3}),
        (10**6, {0, 1, 2, 3}),
    ],
)
def test_the_last_layers_are_kept_within_the_limit(limit, kept):
    plan = choose(PROFILE, 100, limit, SIZE)
    assert plan.kept == kept
    assert plan.peak == peak_by_hand(kept) <= limit


def test_what_adds_nothing_to_the_peak_is_kept_though_the_limit_is_below_it():
    plan = choose(PROFILE, 100, 1, SIZE)
    assert (plan.kept, plan.peak) == ({3}, 150)


def test_smaller_batches_keep_more():
    half = Size(2, 100)
    assert choose(PROFILE, 100, 162, half).kept == {0, 1, 2, 3}
    assert choose(PROFILE, 100, 162, half).peak == peak_by_hand({0, 1, 2, 3}, 0.5)
    shorter = Size(4, 50)
    assert choose(PROFILE, 100, 162, shorter).kept == {0, 1, 2, 3}


def test_at_most_so_many():
    assert choose(PROFILE, 100, 10**6, SIZE, Count(2, 0)).kept == {2, 3}
    assert choose(PROFILE, 100, 10**6, SIZE, NOTHING).kept == set()


# The same four layers, of whose 12 bytes 5 are the results of attention
WITH_ATTENTION = Profile(MOMENTS, tuple(replace(call, attention=5) for call in PROFILE.calls), long=True)


def peak_with_attention(kept, attention):
    peaks = list(MOMENTS)
    for layer in attention | kept:
        for moment in range(layer + 1, 8 - layer):
            peaks[moment] += 12 if layer in kept else 5
    return 100 + max(peaks)


@pytest.mark.parametrize(
    "limit, attention, kept",
    [
        (150, {2, 3}, set()),  # 38 + 2 * 5 = 48 at the end of the forward pass; a third, or 7 more, would be too much
        (154, {1, 2, 3}, set()),
        (158, {0, 1, 2, 3}, set()),
        (164, {0, 1, 2, 3}, set()),
        (165, {0, 1, 2, 3}, {3}),
        (172, {0, 1, 2, 3}, {2, 3}),
        (10**6, {0, 1, 2, 3}, {0, 1, 2, 3}),
    ],
)
def test_attention_comes_first_where_rows_are_long(limit, attention, kept):
    plan = choose(WITH_ATTENTION, 100, limit, SIZE, long=True)
    assert (plan.attention, plan.kept) == (attention, kept)
    assert plan.count == (len(kept), len(attention), 0)
    assert plan.attention_only == len(attention - kept)
    assert plan.peak == peak_with_attention(kept, attention) <= limit


def test_short_rows_keep_whole_calls_alone():
    assert choose(WITH_ATTENTION, 100, 162, SIZE) == choose(PROFILE, 100, 162, SIZE)


def test_layers_without_attention_keep_whole_calls():
    calls = [replace(call, attention=3 if i % 2 else None) for i, call in enumerate(PROFILE.calls)]
    plan = choose(Profile(MOMENTS, tuple(calls), long=True), 100, 10**6, SIZE, Count(3, 4), long=True)
    assert (plan.attention, plan.kept) == ({1, 3}, {1, 2, 3})


@pytest.mark.parametrize("most", [Count(0, 2), Count(1, 2), Count(2, 1), Count(3, 0), NOTHING])
def test_at_most_so_many_of_both(most):
    """As several processes agree on them: what one of them has room for, it has room for with less of the other."""
    plan = choose(WITH_ATTENTION, 100, 10**6, SIZE, most, long=True)
    assert plan.count == most


def test_calls_without_a_backward_pass_or_of_unknown_size_are_not_chosen():
    calls = list(PROFILE.calls)
    calls[3] = replace(calls[3], last=None)
    calls[1] = replace(calls[1], extra=None)
    assert choose(Profile(MOMENTS, tuple(calls)), 100, 10**6, SIZE).kept == {0, 2}


def test_no_layer_at_all():
    plan = choose(Profile((7,), ()), 100, 10**6, SIZE)
    assert (plan.kept, plan.peak) == (set(), 107)


def test_sizes():
    long, wide = Size(1, 100), Size(8, 50)
    assert not long.covers(wide) and not Size(16, 20).covers(long)
    assert wide.covers(long), "400 tokens and 20,000 pairs are more than 100 and 10,000"
    assert Size(8, 50).share(Size(4, 50)) == 0.5
    assert Size(1, 100).share(Size(1, 50)) == 0.5, "at most: the scores of attention are a quarter"


def test_merged_profiles_cover_both():
    a, b = Size(16, 20), Size(1, 100)
    one = Profile((3, 9), (Call(a, 32, 1, 2),))
    two = Profile((5, 4), (Call(b, 20, 1, 2),))
    merged = one.merged(two)
    assert merged.moments == (5, 9)
    for size, extra in ((a, 32), (b, 20)):
        assert merged.covers(size)
        assert merged.calls[0].extra * merged.share(size) >= extra * 0.99
    other_order = Profile((1,), (Call(a, 32, 1, None),))
    assert one.merged(other_order) is other_order


def test_merging_with_a_larger_one_of_unknown_extra_scales_what_is_known():
    known, larger = Profile((1, 1), (Call(Size(1, 10), 8, 1, 2),)), Profile((2, 2), (Call(Size(4, 10), None, 1, 2),))
    assert known.merged(larger).calls[0].extra == 32


def test_merged_profiles_know_of_attention_if_one_does():
    short = Profile((3, 9), (Call(Size(16, 20), 32, 1, 2),))
    long = Profile((5, 4), (Call(Size(1, 160), 20, 1, 2, attention=6),), long=True)
    for merged in (short.merged(long), long.merged(short)):
        assert merged.long and merged.calls[0].attention == 12, "of twice as many tokens"


def test_limits():
    assert limit_of(None, 100 * GIB) == int(100 * GIB * (1 - RESERVE))
    assert 59.8 * GIB < limit_of(60, 100 * GIB) < 60 * GIB
    assert limit_of(200, 100 * GIB) == limit_of(None, 100 * GIB), "a budget gives the device no more memory"
