"""Try deploy/ with its engines' tools on CPUs. `make test-deploy` installs them."""

import pytest
from cpu_only import pytest_collection_finish  # noqa: F401
from recipe_fixtures import write_model, write_rows


@pytest.fixture
def folder(tmp_path):
    """A folder with a tiny model and rows, for `write_recipe`."""
    write_model(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", 20)
    return tmp_path
