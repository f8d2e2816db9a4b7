"""Fixtures of the tests on rows of uneven length."""

import pytest

from liger_trainer.varlen import padding


@pytest.fixture
def tokens(monkeypatch):
    """The number of tokens that each backbone got in place of a batch, call by call."""
    seen, packed = [], padding.Plan.packed

    def counted(self, call):
        seen.append(self.rows.tokens)
        return packed(self, call)

    monkeypatch.setattr(padding.Plan, "packed", counted)
    return seen
