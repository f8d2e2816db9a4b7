"""The scripts of `benchmarks/` import each other by plain names, as they do where they run."""

import sys

import pytest
from checkout import ROOT

BENCHMARKS = str(ROOT / "benchmarks")


@pytest.fixture(autouse=True)
def benchmarks_on_path(monkeypatch):
    """Imported into a test module: each of its tests may import the scripts, and leaves none behind."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield
    for name in [
        name for name, module in sys.modules.items() if (getattr(module, "__file__", "") or "").startswith(BENCHMARKS)
    ]:
        del sys.modules[name]
