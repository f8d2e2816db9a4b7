"""Of a product of parameters, the diagonal has each value of each parameter."""

import types

import pytest
from diagonal import cases_off_the_diagonal


def cases_of(rows, columns):
    marks = [pytest.mark.parametrize("row", rows).mark, pytest.mark.parametrize("column, width", columns).mark]
    cases = []
    for row in rows:
        for column, width in columns:
            params = {"row": row, "column": column, "width": width}
            callspec = types.SimpleNamespace(params=params)
            cases.append(types.SimpleNamespace(callspec=callspec, iter_markers=lambda name: iter(marks)))
    return cases


@pytest.mark.parametrize(("rows", "columns"), [(2, 7), (5, 9), (3, 3), (4, 2)])
def test_each_value_is_left(rows, columns):
    cases = cases_of(list(range(rows)), [(column, 0) for column in range(columns)])
    off = cases_off_the_diagonal(cases)
    left = [case.callspec.params for case in cases if case not in off]
    assert {params["row"] for params in left} == set(range(rows))
    assert {params["column"] for params in left} == set(range(columns))
    assert len(left) < len(cases)


def test_cases_that_were_named_all_run():
    cases = cases_of([0, 1, 2], [(0, 0), (1, 0)])
    assert cases_off_the_diagonal(cases[:1]) == [] == cases_off_the_diagonal(cases[:5])
