"""`LigerMedusaTrainer`: Medusa heads on a frozen model (stage 1), or together with it (stage 2)."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import PreTrainedModel

from liger_trainer.head.deferred import DeferredLogits
from liger_trainer.head.frozen import as_served
from liger_trainer.head.module import base_model_of, head_reason
from liger_trainer.head.request import HeadRequest, run_request
from liger_trainer.head.targets import head_targets
from liger_trainer.medusa.config import LigerMedusaConfig, schedule_of
from liger_trainer.medusa.files import HEADS_FOLDER
from liger_trainer.medusa.heads import HEADS_NAME, MedusaHeads, attach_heads, heads_detached, heads_of
from liger_trainer.medusa.init_checks import check_setup
from liger_trainer.medusa.loss import heads_loss
from liger_trainer.trainers.base import is_dummy
from liger_trainer.trainers.heads_trainer import LigerHeadsTrainer
from liger_trainer.varlen.host_copies import remember, sent, values_of


class LigerMedusaTrainer(LigerHeadsTrainer):
    """[`LigerSFTTrainer`] for Medusa heads: its data, packing and arguments, and the loss of [`LigerMedusaConfig`].

    Only a few rows of logits exist at any time, for the LM head and all heads together. Once the trainer is built, the
    heads are the model's attribute `medusa_head`. Training and evaluation log `medusa_head{k}_loss` and
    `medusa_head{k}_accuracy` for each head k = 1..K: means over all its targets since the last log, on all ranks.
    Stage 2 also logs `lm_loss` and `mean_token_accuracy` of the LM head.

    `output_dir` and every checkpoint get the heads, as `medusa_heads/config.json` and
    `medusa_heads/medusa_lm_head.safetensors`. In stage 2 they also get the model, or its adapter, in the usual format
    of transformers and PEFT. In stage 1 the model does not change and is not saved again. With `fp8` in stage 1, its
    linear layers except the LM head are quantized to FP8.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): The model, with or without heads.
        args (`LigerMedusaConfig`): Shape of the heads, stage, loss and everything else.
        kwargs: The other arguments of `SFTTrainer`.

    Raises:
        ValueError: The model has no LM head that heads can share or copy, the heads that it has or that
            `medusa_init_heads_from` names have another shape, or an option would be silently ignored.
    """

    arguments_class = LigerMedusaConfig
    output_suffix = "Medusa"
    trained = "Medusa heads"
    way_to_train_the_model = ", or set medusa_stage to 2"

    def __init__(
        self, model: str | PreTrainedModel | nn.Module, args: LigerMedusaConfig | None = None, **kwargs: Any
    ) -> None:
        super().__init__(model, args, **kwargs)
        self._schedule = schedule_of(self.args.medusa_schedule)

    @property
    def loss_name(self) -> str:
        """The loss, as the model card names it."""
        return f"of Medusa heads, medusa_stage: {self.args.medusa_stage}, medusa_targets: {self.args.medusa_targets}"

    @classmethod
    def _freezes_model(cls, args: LigerMedusaConfig) -> bool:
        return args.medusa_stage == 1

    @property
    def _heads(self) -> Any:
        """The model's heads; they exist once the trainer is built."""
        return heads_of(self.model)

    # The trained modules

    def _freeze(self, model: nn.Module) -> None:
        super()._freeze(model)
        heads = heads_of(model)
        if heads is not None:
            heads.requires_grad_(True)

    def _finish_init(self) -> None:
        super()._finish_init()
        check_setup(self.model, self.args, self.accelerator)
        attach_heads(self.model, self._initial_heads())

    def _initial_heads(self) -> MedusaHeads:
        args, heads = self.args, heads_of(self.model)
        owner = "the model has"
        if args.medusa_init_heads_from is not None:
            if heads is not None:
                raise ValueError(
                    f"medusa_init_heads_from is {args.medusa_init_heads_from!r}, but the model has heads already. "
                    "Remove one of the two."
                )
            heads, owner = MedusaHeads.from_pretrained(args.medusa_init_heads_from), "medusa_init_heads_from has"
        if heads is None:
            return MedusaHeads.for_model(self.model, args.medusa_num_heads, args.medusa_num_layers, args.medusa_tied)
        for name in ("medusa_num_heads", "medusa_num_layers", "medusa_tied"):
            want, have = getattr(args, name), heads.config.to_dict()[name]
            if want != have:
                raise ValueError(f"{name} is {want}, but {owner} heads with {have}. Set {name} to {have}.")
        return heads

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Create the stock optimizer, with `medusa_lr_multiplier` times the learning rate for the heads."""
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(*args, **kwargs)
        if not is_new:
            return optimizer
        heads = {id(p) for p in self._heads.parameters()}
        num_found = 0
        for group in list(optimizer.param_groups):
            head_parameters = [p for p in group["params"] if id(p) in heads]
            if not head_parameters:
                continue
            num_found += len(head_parameters)
            rate = group["lr"] * self.args.medusa_lr_multiplier
            if len(head_parameters) == len(group["params"]):
                group["lr"] = rate
            else:
                group["params"] = [p for p in group["params"] if id(p) not in heads]
                optimizer.add_param_group({**group, "params": head_parameters, "lr": rate})
        if num_found != len(heads):
            raise ValueError(
                f"optim is {self.args.optim}, but its parameter groups hold only {num_found} of the {len(heads)} "
                "parameters of the Medusa heads, so the rest would not train. Use another optim, such as adamw_torch."
            )
        return optimizer

    # The loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        self._check_labels(inputs)
        training, args = self.model.training, self.args
        targets = head_targets(inputs, args.medusa_num_heads)
        share = self.state.global_step / max(self.state.max_steps, 1)
        weight = args.medusa_heads_coefficient * (self._schedule(share) if training else 1.0)
        call = {name: value for name, value in inputs.items() if name != "labels"} | {"use_cache": False}
        if self.aux_loss_enabled and args.medusa_stage == 2:
            call["output_router_logits"] = True
        request = HeadRequest(logits_consumer=partial(self._scores, targets=targets, weight=weight))
        # The other heads have no targets in padding.
        scores = run_request(model, request, **call, shift_labels=_labels_of_head(inputs, targets))

        loss = self._per_label(scores["loss"], targets[0], num_items_in_batch)
        if "aux_loss" in scores:  # it is a mean over the micro-batch, as in SFTTrainer
            steps = self.current_gradient_accumulation_steps if num_items_in_batch is not None else 1
            loss = loss + self.router_aux_loss_coef * scores["aux_loss"] / steps
        self._sums.add("train" if training else "eval", scores["sums"], inputs)
        if not return_outputs:
            return loss
        with torch.no_grad():
            return loss, model(**call)

    def _scores(self, run: Callable[[], Any], targets: torch.Tensor, weight: float) -> dict[str, torch.Tensor]:
        """Compute the losses of one batch, inside the model's forward. `run` calls the model's own forward.

        Returns:
            `dict`: `loss` (), the sum of all losses, not yet divided by the number of labels. `sums` (3, heads), fp32:
            for each head its unweighted losses, the targets that were its first choice, and its targets. In stage 2
            also `aux_loss` () where the model has one.
        """
        args, joint = self.args, self.args.medusa_stage == 2
        weights = [1.0] * joint + [weight * args.medusa_decay**k for k in range(1, args.medusa_num_heads + 1)]
        by_head = sent(torch.tensor(weights, device="cpu"), targets.device)
        with nullcontext() if joint else as_served(base_model_of(self.model)):
            outputs = run()
        logits = outputs.logits
        if not isinstance(logits, DeferredLogits) or logits.is_materialized:
            raise ValueError(f"Medusa heads need the input of the LM head, but {head_reason(self.model)}.")
        score = partial(heads_loss, self._heads, args.medusa_targets == "soft", row_weight=by_head.to(logits.device))
        loss, *sums = logits.fused(score, targets if joint else targets[1:])
        scores = {"loss": loss, "sums": torch.stack([s.float() for s in sums])}
        if joint and outputs.get("aux_loss") is not None:
            scores["aux_loss"] = outputs.aux_loss
        return scores

    def _metric_names(self, heads: int) -> list[tuple[str, str]]:
        first = 1
        names = []
        if self.args.medusa_stage == 2:
            names.append(("lm_loss", "mean_token_accuracy"))
            first = 0
        return names + [(f"medusa_head{k}_loss", f"medusa_head{k}_accuracy") for k in range(1, heads + first)]

    # Checkpoints

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        output_dir = self.args.output_dir if output_dir is None else output_dir
        heads_state = model_state = None
        if state_dict is not None:
            prefix = f"{HEADS_NAME}."
            heads_state = {name.rpartition(prefix)[2]: tensor for name, tensor in state_dict.items() if prefix in name}
            model_state = {name: tensor for name, tensor in state_dict.items() if prefix not in name}
        if self.args.should_save and not is_dummy(state_dict):
            self._heads.save_pretrained(os.path.join(output_dir, HEADS_FOLDER), heads_state)
        if self.args.medusa_stage == 2:
            with heads_detached(self.model):
                super()._save(output_dir, model_state)
        elif self.args.should_save:
            self._save_beside_heads(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self._load_with_heads(
            resume_from_checkpoint, partial(super()._load_from_checkpoint, resume_from_checkpoint, model)
        )

    def _load_best_model(self) -> None:
        self._load_with_heads(self.state.best_model_checkpoint, super()._load_best_model)

    def _load_with_heads(self, checkpoint: str, load: Callable[[], Any]) -> None:
        if self.is_deepspeed_enabled:  # its checkpoints hold the heads too
            load()
            return
        if self.is_fsdp_enabled:  # its checkpoints hold only the adapter if there is one, otherwise the heads too
            load()
        elif self.args.medusa_stage == 2:
            with heads_detached(self.model):
                load()
        saved = MedusaHeads.from_pretrained(checkpoint).state_dict()
        set_model_state_dict(self._heads, saved, options=StateDictOptions(full_state_dict=True))


def _labels_of_head(inputs: dict[str, Any], targets: torch.Tensor) -> torch.Tensor:
    """Return the targets of the LM head, (B, S). The host knows them if it knows the labels, so that nothing waits."""
    first = targets[0]
    (labels,) = values_of(inputs["labels"])
    if labels.device.type == "cpu" and first.device.type != "cpu":
        remember(first, F.pad(labels[:, 1:], (0, 1), value=-100))
    return first
