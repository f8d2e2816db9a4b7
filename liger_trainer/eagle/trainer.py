"""`LigerEagleTrainer`: an EAGLE-3 drafter for a frozen model."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from liger_trainer._logging import logger
from liger_trainer.eagle.config import LigerEagleConfig
from liger_trainer.eagle.drafter import EagleDrafter
from liger_trainer.eagle.files import DRAFTER_FOLDER, DrafterConfig
from liger_trainer.eagle.fresh import attach_drafter, drafter_of, fresh_config, fresh_drafter
from liger_trainer.eagle.init_checks import check_setup
from liger_trainer.eagle.loss import drafter_loss
from liger_trainer.eagle.target import decoder_layers, default_layers, embedding_of, lm_head_of
from liger_trainer.eagle.vocabulary import count_labels, draft_vocabulary
from liger_trainer.head.deferred import DeferredLogits
from liger_trainer.head.flat_rows import FlatRows, flat_rows, flat_targets
from liger_trainer.head.frozen import as_served
from liger_trainer.head.module import base_model_of, head_reason
from liger_trainer.head.request import HeadRequest, run_request
from liger_trainer.trainers.heads_trainer import LigerHeadsTrainer
from liger_trainer.varlen.host_copies import sent
from liger_trainer.varlen.taps import tapped

# What a drafter computes depends on these too, though its weights have the same shapes.
_BESIDE_SHAPES = ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta")


class LigerEagleTrainer(LigerHeadsTrainer):
    """Trains an EAGLE-3 drafter with the data, packing and arguments of [`LigerSFTTrainer`].

    [`LigerEagleConfig`] defines the loss. The model is frozen. Only a few rows of logits exist at a time, of the model
    and the drafter together. Once the trainer is built, the drafter is the model's attribute `eagle_drafter`. Training
    and evaluation log `eagle_step{k}_loss` and `eagle_step{k}_accuracy` for each step k: means over all its targets
    since the last log, on all ranks. The accuracy is the share of targets that the drafter ranks first, given the right
    earlier tokens.

    `output_dir` and every checkpoint get the drafter, as `eagle_drafter/config.json` and
    `eagle_drafter/model.safetensors`, which vLLM and SGLang load. The model does not change and is not saved again.
    With `gradient_checkpointing`, each step of the drafter is recomputed in the backward pass.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`]): The target.
        args (`LigerEagleConfig`): Steps, draft vocabulary and everything else.
        kwargs: The other arguments of `SFTTrainer`.

    Raises:
        ValueError: The model has no decoder layers or LM head that a drafter can learn from, the drafter that
            `eagle_init_from` names is for another model, or an option would be silently ignored.
    """

    arguments_class = LigerEagleConfig
    output_suffix = "EAGLE3"
    trained = "a drafter"
    _batch_loss: Callable[..., Any] = staticmethod(drafter_loss)

    @property
    def loss_name(self) -> str:
        """The loss, as the model card names it."""
        return f"of an EAGLE-3 drafter, divergence from the model, eagle_steps: {self.args.eagle_steps}"

    @property
    def _drafter(self) -> EagleDrafter:
        """The model's drafter; it exists once the trainer is built."""
        return drafter_of(self.model)

    # The trained modules

    def _finish_init(self) -> None:
        super()._finish_init()
        check_setup(self.accelerator, self.model, self.train_dataset)
        lm_head_of(self.model)
        self._target_layers = decoder_layers(self.model)
        drafter = attach_drafter(self.model, self._initial_drafter())
        if self.accelerator.mixed_precision in ("bf16", "fp16"):
            # Autocast computes in 16 bits anyway, and 16-bit weights lose the updates of a small learning rate.
            drafter.float()
        self._layers = drafter.config.layers or default_layers(len(self._target_layers))

    def _initial_drafter(self) -> EagleDrafter:
        args = self.args
        if args.eagle_init_from is not None:
            return EagleDrafter.from_pretrained(args.eagle_init_from)
        config = fresh_config(self.model, args.eagle_draft_vocab_size, args.eagle_layers, args.eagle_intermediate_size)
        if self.train_dataset is None:
            raise ValueError("train_dataset is None, but its labels are counted for the draft vocabulary. Pass it.")
        counts = count_labels(self.train_dataset, self.data_collator, config.vocab_size)
        d2t, t2d = draft_vocabulary(counts, config.draft_vocab_size)
        share = float(counts[t2d].sum() / counts.sum().clamp(min=1))
        logger.info(f"Draft vocabulary: {len(d2t)} of {len(t2d)} tokens, with {share:.2%} of the labels")
        return fresh_drafter(self.model, config, d2t, t2d)

    # The loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        self._check_labels(inputs)
        images = sorted(name for name in inputs if name.startswith(("pixel_values", "image_", "video_", "audio_")))
        if images:
            raise ValueError(f"The batch has {images[0]}, but a drafter is trained on text. Remove rows with images.")
        args = self.args
        training = self.model.training
        rows = flat_rows(inputs)
        targets = flat_targets(inputs, rows, args.eagle_steps)
        call = {name: value for name, value in inputs.items() if name != "labels"} | {"use_cache": False}
        request = HeadRequest(logits_consumer=partial(self._scores, rows=rows, targets=targets))
        scores = run_request(model, request, **call)

        loss = self._per_label(scores["loss"], targets[0], num_items_in_batch)
        self._sums.add("train" if training else "eval", scores["sums"], inputs)
        if not return_outputs:
            return loss
        with torch.no_grad():
            return loss, model(**call)

    def _scores(self, run: Callable[[], Any], rows: FlatRows, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """Compute the losses of one batch, inside the model's forward. `run` calls the model's own forward.

        Returns:
            `dict`: `loss` (), the sum of all losses, not yet divided by the number of labels. `sums` (3, K), fp32: for
            each step its unweighted loss, the number of targets that it ranked first, and the number of targets.
        """
        args = self.args
        base = base_model_of(self.model)
        with as_served(base), tapped([self._target_layers[i] for i in self._layers]) as tapped_states:
            outputs = run()
        if len(tapped_states) != len(self._layers):
            called = len(tapped_states)
            raise ValueError(f"{called} of the layers {list(self._layers)} were called; expected each of them once.")
        logits = outputs.logits
        if not isinstance(logits, DeferredLogits) or logits.is_materialized:
            raise ValueError(f"A drafter needs the input of the LM head, but {head_reason(self.model)}.")
        weights = torch.tensor([args.eagle_decay**k for k in range(args.eagle_steps)], device="cpu")
        score = partial(
            self._batch_loss,
            self._drafter,
            rows,
            torch.cat([rows.of(x) for x in tapped_states], -1),
            embedding_of(self.model),
            bool(args.gradient_checkpointing) and self.model.training,
            row_weight=sent(weights, logits.device),
        )
        loss, *sums = logits.fused(score, targets[1:])
        return {"loss": loss, "sums": torch.stack([s.float() for s in sums])}

    def _metric_names(self, heads: int) -> list[tuple[str, str]]:
        return [(f"eagle_step{k}_loss", f"eagle_step{k}_accuracy") for k in range(1, heads + 1)]

    # Checkpoints

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        if not self.args.should_save:
            return
        output_dir = self.args.output_dir if output_dir is None else output_dir
        self._drafter.save_pretrained(os.path.join(output_dir, DRAFTER_FOLDER))
        self._save_beside_heads(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self._load_drafter(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        self._load_drafter(self.state.best_model_checkpoint)

    def _load_drafter(self, checkpoint: str) -> None:
        saved = EagleDrafter.from_pretrained(checkpoint)
        self._refuse_another_function(saved.config, checkpoint)
        self._drafter.load_state_dict(saved.state_dict())

    def _refuse_another_function(self, saved: DrafterConfig, checkpoint: str) -> None:
        """ValueError if the drafter in `checkpoint` computes something else from the same weights."""
        layers = saved.layers or default_layers(len(self._target_layers))
        own = self._drafter.config
        differing = [("layers", tuple(layers), tuple(self._layers))]
        differing += [(name, getattr(saved, name), getattr(own, name)) for name in _BESIDE_SHAPES]
        for name, there, here in differing:
            if there != here:
                raise ValueError(
                    f"The drafter in {checkpoint} has {name}: {there}, and the one of this training {here}. Give the "
                    "options of that training (eagle_layers, eagle_init_from), or start from it with eagle_init_from."
                )
