"""Fixtures of the tests on rows of uneven length."""

import pytest

from liger_trainer.varlen import unpad_plan


@pytest.fixture
def tokens(monkeypatch):
    """The number of tokens that each backbone got in place of a batch, call by call."""
    seen, packed = [], unpad_plan.UnpadPlan.unpad

    def counted(self, call):
        seen.append(self.rows.tokens)
        return packed(self, call)

    monkeypatch.setattr(unpad_plan.UnpadPlan, "unpad", counted)
    return seen
