"""The largest number that fits, found with few tries: what a step needs grows nearly in proportion."""

from collections.abc import Callable

TRIES = 10


def largest(
    need: Callable[[int], int], limit: int, known: dict[int, int], guess: int, unit: int = 1, top: int | None = None
) -> int:
    """The largest multiple of `unit` of which `need` is at most `limit`; 0 if there is none.

    It may be less than that by 2 %: no more tries are made for the rest.

    Args:
        need (`Callable`): Grows with its number.
        limit (`int`): What it may be at most.
        known (`dict`): What it is for numbers that have been tried.
        guess (`int`): The number to try first.
        unit (`int`): Only its multiples are tried.
        top (`int`, *optional*): No larger number is tried.
    """
    known = dict(known)
    most = None if top is None else top // unit * unit
    number = max(unit, guess // unit * unit)
    for _ in range(TRIES):
        number = number if most is None else min(number, most)
        if number not in known:
            known[number] = need(number)
        fits = max((n for n in known if known[n] <= limit), default=0)
        fails = min((n for n in known if known[n] > limit), default=None)
        if most is not None and fits >= most or fails is not None and fails - fits <= max(unit, fits // 50):
            break
        number = _next(known, limit, fits, fails, unit)
        if fits and number - fits <= fits // 50:
            break
    return fits // unit * unit


def _next(known: dict[int, int], limit: int, fits: int, fails: int | None, unit: int) -> int:
    """Where the line through two of the tries meets the limit, between the one that fits and the one that does not."""
    tried = sorted(known)
    a, b = tried[-2:] if len(tried) > 1 else (0, tried[0])
    low = known.get(a, 0)
    slope = (known[b] - low) / (b - a)
    met = int(a + (limit - low) / slope) // unit * unit if slope > 0 else 2 * b
    above = min(met, 16 * max(fits, unit)) if fails is None else min(met, (fails - 1) // unit * unit)
    return max(above, fits // unit * unit + unit)
