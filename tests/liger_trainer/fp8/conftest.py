"""Fixtures of several files: fp8 for models with adapters, without a GPU."""

import importlib.util

import pytest
from frozen_bases import fresh_state

from liger_trainer.fp8 import feature as fp8_fields


@pytest.fixture
def fresh_accelerator():
    """Forget the precision of the process's first trainer, which accelerate keeps."""
    fresh_state()
    yield
    fresh_state()


@pytest.fixture
def no_torchao(monkeypatch):
    """Pretend that torchao is not installed."""
    own = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "torchao" else own(name, *rest)
    )


@pytest.fixture
def any_device(monkeypatch):
    """Pretend that a CPU is a GPU with FP8 matmuls. It computes them in fp32."""
    monkeypatch.setattr(fp8_fields, "fault_of_device", lambda device: None)
