"""How layers are checkpointed in one training of a trainer: by the `Chooser` of `auto`, or by `light.checkpoint`."""

from collections.abc import Callable
from typing import Any

from torch import nn

from liger_trainer._logging import logger
from liger_trainer.memory import light, switches
from liger_trainer.memory.chooser import Chooser
from liger_trainer.memory.memory import Memory, memory_of

AUTO = "auto"


class Lightly:
    """Has layers that are checkpointed in the plain way cost the host less, see `light.py`."""

    outcome = None
    model: nn.Module | None = None

    def run(self, model: nn.Module, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.model is None:
            switches.install(model, light.light)
            self.model = model
        return step(*args, **kwargs)

    def end(self) -> None:
        if self.model is not None:
            switches.remove(self.model)


def checkpointing_of(trainer: Any, memory: Memory | None) -> Chooser | Lightly | None:
    """What runs the micro-batches of one training; None if layers are checkpointed by PyTorch's function.

    Args:
        trainer (`LigerTrainerMixin`): The trainer, which is about to train. It may not have its model yet.
        memory (`Memory` or `None`): Another memory than that of the trainer's device.
    """
    args = trainer.args
    # What is kept of sharded parameters would have to be gathered again
    lightly = not (trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled)
    if getattr(args, "activation_checkpointing", None) == AUTO:
        memory = memory or memory_of(args.device)
        if memory is not None:
            return Chooser(memory, args.memory_budget, args.host_memory_budget, lightly)
        if args.process_index == 0:
            logger.info(
                "activation_checkpointing: auto goes by the memory of a CUDA GPU. There is none, so every layer is "
                "checkpointed."
            )
    return Lightly() if lightly and trainer.uses_liger else None
