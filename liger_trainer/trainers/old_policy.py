"""When the pass of the old policy is not needed, and what was left out.

The ratios of GRPO and RLOO compare each log-probability with that under the policy that wrote the completions. TRL runs
one more pass for these. Where the policy has not moved since, it is the policy that is trained, and the training pass
computes the same numbers. TRL leaves the pass out then in GRPO without vLLM. Here it is left out with vLLM and in RLOO
too, by the same rule. Everything that might make the two passes differ, or that might miss one, brings it back.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from liger_trainer.head.module import base_model_of
from liger_trainer.patching.core.binding import Binding
from liger_trainer.patching.core.hooks import comes_from, hook_on, name_of_unknown
from liger_trainer.varlen.decide import HARMLESS_HOOKS
from liger_trainer.varlen.randomness import what_is_random

# What a subclass, or a function put in place of one of these, might do with the numbers or with the pass.
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
# TRL's experimental trainers, which extend its stable ones, are not among them.
_TRAINERS_OF_LIBRARIES = ("liger_trainer.", "trl.trainer.", "trl.extras.", "transformers.")
# Code of a model that computes the same numbers twice, and counts no calls.
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
# Hooks on gradients that reduce, shard or note them. PyTorch's own optimizers in the backward pass are not among them.
_GATHERERS_OF_GRADIENTS = ("deepspeed.", "accelerate.", "liger_trainer.", "torch.distributed.fsdp.", "torch.nn.")
_OPTIMIZERS_IN_BACKWARD = ("lomo", "adalomo")  # of transformers; its others of that kind accumulate no gradients


class OldPolicyPasses:
    """Passes of the old policy in one trainer, for the report.

    Attributes:
        left_out (`int`): Passes over a generation batch, or over a batch of an evaluation, that were not run.
        run (`dict[str, int]`): For each reason, the passes that ran.
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


def old_policy_of(trainer: Any) -> OldPolicyPasses | None:
    """Return what became of the passes of the old policy in `trainer`; None where there were none to leave out."""
    passes = getattr(trainer, "old_policy", None)
    return None if passes is None or passes.is_empty else passes


def why_it_has_moved(args: Any, num_iterations: int, began_at: int) -> str | None:
    """Tell why the policy may move between a generation and the last step on its completions, or return None.

    TRL's rule: all micro-batches of a generation batch belong to one step of the optimizer.

    Args:
        args ([`~trl.GRPOConfig`] or [`~trl.RLOOConfig`]): Arguments of the trainer.
        num_iterations (`int`): How often a generation batch is used.
        began_at (`int`): Micro-batches that the trainer had seen when this training began.
    """
    steps = args.steps_per_generation * num_iterations
    if num_iterations > 1:
        return f"num_iterations is {num_iterations}"
    if args.gradient_accumulation_steps % steps:
        return (
            f"gradient_accumulation_steps is {args.gradient_accumulation_steps}, no multiple of "
            f"steps_per_generation, which is {steps}"
        )
    if began_at % steps:
        return "an earlier training of this trainer stopped within a generation batch"
    if args.optim in _OPTIMIZERS_IN_BACKWARD and args.gradient_accumulation_steps > 1:
        return f"optim {args.optim!s} steps in each backward pass"
    if args.auto_find_batch_size:
        return "auto_find_batch_size begins again within a generation batch"
    return None


def overridden(trainer: Any, methods: Iterable[str] = _METHODS) -> str | None:
    """Name one of `methods` that is neither TRL's nor ours, or return None."""
    for name in methods:
        own = vars(trainer).get(name)
        if own is not None and not comes_from(own, _TRAINERS_OF_LIBRARIES):
            return f"{name} of this trainer was replaced"
        for owner in type(trainer).__mro__:
            method = vars(owner).get(name)
            if method is not None and not comes_from(method, _TRAINERS_OF_LIBRARIES):
                return f"{owner.__name__} overrides {name}"
    return None


def why_it_moves_within(trainer: Any) -> str | None:
    """Name code that runs after each micro-batch of a step and may change weights, or return None."""
    for callback in trainer.callback_handler.callbacks:
        if not comes_from(callback.on_substep_end, _TRAINERS_OF_LIBRARIES):
            return f"on_substep_end of {type(callback).__name__} may move the policy within a step"
    for weight in trainer.model.parameters():
        for hook in (weight._post_accumulate_grad_hooks or {}).values():
            name = name_of_unknown(hook, _GATHERERS_OF_GRADIENTS)
            if name is not None:
                return f"a hook ({name}) on a gradient may move the policy within a step"
    return None


def why_passes_differ(trainer: Any) -> str | None:
    """Tell why two passes of the policy over the same rows may differ, or may not be one, or return None."""
    model: nn.Module = trainer.model
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
    """Name a module that keeps something of each pass, or has code or a hook that may, or return None."""
    known = set()
    for module in modules:
        kind = type(module)
        if isinstance(module, _BatchNorm) and module.training:
            return f"a {kind.__name__} keeps statistics of each pass"
        if kind not in known:
            if not comes_from(kind.forward, _MODELS_OF_LIBRARIES):
                return f"the forward of {kind.__name__} is of no library that is known"
            known.add(kind)
        hook = hook_on(module, Binding.of(module), (*HARMLESS_HOOKS, "trl."))
        if hook is not None:
            return f"{hook} on a {kind.__name__} would miss a pass"
    return None


def agreed(reason: str | None, accelerator: Any) -> str | None:
    """Return `reason`, or one in its place where another process has one: all of them run the same passes."""
    if accelerator.num_processes == 1:
        return reason
    has_one = torch.tensor([int(reason is not None)], device=accelerator.device)
    anyone = bool(accelerator.gather(has_one).any())
    return "another process has a reason" if anyone and reason is None else reason
