"""What the tests of rows of uneven length share."""

import pytest

from liger_trainer.varlen import padding


@pytest.fixture
def tokens(monkeypatch):
    """How many tokens each backbone was given in place of a batch, call by call."""
    seen, packed = [], padding.Plan.packed

    def counted(self, call):
        seen.append(self.rows.tokens)
        return packed(self, call)

    monkeypatch.setattr(padding.Plan, "packed", counted)
    return seen
