import random

import pytest

from liger_trainer.fitting.fit_report import TRIES, largest


@pytest.mark.parametrize("seed", range(200))
def test_the_largest_that_fits_or_a_little_less(seed):
    draw = random.Random(seed)
    base = draw.randint(0, 80)
    slope = draw.uniform(0.1, 9)
    jump = draw.choice([0, 0, 2])
    first = draw.randint(1, 16)
    tries = []

    def need(n):
        tries.append(n)
        return base + slope * n + jump * (n // 3)

    got = largest(need, 75, {first: need(first)}, 1, 1000)
    best = max(n for n in range(1000) if n == 0 or need(n) <= 75)
    assert best - max(1, best // 40) <= got <= best
    assert len(tries) - 1000 <= TRIES


def test_only_multiples_of_the_unit_are_tried():
    tries = []

    def need(n):
        tries.append(n)
        return n

    assert largest(need, 5000, {1000: 1000}, 128, 10**6) == 4992
    assert all(n % 128 == 0 for n in tries)


@pytest.mark.parametrize("top", [700, 1000, 4095])
def test_nothing_above_the_top_is_tried(top):
    tries = []

    def need(n):
        tries.append(n)
        return n

    assert largest(need, 5000, {100: 100}, 128, top) == top // 128 * 128
    assert max(tries) <= top
