"""Fixtures of the command's tests, in addition to `recipe_fixtures`."""

import pytest
from recipe_fixtures import SAVING, write_model, write_recipe, write_rows

from liger_trainer.command.main import main


@pytest.fixture(autouse=True)
def no_curves(request, monkeypatch):
    """Draw no curves after each run, which takes as long as some runs. `test_summary.py` draws them."""
    if request.path.name != "test_summary.py":
        monkeypatch.setattr("liger_trainer.command.run.saving.draw_curves", lambda history, path: False)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a tiny model and rows, for `write_recipe`."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    write_model(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl")
    return tmp_path


@pytest.fixture(scope="session")
def saved_run(tmp_path_factory):
    """The output of a run of four steps with two checkpoints, to be copied and damaged."""
    root = tmp_path_factory.mktemp("saved")
    write_model(root / "model")
    write_rows(root / "rows.jsonl")
    assert main(["train", str(write_recipe(root, **SAVING))]) == 0
    return root / "out"
