"""Fixtures of several files: fp8 for models with adapters, without a GPU."""

import importlib.util

import pytest
from frozen_bases import fresh_state

from liger_trainer.fp8 import feature as fp8_fields


@pytest.fixture
def fresh_accelerator():
    """accelerate keeps the precision of the first trainer of a process."""
    fresh_state()
    yield
    fresh_state()


@pytest.fixture
def no_torchao(monkeypatch):
    """torchao counts as not installed."""
    own = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "torchao" else own(name, *rest)
    )


@pytest.fixture
def any_device(monkeypatch):
    """A CPU, which computes products of eight bits in fp32, counts as a GPU that has them."""
    monkeypatch.setattr(fp8_fields, "fault_of_device", lambda device: None)
