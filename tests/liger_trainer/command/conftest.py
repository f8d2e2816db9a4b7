"""What the tests of the command share beside `recipe_fixtures`."""

import pytest
from recipe_fixtures import write_model, write_rows


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a tiny model and rows, for `write_recipe`."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    write_model(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl")
    return tmp_path
