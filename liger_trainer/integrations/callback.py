"""A callback for any tool that trains with transformers' `Trainer`, such as LLaMA-Factory."""

from typing import Any

from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import TrainerCallback, TrainerControl, TrainerState

from liger_trainer._logging import logger
from liger_trainer.patching import apply_liger
from liger_trainer.patching.core.binding import WeakModuleRef
from liger_trainer.patching.core.report import LigerReport


class LigerCallback(TrainerCallback):
    """Patches the trainer's model once the trainer is built.

    With `model_init` the trainer builds a new model for each training, and the callback patches that one too.

    ```python
    trainer = Trainer(model, args, train_dataset=rows, callbacks=[LigerCallback()])
    ```

    The trainer's own code still runs, and its model returns no logits when it computes the loss. If you can choose the
    trainer, use `LigerTrainer` or one of its siblings: they raise for options that would not work.

    Args:
        liger_config (`dict`, *optional*): Switches single operations off, as in `apply_liger`.
        strict (`bool`, *optional*, defaults to `False`): Raise if a recognised module keeps its own code.

    Attributes:
        liger_report (`LigerReport` or `None`): The patches in the trainer's model, or None before there are any.
    """

    def __init__(self, liger_config: dict | None = None, strict: bool = False) -> None:
        self.liger_config = liger_config
        self.strict = strict
        self.liger_report: LigerReport | None = None
        self._patched = WeakModuleRef()

    def on_init_end(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        if getattr(args, "use_liger_kernel", False):
            raise ValueError(
                "use_liger_kernel is true, so liger-kernel would patch the model again when training starts. Remove "
                "use_liger_kernel, or LigerCallback."
            )
        self._patch(args, model)

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        if model is self._patched.to():
            return
        if isinstance(model, FullyShardedDataParallel):
            raise ValueError(
                "FSDP sharded the model from model_init before LigerCallback could patch it. Pass model instead of "
                "model_init, set fsdp_version: 2, or use LigerTrainer."
            )
        self._patch(args, model)

    def _patch(self, args: Any, model: Any) -> None:
        self.liger_report = apply_liger(model, self.liger_config, strict=self.strict)
        self._patched = WeakModuleRef(model)
        if args.process_index == 0:
            logger.info(self.liger_report.one_line())
