"""Lists all features of the trainers, and defines two without an option: the loss filter and the report."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import TrainerCallback, TrainerState

from liger_trainer._logging import logger
from liger_trainer.base_weights.feature import BaseWeights, BaseWeightsArguments, BaseWeightsFields, SavingTrainer
from liger_trainer.feature import Feature, FeatureTrainer
from liger_trainer.fp8.feature import Fp8, Fp8Arguments, Fp8Fields, Fp8Trainer
from liger_trainer.memory.feature import CheckpointedTrainer, Checkpointing, CheckpointingArguments, MemoryFields
from liger_trainer.memory.summary import CheckpointingSummary
from liger_trainer.patching.apply import swap_converted
from liger_trainer.patching.core.report import LigerReport
from liger_trainer.preflight.context import PreflightArguments, PreflightTrainer
from liger_trainer.preflight.feature import Preflight, PreflightFields
from liger_trainer.trainers.compiled_inputs import CompiledArguments, CompiledInputs, CompiledTrainer
from liger_trainer.trainers.cuda_graphs import CapturedArguments, CapturedTrainer, CudaGraphs, CudaGraphsFields
from liger_trainer.trainers.module_walks import ModuleWalks, WalkedArguments, WalkedTrainer
from liger_trainer.trainers.online.old_policy import old_policy_of
from liger_trainer.trainers.online.sorted_rows import sorting_of
from liger_trainer.trainers.optimizer_in_backward import (
    InBackward,
    InBackwardArguments,
    InBackwardFields,
    InBackwardTrainer,
)
from liger_trainer.trainers.samples import SampledTrainer, SampleFields, Samples, SamplesArguments
from liger_trainer.trainers.shared_prompts import shared_prompts_of
from liger_trainer.trainers.trackers import TrackedTrainer, Trackers
from liger_trainer.varlen.graphs.capture_summary import CaptureSummary


class FilteringArguments(Protocol):
    """The trainer argument that the filter reads, and writes while a loss is added up."""

    logging_nan_inf_filter: bool | None


class FilteringTrainer(FeatureTrainer, Protocol):
    """The trainer attributes that the filter reads. It writes the first two."""

    training_step: Callable[..., torch.Tensor]
    floating_point_ops: Callable[..., Any]
    args: FilteringArguments
    state: TrainerState
    _globalstep_last_logged: int
    _tr_loss: torch.Tensor


class LossFilter(Feature[FilteringArguments, FilteringTrainer]):
    """Filters logged losses as `logging_nan_inf_filter` asks, without making the host wait for the GPU.

    `Trainer` checks every loss for NaN and infinity, and waits for the GPU. If it finds one, it adds the mean of the
    earlier losses instead. Here the device chooses between the two. The argument is off from the end of `training_step`
    until `floating_point_ops` is called, right after the loss was added, so no other code sees it off.
    """

    @contextmanager
    def around_training(self, trainer: FilteringTrainer) -> Iterator[None]:
        args = trainer.args
        step = trainer.training_step
        operations = trainer.floating_point_ops
        if not (trainer.uses_liger and args.logging_nan_inf_filter):
            yield
            return

        def filtered_step(*step_args: Any, **step_kwargs: Any) -> torch.Tensor:
            filter_on()  # a callback may have called it before
            loss = step(*step_args, **step_kwargs)  # an overriding subclass gets each loss unfiltered
            in_place = all(trainer.__dict__.get(name) is method for name, method in replacements.items())
            if args.logging_nan_inf_filter and in_place:
                steps = 1 + trainer.state.global_step - trainer._globalstep_last_logged
                loss = torch.where(torch.isfinite(loss), loss, trainer._tr_loss / steps)
                args.logging_nan_inf_filter = None
            return loss

        def filter_on_and_count(*step_args: Any, **step_kwargs: Any) -> Any:
            filter_on()
            return operations(*step_args, **step_kwargs)

        def filter_on() -> None:
            if args.logging_nan_inf_filter is None:
                args.logging_nan_inf_filter = True

        replacements = {"training_step": filtered_step, "floating_point_ops": filter_on_and_count}
        before = {name: trainer.__dict__[name] for name in replacements if name in trainer.__dict__}
        trainer.__dict__.update(replacements)
        try:
            yield
        finally:
            filter_on()
            for name, method in replacements.items():
                if trainer.__dict__.get(name) is method:  # else a callback has wrapped or removed it
                    del trainer.__dict__[name]
            trainer.__dict__.update(before)


class ReportedTrainer(FeatureTrainer, Protocol):
    """The trainer attributes that the report reads."""

    model: nn.Module
    liger_report: LigerReport | None
    checkpointing: CheckpointingSummary | None
    captured_steps: CaptureSummary | None

    def add_callback(self, callback: TrainerCallback) -> None:
        """Call `callback` at the events of the training."""


class Report(Feature[object, ReportedTrainer]):
    """Writes `liger_report.json` into `output_dir`."""

    def check_trainer(self, trainer: ReportedTrainer) -> None:
        if trainer.liger_report is not None:
            trainer.add_callback(_ReportCallback(trainer))


class _ReportCallback(TrainerCallback):
    """Writes the report when training starts, and again at the end with the choices made in training."""

    def __init__(self, trainer: ReportedTrainer) -> None:
        self.trainer = trainer

    @property
    def report(self) -> LigerReport:
        """The current report: with `model_init`, each model has its own."""
        report = self.trainer.liger_report
        assert report is not None, "the models of this trainer are patched"
        return report

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Patch the fp8 layers that accelerate has converted meanwhile (`mixed_precision: fp8`), and write."""
        report = self.report
        if swap_converted(self.trainer.model, report) and args.process_index == 0:
            logger.info(report.one_line())
        self._write(args, state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if any(summary is not None for summary in self._summaries().values()):
            self._write(args, state)

    def _summaries(self) -> dict[str, dict[str, Any] | None]:
        """Return what the features counted in training, by field of the report. None for a feature that did nothing."""
        trainer = self.trainer
        counted = {
            "checkpointing": trainer.checkpointing,
            "cuda_graphs": trainer.captured_steps,
            "shared_prompts": shared_prompts_of(trainer.model),
            "sort_by_prompt": sorting_of(trainer, trainer.model),
            "old_policy": old_policy_of(trainer),
        }
        return {name: None if summary is None else summary.to_dict() for name, summary in counted.items()}

    def _write(self, args: Any, state: Any) -> None:
        report = self.report
        if not state.is_world_process_zero or args.output_dir is None:
            return
        for name, summary in self._summaries().items():
            setattr(report, name, summary)
        os.makedirs(args.output_dir, exist_ok=True)
        report.to_json(os.path.join(args.output_dir, "liger_report.json"))


class FeatureArguments(
    BaseWeightsArguments,
    CapturedArguments,
    CheckpointingArguments,
    CompiledArguments,
    FilteringArguments,
    Fp8Arguments,
    InBackwardArguments,
    PreflightArguments,
    SamplesArguments,
    WalkedArguments,
    Protocol,
):
    """The trainer arguments that all features read and write."""

    # The stock class may put any of these there
    gradient_checkpointing_kwargs: dict[str, Any] | str | None


class FeaturedTrainer(
    CapturedTrainer,
    CheckpointedTrainer,
    CompiledTrainer,
    FilteringTrainer,
    Fp8Trainer,
    InBackwardTrainer,
    PreflightTrainer,
    ReportedTrainer,
    SampledTrainer,
    SavingTrainer,
    TrackedTrainer,
    WalkedTrainer,
    Protocol,
):
    """The trainer attributes that all features read and write. `LigerTrainerMixin` in `base.py` has them."""

    args: FeatureArguments
    model: nn.Module


FEATURES: tuple[Feature[FeatureArguments, FeaturedTrainer], ...] = (
    Checkpointing(),
    CudaGraphs(),
    LossFilter(),
    InBackward(),
    Fp8(),
    BaseWeights(),
    Report(),
    ModuleWalks(),
    Trackers(),
    Preflight(),
    Samples(),
    CompiledInputs(),
)


@dataclass
class FeatureFields(
    Fp8Fields,
    InBackwardFields,
    MemoryFields,
    CudaGraphsFields,
    BaseWeightsFields,
    PreflightFields,
    SampleFields,
):
    """The fields of `FEATURES`."""
