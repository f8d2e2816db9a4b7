"""The interface of a trainer's option: its fields, its checks, and its effect on training."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from accelerate import Accelerator
from torch import nn

# Called as `run(step, *args, **kwargs)` in place of a training step, `step(*args, **kwargs)`.
StepRunner = Callable[..., Any]


class FeatureTrainer(Protocol):
    """The attributes of a trainer that every feature may read. A feature's own protocol adds what else it uses.

    So features do not depend on trainers, and the protocols show which feature changes which attribute.
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

    A subclass overrides the methods that it needs. They are listed in the order of their calls, and each is called for
    all features in turn. A check raises a ValueError with the field, its value and what to do. `ArgumentsT` and
    `TrainerT` are protocols of the attributes that the feature reads and writes.
    """

    def resolve(self, args: ArgumentsT) -> None:
        """Set fields of `args`, before the stock class reads them."""

    def check(self, args: ArgumentsT) -> None:
        """Reject fields that contradict each other, after the stock class has read them."""

    def around_accelerator(self, trainer: TrainerT) -> AbstractContextManager[None]:
        """Return the context for building the accelerator of `trainer`."""
        return nullcontext()

    def before_patch(self, model: nn.Module, trainer: TrainerT) -> dict[str, Any]:
        """Change `model` before it is patched. Return entries for the operations in the report."""
        return {}

    def check_trainer(self, trainer: TrainerT) -> None:
        """Reject a trainer that has just been built."""

    def around_training(self, trainer: TrainerT) -> AbstractContextManager[StepRunner | None]:
        """Return the context of training. It may yield a function that runs the training steps."""
        return nullcontext()

    def after_save(self, trainer: TrainerT, folder: Path) -> None:
        """Add files to the model that `trainer` has just saved in `folder`. Only called in the process that writes."""
