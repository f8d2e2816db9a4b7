"""Which calls have their activations on the host, on sizes that one can add up by hand."""

from dataclasses import replace

import pytest

from liger_trainer.checkpointing.choose import Carrier, choose
from liger_trainer.checkpointing.plan import NOTHING, Call, Count, Profile, Seen, Size, Spread

SIZE = Size(4, 100)
LAYERS, EXTRA, GIVEN = 12, 100, 10
# Moment 0 is before the first call, 1-12 begin with the forward passes, 13-24 with the backward passes, last to first.
# Every call leaves its hidden states, and every backward pass takes them away again and leaves a gradient of 30.
MOMENTS = tuple(
    [0] + [GIVEN * (i + 1) for i in range(LAYERS)] + [GIVEN * (LAYERS - i) + 30 * (i + 1) for i in range(LAYERS)]
)
CALLS = tuple(Call(SIZE, EXTRA, i + 1, 2 * LAYERS - i, given=GIVEN) for i in range(LAYERS))
PROFILE = Profile(MOMENTS, CALLS, seconds=LAYERS)  # a second each
FAST = Carrier(room=10**6, rate=2 * (EXTRA + GIVEN))  # half a second for the activations of a call
SLOW = Carrier(room=10**6, rate=(EXTRA + GIVEN) / 2.5)  # two and a half


def peak_by_hand(plan, left=(), stays=0):
    """Walk through the moments and add up what each call holds.

    The hidden states of calls `left` are gone in between, and `stays` bytes of each call on the host are not.
    """
    moments = list(MOMENTS)
    for i in plan.kept:
        for moment in range(i + 1, 2 * LAYERS - i):
            moments[moment] += EXTRA
    for i in plan.on_host:
        for moment in range(i + 1, 2 * LAYERS - i):
            copied = moment >= i + 2 + plan.spread.lag
            fetched = moment >= 2 * LAYERS - i - plan.spread.ahead
            gone = GIVEN if i in left else 0
            moments[moment] += EXTRA + GIVEN - gone if fetched else stays - gone if copied else EXTRA
    return max(moments)


def test_nothing_goes_to_the_host_where_all_fits():
    plan = choose(PROFILE, 0, 10**6, SIZE, carrier=FAST)
    assert len(plan.kept) == LAYERS and not plan.on_host


@pytest.mark.parametrize("carrier", [FAST, SLOW], ids=["fast", "slow"])
@pytest.mark.parametrize("limit", [370, 500, 620, 800, 1000])
def test_fewer_calls_are_computed_again_within_the_limit(limit, carrier):
    without = choose(PROFILE, 0, limit, SIZE)
    plan = choose(PROFILE, 0, limit, SIZE, carrier=carrier)
    assert plan.peak == peak_by_hand(plan) <= limit
    assert not plan.kept & plan.on_host
    assert len(plan.kept | plan.on_host) > len(without.kept)


@pytest.mark.parametrize("limit", [370, 500, 800])
def test_what_was_seen_counts(limit):
    left = range(1, LAYERS)
    seen = PROFILE.with_seen({i: Seen(i in left, stays=0) for i in range(LAYERS)}, SIZE)
    plan = choose(seen, 0, limit, SIZE, carrier=FAST)
    assert plan.peak == peak_by_hand(plan, left) <= limit
    assert len(plan.kept | plan.on_host) > len(choose(PROFILE, 0, limit, SIZE, carrier=FAST).kept)
    stays = PROFILE.with_seen({i: Seen(True, stays=20) for i in range(LAYERS)}, Size(2, 100))  # 40 of the whole size
    plan = choose(stays, 0, limit, SIZE, carrier=FAST)
    assert plan.peak == peak_by_hand(plan, range(LAYERS), 40) <= limit
    assert stays.merged(PROFILE) == stays, "a new measurement does not know more"


def test_no_more_than_it_takes():
    plan = choose(PROFILE, 0, 1000, SIZE, carrier=FAST)
    assert len(plan.kept | plan.on_host) == LAYERS
    least = len(plan.on_host)
    fewer = choose(PROFILE, 0, 1000, SIZE, Count(LAYERS, LAYERS, least - 1), carrier=FAST)
    assert len(fewer.kept | fewer.on_host) < LAYERS


def test_copies_keep_up_with_the_calls():
    """Two and a half calls pass while one is copied, so that there are at least as many from one to the next."""
    plan = choose(PROFILE, 0, 490, SIZE, carrier=SLOW)
    assert plan.spread.lag == 3 and plan.spread.ahead == 1
    places = sorted(plan.on_host)
    assert len(places) > 1
    assert all(b - a >= 2 for a, b in zip(places, places[1:], strict=False))
    assert (places[-1] - places[0]) / (len(places) - 1) >= 2.5
    assert places[-1] + 1 + plan.spread.lag < LAYERS, "there is a call that waits for the last copy"


def test_a_link_that_takes_longer_than_all_calls_carries_nothing():
    plan = choose(PROFILE, 0, 500, SIZE, carrier=Carrier(10**6, rate=(EXTRA + GIVEN) / 20))
    assert plan == choose(PROFILE, 0, 500, SIZE)


def test_nothing_is_carried_where_the_time_is_not_known():
    assert choose(replace(PROFILE, seconds=0.0), 0, 500, SIZE, carrier=FAST) == choose(PROFILE, 0, 500, SIZE)


@pytest.mark.parametrize("room, most", [(0, 0), (EXTRA, 0), (3.5 * (EXTRA + GIVEN), 3)])
def test_no_more_than_there_is_room_for(room, most):
    plan = choose(PROFILE, 0, 370, SIZE, carrier=Carrier(int(room), FAST.rate))
    assert len(plan.on_host) == most


def test_the_last_in_the_backward_pass_are_left_alone_where_gradients_leave_no_room():
    """At the end of the backward pass there is no room for what is fetched ahead, with the limit at the peak there."""
    plan = choose(PROFILE, 0, max(MOMENTS), SIZE, carrier=FAST)
    assert plan.on_host and min(plan.on_host) == plan.spread.start > 0


@pytest.mark.parametrize("most", [NOTHING, Count(2, 0, 0), Count(2, 0, 1), Count(0, 0, 3)])
def test_at_most_so_many(most):
    plan = choose(PROFILE, 0, 600, SIZE, most, carrier=FAST)
    assert len(plan.kept) <= most.whole and len(plan.on_host) <= most.on_host


def test_what_was_agreed_is_kept_whatever_it_takes():
    """Processes whose memories differ have to run the same calls in the same way."""
    agreed = Count(5, 0, 3), Spread(3, 2, 2)
    plans = [choose(PROFILE, base, limit, SIZE, agreed=agreed) for base, limit in ((0, 10**6), (500, 1))]
    assert plans[0].kept == plans[1].kept and plans[0].on_host == plans[1].on_host
    assert plans[0].count == agreed[0] and min(plans[0].on_host) == 2


def test_what_was_agreed_and_cannot_be_is_left_out_by_all():
    plan = choose(PROFILE, 0, 1, SIZE, agreed=(Count(2, 0, 9), Spread(9, 8, 3)))
    assert (len(plan.kept), plan.on_host) == (2, frozenset())


def test_calls_whose_backward_passes_come_in_another_order_stay():
    calls = [replace(call, last=2 * LAYERS - CALLS[-1 - i].first + 1) for i, call in enumerate(CALLS)]
    plan = choose(Profile(MOMENTS, tuple(calls), seconds=LAYERS), 0, 500, SIZE, carrier=FAST)
    assert not plan.on_host


def test_smaller_batches_take_less_of_the_host():
    room = 3 * (EXTRA + GIVEN)
    assert len(choose(PROFILE, 0, 370, SIZE, carrier=Carrier(room, FAST.rate)).on_host) == 2
    assert len(choose(PROFILE, 0, 370, Size(2, 100), carrier=Carrier(room, FAST.rate)).on_host) >= 4


def test_attention_beside():
    calls = tuple(replace(call, attention=20) for call in CALLS)
    profile = Profile(MOMENTS, calls, long=True, seconds=LAYERS)
    plan = choose(profile, 0, 450, SIZE, long=True, carrier=FAST)
    assert plan.on_host and not plan.attention & plan.on_host
    assert plan.attention
