"""The few lines that `liger-trainer train` prints at the end."""

import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainerCallback

from liger_trainer.command.launch import say
from liger_trainer.command.row_counts import RowCounts


class RunRecorder(TrainerCallback):
    """Notes what the summary needs while the trainer runs: logged losses, tokens seen, and the time they took.

    Before training, set `rows` (what the trainer has made of its rows), `parameters` (how many are trained, and how
    many there are) and, if there is one, `early_stopping` (the callback).
    """

    def __init__(self) -> None:
        self.rows: RowCounts | None = None
        self.parameters: tuple[int, int] | None = None
        self.early_stopping: Any = None
        self.stopped: str | None = None
        self.losses: list[float] = []
        self.eval_losses: list[float] = []
        self.mean_loss: float | None = None
        self.first_step = self.last_step = 0
        self.tokens = 0.0
        self.seconds = 0.0  # 0 as long as no tokens are counted
        self._start = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        self._start, self.first_step = time.perf_counter(), state.global_step
        by_steps = args.logging_strategy == "steps" and not args.logging_first_step
        if by_steps and state.logging_steps > state.max_steps:
            say(
                f"logging_steps is {state.logging_steps}, but the run has only {state.max_steps} steps, so only their "
                "mean loss is logged. Set a smaller logging_steps."
            )
        _say_where_warmup_never_ends(args, state.max_steps)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))
            if "num_tokens" in logs:  # counted by TRL over all processes
                self.tokens, self.seconds = logs["num_tokens"], time.perf_counter() - self._start
        if logs and "train_loss" in logs and not self.losses and state.global_step > self.first_step:
            self.mean_loss = logs["train_loss"]
            if "num_tokens" in logs:
                self.tokens, self.seconds = logs["num_tokens"], time.perf_counter() - self._start
        if logs and "eval_loss" in logs:
            self.eval_losses.append(float(logs["eval_loss"]))

    def on_train_end(self, args, state, control, **kwargs):
        self.last_step, stopper = state.global_step, self.early_stopping
        patient = stopper is None or stopper.early_stopping_patience_counter < stopper.early_stopping_patience
        if not patient and state.global_step < state.max_steps:
            metric = f"eval_{args.metric_for_best_model.removeprefix('eval_')}"
            self.stopped = (
                f" of {state.max_steps}, stopped early: {metric} was best at step {state.best_global_step}, with "
                f"{state.best_metric:.3f}, and that model is saved"
            )


@dataclass(frozen=True)
class Summary:
    """What a run has done. `str()` gives the text that is printed."""

    steps: int
    resumed_at: int
    losses: list[float]
    tokens_per_second: float | None
    peak_memory: str
    patched: str
    output_dir: str
    stopped: str | None = None
    rows: RowCounts | None = None
    parameters: tuple[int, int] | None = None
    eval_losses: tuple[float, ...] = ()
    mean_loss: float | None = None  # of all steps, if no loss was logged during training
    checkpointing: str | None = None  # what activation_checkpointing: auto has chosen
    evaluation: object | None = None  # printed below the rest

    @classmethod
    def of(cls, recorder: RunRecorder, trainer, evaluation=None) -> "Summary":
        report, chosen = getattr(trainer, "liger_report", None), getattr(trainer, "checkpointing", None)
        return cls(
            steps=recorder.last_step - recorder.first_step,
            resumed_at=recorder.first_step,
            losses=recorder.losses,
            tokens_per_second=recorder.tokens / recorder.seconds if recorder.seconds else None,
            peak_memory=peak_memory(0 if chosen is None else chosen.highest),
            patched=report.one_line() if report is not None else "nothing (use_liger is false)",
            output_dir=str(trainer.args.output_dir),
            stopped=recorder.stopped,
            rows=recorder.rows,
            parameters=recorder.parameters,
            eval_losses=tuple(recorder.eval_losses),
            mean_loss=recorder.mean_loss,
            checkpointing=None if chosen is None else str(chosen),
            evaluation=evaluation,
        )

    def __str__(self) -> str:
        resumed = f", resumed at step {self.resumed_at}" if self.resumed_at else ""
        loss = "not logged" if self.mean_loss is None else f"{self.mean_loss:.3f}, the mean of all steps"
        loss = _first_to_last(self.losses) if self.losses else loss
        speed = f"{self.tokens_per_second:.0f} tokens/s" if self.tokens_per_second else "not counted"
        return "\n".join(
            (
                "Summary",
                f"  steps    {self.steps}{resumed}{self.stopped or ''}",
                *([] if self.rows is None else [f"  rows     {self.rows}"]),
                *([] if self.parameters is None else [f"  trains   {_share(*self.parameters)}"]),
                f"  loss     {loss}",
                *([f"  eval     loss {_first_to_last(self.eval_losses)}"] if self.eval_losses else []),
                f"  speed    {speed}",
                f"  memory   {self.peak_memory}",
                *([] if self.checkpointing is None else [f"  layers   {self.checkpointing}"]),
                f"  patched  {self.patched}",
                f"  model    {self.output_dir}",
                *([] if self.evaluation is None else ["", str(self.evaluation)]),
            )
        )


def _say_where_warmup_never_ends(args, max_steps: int) -> None:
    with_warmup = args.lr_scheduler_type not in ("constant", "reduce_lr_on_plateau", "greedy")
    if with_warmup and 0 < max_steps <= (warmup := args.get_warmup_steps(max_steps)):
        say(
            f"warmup_steps is {warmup}, but the run has only {max_steps} steps, so the warm-up never ends and "
            f"learning_rate {args.learning_rate} is never reached. Set a smaller warmup_steps."
        )


def _first_to_last(losses) -> str:
    return f"{losses[0]:.3f} -> {losses[-1]:.3f}"


def _share(trained: int, total: int) -> str:
    if trained == total:
        return f"{total:,} parameters, all of them"
    return f"{trained:,} of {total:,} parameters ({trained / total:.2%})"


def count_parameters(model) -> tuple[int, int]:
    """How many parameters of a model are trained, and how many it has. Sharded and quantised ones count in full."""
    counts = {True: 0, False: 0}
    for parameter in model.parameters():
        count = getattr(parameter, "ds_numel", parameter.numel())  # under ZeRO-3, numel counts this rank's part only
        if type(parameter).__name__ == "Params4bit":  # bitsandbytes packs two of them into a byte
            count *= 2 * getattr(parameter, "quant_storage", torch.uint8).itemsize
        counts[parameter.requires_grad] += count
    return counts[True], sum(counts.values())


def peak_memory(known: int = 0) -> str:
    """The peak of memory so far: of this process's tensors on the GPU or, without a GPU, of the whole process.

    `known`: a peak in bytes that torch's counter for the GPU has forgotten.
    """
    if torch.cuda.is_available():
        return f"{max(known, torch.cuda.max_memory_allocated()) / 2**30:.2f} GiB peak on the GPU (this process)"
    if sys.platform == "win32":
        return "not measured on Windows without a GPU"
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30:.2f} GiB peak of the process"
