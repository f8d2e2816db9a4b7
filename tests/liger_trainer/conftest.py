"""The trainer tests run with no hub, no GPU and one thread."""

import pytest
from cpu_only import pytest_collection_finish  # noqa: F401
from diagonal import pytest_collection_modifyitems  # noqa: F401

from liger_trainer.lora import layers as lora


@pytest.fixture(autouse=True)
def lora_of_few_tokens(monkeypatch):
    """Tests have few tokens. Where that matters to users, a test sets it back."""
    monkeypatch.setattr(lora, "LEAST_WORK", 0)
