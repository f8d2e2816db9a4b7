"""Implements the option `cuda_graphs`: captures the backbones that a trainer calls in its training steps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from transformers import TrainerState

from liger_trainer._logging import logger
from liger_trainer.feature import Feature, FeatureTrainer, StepRunner
from liger_trainer.head.module import base_model_of
from liger_trainer.memory.device_memory import is_out_of_memory
from liger_trainer.patching.core.modules import is_spread
from liger_trainer.varlen.decide import bound_backbone
from liger_trainer.varlen.graphs.capture_summary import CaptureSummary
from liger_trainer.varlen.graphs.step_graphs import StepGraphs, use_graphs

AUTO = "auto"
CAPTURES_ON = ("cuda",)  # types of devices
_WORDS: dict[str, bool | str] = {"true": True, "false": False, AUTO: AUTO}


@dataclass
class CudaGraphsFields:
    """The config field `cuda_graphs`."""

    cuda_graphs: str | None = field(
        default=AUTO,
        metadata={
            "help": "'auto': if the GPU would wait for Python, replay the backbone of the model as CUDA graphs, one "
            "pair for each batch size. Needs one GPU and a model that runs on real tokens; the report says why a step "
            "was not captured. true: the same, but an error if the trainer or its arguments rule out captured steps. "
            "false: never.",
            "nargs": "?",
            "const": "true",
        },
    )


class CapturedArguments(Protocol):
    """The trainer arguments that captured steps read. They write the first."""

    cuda_graphs: bool | str | None
    device: torch.device
    gradient_checkpointing_kwargs: dict[str, Any] | str | None
    n_gpu: int
    process_index: int
    torch_compile: bool


class CapturedTrainer(FeatureTrainer, Protocol):
    """The trainer attributes that captured steps read. They write `captured_steps`."""

    args: CapturedArguments
    model: nn.Module | None
    state: TrainerState
    captured_steps: CaptureSummary | None

    @property
    def overrides_compute_loss(self) -> bool:
        """Return whether a user's class overrides `compute_loss`."""


class CudaGraphs(Feature[CapturedArguments, CapturedTrainer]):
    """Captures the backbones that a trainer calls in its training steps."""

    def resolve(self, args: CapturedArguments) -> None:
        value = args.cuda_graphs
        if isinstance(value, str):
            value = _WORDS.get(value.lower(), value)
        if not isinstance(value, bool) and value != AUTO:
            raise ValueError(f"cuda_graphs is {args.cuda_graphs!r}; expected auto, true or false.")
        args.cuda_graphs = value

    @contextmanager
    def around_training(self, trainer: CapturedTrainer) -> Iterator[StepRunner | None]:
        wanted = getattr(trainer.args, "cuda_graphs", False)
        reason = "cuda_graphs is false" if wanted is False else uncaptured_reason(trainer)
        if reason is not None and wanted is True:
            raise ValueError(f"cuda_graphs is true, but {reason}. Set cuda_graphs: auto, or false.")
        if reason is not None:
            was_asked_for = wanted is not False and trainer.uses_liger
            trainer.captured_steps = CaptureSummary(off=reason) if was_asked_for else None
            _log_summary(trainer)
            yield None
            return
        graphs = StepGraphs()
        trainer.captured_steps = graphs.summary
        began_at: int | None = None

        def run(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            # The optimizer allocates its states in the first step, so the free memory is unknown before that. The first
            # step is only known now: the trainer may have trained before, or may resume from a checkpoint.
            nonlocal began_at
            if began_at is None:
                began_at = trainer.state.global_step
            graphs.may_capture = trainer.state.global_step > began_at
            try:
                with use_graphs(graphs):
                    return step(*args, **kwargs)
            except RuntimeError as error:
                if is_out_of_memory(error) and graphs.summary.sizes:
                    graphs.release()
                    error.add_note(
                        "The memory of captured steps was released. To train without, set cuda_graphs: false."
                    )
                raise

        try:
            yield run
        finally:
            graphs.release()
            _log_summary(trainer)


def _log_summary(trainer: CapturedTrainer) -> None:
    """Log what was captured; as a warning if captures were required and none was made."""
    summary = trainer.captured_steps
    if summary is None or trainer.args.process_index != 0:
        return
    missed = trainer.args.cuda_graphs is True and not summary.replayed
    (logger.warning if missed else logger.info)(summary.one_line())


def arguments_reason(args: CapturedArguments) -> str | None:
    """Return which argument rules out captured steps for any model and device, or None."""
    if args.torch_compile:
        return "torch_compile is set"
    if getattr(args, "optimizer_in_backward", False):
        return "optimizer_in_backward steps weights within the backward pass"
    if getattr(args, "activation_checkpointing", None) == AUTO:
        return "activation_checkpointing is 'auto', which decides in Python what each layer saves"
    options = args.gradient_checkpointing_kwargs
    offloads = isinstance(options, dict) and options.get("offload")
    if offloads or getattr(args, "activation_offloading", False):
        return "activations are moved to the host"
    return None


def uncaptured_reason(trainer: CapturedTrainer) -> str | None:
    """Return why no step of a trainer can be captured, or None.

    Reasons that may change during training are checked in each call (`varlen/decide.py`).
    """
    args = trainer.args
    if not trainer.uses_liger:
        return "use_liger is false"
    if args.device.type not in CAPTURES_ON:
        return f"it trains on {args.device.type}, and CUDA graphs need a CUDA GPU"
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled or trainer.accelerator.num_processes > 1:
        return "several processes train, and they exchange gradients during the backward pass"
    if args.n_gpu > 1 or (trainer.model is not None and is_spread(trainer.model)):
        return "the model is spread over several devices"
    reason = arguments_reason(args)
    if reason is not None:
        return reason
    if trainer.overrides_compute_loss:
        return f"{type(trainer).__name__} overrides compute_loss"
    if trainer.model is None:  # `model_init` builds it when training begins
        return None
    if bound_backbone(base_model_of(trainer.model)) is None:
        return "its model does not run on real tokens (varlen_attention)"
    return None
