"""The parts of an option of the trainers: its fields, what it is refused with, and what it does in a training."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from accelerate import Accelerator
from torch import nn

# `run(step, *args, **kwargs)` returns `step(*args, **kwargs)`, a training step, in its own way
StepRunner = Callable[..., Any]


class FeatureTrainer(Protocol):
    """What any feature may read of a trainer. The protocol of a feature adds what it reads besides, and what it writes.

    So a feature knows no trainer, and a reader of a trainer knows who changes which attribute.
    """

    accelerator: Accelerator
    is_deepspeed_enabled: bool
    is_fsdp_enabled: bool

    @property
    def uses_liger(self) -> bool:
        """Return whether the trainer patches its models."""


ArgumentsT = TypeVar("ArgumentsT", contravariant=True)
TrainerT = TypeVar("TrainerT", contravariant=True, bound=FeatureTrainer)


class Feature(Generic[ArgumentsT, TrainerT]):
    """One feature of the trainers. `FEATURES` in `trainers/features.py` has one of each.

    A subclass overrides what it needs; the methods here do nothing. They are called in the order in which they stand
    here, for each feature in turn. Those that refuse raise a ValueError with the field, its value and what to do.
    `ArgumentsT` and `TrainerT` are protocols of what the feature reads and writes.
    """

    def resolve(self, args: ArgumentsT) -> None:
        """Give the fields of `args` their values, before the stock class looks at them."""

    def check(self, args: ArgumentsT) -> None:
        """Refuse fields that do not go together, after the stock class has looked at them."""

    def around_accelerator(self, trainer: TrainerT) -> AbstractContextManager[None]:
        """A context in which the accelerator of `trainer` is made."""
        return nullcontext()

    def before_patch(self, model: nn.Module, trainer: TrainerT) -> dict[str, Any]:
        """Change `model` before it is patched. Returns what goes into the operations of the report."""
        return {}

    def check_trainer(self, trainer: TrainerT) -> None:
        """Refuse a trainer that has just been built."""

    def around_training(self, trainer: TrainerT) -> AbstractContextManager[StepRunner | None]:
        """A context in which `trainer` trains. It may give a function that runs the training steps."""
        return nullcontext()

    def after_save(self, trainer: TrainerT, folder: Path) -> None:
        """Add to the model of `trainer` that was just saved in `folder`. Only the process that writes calls it."""
