"""`liger-trainer compare`: the stock trainer and ours on a recipe's first steps."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from matplotlib.colors import to_hex
from recipe_fixtures import ROOT, SAVING, command, write_recipe
from varlen_batches import capture_on_cpu

from liger_trainer.command.run.pictures import draw_comparison
from liger_trainer.command.tools import compare

OURS = "#d55e00"  # in benchmarks/figures.py
RECIPES = {
    "sft": {},
    "lora": {
        "use_peft": True,
        "lora_r": 4,
        "lora_target_modules": ["q_proj"],
        "lora_dropout": 0.0,
        "activation_checkpointing": "auto",
        "gradient_checkpointing": None,
    },
    "dpo": {"trainer": "dpo", "dataset_name": "pairs.jsonl", "prompt_template": None},
    "orpo": {"trainer": "orpo", "dataset_name": "pairs.jsonl", "prompt_template": None},
    "named template": {"chat_template_path": "mistral", "dataset_name": "turns.jsonl", "prompt_template": None},
}


def arm(capsys, path, name, *words):
    """Return the result of one arm, run in this process."""
    found = path.parent / "arm.json"
    code, _, err = command(capsys, "compare", path, "--arm", name, "--json", found, *words)
    assert code == 0, err
    return json.loads(found.read_text())


@pytest.mark.parametrize("keys", RECIPES.values(), ids=RECIPES)
def test_both_train_the_same_steps(keys, folder, capsys):
    """Learning rates follow the whole recipe, although only its first steps run."""
    (folder / "pairs.jsonl").write_text('{"prompt": "w3 w4 ", "chosen": "w5", "rejected": "w6"}\n' * 12)
    turns = [{"role": "user", "content": "w3 w4"}, {"role": "assistant", "content": "w5"}]
    (folder / "turns.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 12)
    path = write_recipe(folder, **keys)
    stock, ours = (arm(capsys, path, name, "--steps", "3") for name in ("stock", "ours"))
    assert "error" not in stock | ours, (stock, ours)
    assert stock["steps"] == ours["steps"] == len(ours["losses"]) == 3 and ours["untimed"] == 1
    assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-4)
    assert ours["peak_gib"] > 0.1 and ours["step_s"] > 0
    counted = "orpo" not in keys.values()
    assert (ours["tokens_per_s"] is not None) == (stock["tokens_per_s"] is not None) == counted
    whole = arm(capsys, path, "ours", "--steps", "9")
    assert whole["steps"] == 4, "all that the recipe has"
    assert whole["losses"][:3] == pytest.approx(ours["losses"], rel=1e-6)


def test_the_stock_arm_runs_the_stock_class(folder, capsys, monkeypatch):
    from trl import SFTConfig, SFTTrainer

    seen = []
    train = SFTTrainer.train
    monkeypatch.setattr(SFTTrainer, "train", lambda self: (seen.append((type(self), type(self.args))), train(self)))
    path = write_recipe(folder, optimizer_in_backward=True, max_grad_norm=0, bf16=False)
    assert arm(capsys, path, "stock")["left_out"] == ["optimizer_in_backward"]
    assert seen == [(SFTTrainer, SFTConfig)]


def test_the_table(folder, capsys, monkeypatch):
    """Runs an arm in its own process and writes a JSON and a chart; output_dir stays empty in any case."""
    # One arm is enough: a process takes 15 s to start
    apart = {
        "stock": compare._run_arm,
        "ours": compare._run_in_subprocess,
    }
    monkeypatch.setattr(
        compare, "_run_in_subprocess", lambda recipe, words, arm, steps: apart[arm](recipe, words, arm, steps)
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "kernels")]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    path = write_recipe(
        folder,
        **SAVING,
        eval_fraction=0.2,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        early_stopping_patience=2,
        metric_for_best_model="loss",
    )
    files = {"--json": folder / "found.json", "--chart": folder / "chart.png"}
    code, out, err = command(
        capsys, "compare", path, "--steps", "4", *[word for pair in files.items() for word in pair]
    )
    assert code == 0, err
    assert "4 steps, the first 1 not timed" in out and "differs" not in out and "failed" not in out
    named = [line.split()[:2] for line in out.splitlines() if line.startswith(("stock", "ours"))]
    assert [first for first, second in named if second != "captured"] == ["stock", "ours"]
    found = json.loads(files["--json"].read_text())
    assert len(found["arms"][1]["losses"]) == 4 and found["hardware"].startswith("CPU")
    assert files["--chart"].stat().st_size > 5000
    assert f"Wrote the figures to {files['--json']}.\nWrote the chart to {files['--chart']}.\n" in out
    assert not (folder / "out").exists()


def arms_of(monkeypatch, **found):
    monkeypatch.setattr(
        "liger_trainer.command.tools.compare._run_in_subprocess", lambda recipe, words, name, steps: found[name]
    )


RAN = {
    "steps": 4,
    "untimed": 1,
    "step_s": 0.5,
    "tokens_per_s": 100.0,
    "peak_gib": 1.0,
    "in_16_bits": True,
    "left_out": [],
    "losses": [2.0, 1.9],
}


def test_an_arm_that_fails_is_a_row(folder, capsys, monkeypatch):
    arms_of(monkeypatch, stock={"error": "OutOfMemoryError: CUDA out of memory."}, ours=RAN)
    code, out, _ = command(capsys, "compare", write_recipe(folder), "--chart", folder / "chart.png")
    assert code == 0 and "stock          failed: OutOfMemoryError" in out and "\nours  " in out
    assert out.endswith(f"Wrote the chart to {folder / 'chart.png'}.\n")
    arms_of(monkeypatch, stock={"error": "no rows"}, ours={"error": "no rows"})
    code, out, err = command(capsys, "compare", write_recipe(folder))
    assert code == 2 and err.endswith("error: no rows\n"), "the recipe's own mistake, said once"
    arms_of(monkeypatch, stock={"error": "No stock."}, ours={"error": "No rows."})
    assert command(capsys, "compare", write_recipe(folder))[2].endswith("error: No stock. No rows.\n")


@pytest.mark.parametrize("losses, said", [([2.01, 1.95], False), ([2.03, 1.9], True), ([2.0, 2.1], True)])
def test_losses_that_differ_are_named(losses, said, folder, capsys, monkeypatch):
    arms_of(monkeypatch, stock=RAN, ours=RAN | {"losses": losses})
    out = command(capsys, "compare", write_recipe(folder))[1]
    assert ("ours differs by more than rounding: loss" in out) == said


def test_captured_steps_are_named(folder, capsys, monkeypatch):
    """They are named both with and without captures among the timed steps."""
    path = write_recipe(folder, model_init_kwargs={"attn_implementation": "sdpa"}, cuda_graphs="auto")
    stock, uncaptured = arm(capsys, path, "stock"), arm(capsys, path, "ours")
    assert stock["captured"] is None and stock["left_out"] == ["cuda_graphs"]
    arms_of(monkeypatch, stock=stock, ours=uncaptured)
    out = command(capsys, "compare", path)[1]
    assert "ours captured (cuda_graphs): nothing, because it trains on cpu, and CUDA graphs need a CUDA GPU.\n" in out
    assert "timed steps include the captures" not in out
    capture_on_cpu(monkeypatch)
    captured = arm(capsys, path, "ours")
    assert captured["captured"]["calls_replayed"] > 0
    assert captured["losses"] == pytest.approx(uncaptured["losses"], rel=1e-5)
    arms_of(monkeypatch, stock=stock, ours=captured)
    out = command(capsys, "compare", path)[1]
    assert "\nours captured (cuda_graphs): " in out and "timed steps include the captures" in out


def test_a_loss_that_is_nan_is_named(folder, capsys, monkeypatch):
    """transformers would log 0 instead, in all arms."""
    path = write_recipe(folder, adam_epsilon=0.0)
    found = arm(capsys, path, "stock")
    arms_of(monkeypatch, stock=found, ours=found)
    out = command(capsys, "compare", path)[1]
    assert "stock has the loss nan at step 2.\n" in out and "ours has the loss nan at step 2.\n" in out


def test_an_arm_has_the_color_that_it_has_in_the_docs(monkeypatch):
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: drawn.append(figure))
    for names in (["stock", "stock + Liger", "ours"], ["ours"]):
        draw_comparison([RAN | {"arm": name} for name in names], "here", "chart.png")
    assert len(drawn) == 2
    for figure in drawn:
        assert to_hex(figure.axes[0].patches[-1].get_facecolor()) == OURS
        assert figure.axes[2].lines[-1].get_color() == OURS


@pytest.mark.parametrize(
    "trainer, name", [("medusa", "Medusa heads"), ("eagle", "EAGLE-3 drafters"), ("mtp", "MTP heads")]
)
def test_heads_have_no_stock_trainer(trainer, name, folder, capsys):
    path = write_recipe(folder, trainer=trainer)
    assert arm(capsys, path, "stock") == {"error": f"No stock trainer trains {name}."}


@pytest.mark.skipif(torch.accelerator.is_available(), reason="liger-kernel runs here")
def test_liger_kernel_needs_a_gpu(folder, capsys):
    said = {"error": "liger-kernel only has kernels for GPUs."}
    assert arm(capsys, write_recipe(folder), "stock + Liger") == said


@pytest.mark.parametrize("words", [("--steps", "0"), ("--steps", "1"), ("--json",), ("--chart",), ("--max_stepz", "3")])
def test_mistakes(words, folder, capsys):
    code, _, err = command(capsys, "compare", write_recipe(folder), *words)
    assert code == 2 and words[0] in err


@pytest.mark.parametrize(
    "option, file", [("--chart", "nodir/x.png"), ("--json", "nodir/x.json"), ("--chart", "x.txt"), ("--json", "model")]
)
def test_a_file_that_cannot_be_written_is_refused_before_training(option, file, folder, capsys):
    code, _, err = command(capsys, "compare", write_recipe(folder), option, folder / file)
    other = {"x.txt": "expected a file ending in", "model": "a folder; expected a file"}
    said = other.get(file, f"the folder {folder / 'nodir'} does not exist. Make it.")
    assert code == 2 and said in err and "training" not in err


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_sigterm_ends_the_process_of_the_arm_too(folder):
    path = str(write_recipe(folder, max_steps=100000))
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    begin = f"from liger_trainer.command.tools import compare; compare._run_in_subprocess({path!r}, [], 'ours', 100000)"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([sys.executable, "-c", begin], env=env, **quiet)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.time() + 120
    while not children.read_text() and time.time() < deadline:
        time.sleep(0.05)
    arm = Path("/proc", children.read_text().strip())
    assert arm.name.isdecimal() and arm.exists()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143 and not arm.exists()


def test_sigterm_at_the_start_of_an_arm_ends_it_too(monkeypatch):
    """The signal arrives when the arm's process exists and its parent has no handle for it yet."""
    started = []

    class Signalled(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(subprocess, "Popen", Signalled)
    try:
        with pytest.raises(SystemExit) as ended:
            compare._run_in_subprocess("quickstart", [], "ours", 2)
        assert ended.value.code == 143
        assert started[0].returncode is not None, "the arm was left running"
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        started[0].kill()
        started[0].wait()
