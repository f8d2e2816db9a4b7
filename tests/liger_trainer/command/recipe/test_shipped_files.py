"""Shipped files are listed, found by name from a shell, and copied for editing."""

import re
import shlex
from pathlib import Path

import pytest
from recipe_fixtures import command

from liger_trainer.command.recipe.read import parse_recipe, recipe_names
from liger_trainer.command.rows.load import load_rows
from liger_trainer.paths import shipped

CONFIGS = sorted(path.stem for path in shipped("configs").glob("*.yaml"))


def test_recipes_lists_names_and_descriptions(capsys):
    code, out, _ = command(capsys, "recipes")
    assert code == 0
    assert re.search(r"^quickstart +\S.*SmolLM2", out, re.M)
    assert re.search(r"^llama3_8b/sft_alpaca_lora +LoRA", out, re.M)
    recipes, configs = out.split("\n\n")
    assert len(recipes.splitlines()) == len(recipe_names())
    assert [line.split()[0] for line in configs.splitlines()] == [f"configs/{name}" for name in CONFIGS]
    assert re.search(r"^configs/fsdp2 +One machine", configs, re.M)


@pytest.mark.parametrize("name", ["configs/fsdp2", "fsdp2", "fsdp2.yaml"])
def test_path_of_a_config(name, capsys):
    code, out, _ = command(capsys, "path", name)
    assert code == 0 and out == f"{shipped('configs') / 'fsdp2.yaml'}\n"


def test_path_of_a_recipe(capsys):
    code, out, _ = command(capsys, "path", "llama3_8b/sft_alpaca")
    assert code == 0 and out == f"{shipped('recipes') / 'llama3_8b' / 'sft_alpaca.yaml'}\n"


@pytest.mark.parametrize("words", [["path", "fsdp3"], ["init", "fsdp3"]])
def test_unknown_name(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = command(capsys, *words)
    assert (code, out) == (2, "") and "Did you mean" in err and "configs/fsdp2" in err
    assert not list(tmp_path.iterdir())


def test_copied_recipe_finds_its_rows(capsys, tmp_path, monkeypatch):
    """Rows that ship with a recipe are copied too, so the copy runs in any folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    code, out, err = command(capsys, "init", "quickstart", "mine")
    assert code == 0, err
    assert Path("mine/quickstart.yaml").read_text() == (shipped("recipes") / "quickstart.yaml").read_text()
    assert out.splitlines() == [
        "mine/quickstart.yaml",
        "mine/data/alpaca_quickstart.jsonl",
        "",
        "To run it: liger-trainer train mine/quickstart.yaml",
    ]
    recipe = parse_recipe("mine/quickstart.yaml")
    rows, _ = load_rows(recipe.args, recipe.path.parent, (("prompt", "completion"),), 0)
    assert len(rows) == 256
    assert recipe.args == parse_recipe("quickstart").args


@pytest.mark.parametrize("name", recipe_names())
def test_command_for_a_copied_recipe(name, capsys, tmp_path):
    """The command names the copy, and finds the config wherever the package is installed."""
    code, out, err = command(capsys, "init", name, tmp_path)
    assert code == 0, err
    run = out.splitlines()[-1].removeprefix("To run it: ")
    copy = tmp_path / f"{name.rpartition('/')[2]}.yaml"
    assert shlex.split(run)[-2:] == ["train", str(copy)]
    assert re.match(
        r"liger-trainer |accelerate launch --config_file \$\(liger-trainer path \w+\) -m liger_trainer ", run
    )
    for config in re.findall(r"\(liger-trainer path (\w+)\)", copy.read_text()):
        assert config in CONFIGS
    assert "configs/" not in copy.read_text(), "which only a checkout has"


def test_copied_config(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = command(capsys, "init", "fsdp2")
    assert code == 0, err
    assert Path("fsdp2.yaml").read_text() == (shipped("configs") / "fsdp2.yaml").read_text()
    assert out == (
        "fsdp2.yaml\n\nTo run it: accelerate launch --config_file fsdp2.yaml -m liger_trainer train RECIPE\n"
    )


@pytest.mark.parametrize("there", ["quickstart.yaml", "data/alpaca_quickstart.jsonl"])
def test_nothing_is_overwritten(there, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(there).parent.mkdir(exist_ok=True)
    Path(there).write_text("mine\n")
    code, out, err = command(capsys, "init", "quickstart")
    assert (code, out) == (2, "") and f"{there} exists already and is not overwritten" in err
    assert Path(there).read_text() == "mine\n"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / there], "half of it is not copied"


def test_rows_that_are_there_already_stay(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command(capsys, "init", "quickstart")[0] == 0
    Path("quickstart.yaml").rename("first.yaml")
    code, _, err = command(capsys, "init", "quickstart")
    assert code == 0, err


def test_folder_that_cannot_be_made(capsys, tmp_path):
    (tmp_path / "file").touch()
    code, _, err = command(capsys, "init", "fsdp2", tmp_path / "file")
    assert code == 2 and "cannot be written" in err
    code, _, err = command(capsys, "init", "fsdp2", tmp_path / "mine.yaml")
    assert code == 2 and "expected a folder" in err and not (tmp_path / "mine.yaml").exists()


def test_a_missing_file_of_the_users_is_named_with_its_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_recipe.yaml").write_text("trainer: sft\n")
    code, _, err = command(capsys, "train", "my_recip.yaml")
    assert code == 2
    assert f"RECIPE is 'my_recip.yaml', and {tmp_path} has no such file. Did you mean my_recipe.yaml?" in err
    assert "Shipped" not in err
