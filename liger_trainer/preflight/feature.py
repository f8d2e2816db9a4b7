"""Runs the checks before the first step, in a fixed order, except those in `skip_checks`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from liger_trainer._logging import logger
from liger_trainer.feature import Feature
from liger_trainer.preflight import model_checks, row_checks, run_checks
from liger_trainer.preflight.context import PreflightArguments, PreflightContext, PreflightTrainer

CHECKS: tuple[Callable[[PreflightContext], str | None], ...] = (
    row_checks.nothing_learned,
    row_checks.cut_answers,
    row_checks.two_begin_tokens,
    row_checks.end_token_learned,
    row_checks.end_token_stops,
    run_checks.learning_rate,
    run_checks.warmup,
    model_checks.slow_attention,
    model_checks.slow_layers,
    model_checks.unloaded_weights,
    model_checks.served_adapter,
    model_checks.tokenizer_class,
)
NAMES = tuple(check.__name__ for check in CHECKS)


@dataclass
class PreflightFields:
    """The field of the checks before the first step."""

    skip_checks: list[str] | None = field(
        default=None,
        metadata={"help": f"Skip these checks before the first step: names of {', '.join(NAMES)}; or 'all'."},
    )


class Preflight(Feature[PreflightArguments, PreflightTrainer]):
    """Warns before the first step about mistakes that raise no error in training."""

    def check(self, args: PreflightArguments) -> None:
        for name in args.skip_checks or ():
            if name not in (*NAMES, "all"):
                raise ValueError(f"skip_checks has {name!r}; expected names of {', '.join(NAMES)}, or 'all'.")

    def check_trainer(self, trainer: PreflightTrainer) -> None:
        if trainer.uses_liger:
            trainer.add_callback(_BeforeFirstStep(trainer))


class _BeforeFirstStep(TrainerCallback):
    """Runs the checks when training begins, because only then are the number of steps and the stop tokens known."""

    def __init__(self, trainer: PreflightTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        skipped = getattr(args, "skip_checks", None) or ()  # stock arguments have no such field
        if state.global_step > 0 or not state.is_world_process_zero or "all" in skipped:
            return
        run = PreflightContext(self.trainer, state.max_steps)
        for check in CHECKS:
            name = check.__name__
            line = None if name in skipped else check(run)
            if line is not None:
                logger.warning(f"{name}: {line} (skip_checks: [{name}] silences this.)")
