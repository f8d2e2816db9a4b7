"""Decides when the forward pass of the old policy can be skipped, and counts skipped passes.

GRPO and RLOO compare each log-probability with the one under the policy that generated the completions, the old policy.
TRL runs one more forward pass to compute these. If the policy has not changed since generation, the training pass
computes the same numbers. TRL then skips the pass in GRPO without vLLM. By the same rule, we skip it with vLLM and in
RLOO too. The pass runs whenever two passes could differ, or when code could notice that one is missing.
"""

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers.trainer_callback import CallbackHandler

from liger_trainer.head.module import base_model_of
from liger_trainer.patching.core.binding import Binding
from liger_trainer.patching.core.hooks import comes_from, hook_on, name_of_unknown
from liger_trainer.varlen.decide import HARMLESS_HOOKS
from liger_trainer.varlen.randomness import what_is_random

# A subclass that overrides one of these, or a function that replaces it, may read the numbers or count the pass.
_METHODS = (
    "_compute_loss",
    "_generate",
    "_generate_and_score_completions",
    "_get_per_token_logps_and_entropies",
    "_prepare_inputs",
    "compute_loss",
    "prediction_step",
    "training_step",
)
# Not trl.experimental: its trainers extend the stable ones.
_TRAINERS_OF_LIBRARIES = ("liger_trainer.", "trl.trainer.", "trl.extras.", "transformers.")
# Model code from these libraries computes the same numbers in each pass, and does not count calls.
_MODELS_OF_LIBRARIES = (
    "transformers.",
    "torch.",
    "peft.",
    "liger_trainer.",
    "trl.",
    "accelerate.",
    "deepspeed.",
    "bitsandbytes.",
    "hqq.",
    "gptqmodel.",
    "torchao.",
)
# Gradient hooks from these only reduce, shard or record gradients. PyTorch's optimizers in backward are not included.
_GATHERERS_OF_GRADIENTS = ("deepspeed.", "accelerate.", "liger_trainer.", "torch.distributed.fsdp.", "torch.nn.")
# transformers' other optimizers in backward do not accumulate gradients.
_OPTIMIZERS_IN_BACKWARD = ("lomo", "adalomo")


class PolicyArguments(Protocol):
    """The trainer arguments that tell when the policy changes. Ours also have `reuse_log_probs`."""

    steps_per_generation: int
    gradient_accumulation_steps: int
    optim: str
    auto_find_batch_size: bool


class PolicyTrainer(Protocol):
    """The trainer attributes that decide whether the policy's passes agree. None is written.

    Some trainers also have `neftune_noise_alpha`, which adds noise to embeddings.
    """

    model: nn.Module
    accelerator: Accelerator
    callback_handler: CallbackHandler


class OldPolicyPasses:
    """Counts the old policy's passes in one trainer, for the report.

    Attributes:
        left_out (`int`): The skipped passes, each over a generation batch or an evaluation batch.
        run (`dict[str, int]`): For each reason, the number of passes that ran.
    """

    def __init__(self) -> None:
        self.left_out = 0
        self.run: dict[str, int] = {}

    def count(self, reason: str | None) -> None:
        """Count a pass that ran for `reason`, or was left out if that is None."""
        if reason is None:
            self.left_out += 1
        else:
            self.run[reason] = self.run.get(reason, 0) + 1

    @property
    def is_empty(self) -> bool:
        return not self.left_out and not self.run

    def to_dict(self) -> dict[str, Any]:
        return {"passes_left_out": self.left_out, "passes_run": self.run}


def old_policy_of(trainer: object) -> OldPolicyPasses | None:
    """Return the counts of the old policy's passes in `trainer`, or None if TRL would not have run any."""
    passes = getattr(trainer, "old_policy", None)
    return None if passes is None or passes.is_empty else passes


def why_it_has_moved(args: PolicyArguments, num_iterations: int, began_at: int) -> str | None:
    """Return why the policy may change between a generation and the last step on its completions, or None.

    It is TRL's rule: all micro-batches of a generation batch belong to one optimizer step.

    Args:
        args ([`~trl.GRPOConfig`] or [`~trl.RLOOConfig`]): The trainer's arguments.
        num_iterations (`int`): How often each generation batch is used.
        began_at (`int`): The micro-batches that the trainer had seen before this call of `train`.
    """
    steps = args.steps_per_generation * num_iterations
    if num_iterations > 1:
        return f"num_iterations is {num_iterations}"
    if args.gradient_accumulation_steps % steps:
        return (
            f"gradient_accumulation_steps is {args.gradient_accumulation_steps}, not a multiple of "
            f"steps_per_generation, which is {steps}"
        )
    if began_at % steps:
        return "an earlier training of this trainer stopped within a generation batch"
    if args.optim in _OPTIMIZERS_IN_BACKWARD and args.gradient_accumulation_steps > 1:
        return f"optim {args.optim!s} steps in each backward pass"
    if args.auto_find_batch_size:
        return "auto_find_batch_size restarts within a generation batch"
    return None


def overridden(trainer: object, methods: Iterable[str] = _METHODS) -> str | None:
    """Return which of `methods` is neither TRL's nor ours, or None."""
    for name in methods:
        own = vars(trainer).get(name)
        if own is not None and not comes_from(own, _TRAINERS_OF_LIBRARIES):
            return f"{name} of this trainer was replaced"
        for owner in type(trainer).__mro__:
            method = vars(owner).get(name)
            if method is not None and not comes_from(method, _TRAINERS_OF_LIBRARIES):
                return f"{owner.__name__} overrides {name}"
    return None


def why_it_moves_within(trainer: PolicyTrainer) -> str | None:
    """Return the code that runs after each micro-batch and may change weights within a step, or None."""
    for callback in trainer.callback_handler.callbacks:
        if not comes_from(callback.on_substep_end, _TRAINERS_OF_LIBRARIES):
            return f"on_substep_end of {type(callback).__name__} may move the policy within a step"
    for weight in trainer.model.parameters():
        for hook in (weight._post_accumulate_grad_hooks or {}).values():
            name = name_of_unknown(hook, _GATHERERS_OF_GRADIENTS)
            if name is not None:
                return f"a hook ({name}) on a gradient may move the policy within a step"
    return None


def why_passes_differ(trainer: PolicyTrainer) -> str | None:
    """Return why two passes over the same rows may differ, or why skipping one may be noticed, or None."""
    model = trainer.model
    modules = list(model.modules())
    training = model.training
    if training and getattr(trainer, "neftune_noise_alpha", None) is not None:
        return "NEFTune adds noise"
    if trainer.accelerator.mixed_precision == "fp8":
        return "fp8 scales by the passes before"
    random = what_is_random(base_model_of(model), modules)
    if random is not None:
        return random
    return _keeps_or_counts(modules)


def _keeps_or_counts(modules: Iterable[nn.Module]) -> str | None:
    """Return which module keeps statistics of each pass, or has unknown code or a hook that may, or None."""
    known = set()
    for module in modules:
        kind = type(module)
        if isinstance(module, _BatchNorm) and module.training:
            return f"a {kind.__name__} keeps statistics of each pass"
        if kind not in known:
            if not comes_from(kind.forward, _MODELS_OF_LIBRARIES):
                return f"the forward of {kind.__name__} is not from a known library"
            known.add(kind)
        hook = hook_on(module, Binding.of(module), (*HARMLESS_HOOKS, "trl."))
        if hook is not None:
            return f"{hook} on a {kind.__name__} would miss a pass"
    return None


def agreed(reason: str | None, accelerator: Accelerator) -> str | None:
    """Return `reason`, or a reason because another process has one: all processes have to run the same passes."""
    if accelerator.num_processes == 1:
        return reason
    has_one = torch.tensor([int(reason is not None)], device=accelerator.device)
    anyone = bool(accelerator.gather(has_one).any())
    return "another process has a reason" if anyone and reason is None else reason
