"""Any tool that trains with a `Trainer` of transformers and takes callbacks, such as LLaMA-Factory."""

from typing import Any

from transformers import TrainerCallback

from liger_trainer._logging import logger
from liger_trainer.instance.report import LigerReport
from liger_trainer.patching import apply_liger


class LigerCallback(TrainerCallback):
    """Patches the model of the trainer that it is given to, when that trainer has been built.

    ```python
    trainer = Trainer(model, args, train_dataset=rows, callbacks=[LigerCallback()])
    ```

    The trainer's own code runs, and finds no logits where the model computes the loss. If you can choose the trainer,
    use `LigerTrainer` or one of its siblings, which refuse what would not work.

    Args:
        liger_config (`dict`, *optional*): Switches single operations off, as in `apply_liger`.
        strict (`bool`, *optional*, defaults to `False`): Raise if something that is recognised keeps its own code.

    Attributes:
        liger_report (`LigerReport` or `None`): What was patched, once the trainer has been built.
    """

    def __init__(self, liger_config: dict | None = None, strict: bool = False) -> None:
        self.liger_config, self.strict = liger_config, strict
        self.liger_report: LigerReport | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if getattr(args, "use_liger_kernel", False):
            raise ValueError(
                "use_liger_kernel is true, which has liger-kernel patch the model once more when training starts. "
                "Remove use_liger_kernel, or LigerCallback."
            )
        self.liger_report = apply_liger(model, self.liger_config, strict=self.strict)
        if args.process_index == 0:
            logger.info(self.liger_report.one_line())
