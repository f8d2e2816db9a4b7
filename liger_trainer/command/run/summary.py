"""Writes the summary that `liger-trainer train` prints at the end."""

import math
import platform
import sys
import time
from datetime import timedelta
from typing import Any, Protocol

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from liger_trainer.command.processes import Heartbeat, print_status
from liger_trainer.command.rows.counts import RowCounts
from liger_trainer.command.rows.prompt_form import IN_WORDS

# Keys of the trainers' logs, and their names in the summary
_LOGGED = {
    "loss": "loss",
    "eval_loss": "eval     loss",
    "reward": "reward",
    "rewards/margins": "margin",
    "rewards/accuracies": "accuracy",
}


class SummarizedTrainer(Protocol):
    """The trainer attributes that every summary reads. Ours also have reports of single features."""

    args: TrainingArguments
    state: TrainerState


class RunRecorder(TrainerCallback):
    """Records a run while it trains, and writes its summary.

    Before training, set `rows` (the trainer's rows, counted), `parameters` (trained, total) and, with early stopping,
    `early_stopping` (the callback).
    """

    def __init__(self, form: str = "chat") -> None:
        self.form = form  # of the prompts, a key of `IN_WORDS`
        self.rows: RowCounts | None = None
        self.parameters: tuple[int, int] | None = None
        self.early_stopping: Any = None
        self._logged: dict[str, list[float]] = {}
        self._mean_loss: float | None = None  # of all steps, if no loss was logged during training
        self._first_step = 0
        self._norm = 0.0  # of the gradient, as logged last
        self._tokens = self._seconds = 0.0  # 0 as long as no tokens are counted
        self._start = 0.0
        self._first_step_beat = Heartbeat(_describe_first_step)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._start, self._first_step = time.perf_counter(), state.global_step
        steps = state.max_steps - self._first_step
        if steps > 0:
            print_status(f"training {steps} steps. The first one takes longest.")
            self._first_step_beat.start()
        else:
            print_status(
                f"nothing is left to train: the run in {args.output_dir!r} has had its {state.max_steps} steps. To go "
                "on, raise max_steps or num_train_epochs."
            )
        if self.early_stopping is not None:  # after a resume, transformers would count from 0 again
            saved = state.stateful_callbacks["EarlyStoppingCallback"]["attributes"]
            self.early_stopping.early_stopping_patience_counter = saved["early_stopping_patience_counter"]
            control.should_training_stop = not self._is_patient()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.stop_heartbeat()

    def stop_heartbeat(self) -> None:
        """Stop the lines about the first step: it is over, or an error has ended the run."""
        self._first_step_beat.stop()

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        logs = logs or {}
        for key in _LOGGED.keys() & logs.keys():
            if logs[key] is not None:  # None: the reward of completions that no function judged
                self._logged.setdefault(key, []).append(float(logs[key]))
        self._norm = float(logs.get("grad_norm", self._norm))
        if "train_loss" in logs and "loss" not in self._logged and state.global_step > self._first_step:
            self._mean_loss = logs["train_loss"]
        if "num_tokens" in logs and ("loss" in logs or self._mean_loss is not None):  # TRL counts over all processes
            self._tokens, self._seconds = logs["num_tokens"], time.perf_counter() - self._start

    def summary(self, trainer: SummarizedTrainer) -> str:
        """Return the summary of the run of `trainer`."""
        args, state = trainer.args, trainer.state
        report, checkpointing = getattr(trainer, "liger_report", None), getattr(trainer, "checkpointing", None)
        kept_weights, captured = getattr(trainer, "kept_weights", None), getattr(trainer, "captured_steps", None)
        resumed = f", resumed at step {self._first_step}" if self._first_step else ""
        lines = ["Summary", f"  steps    {state.global_step - self._first_step}{resumed}{self._stopped(args, state)}"]
        if self.rows is not None:
            lines.append(f"  rows     {self.rows}")
        lines.append(f"  form     {IN_WORDS[self.form]}")
        if self.parameters is not None:
            trained, total = self.parameters
            lines.append(f"  trains   {trained:,} of {total:,} parameters ({trained / total:.2%})")
        seconds = timedelta(seconds=round(time.perf_counter() - self._start))
        epochs = (state.epoch or 0) * (1 - self._first_step / max(1, state.global_step))
        lines.append(f"  time     {seconds} for {epochs:.2f} epochs of these rows")
        if "loss" not in self._logged:
            mean = self._mean_loss
            if mean is not None and not hasattr(trainer, "_initial_global_step"):
                # After a resume, transformers 5.17 divides by the steps of the whole run
                mean *= state.global_step / (state.global_step - self._first_step)
            lines.append(f"  loss     {'not logged' if mean is None else f'{mean:.3f}, the mean of all steps'}")
        for key, name in _LOGGED.items():
            logged = self._logged.get(key)
            if logged:
                best = best_evaluation(state.log_history) if key == "eval_loss" else None
                lines.append(f"  {name:8} {logged[0]:.3f} -> {logged[-1]:.3f}{'' if best is None else f', {best}'}")
        if math.isnan(self._norm):
            lines.append("  warning  the last gradient norm is NaN, and a loss that is NaN is left out above")
        lines += [
            f"  speed    {'not counted' if self.speed is None else f'{self.speed:.0f} tokens/s'}",
            f"  memory   {peak_memory(0 if checkpointing is None else checkpointing.highest)}",
            *([] if checkpointing is None else [f"  layers   {checkpointing}"]),
            *([] if captured is None else [f"  captured {captured.describe()}"]),
            f"  patched  {'nothing (use_liger is false)' if report is None else report.one_line()}",
            *([f"  kept     {kept_weights}"] if kept_weights is not None and str(kept_weights) else []),
            f"  model    {args.output_dir}",
        ]
        return "\n".join(lines)

    @property
    def speed(self) -> float | None:
        """Tokens per second over all processes, without padding; None if the trainer does not count them."""
        return self._tokens / self._seconds if self._tokens else None

    def _is_patient(self) -> bool:
        stopper = self.early_stopping
        return stopper is None or stopper.early_stopping_patience_counter < stopper.early_stopping_patience

    def _stopped(self, args, state) -> str:
        if self._is_patient() or state.global_step >= state.max_steps:
            return ""
        return (
            f" of {state.max_steps}, stopped early: eval_{args.metric_for_best_model.removeprefix('eval_')} was best "
            f"at step {state.best_global_step}, with {state.best_metric:.3f}, and that model is saved"
        )


def _describe_first_step(time: str) -> str:
    line = f"still in the first step, {time}."
    if torch.cuda.is_available():
        line += " Kernels are compiled and compared with the model's own code; later steps are faster."
    return line


def best_evaluation(history: list[dict[str, Any]]) -> str | None:
    """Return the lowest evaluation loss and its step as text; None without an evaluation."""
    evaluated = [log for log in history if "eval_loss" in log]
    if not evaluated:
        return None
    best = min(evaluated, key=lambda log: log["eval_loss"])
    return f"best {best['eval_loss']:.3f} at step {best['step']}"


def hardware(processes: int = 1) -> str:
    """Return the name of the device that trains, with the number of processes."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})"
    return name if processes == 1 else f"{processes} x {name}"


def peak_bytes(known: int = 0) -> int | None:
    """Return the peak memory so far: of this process's tensors on the GPU or, without a GPU, of the whole process.

    None on Windows without a GPU. `known` is an earlier peak, from before torch's counter was reset.
    """
    if torch.cuda.is_available():
        return max(known, torch.cuda.max_memory_allocated())
    if sys.platform == "win32":
        return None
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def peak_memory(known: int = 0) -> str:
    """Return `peak_bytes` as text."""
    peak = peak_bytes(known)
    if peak is None:
        return "not measured on Windows without a GPU"
    where = "on the GPU (this process)" if torch.cuda.is_available() else "of the process"
    return f"{peak / 2**30:.2f} GiB peak {where}"
