"""How layers are checkpointed in one training of a trainer: by `light.checkpoint`, or by the `Chooser` of `auto`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from accelerate.utils import DistributedType

from liger_trainer._logging import logger
from liger_trainer.checkpointing import light, switches
from liger_trainer.checkpointing.chooser import Chooser
from liger_trainer.checkpointing.memory import Memory, memory_of
from liger_trainer.trainers import in_backward_checks

if TYPE_CHECKING:
    from liger_trainer.trainers.base import LigerTrainerMixin

AUTO = "auto"
OPTIMIZERS_IN_BACKWARD = ("lomo", "adalomo")


def chooser_of(trainer: "LigerTrainerMixin", memory: Memory | None) -> Chooser | None:
    """What chooses the layers that are checkpointed; None if the arguments or the device leave no choice.

    Args:
        trainer (`LigerTrainerMixin`): The trainer, which is about to train.
        memory (`Memory` or `None`): Another memory than that of the trainer's device.
    """
    args = trainer.args
    if getattr(args, "activation_checkpointing", None) != AUTO:
        return None
    memory = memory or memory_of(args.device)
    if memory is None:
        if args.process_index == 0:
            logger.info(
                "activation_checkpointing: auto goes by the memory of a CUDA GPU. There is none, so every layer is "
                "checkpointed."
            )
        return None
    keeps = not in_backward_checks.wants(args)
    return Chooser(
        trainer.model, memory, args.memory_budget, _why_not_again(trainer), keeps_gradients=keeps,
        host_budget=args.host_memory_budget,
    )  # fmt: skip


@contextmanager
def checkpointing_lightly(trainer: "LigerTrainerMixin") -> Iterator[None]:
    """Within it, layers that are checkpointed in the plain way cost the host less. See `checkpointing/light.py`.

    Not where parameters are sharded: what is kept of them would have to be gathered again.
    """
    model = trainer.model
    if not trainer.uses_liger or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        yield
        return
    switches.install(model, light.light)
    try:
        yield
    finally:
        switches.remove(model)


def _why_not_again(trainer: "LigerTrainerMixin") -> str | None:
    """Why a micro-batch that runs out of memory cannot be run again, or None if it can."""
    if trainer.accelerator.distributed_type != DistributedType.NO:
        return "it cannot be run again, because the other processes have gone on with theirs"
    if trainer.args.optim in OPTIMIZERS_IN_BACKWARD:
        return f"it cannot be run again, because optim is {trainer.args.optim}, which changes weights as it runs"
    if in_backward_checks.wants(trainer.args):
        return "it cannot be run again, because optimizer_in_backward is true, which changes weights as it runs"
    return None
