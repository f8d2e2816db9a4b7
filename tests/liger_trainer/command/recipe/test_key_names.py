"""`train --help` lists all keys without importing the configs, and lists exactly their keys."""

import os
import subprocess
import sys

import pytest
from recipe_fixtures import ROOT, command

from liger_trainer.command.recipe import key_names
from liger_trainer.command.recipe.key_names import TOPICS, names_by_topic
from liger_trainer.command.recipe.parser import build_parser
from liger_trainer.command.recipe.trainers import TRAINERS


@pytest.mark.parametrize("name", TRAINERS)
def test_names_equal_the_configs_fields(name):
    keys = build_parser(TRAINERS[name], "usage")[1]
    want = {topic: [key for key, of in keys.items() if of.topic == topic] for topic in TOPICS}
    assert names_by_topic(TRAINERS[name]) == want


def test_help_imports_no_torch():
    code = (
        "import sys\nfrom liger_trainer.command.main import main\n"
        "try:\n    main(['train', 'quickstart', '--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "print(*sys.modules)"
    )
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths}
    )
    assert done.returncode == 0, done.stderr
    *text, loaded = done.stdout.splitlines()
    assert any(line.startswith("training: steps, optimizer") for line in text)
    assert "learning_rate" in done.stdout
    assert not {"torch", "transformers", "trl", "datasets"} & set(loaded.split())
    assert "loading" not in done.stderr


def test_a_class_that_is_not_found_is_imported(monkeypatch, capsys):
    code, want, _ = command(capsys, "train", "quickstart", "--help")
    assert code == 0
    monkeypatch.setitem(key_names._FILES, "trl", ("nothing_config.py",))
    assert names_by_topic(TRAINERS["sft"]) is None
    code, got, _ = command(capsys, "train", "quickstart", "--help")
    assert code == 0 and got == want
