"""`LigerDPOTrainer`: `trl.DPOTrainer` with our fused head in the place of TRL's own, and a hook for a loss of pairs."""

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import nn
from trl import DPOConfig, DPOTrainer

from liger_trainer.trainers.arguments import LigerArguments
from liger_trainer.trainers.trl import LigerTRLMixin

_SMOOTHED = ("exo_pair", "robust", "aot", "aot_unpaired")  # the loss types in which TRL reads label_smoothing


@dataclass
class LigerDPOConfig(LigerArguments, DPOConfig):
    """[`~trl.DPOConfig`] with the fields of [`LigerArguments`], for [`LigerDPOTrainer`]."""


class LigerDPOTrainer(LigerTRLMixin, DPOTrainer):
    """[`~trl.DPOTrainer`] with the same losses, gradients and metrics, on fused kernels.

    The policy and the reference model are patched, and neither builds logits. The trainer takes the arguments of
    `DPOTrainer`, with a [`LigerDPOConfig`] as `args`; a plain `DPOConfig` counts as one with `use_liger=True`. Every
    option keeps its meaning, since the loss code is TRL's. Unlike the stock trainer, it can train a LoRA on `lm_head`,
    and with `eval_predictions="tokens"` it gives `compute_metrics` token ids, log-probabilities and ranks without a
    second forward pass.

    A subclass changes the loss by overriding `pair_loss`; the metrics stay TRL's:

    ```python
    class MarginDPOTrainer(LigerDPOTrainer):
        pair_columns = ("margin",)

        def pair_loss(self, chosen_logratios, rejected_logratios, inputs):
            return -F.logsigmoid(self.beta * (chosen_logratios - rejected_logratios) - inputs["margin"])
    ```

    Attributes:
        pair_columns (`tuple[str, ...]`): Columns of the rows that hold numbers, which `pair_loss` finds in `inputs`.

    Raises:
        ValueError: An option would have no effect, or two options would each decide the loss.
    """

    loss_hook = "pair_loss"
    other_losses: ClassVar[dict[str, Any]] = {
        "loss_type": ["sigmoid"], "loss_weights": None, "f_divergence_type": "reverse_kl", "ld_alpha": None,
        "label_smoothing": 0.0, "use_weighting": False,
    }  # fmt: skip
    pair_columns: tuple[str, ...] = ()
    gives_token_predictions = True
    args: DPOConfig
    data_collator: Callable[[list], dict[str, Any]]
    loss_types: list[str]
    loss_weights: list[float]
    precompute_ref_logps: bool

    def pair_loss(self, chosen_logratios: torch.Tensor, rejected_logratios: torch.Tensor, inputs: dict) -> torch.Tensor:
        """Loss of each pair. The trainer takes the mean, and adds the auxiliary loss of a mixture of experts.

        Args:
            chosen_logratios (`torch.Tensor`): (P,) for P pairs, fp32: the log-probability of the chosen completion
                under the policy minus that under the reference, each summed over the completion's tokens.
            rejected_logratios (`torch.Tensor`): (P,), the same for the rejected completion.
            inputs (`dict`): The batch: `input_ids`, `attention_mask` and `completion_mask` (2 P, S), chosen before
                rejected; `ref_chosen_logps` and `ref_rejected_logps` (P,); and the `pair_columns`, each (P,).

        Returns:
            `torch.Tensor`: (P,), not reduced.
        """
        raise NotImplementedError("Without an override the loss is the `loss_type` of the config, computed by TRL.")

    @property
    def has_own_loss(self) -> bool:
        return type(self).pair_loss is not LigerDPOTrainer.pair_loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        if self.has_own_loss and self.head_is_ours:
            return self._own_loss(model, inputs, return_outputs)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _own_loss(self, model: Callable[..., Any], inputs: dict[str, Any], return_outputs: bool) -> Any:
        """`pair_loss`, added to a stock step that has no losses of its own, but metrics and the auxiliary loss."""
        columns = {name: inputs[name] for name in self.pair_columns}
        inputs = {name: value for name, value in inputs.items() if name not in columns}
        if not self.precompute_ref_logps:
            chosen, rejected = self.compute_ref_log_probs(self.ref_model or self.model, inputs)
            inputs |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        scored: list[torch.Tensor] = []

        def scoring(**call: Any) -> Any:
            outputs = model(**call)
            if call.get("fused_lm_head"):
                scored.append(outputs.log_probs)
            return outputs

        stock = self.loss_types, self.loss_weights, self.precompute_ref_logps
        self.loss_types, self.loss_weights, self.precompute_ref_logps = [], [], True
        try:
            rest = super().compute_loss(scoring, inputs, return_outputs)
        finally:
            self.loss_types, self.loss_weights, self.precompute_ref_logps = stock
        # Prompt-learning adapters of PEFT put virtual tokens before the real ones.
        log_probs = scored[0][:, -(inputs["input_ids"].shape[1] - 1) :]
        chosen, rejected = log_probs.sum(dim=1).chunk(2)
        chosen, rejected = chosen - inputs["ref_chosen_logps"], rejected - inputs["ref_rejected_logps"]
        loss = self.pair_loss(chosen, rejected, inputs | columns)
        if loss.shape != chosen.shape:
            raise ValueError(
                f"pair_loss returned shape {tuple(loss.shape)}; expected one loss per pair, {tuple(chosen.shape)} (do "
                "not reduce: the trainer does)."
            )
        return (rest[0] + loss.mean(), rest[1]) if return_outputs else rest + loss.mean()

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        self._signature_columns += [name for name in self.pair_columns if name not in self._signature_columns]

    def _finish_init(self) -> None:
        super()._finish_init()
        if self.uses_liger and self.args.label_smoothing and not set(self.args.loss_type) & set(_SMOOTHED):
            raise ValueError(
                f"label_smoothing is {self.args.label_smoothing}, which DPOTrainer does not use with loss_type "
                f"{self.args.loss_type}. Remove it, or take one of {', '.join(_SMOOTHED)}; 'robust' is 'sigmoid' for "
                "preferences some of which are wrong."
            )
        if not self.pair_columns:
            return
        if not self.has_own_loss:
            raise ValueError(f"pair_columns is {self.pair_columns!r}, but no pair_loss reads them. Override pair_loss.")
        for name in self.pair_columns:
            value = next(iter(self.train_dataset)).get(name)
            if not isinstance(value, Real):
                raise ValueError(
                    f"pair_columns has {name!r}, and the first row's {name!r} is {value!r}; expected a number in every "
                    "row."
                )
        self.data_collator = _WithColumns(self.data_collator, self.pair_columns)


class _WithColumns:
    """A collator whose batches also have the columns `names`, each a tensor of one number per row."""

    def __init__(self, collator: Callable[[list], dict[str, Any]], names: tuple[str, ...]) -> None:
        self.collator, self.names = collator, names

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        columns = {name: torch.tensor([row[name] for row in rows]) for name in self.names}
        return {**self.collator(rows), **columns}
