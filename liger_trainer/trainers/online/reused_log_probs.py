"""Skips the forward pass of the old policy in GRPO and RLOO when the training pass computes the same numbers."""

from contextlib import ExitStack
from typing import Any, Protocol

import torch
from transformers import TrainerState

from liger_trainer.trainers.online.old_policy import (
    OldPolicyPasses,
    PolicyArguments,
    PolicyTrainer,
    agreed,
    overridden,
    why_it_has_moved,
    why_it_moves_within,
    why_passes_differ,
)
from liger_trainer.trainers.online.policy_weights import PolicyWeights
from liger_trainer.trainers.online.rows import KnowsOnlineRows


class ReusingTrainer(PolicyTrainer, Protocol):
    """The trainer attributes that tell whether the old policy's pass can be skipped. None is written."""

    args: PolicyArguments
    state: TrainerState
    num_iterations: int
    is_deepspeed_enabled: bool
    is_fsdp_enabled: bool

    @property
    def uses_liger(self) -> bool:
        """Return whether the trainer patches its models."""

    def get_tp_size(self) -> int:
        """Return how many processes hold parts of each layer."""


class ReusesLogProbs(KnowsOnlineRows):
    """Mixin of trainers that generate their rows. It precedes `LigerTRLMixin`.

    During generation, `_leave_out` keeps TRL from running the pass. In training, once the rows of a micro-batch are
    scored, `_fill_in` adds what TRL would have derived from the pass, before TRL's loss reads it.

    Attributes:
        old_policy (`OldPolicyPasses`): Counts the passes that were skipped, and the reasons for those that ran.
    """

    _undo: ExitStack | None = None  # restores TRL's pass; set while rows are generated without it
    _mode_of_rows: str | None = None  # None until rows are fetched
    _began_at: int = 0  # micro-batches before this call of `train`
    _wrote_at: dict[str, int]  # the optimizer step at the last generation, by mode
    _wrote_with: dict[str, PolicyWeights]  # the weights after the last generation, by mode
    old_policy: OldPolicyPasses

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.old_policy = OldPolicyPasses()
        self._wrote_at = {}
        self._wrote_with = {}
        super().__init__(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self._began_at = self._step
        return super().train(*args, **kwargs)

    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        self._mode_of_rows = self._mode_of_model
        return super()._prepare_inputs(*args, **kwargs)

    @property
    def _mode_of_model(self) -> str:
        return "train" if self.model.training else "eval"

    @property
    def _mode(self) -> str:
        """The mode of the model when TRL fetched the rows. A reward function may have changed the model's since."""
        return self._mode_of_rows or self._mode_of_model

    def _runs_old_policy(self) -> bool:
        """Return whether TRL would run the pass for this batch."""
        raise NotImplementedError

    def _why_needed(self) -> str | None:
        """Return the reason why this trainer needs the pass, or None."""
        raise NotImplementedError

    def _leave_out(self, undo: ExitStack) -> None:
        """Keep TRL from running the pass, right before it would. `undo` gets the callbacks that restore it."""
        raise NotImplementedError

    def _without_pass(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a batch made without the pass, without the placeholders that TRL computed from it."""
        raise NotImplementedError

    def _lacks(self, inputs: dict[str, Any]) -> bool:
        """Return whether a micro-batch still lacks what TRL derives from the pass."""
        raise NotImplementedError

    def _fill_in(self, inputs: dict[str, Any], old: torch.Tensor) -> None:
        """Add to a micro-batch what TRL derives from `old`, the log-probabilities (B, T) without a gradient."""
        raise NotImplementedError

    def _why_it_runs(self) -> str | None:
        trainer: ReusingTrainer = self
        if not getattr(trainer.args, "reuse_log_probs", True):
            return "reuse_log_probs is false"
        reason = self._why_needed()
        if reason is not None:  # depends on arguments alone, so all processes agree
            return reason
        own = overridden(trainer) or why_it_moves_within(trainer) or why_passes_differ(trainer)
        return agreed(own, trainer.accelerator)

    def _why_moved(self) -> str | None:
        trainer: ReusingTrainer = self
        return why_it_has_moved(trainer.args, trainer.num_iterations, self._began_at)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        trainer: ReusingTrainer = self
        if not trainer.uses_liger or not self._runs_old_policy():
            return super()._generate_and_score_completions(inputs)
        reason = self._why_it_runs()
        self.old_policy.count(reason)
        if reason is not None:
            return super()._generate_and_score_completions(inputs)
        self._wrote_at[self._mode] = trainer.state.global_step
        with ExitStack() as undo:
            undo.callback(setattr, self, "_undo", None)
            self._undo = undo
            batch = super()._generate_and_score_completions(inputs)
        return self._without_pass(batch)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate, then leave the pass out. TRL's caller runs the pass next, so no user code runs in between."""
        generated = super()._generate(*args, **kwargs)
        if self._undo is not None:
            self._note_weights()
            self._leave_out(self._undo)
        return generated

    def _note_weights(self) -> None:
        """Record the weights that TRL would run the pass with, because user code that runs later may change them."""
        trainer: ReusingTrainer = self
        sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or trainer.get_tp_size() > 1
        if not sharded:
            self._wrote_with[self._mode] = PolicyWeights(trainer.model)

    def _written(self) -> str | None:
        """Return the name of a weight that was written since the weights were noted, or None."""
        noted = self._wrote_with.get(self._mode)
        return None if noted is None else noted.changed()

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        inputs = self._trained
        if inputs is None or not self._lacks(inputs):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._refuse_if_moved()
        scored = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._written() is not None:  # by the pass, as PEFT's constrained OFT does in each
            self._note_weights()
        self._fill_in(inputs, scored[0].detach())
        return scored

    def _refuse_if_moved(self) -> None:
        """Raise RuntimeError if the policy has changed since the rows were generated.

        TRL's schedule has no optimizer step in between. But a reward function or a callback may change weights.
        """
        trainer: ReusingTrainer = self
        wrote_at = self._wrote_at.get(self._mode)
        now = trainer.state.global_step
        if wrote_at != now:
            raise RuntimeError(
                f"The completions of this batch were written at step {wrote_at}, and this is step {now}: the policy "
                "has moved, and the log-probabilities of the one that wrote them were not kept. Set "
                "reuse_log_probs=False, or let train() run to the end of a step before you call it again."
            )
        name = self._written()
        if name is not None:
            raise RuntimeError(
                f"{name} was written after the completions of this batch were generated, such as by a reward function "
                "or a callback. The log-probabilities of the policy that wrote them were not kept. Set "
                "reuse_log_probs=False, or leave the weights as they are until the step has ended."
            )
