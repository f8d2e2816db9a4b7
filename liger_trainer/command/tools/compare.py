"""`liger-trainer compare RECIPE` trains the first steps of a recipe with the stock trainer and with ours.

Each arm runs in its own process, because peak memory, compiled kernels and Liger's patches belong to a whole process.
"""

import argparse
import dataclasses
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from liger_trainer.command.options import add_recipe_command, parse_positive, take_options
from liger_trainer.command.processes import Heartbeat, launched_processes
from liger_trainer.command.recipe.accelerate_file import preserve_environment
from liger_trainer.command.recipe.read import Recipe, parse_recipe, read_recipe
from liger_trainer.errors import RecipeError

if TYPE_CHECKING:
    from transformers import TrainingArguments

_USAGE = "liger-trainer compare RECIPE [--steps N] [--json FILE] [--chart FILE] [--key value ...]"
_STOCK = "stock"
_LIGER = "stock + Liger"
_OURS = "ours"
_ALONE = {  # switches off everything that a run does besides training, and logs each step
    "save_strategy": "no",
    "eval_strategy": "no",
    "load_best_model_at_end": "false",
    "report_to": "none",
    "push_to_hub": "false",
    "logging_strategy": "steps",
    "logging_steps": "1",
    "disable_tqdm": "true",
    "logging_nan_inf_filter": "false",
}
_WITHOUT_STOCK = {
    "LigerMedusaTrainer": "Medusa heads",
    "LigerEagleTrainer": "EAGLE-3 drafters",
    "LigerMTPTrainer": "MTP heads",
}
_ROW = "{:14} {:>15} {:>9} {:>9} {:>9} {:>11} {:>10}"


def add_compare_command(commands: Any) -> None:
    """Add `compare` to the subparsers of `liger-trainer`."""
    add_recipe_command(
        commands,
        "compare",
        _compare,
        _USAGE,
        "time a recipe's first steps with the stock trainer, with Liger if installed, and with ours",
        "Train the first steps of a recipe with the stock trainer, with the stock trainer and liger-kernel if that is "
        "installed, and with ours, one after the other. Show speed, peak memory and losses. --steps is the number of "
        "steps (20); the first quarter, at most five, is not timed. --json writes a file, and so does --chart (.png, "
        ".svg or .pdf). Nothing is saved, and the recipe's output_dir is not touched.",
    )


def _compare(args: argparse.Namespace) -> int:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `liger-trainer train` does; the arms inherit it
    own_options, argv = take_options(args.options, "steps", "json", "chart", "arm")
    steps = parse_positive("--steps", own_options.get("steps", "20"), int)
    if "arm" in own_options:
        Path(own_options["json"]).write_text(json.dumps(_run_arm(args.recipe, argv, own_options["arm"], steps)))
        return 0
    if steps < 2:
        raise RecipeError(f"--steps is {steps}; expected 2 or more, since the first step is not timed.")
    for option in ("json", "chart"):
        if option in own_options and Path(own_options[option]).is_dir():
            raise RecipeError(f"--{option} is {own_options[option]!r}, a folder; expected a file to write.")
        if option in own_options and not Path(own_options[option]).name:
            raise RecipeError(f"--{option} has no value; expected a file to write.")
        folder = Path(own_options.get(option, "")).absolute().parent
        if option in own_options and not folder.is_dir():
            raise RecipeError(
                f"--{option} is {own_options[option]!r}, but the folder {folder} does not exist. Make it."
            )
    if "chart" in own_options and not own_options["chart"].endswith((".png", ".svg", ".pdf")):
        raise RecipeError(f"--chart is {own_options['chart']!r}; expected a file ending in .png, .svg or .pdf.")
    if "chart" in own_options and importlib.util.find_spec("matplotlib") is None:
        raise RecipeError("--chart needs the package matplotlib. Run: pip install matplotlib")
    if launched_processes() > 1:
        raise RecipeError("liger-trainer compare trains in one process. Run it without a launcher.")
    with preserve_environment():
        read_recipe(args.recipe, argv, _USAGE)  # reports a misspelt key once, instead of once for each arm
    with_liger = importlib.util.find_spec("liger_kernel") is not None
    arms = []
    for name in (_STOCK, _LIGER, _OURS) if with_liger else (_STOCK, _OURS):
        print(f"{name}: training up to {steps} steps", file=sys.stderr, flush=True)
        with Heartbeat(f"still training {name}, {{}}.".format):
            arms.append({"arm": name} | _run_in_subprocess(args.recipe, argv, name, steps))
    if all("error" in arm for arm in arms):
        raise RecipeError(" ".join(dict.fromkeys(arm["error"] for arm in arms)))
    from liger_trainer.command.run.summary import hardware

    _note_losses(arms)
    result = {"recipe": args.recipe, "options": argv, "hardware": hardware(), "arms": arms}
    if "json" in own_options:
        Path(own_options["json"]).write_text(json.dumps(result, indent=1))
    if "chart" in own_options:
        from liger_trainer.command.run.pictures import draw_comparison

        draw_comparison(arms, f"{args.recipe}, {result['hardware']}", own_options["chart"])
    print(_table(result))
    if not with_liger:
        print("liger-kernel is not installed, so the stock trainer is not shown with it.")
    for option, content in (("json", "figures"), ("chart", "chart")):
        if option in own_options:
            print(f"Wrote the {content} to {own_options[option]}.")
    return 0


def _run_in_subprocess(recipe: str, argv: list[str], arm: str, steps: int) -> dict[str, Any]:
    """Return the result of `_run_arm` in a subprocess, or the last line that the subprocess has written."""
    with tempfile.TemporaryDirectory() as folder:
        path, output = Path(folder, "arm.json"), Path(folder, "output.txt")
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]  # TRL and transformers would use all GPUs
        arm_options = ["--arm", arm, "--steps", str(steps), "--json", str(path)]
        with output.open("w") as file:
            code = _run_to_its_end(
                [sys.executable, "-m", "liger_trainer", "compare", recipe, *arm_options, *argv],
                file,
                os.environ | {"CUDA_VISIBLE_DEVICES": gpu},
            )
        if path.exists():
            return json.loads(path.read_text())
        last = output.read_text(errors="replace").strip().rpartition("\n")[2]
        return {"error": f"its process ended with code {code}: {last}"}


def _run_to_its_end(command: list[str], output: IO[str], environment: dict[str, str]) -> int:
    """Run `command` and return its exit code. On SIGTERM, end the command too, and exit with 143.

    Without a handler, SIGTERM would end only this process and leave the command running.
    """
    process: subprocess.Popen[bytes] | None = None
    received: list[int] = []

    def stop(number: int, frame: Any) -> None:
        received.append(number)
        # An exception inside Popen would lose the handle of a running child, so it waits until `process` is set.
        if process is not None:
            sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        if received:
            sys.exit(128 + received[0])
        return process.wait()
    finally:
        if process is not None:
            process.kill()  # does nothing to a process that has ended
            process.wait()
        signal.signal(signal.SIGTERM, before)


def _run_arm(name: str, argv: list[str], arm: str, steps: int) -> dict[str, Any]:
    """Train the first `steps` steps of the recipe `name`, and return the numbers of the arm, or why it has none."""
    with tempfile.TemporaryDirectory() as folder, preserve_environment():
        overrides = [word for key, value in (_ALONE | {"output_dir": folder}).items() for word in (f"--{key}", value)]
        try:
            recipe = parse_recipe(name, [*argv, *overrides], _USAGE)
            return _train(recipe, arm, steps)
        except RecipeError as error:
            return {"error": str(error)}
        except Exception as error:  # out of memory, or a stock trainer that does not support the recipe
            return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def _train(recipe: Recipe, arm: str, steps: int) -> dict[str, Any]:
    """Train the first `steps` steps, and return the numbers of the arm. RecipeError if it cannot train the recipe."""
    import torch

    from liger_trainer.command.rows.sources import find_sources
    from liger_trainer.command.run.train import build_trainer

    if arm == _LIGER and not torch.accelerator.is_available():
        raise RecipeError("liger-kernel only has kernels for GPUs.")
    trainer_class, left_out = _prepare_arm(recipe, arm)
    sources = find_sources(recipe)._replace(eval_rows=None)
    clock = _clock(steps)
    trainer = build_trainer(recipe, sources, [clock], trainer_class)
    trainer.train()
    return _timings(clock) | _facts(trainer) | {"losses": clock.losses, "left_out": left_out}


def _prepare_arm(recipe: Recipe, arm: str) -> tuple[type, list[str]]:
    """Return the trainer class of the arm, and the keys that its config does not have. Changes `recipe.training`."""
    import liger_trainer
    from liger_trainer.trainers.base import stock_class

    trainer_class = getattr(liger_trainer, recipe.entry.trainer)
    if arm == _OURS:
        recipe.training.sample_prompts = None
        return trainer_class, []
    trained = _WITHOUT_STOCK.get(recipe.entry.trainer)
    if trained is not None:
        raise RecipeError(f"No stock trainer trains {trained}.")
    recipe.training, left_out = _stock_arguments(recipe, use_liger_kernel=arm == _LIGER)
    return stock_class(trainer_class), left_out


def _clock(steps: int) -> Any:
    """Return a callback that records `times`, `losses` and `tokens`, and stops the training after `steps` steps."""
    import torch
    from transformers import TrainerCallback, TrainerControl, TrainerState

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.times: list[float] = []
            self.losses: list[float] = []
            self.tokens: list[float] = []

        def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.times.append(time.perf_counter())
            if state.global_step >= steps:  # max_steps is not changed, because learning rates depend on it
                control.should_training_stop = True

        def on_log(
            self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
        ) -> None:
            if "loss" in logs:
                self.losses.append(float(logs["loss"]))
                self.tokens += [logs["num_tokens"]] if "num_tokens" in logs else []  # TRL's count, without padding

    return Clock()


def _timings(clock: Any) -> dict[str, Any]:
    """Return the speed of the timed steps: the first ones are slower. RecipeError if none is left."""
    ran = len(clock.times)
    untimed = min(5, ran // 4) or 1
    if ran <= untimed:
        raise RecipeError(f"{ran} steps leave none to time. Compare at least 2 steps.")
    seconds = clock.times[-1] - clock.times[untimed - 1]
    tokens = clock.tokens[-1] - clock.tokens[untimed - 1] if clock.tokens else None
    return {
        "steps": ran,
        "untimed": untimed,
        "step_s": seconds / (ran - untimed),
        "tokens_per_s": None if tokens is None else tokens / seconds,
    }


class ArmTrainer(Protocol):
    """The trainer attributes that every arm reads. Ours also have `checkpointing` and `captured_steps`."""

    args: "TrainingArguments"


def _facts(trainer: ArmTrainer) -> dict[str, Any]:
    """Return the memory that the training took, its precision, and its captured steps."""
    from liger_trainer.command.run.summary import peak_bytes

    checkpointing, captured = getattr(trainer, "checkpointing", None), getattr(trainer, "captured_steps", None)
    peak = peak_bytes(0 if checkpointing is None else checkpointing.highest)
    return {
        "peak_gib": None if peak is None else peak / 2**30,
        "in_16_bits": bool(trainer.args.bf16 or trainer.args.fp16),
        "captured": None if captured is None else captured.to_dict(),
        "captured_in_words": None if captured is None else captured.describe(),
    }


def _stock_arguments(recipe: Recipe, use_liger_kernel: bool) -> tuple[Any, list[str]]:
    """Return the stock trainer's config with the keys of `recipe`, and the keys that it does not have."""
    from liger_trainer.trainers.base import stock_class

    stock = stock_class(type(recipe.training))
    known = {field.name for field in dataclasses.fields(stock) if field.init}
    values = dict(recipe.explicit)
    for suffix in ("", "_kwargs"):  # all versions of transformers know the older name
        value = values.pop(f"activation_checkpointing{suffix}", None)
        if value is not None:
            values[f"gradient_checkpointing{suffix}"] = value if suffix else str(value).lower() != "false"
    switches = ("use_liger", "liger_config", "skip_checks", "sample_prompts", "sample_steps", "sample_max_new_tokens")
    left_out = [key for key in values if hasattr(recipe.training, key) and key not in (*known, *switches)]
    values = {key: value for key, value in values.items() if key in known}
    return stock(**values | {"use_liger_kernel": use_liger_kernel}), left_out


def _note_losses(arms: list[dict[str, Any]]) -> None:
    """Add a note to each arm with losses that differ from the stock trainer's by more than rounding.

    Later steps may differ more, because rounding errors grow from step to step.
    """
    want: list[float] = next((arm["losses"] for arm in arms if arm["arm"] == _STOCK and "losses" in arm), [])
    for arm in arms:
        first, later = (0.01, 0.05) if arm.get("in_16_bits") else (0.001, 0.01)
        for step, got in enumerate(arm.get("losses", ()), 1):
            if not math.isfinite(got):
                arm["note"] = f"has the loss {got} at step {step}"
                break
            loss = want[step - 1] if step <= len(want) else got
            if not abs(got - loss) <= (first if step == 1 else later) * max(map(abs, want), default=0.0):
                arm["note"] = f"differs by more than rounding: loss {got:.4f} at step {step}, stock {loss:.4f}"
                break


def _table(result: dict[str, Any]) -> str:
    arms = result["arms"]
    ran = [arm for arm in arms if "losses" in arm]
    stock = next((arm["step_s"] for arm in ran if arm["arm"] == _STOCK), None)
    memory = "the process" if result["hardware"].startswith("CPU") else "tensors on the GPU"
    lines = [
        f"{result['recipe']} on {result['hardware']}: {ran[0]['steps']} steps, the first {ran[0]['untimed']} not timed",
        "",
        _ROW.format("", "useful tokens/s", "x stock", "s a step", "peak GiB", "first loss", "last loss"),
    ]
    for arm in arms:
        if "error" in arm:
            lines.append(f"{arm['arm']:14} failed: {arm['error']}")
            continue
        cells = [
            arm["arm"],
            "not counted" if arm["tokens_per_s"] is None else f"{arm['tokens_per_s']:,.0f}",
            "" if stock is None else f"{stock / arm['step_s']:.2f}",
            f"{arm['step_s']:.3f}",
            "" if arm["peak_gib"] is None else f"{arm['peak_gib']:.2f}",
            f"{arm['losses'][0]:.4f}" if arm["losses"] else "",
            f"{arm['losses'][-1]:.4f}" if arm["losses"] else "",
        ]
        lines.append(_ROW.format(*cells))
    lines += ["", f"Useful tokens are all tokens but padding. The peak is of {memory}."]
    lines += [f"{arm['arm']} {arm['note']}." for arm in ran if "note" in arm]
    for arm in ran:
        captured = arm.get("captured_in_words")
        if captured is not None:
            lines.append(f"{arm['arm']} captured (cuda_graphs): {captured}.")
            if arm["captured"]["sizes"]:
                lines.append("Its timed steps include the captures, which a longer run only does once for each size.")
    left_out = next((arm["left_out"] for arm in ran if arm["left_out"]), None)
    if left_out:
        lines.append(f"The stock trainer has no {', '.join(left_out)}, and trained without it.")
    return "\n".join(lines)
