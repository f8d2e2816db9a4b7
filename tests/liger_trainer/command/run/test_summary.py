"""The end of a run: its summary and its model's card."""

import json
import re

import pytest
from PIL import Image
from recipe_fixtures import SAVING, command, write_recipe
from varlen_batches import capture_on_cpu

from liger_trainer.command.recipe.read import parse_recipe
from liger_trainer.command.run import manifest
from liger_trainer.command.run.manifest import checkpoints_in
from liger_trainer.command.run.pictures import CURVES, draw_curves
from liger_trainer.data.formats import alpaca_row

TRAINED = {
    "sft": ({}, "nll", "loss"),
    "dpo": ({"trainer": "dpo", "dataset_name": "pairs.jsonl", "prompt_template": None}, "sigmoid", "margin"),
    "grpo": (
        {
            "trainer": "grpo",
            "dataset_name": "prompts.jsonl",
            "prompt_template": None,
            "reward_funcs": ["mine.length"],
            "max_completion_length": 4,
            "num_generations": 2,
            "max_length": None,
        },
        "dapo",
        "reward",
    ),
}


@pytest.mark.parametrize("keys, loss, line", TRAINED.values(), ids=TRAINED)
def test_what_a_run_has_learned(keys, loss, line, folder, capsys):
    """It gives the first and last loss, margin or reward, the time, and the epochs: 4 steps of 2 out of 12 rows."""
    (folder / "pairs.jsonl").write_text('{"prompt": "w3 w4 ", "chosen": "w5", "rejected": "w6"}\n' * 12)
    (folder / "prompts.jsonl").write_text('{"prompt": "w3 w4 "}\n' * 12)
    (folder / "mine.py").write_text("def length(completions, **kwargs):\n    return [2.0 for _ in completions]\n")
    code, out, err = command(capsys, "train", write_recipe(folder, **keys))
    assert code == 0, err
    epochs = "0.33" if line == "reward" else "0.67"
    assert re.search(rf"^  time     \d+:\d\d:\d\d for {epochs} epochs of these rows$", out, re.M), out
    history = json.loads((folder / "out" / "trainer_state.json").read_text())["log_history"]
    key = {"margin": "rewards/margins"}.get(line, line)
    logged = [entry[key] for entry in history if key in entry]
    assert f"\n  {line:8} {logged[0]:.3f} -> {logged[-1]:.3f}\n" in out, out
    card = (folder / "out" / "README.md").read_text()
    assert "fine-tuned version of `model`." in card and "None" not in card
    assert "Quick start" not in card, "it would ask with a chat template, and the model has none"
    assert re.search(rf"^- Loss: {loss}, 4 steps, from [\d.e-]+ to [\d.e-]+$", card, re.M), card
    assert re.search(rf"^- Data: `{keys.get('dataset_name', 'rows.jsonl')}` \(12 rows, crc32 ", card, re.M)
    assert re.search(r"^- liger_trainer \d", card, re.M) and "huggingface.co/datasets" not in card
    assert re.search(r"^- Hardware: .+, [\d,]+ tokens/s$", card, re.M), card
    assert "\nliger-trainer train recipe.yaml\n" in card and "\nmodel_name_or_path: model\n" in card
    assert f"]({CURVES})" in card and Image.open(folder / "out" / CURVES).width > 700
    assert str(folder) not in card.replace(f'model="{folder}', "")


def test_the_best_evaluation_is_in_summary_and_card(folder, capsys):
    keys = {"eval_fraction": 0.25, "eval_strategy": "steps", "eval_steps": 1, "learning_rate": 0.5}
    code, out, err = command(capsys, "train", write_recipe(folder, **keys))
    assert code == 0, err
    history = json.loads((folder / "out" / "trainer_state.json").read_text())["log_history"]
    losses = {entry["step"]: entry["eval_loss"] for entry in history if "eval_loss" in entry}
    step = min(losses, key=losses.get)
    best = f"best {losses[step]:.3f} at step {step}"
    assert f"\n  eval     loss {losses[1]:.3f} -> {losses[4]:.3f}, {best}\n" in out, out
    assert re.search(rf"^- Loss of the evaluation: from .*, {best}; the last is saved$", card_of(folder), re.M)


def card_of(folder):
    return (folder / "out" / "README.md").read_text()


def test_prompts_are_answered_in_the_form_of_the_rows(folder, capsys):
    code, _, err = command(capsys, "train", write_recipe(folder, sample_prompts=["w3 w4"], sample_steps=2))
    assert code == 0, err
    lines = [json.loads(line) for line in (folder / "out" / "samples.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 2, 4]
    assert lines[0]["prompt"] == alpaca_row({"instruction": "w3 w4", "output": ""})["prompt"]


def test_a_run_that_ends_in_nan_says_so(folder, capsys):
    """transformers then logs losses of 0."""
    code, out, err = command(capsys, "train", write_recipe(folder, adam_epsilon=0.0, weight_decay=0.0))
    assert code == 0, err
    assert "\n  warning  the last gradient norm is NaN" in out
    assert "warning" not in command(capsys, "train", write_recipe(folder, output_dir=str(folder / "other")))[1]


def test_captured_steps(folder, capsys, monkeypatch):
    def captured(**keys):
        code, out, err = command(capsys, "train", write_recipe(folder, output_dir=str(folder / f"{len(keys)}"), **keys))
        assert code == 0, err
        return [line for line in out.splitlines() if line.startswith("  captured ")]

    assert captured() == ["  captured nothing, because it trains on cpu, and CUDA graphs need a CUDA GPU"]
    assert captured(cuda_graphs=False) == []
    capture_on_cpu(monkeypatch)
    (line,) = captured(cuda_graphs=True, model_init_kwargs={"attn_implementation": "sdpa"})
    assert re.match(r"  captured \d of 4 calls of the backbone replayed, \d captures in 0\.\d s\. Not captured: ", line)
    code, _, err = command(capsys, "train", write_recipe(folder, cuda_graphs="sometimes"))
    assert code == 2 and "cuda_graphs is 'sometimes'; expected auto, true or false" in err


def test_completions_that_no_function_judges(folder, capsys):
    """TRL logs None as the reward of such a step."""
    (folder / "prompts.jsonl").write_text('{"prompt": "w3 w4 "}\n' * 12)
    (folder / "silent.py").write_text(
        "calls = []\n\ndef at_times(completions, **kwargs):\n    calls.append(1)\n"
        "    return [len(calls) / 2 if len(calls) % 2 == 0 else None for _ in completions]\n"
    )
    keys = TRAINED["grpo"][0] | {"reward_funcs": ["silent.at_times"], "logging_steps": 1}
    code, out, err = command(capsys, "train", write_recipe(folder, **keys))
    assert code == 0, err
    assert re.search(r"^  reward   [\d.]+ -> [\d.]+$", out, re.M), out
    assert (folder / "out" / CURVES).exists()


def test_steps_of_a_short_run_are_whole(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: drawn.append(figure))
    assert draw_curves([{"step": step, "loss": 1 / step} for step in (1, 2, 3, 4)], tmp_path / CURVES)
    (axis,) = drawn[0].axes
    assert len(axis.get_xticks()) > 2 and all(tick == int(tick) for tick in axis.get_xticks())


def test_a_picture_that_fails_costs_no_model(folder, capsys, monkeypatch):
    def fail(*args, **kwargs):
        raise ImportError("a broken matplotlib")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    assert command(capsys, "train", write_recipe(folder))[0] == 0
    assert (folder / "out" / "model.safetensors").exists() and CURVES not in (folder / "out" / "README.md").read_text()


def test_a_card_has_no_token_and_no_folders_of_the_machine(folder):
    path = write_recipe(
        folder, hub_token="hf_secretsecret", activation_checkpointing=False, gradient_checkpointing=None
    )
    card = parse_recipe(str(path), ["--output_dir=/home/me/new", "--run_name", "https://a/b"]).to_card()
    assert "secret" not in card and str(folder) not in card and "/home" not in card
    assert "train recipe.yaml --output_dir=new --run_name https://a/b\n" in card
    assert "\nactivation_checkpointing: false\n" in card, "as the recipe has it, not as a text"


def test_a_checkpoint_of_a_run_that_is_cut_off_has_a_card(folder, capsys, monkeypatch):
    def fail(self, *args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("transformers.Trainer.save_state", fail)
    assert command(capsys, "train", write_recipe(folder, **SAVING))[0] == 130
    assert "- liger_trainer " in (folder / "out" / "README.md").read_text()


def test_an_error_in_a_card_costs_no_checkpoint(folder, capsys, caplog, monkeypatch):
    """While TRL writes a card, which comes before saving, it asks trackers for addresses."""

    def fail():
        raise ModuleNotFoundError("No module named 'gradio_client'")

    monkeypatch.setattr("trl.trainer.base_trainer.get_trackio_space_url", fail)
    monkeypatch.setattr("liger_trainer.command.run.saving.draw_curves", lambda *a: fail())
    code, out, err = command(capsys, "train", write_recipe(folder, **SAVING))
    assert code == 0, err
    assert (folder / "out" / "model.safetensors").is_file()
    checkpoints = checkpoints_in(folder / "out")
    assert checkpoints and all(manifest.read(path) is not None for path in checkpoints)
    assert not (folder / "out" / "README.md").exists()
    assert "gradio_client" in err + caplog.text and "without it" in err + caplog.text
