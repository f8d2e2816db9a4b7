"""The lines that `tests/support/mutants.py` changes are in the package, and the tests that should notice exist."""

import pytest
from checkout import ROOT
from mutants import MUTANTS


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant[0]}: {mutant[1].strip()}")
def test_it_can_be_made(mutant):
    name, line, other, tests = mutant
    assert (ROOT / name).read_text().count(line) == 1, f"{name} has no such line: {line!r}"
    assert line != other
    for path in tests.split():
        assert (ROOT / path).exists(), path
