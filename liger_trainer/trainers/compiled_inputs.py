"""LoRA with activation checkpointing under `torch_compile`: without the hook that makes embeddings require gradients.

PyTorch's reentrant checkpointing loses gradients where no input of a layer requires any, so transformers, TRL and PEFT
put a hook on the embeddings that calls `requires_grad_`. Non-reentrant checkpointing does not need it. Dynamo cannot
trace that call: it traces the whole model, finds the tensor at the end, and does so again for each of a dozen frames.
"""

from typing import Any, Protocol

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState

from liger_trainer.feature import Feature, FeatureTrainer
from liger_trainer.memory import switches

_HOOKS = ("make_inputs_require_grads", "make_inputs_require_grad")  # of transformers, of PEFT
_LIBRARIES = ("transformers.", "peft.", "trl.")


class CompiledArguments(Protocol):
    """The trainer argument that the feature reads."""

    torch_compile: bool


class CompiledTrainer(FeatureTrainer, Protocol):
    """The trainer attributes that the feature reads."""

    args: CompiledArguments
    model: nn.Module

    def add_callback(self, callback: TrainerCallback) -> None:
        """Add a callback."""


class CompiledInputs(Feature[CompiledArguments, CompiledTrainer]):
    """Removes the hook when training begins: the stock trainer adds it once more right before."""

    def check_trainer(self, trainer: CompiledTrainer) -> None:
        if trainer.uses_liger and trainer.args.torch_compile:
            trainer.add_callback(_RemovesHooks(trainer))


class _RemovesHooks(TrainerCallback):
    def __init__(self, trainer: CompiledTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        model = self.trainer.model
        if checkpoints_without_reentering(model):
            remove_input_hooks(model)


def checkpoints_without_reentering(model: nn.Module) -> bool:
    """Return whether layers of `model` are checkpointed, each by PyTorch's non-reentrant checkpointing."""
    layers = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    for layer in layers:
        function: Any = getattr(layer, "_gradient_checkpointing_func", None)
        if switches.options_of(getattr(function, "checkpointed", function)) is None:
            return False
    return bool(layers)


def remove_input_hooks(model: nn.Module) -> None:
    """Remove the hooks of transformers and PEFT that call `requires_grad_` on what a module of `model` returns."""
    for module in model.modules():
        for number, hook in list(module._forward_hooks.items()):
            named = getattr(hook, "__name__", "") in _HOOKS
            if named and getattr(hook, "__module__", "").startswith(_LIBRARIES):
                del module._forward_hooks[number]
