"""A recipe that trains a reward model: its rows, what it saves, and the tools that refuse it."""

import json

import torch
from recipe_fixtures import command, write_model, write_recipe
from transformers import AutoModelForSequenceClassification


def recipe_of_pairs(folder, **keys):
    write_model(folder / "model")
    rows = [
        {"prompt": f"w{3 + i} w4 w5 ", "chosen": f"w{6 + i} w{40 + i} w8", "rejected": f"w{9 + i}"} for i in range(8)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return write_recipe(folder, trainer="reward", prompt_template=None, max_steps=2, **keys)


def test_a_recipe_trains_and_saves_a_head_of_one_number(tmp_path, capsys):
    code, out, err = command(capsys, "train", recipe_of_pairs(tmp_path))
    assert code == 0, err
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert model.score.weight.shape[0] == 1 and torch.isfinite(model.score.weight).all()
    report = json.loads((tmp_path / "out" / "liger_report.json").read_text())
    assert "pools one token of each row" in str(report["operations"]["varlen_attention"])


def test_verify_names_the_trainer_that_it_does_not_know(tmp_path, capsys):
    code, _, err = command(capsys, "verify", recipe_of_pairs(tmp_path))
    assert code == 2
    assert "trainer is 'reward', but verify cannot build its models" in err
