"""Keeps the models that a trainer has patched, and the options of their heads."""

from torch import nn

from liger_trainer.head.calls import install_fused_head
from liger_trainer.head.module import base_model_of, has_fused_head, head_options
from liger_trainer.head.outputs import HeadOptions
from liger_trainer.patching import LigerReport, apply_liger


class PatchedModels:
    """The models that a trainer has patched.

    Two trainers may share a model and alternate. The model's head has one set of options: the trainer that was built
    last has set them, until another trainer calls `apply_options`.
    """

    def __init__(self) -> None:
        self._options: list[tuple[nn.Module, HeadOptions]] = []

    def patch(
        self, model: nn.Module, config: dict | None, options: HeadOptions | None = None, forget_others: bool = False
    ) -> LigerReport:
        """Call `apply_liger` and remember the head's `options`. With `forget_others`, only keep this model's."""
        report = apply_liger(model, config, head_options=options)
        if has_fused_head(model):
            base = base_model_of(model)
            self._options = [] if forget_others else [known for known in self._options if known[0] is not base]
            self._options.append((base, options or HeadOptions()))
        return report

    def apply_options(self) -> bool:
        """Give every head the options of this trainer. Return whether all models still have their fused head."""
        heads = [(model, options, head_options(model)) for model, options in self._options]
        for model, options, current in heads:
            if current is not None and current != options:
                install_fused_head(model, options)
        return all(current is not None for _, _, current in heads)
