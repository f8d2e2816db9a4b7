"""The options of activation checkpointing, and how layers are checkpointed in one training.

Transformers 5.23 has the switch `activation_checkpointing`, with `gradient_checkpointing` for its old name.
Transformers 5.17 has the old name alone, which TRL sets to True. The new name counts wherever it is given.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import nn
from transformers import TrainingArguments

from liger_trainer._logging import logger
from liger_trainer.feature import Feature, FeatureTrainer, StepRunner
from liger_trainer.memory import switches
from liger_trainer.memory.device_memory import DeviceMemory, GpuMemory
from liger_trainer.memory.host_inputs import OPTION, HostInputs
from liger_trainer.memory.pinned_memory import PinnedMemory, host_bytes_allowed
from liger_trainer.memory.planner import ActivationPlanner
from liger_trainer.memory.summary import CheckpointingSummary
from liger_trainer.patching.core.modules import is_spread

AUTO = "auto"
KNOWS_NEW_NAME = "activation_checkpointing" in {field.name for field in dataclasses.fields(TrainingArguments)}
_MODES: dict[str, bool | str] = {"true": True, "false": False, AUTO: AUTO}


@dataclass
class MemoryFields:
    """The fields of activation checkpointing."""

    activation_checkpointing: str | None = field(
        default=None,
        metadata={
            "help": "true: recompute the layers' activations in the backward pass, which takes less memory and more "
            "time. false: keep them. 'auto': keep them in as many layers as memory_budget allows, as measured in the "
            "first steps. Newer name of gradient_checkpointing.",
            "nargs": "?",
            "const": "true",
        },
    )
    activation_checkpointing_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Newer name of gradient_checkpointing_kwargs."}
    )
    memory_budget: float | None = field(
        default=None,
        metadata={
            "help": "With activation_checkpointing 'auto': how many GiB of the GPU's memory tensors may take up. By "
            "default, what the GPU has, less a reserve."
        },
    )
    host_memory_budget: float | None = field(
        default=None,
        metadata={
            "help": "With activation_checkpointing 'auto': in how many GiB of the host's memory each process may keep "
            "activations that the GPU has no room for. By default, half of what is free, shared by the processes of "
            "the machine. 0: none are kept there."
        },
    )


class CheckpointingArguments(Protocol):
    """The arguments that activation checkpointing reads, and writes (the first four)."""

    activation_checkpointing: bool | str | None
    activation_checkpointing_kwargs: dict[str, Any] | str | None
    gradient_checkpointing: bool
    gradient_checkpointing_kwargs: dict[str, Any] | str | None  # a dict, once the stock class has looked
    memory_budget: float | None
    host_memory_budget: float | None
    torch_compile: bool
    device: torch.device
    process_index: int
    ddp_timeout: int


class CheckpointedTrainer(FeatureTrainer, Protocol):
    """The attributes of a trainer that activation checkpointing reads, and writes (`checkpointing`)."""

    args: CheckpointingArguments
    model: nn.Module
    checkpointing: CheckpointingSummary | None
    device_memory: DeviceMemory | None  # in place of the GPU's; None: the GPU's

    def real_tokens(self, *args: Any, **kwargs: Any) -> int | None:
        """Return how many tokens layers get of a step with these arguments; None if the host does not know."""


class Checkpointing(Feature[CheckpointingArguments, CheckpointedTrainer]):
    """Activation checkpointing: by the `ActivationPlanner` of `auto`, by PyTorch, or with inputs on the host."""

    def resolve(self, args: CheckpointingArguments) -> None:
        """Give both names of checkpointing their values."""
        value = args.activation_checkpointing
        if isinstance(value, str):
            value = _MODES.get(value.lower(), value)
        if value is not None and not isinstance(value, bool) and value != AUTO:
            raise ValueError(f"activation_checkpointing is {value!r}; expected true, false or auto.")
        args.activation_checkpointing = value
        _check_budget(args)
        if value == AUTO and args.torch_compile:
            raise ValueError(
                "activation_checkpointing is 'auto', and torch_compile would compile the model again for each plan. "
                "Set activation_checkpointing to true or false, or remove torch_compile."
            )
        if value == AUTO and getattr(args, "activation_offloading", False):
            raise _offloads("activation_offloading is true", "activation_offloading")
        if not KNOWS_NEW_NAME and value is not None:
            args.gradient_checkpointing = bool(value)
        if not KNOWS_NEW_NAME and args.activation_checkpointing_kwargs is not None:
            options = _parse_options(args.activation_checkpointing_kwargs)
            args.activation_checkpointing_kwargs = options
            args.gradient_checkpointing_kwargs = options

    def check(self, args: CheckpointingArguments) -> None:
        if args.activation_checkpointing == AUTO and _offloading(args):
            raise _offloads("its option offload is true", "offload from activation_checkpointing_kwargs")

    @contextmanager
    def around_training(self, trainer: CheckpointedTrainer) -> Iterator[StepRunner | None]:
        args = trainer.args
        memory = _memory_of(trainer)
        if memory is not None:
            timeout = timedelta(seconds=args.ddp_timeout)
            planner = ActivationPlanner(memory, args.memory_budget, args.host_memory_budget, timeout=timeout)
            trainer.checkpointing = planner.summary
            try:

                def run(step: Callable[..., Any], *given: Any, **named: Any) -> Any:
                    tokens = trainer.real_tokens(*given, **named)
                    return planner.run(trainer.model, step, given, named, tokens)

                yield run
            finally:
                planner.end()
        elif _keeps_inputs_on_host(trainer):
            with _inputs_on_host(trainer) as run:
                yield run
        else:
            yield None


def _memory_of(trainer: CheckpointedTrainer) -> DeviceMemory | None:
    """Return the memory that `auto` plans with; None without `auto`, without a GPU, or for a model on several."""
    args = trainer.args
    if getattr(args, "activation_checkpointing", None) != AUTO:  # arguments of another class have no such field
        return None
    if trainer.device_memory is not None:
        return trainer.device_memory
    if is_spread(trainer.model):
        logger.warning(
            "activation_checkpointing: auto goes by the memory of one GPU, but device_map has spread the model over "
            "several devices, so every layer is checkpointed. Launch one process for each GPU, or set device_map to "
            "null in model_init_kwargs."
        )
        return None
    if args.device.type == "cuda":
        return GpuMemory(args.device)
    if args.process_index == 0:
        logger.info(
            "activation_checkpointing: auto goes by the memory of a CUDA GPU. Without one, every layer is checkpointed."
        )
    return None


def _parse_options(options: dict[str, Any] | str) -> dict[str, Any]:
    """Return the options of checkpointing. ValueError for a text, as from the command line, that is not JSON."""
    if not isinstance(options, str):
        return options
    try:
        return json.loads(options)
    except ValueError as error:
        raise ValueError(
            f"activation_checkpointing_kwargs is {options!r}; expected a mapping in JSON, such as "
            '{"use_reentrant": false}.'
        ) from error


@contextmanager
def _inputs_on_host(trainer: CheckpointedTrainer) -> Iterator[StepRunner]:
    """Context manager: the inputs of checkpointed layers wait on the host."""
    model: nn.Module | None = None
    memory = PinnedMemory(host_bytes_allowed(None))

    def run(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal model
        if model is None:  # with `model_init` the model is built when training begins
            model = trainer.model
            switches.install(model, HostInputs(memory))
        return step(*args, **kwargs)

    try:
        yield run
    finally:
        if model is not None:
            switches.remove(model)
        memory.release()


def _keeps_inputs_on_host(trainer: CheckpointedTrainer) -> bool:
    """Return whether the inputs of checkpointed layers are copied to the host by ours, not by transformers."""
    if not trainer.uses_liger or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        return False
    return trainer.args.device.type == "cuda" and _offloading(trainer.args)


def _offloading(args: CheckpointingArguments) -> bool:
    """Return whether the inputs of recomputed layers are to wait on the host."""
    options = args.gradient_checkpointing_kwargs
    return isinstance(options, dict) and bool(options.get(OPTION))


def _offloads(what: str, remove: str) -> ValueError:
    """Return the error for `auto` with another offload: `what` it is, and what to `remove`."""
    return ValueError(
        f"activation_checkpointing is 'auto' and {what}, and each of them decides what waits in the host's memory. "
        f"Remove {remove}, or set activation_checkpointing to true or false."
    )


def _check_budget(args: CheckpointingArguments) -> None:
    """Raise ValueError for a budget that is not a number of GiB, or that nothing reads."""
    for name, least in (("memory_budget", "above 0, such as 70"), ("host_memory_budget", "of 0 or more, such as 32")):
        budget = getattr(args, name)
        if budget is None:
            continue
        number = isinstance(budget, int | float) and not isinstance(budget, bool) and budget < float("inf")
        if not number or budget < 0 or (budget == 0 and name == "memory_budget"):
            raise ValueError(f"{name} is {budget!r}; expected a number of GiB {least}.")
        if args.activation_checkpointing != AUTO:
            given = args.activation_checkpointing
            found = "activation_checkpointing is not set" if given is None else f"it is {given!r}"
            raise ValueError(
                f"{name} is {budget}, which only activation_checkpointing: auto reads, but {found}. "
                f"Set activation_checkpointing: auto, or remove {name}."
            )
