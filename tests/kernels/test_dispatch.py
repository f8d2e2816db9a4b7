"""Which calls the kernels take, and what it costs the host to know."""

import sys

import pytest
import torch

from liger_triton import _dispatch
from liger_triton.sizes import sizes_only


@pytest.fixture
def no_interpreter(monkeypatch):
    monkeypatch.setattr(_dispatch, "INTERPRET", False)


def calls_of(function, *args):
    """Return what `function` returns, and the names of the Python functions that ran."""
    called = []

    def note(frame, event, _):
        if event == "call":
            called.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        result = function(*args)
    finally:
        sys.setprofile(None)
    return result, called


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_tensor_on_the_cpu_goes_to_the_twin_in_one_step(no_interpreter, dtype):
    x = torch.randn(2, 3, dtype=dtype)
    runs, called = calls_of(_dispatch.runs_triton, x, None, x)
    assert not runs
    assert called == ["runs_triton"]


def test_a_tensor_on_the_cpu_counts_as_one_on_a_gpu_where_only_sizes_are_asked(no_interpreter):
    x = torch.randn(2, 3)
    with sizes_only():
        assert _dispatch.runs_triton(x, x)
        assert _dispatch.use_triton(x)
        assert not _dispatch.runs_triton(x.double())
    assert not _dispatch.runs_triton(x, x)


def test_the_interpreter_runs_kernels_on_the_cpu(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(_dispatch, "INTERPRET", True)
    x = torch.randn(2, 3)
    assert _dispatch.runs_triton(x, None)
    assert not _dispatch.runs_triton(x, x.double())
    assert not _dispatch.runs_triton(x[:0])
