"""Without Axolotl nothing breaks until it is used, and then the error says what to install."""

import importlib
import sys

import pytest


@pytest.fixture
def missing(monkeypatch):
    for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "liger_trainer.integrations.axolotl", raising=False)


def test_axolotl(missing):
    with pytest.raises(ImportError, match="plugin of Axolotl.*pip install axolotl"):
        importlib.import_module("liger_trainer.integrations.axolotl")
