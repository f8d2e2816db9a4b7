"""The marker `diagonal`: of a product of parameters, `make test` runs cases that have each value of each parameter.

The other cases are marked slow, so `-m ""` runs them too.
"""

import math

import pytest


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked slow
def pytest_collection_modifyitems(items):
    of_test = {}
    for item in items:
        if item.get_closest_marker("diagonal") and not item.get_closest_marker("slow"):
            of_test.setdefault((item.path, item.originalname), []).append(item)
    for cases in of_test.values():
        for item in cases_off_the_diagonal(cases):
            item.add_marker(pytest.mark.slow)


def cases_off_the_diagonal(cases):
    """Return the cases whose ranks in all parameters do not sum to a multiple of the smallest number of values.

    A rank is the place of a value among those of its parameter. Parameters of one decorator count as one. Returns none
    where cases of the product are missing, as in a run of cases that were named.
    """
    axes = [mark_names(mark) for mark in cases[0].iter_markers("parametrize")]
    values = [[repr([case.callspec.params[name] for name in names]) for case in cases] for names in axes]
    ranks = [{value: rank for rank, value in enumerate(dict.fromkeys(found))} for found in values]
    several = [len(found) for found in ranks if len(found) > 1]
    if len(several) < 2 or math.prod(several) != len(cases):
        return []
    sums = [sum(found[value] for found, value in zip(ranks, case, strict=True)) for case in zip(*values, strict=True)]
    return [case for case, total in zip(cases, sums, strict=True) if total % min(several)]


def mark_names(mark):
    names = mark.args[0] if mark.args else mark.kwargs["argnames"]
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else names
