"""The base of every Liger trainer: patches the models when it is built, and lets a subclass change the loss."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from accelerate import DistributedType
from accelerate.data_loader import DataLoaderShard
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import TrainOutput

from liger_trainer._logging import logger
from liger_trainer.base_weights.unloaded import Base, KeptWeights
from liger_trainer.feature import StepRunner
from liger_trainer.head.module import base_model_of, has_fused_head
from liger_trainer.head.outputs import FusedLMOutput, HeadOptions
from liger_trainer.head.request import HeadRequest, run_request
from liger_trainer.memory.device_memory import GpuMemory
from liger_trainer.memory.summary import CheckpointingSummary
from liger_trainer.patching import LigerReport
from liger_trainer.patching.core.hooks import comes_from
from liger_trainer.trainers import init_checks
from liger_trainer.trainers.features import FEATURES
from liger_trainer.trainers.fsdp2 import keep_losses_in_fp32
from liger_trainer.trainers.module_walks import WithParameters
from liger_trainer.trainers.passes import ResumesInPass
from liger_trainer.trainers.patched_models import PatchedModels
from liger_trainer.trainers.renamed_weights import LoadsRenamedWeights
from liger_trainer.trainers.world import launch_problem
from liger_trainer.varlen import registry
from liger_trainer.varlen.decide import bound_backbone
from liger_trainer.varlen.graphs.capture_summary import CaptureSummary
from liger_trainer.varlen.host_copies import real_tokens, remembering

_LIBRARIES = ("liger_trainer.", "trl.", "transformers.")


def stock_class(liger_class: type) -> type:
    """Return the class of transformers or TRL that `liger_class`, a trainer or its config, extends."""
    return next(base for base in liger_class.__mro__ if base.__module__.partition(".")[0] in ("trl", "transformers"))


@lru_cache(maxsize=16)
def _are_overridden(methods: tuple[Callable[..., Any] | None, ...]) -> bool:
    """Return whether one of `methods` is a user's instead of a library's. Cached, because each step asks."""
    return not all(method is None or comes_from(method, _LIBRARIES) for method in methods)


def is_dummy(state_dict: dict | None) -> bool:
    """Return whether a state dict is DeepSpeed's without gathered weights, whose file is deleted at once."""
    return state_dict is not None and not state_dict


class LigerTrainerMixin(LoadsRenamedWeights, ResumesInPass):
    """The base of every Liger trainer. It patches its models when it is built, and a subclass may change the loss.

    To change the loss, override `token_loss`, which gets per-token quantities and never logits. The stock trainer still
    sums over tokens, divides by the number of labels in the accumulated batch over all ranks, and computes the metrics:

    ```python
    class FocalTrainer(LigerSFTTrainer):
        def token_loss(self, outputs, inputs):
            return -((1 - outputs.log_probs.exp()) ** 2) * outputs.log_probs
    ```

    Attributes:
        token_outputs (`tuple[str, ...]`): The fields of `FusedLMOutput` that `token_loss` needs besides `log_probs` and
            `label_mask`: any of `"entropy"`, `"log_sum_sq_probs"`, `"mean_logits"`, `"is_top1"`, `"hidden_states"`,
            `"vocab_mean"`. Another name is an error.
        loss_hook (`str` or `None`): Name of the method that a subclass overrides to change the loss.
        gives_token_predictions (`bool`): Whether `compute_loss` calls its model through `_with_predictions`, as
            `eval_predictions="tokens"` needs.
        liger_report (`LigerReport` or `None`): What was patched, or `None` with `use_liger=False`.
        takes_classifiers (`bool`): Whether it trains models with a classification head instead of an LM head.
        freezes_model (`bool`): Whether the whole model is frozen, and only the trainer's own modules train.
        freezes_in_fp8 (`bool`): Whether `fp8` stores the frozen base of the model in FP8.
        checkpointing (`CheckpointingSummary` or `None`): What `auto` chose in the last training.
        captured_steps (`CaptureSummary` or `None`): What `cuda_graphs` captured in the last training, or
            why it captured nothing. `None` with `cuda_graphs=False` or `use_liger=False`.
        device_memory (`GpuMemory` or `None`): The memory that `auto` plans for, instead of the GPU's.
        base_checkpoint (`Base` or `None`): The files that the model was loaded from, if they may have unloaded weights.
        kept_weights (`KeptWeights` or `None`): The unloaded weights that the last save copied from these files.
        rows_are_chats (`bool`): Whether rows are messages, so that `sample_prompts` are chats. True if unknown.
        system_prompt (`str` or `None`): The system prompt of the first row, used for `sample_prompts`.
        grad_norm_of_step (`Callable` or `None`): Returns the gradient norm, in place of the stock trainer's code.
    """

    token_outputs: tuple[str, ...] = ()
    loss_hook: str | None = "token_loss"
    gives_token_predictions: bool = False
    _predicted: list[dict[str, torch.Tensor]] | None = None  # a list while `prediction_step` gathers predictions
    _loss_only: bool = False  # True while `prediction_step` wants no logits
    _patched: PatchedModels
    _needs_heads: bool = False  # whether the loss is computed by fused heads alone
    liger_report: LigerReport | None = None
    takes_classifiers: bool = False
    freezes_model: bool = False
    freezes_in_fp8: bool = False
    checkpointing: CheckpointingSummary | None = None
    captured_steps: CaptureSummary | None = None
    device_memory: GpuMemory | None = None
    base_checkpoint: Base | None = None
    kept_weights: KeptWeights | None = None
    rows_are_chats: bool = True
    system_prompt: str | None = None
    grad_norm_of_step: Callable[[], torch.Tensor] | None = None
    _step_runners: Sequence[StepRunner] = ()  # they wrap the training steps, the outermost first
    _ops_of_token: int | None = None  # None until counted
    _packing_faults: dict[frozenset[str], str | None]  # a cache for `refuse_packed_batch_that_mixes`

    def token_loss(self, outputs: FusedLMOutput, inputs: dict) -> torch.Tensor:
        """Return the loss of each label. The trainer sums it and divides by the number of labels that count.

        If the model computes an auxiliary loss of its routers (`output_router_logits` in its config,
        `router_aux_loss_coef` in TRL's arguments), the trainer adds it, as the stock trainer does.

        Args:
            outputs (`FusedLMOutput`): Per-token fields, each (B, S - 1), fp32, for the labels
                `inputs["labels"][:, 1:]`. With `inputs["shift_labels"]` in the batch, (B, S), for those labels. Zero
                where `outputs.label_mask` is False.
            inputs (`dict`): The batch as given to the model.

        Returns:
            `torch.Tensor`: The unreduced loss of each label, in the shape of `outputs.label_mask`. Values where
            `label_mask` is False are ignored.
        """
        return -outputs.log_probs  # type: ignore[operator]  # always asked for, so it is not None

    @classmethod
    def stock_class(cls) -> type:
        """Return the class of transformers or TRL that `cls` extends."""
        return stock_class(cls)

    @property
    def uses_liger(self) -> bool:
        """Return whether models are patched. True for stock arguments, which have no `use_liger`."""
        return getattr(self.args, "use_liger", True)

    @property
    def overrides_token_loss(self) -> bool:
        return self.loss_hook == "token_loss" and type(self).token_loss is not LigerTrainerMixin.token_loss

    def _token_loss_of(self, outputs: FusedLMOutput, inputs: dict) -> torch.Tensor:
        """Call `token_loss`, and set positions without a label to zero. ValueError if it is not one loss per label."""
        per_token: Any = self.token_loss(outputs, inputs)  # a user's method, which may return anything
        mask: Any = outputs.label_mask
        shape = getattr(per_token, "shape", None)
        if shape != mask.shape:
            returned = f"the {type(per_token).__name__} {per_token!r}" if shape is None else f"shape {tuple(shape)}"
            raise ValueError(
                f"token_loss returned {returned}; expected one loss per label, {tuple(mask.shape)} (do not reduce: the "
                "trainer does)."
            )
        return per_token.masked_fill(~mask, 0.0)

    @property
    def uses_fused_head(self) -> bool:
        return self.liger_report is not None and has_fused_head(self.model)

    def create_accelerator_and_postprocess(self) -> None:
        with ExitStack() as stack:
            for feature in FEATURES:
                stack.enter_context(feature.around_accelerator(self))
            super().create_accelerator_and_postprocess()
        if self.uses_liger:
            keep_losses_in_fp32(self.accelerator)

    def get_train_dataloader(self) -> DataLoader:
        return self._remembering(super().get_train_dataloader())

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader:
        return self._remembering(super().get_eval_dataloader(*args, **kwargs))

    def _remembering(self, loader: DataLoader) -> DataLoader:
        """Have the host keep the mask and positions of each batch of `loader`, so that it can find the rows."""
        if isinstance(loader, DataLoaderShard) and self.wants_part("varlen_attention"):
            loader.base_dataloader.collate_fn = remembering(loader.base_dataloader.collate_fn)
        return loader

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._apply_head_options()
        if self.uses_liger:
            inputs = args[1] if len(args) > 1 else kwargs.get("inputs")
            init_checks.refuse_packed_batch_that_mixes(self.model, inputs, self._packing_faults)
        step = super().training_step
        for run in reversed(self._step_runners):
            step = partial(run, step)
        with self._errors_with_advice():
            return step(*args, **kwargs)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Count as the stock class does, but count the parameters once: that takes as long as a few layers do."""
        stock, name = super().floating_point_ops, getattr(self.model, "main_input_name", "input_ids")
        if stock.__func__ is not Trainer.floating_point_ops:  # a user's method, which may count anything
            return stock(inputs)
        if self._ops_of_token is None:
            self._ops_of_token = stock({name: torch.empty(1, device="meta")})
        return inputs[name].numel() * self._ops_of_token if name in inputs else 0

    def real_tokens(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> int | None:
        """Count the tokens of a step without padding; None if padding is computed or the host cannot tell."""
        return None if bound_backbone(base_model_of(self.model)) is None else real_tokens(inputs)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return super()._clip_grad_norm(self._with_parameters(model, super()._clip_grad_norm))

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if self.grad_norm_of_step is not None:
            return self.grad_norm_of_step()
        return super()._get_grad_norm(self._with_parameters(model, super()._get_grad_norm), grad_norm)

    def _with_parameters(self, model: nn.Module, stock: Any) -> Any:
        """Return the model to pass to `stock`, a method of `Trainer` that reads only the parameters of a model."""
        is_stock = getattr(stock, "__func__", None) is getattr(Trainer, stock.__name__)
        alone = self.accelerator.distributed_type == DistributedType.NO
        return WithParameters(model) if self.uses_liger and is_stock and alone else model

    def _apply_head_options(self) -> None:
        """Give the heads the options of this trainer: another trainer may have been built on the same models.

        RuntimeError if a model has lost the fused head that the loss needs.
        """
        if self.liger_report is None:
            return
        all_there = self._patched.apply_options()
        if not all_there and (self._needs_heads or self.overrides_token_loss):
            raise RuntimeError(
                f"The loss of {type(self).__name__} needs the fused LM head, which remove_liger has taken from a "
                "model. Call apply_liger(model), or build a new trainer."
            )

    @property
    def overrides_compute_loss(self) -> bool:
        """Return whether a user's class overrides `compute_loss`."""
        replaced = vars(self).get("compute_loss")
        if replaced is not None and not comes_from(replaced, _LIBRARIES):
            return True
        return _are_overridden(tuple([vars(owner).get("compute_loss") for owner in type(self).__mro__]))

    def _advice_on_logits(self) -> str:
        hook = f"override {self.loss_hook} instead, which builds none; " if self.loss_hook else ""
        return (
            f"{type(self).__name__} overrides compute_loss. In training, a model that is called with labels returns "
            f"its loss and no logits (logits=None). If that compute_loss reads logits, {hook}call model(..., "
            'skip_logits=False); or set liger_config={"fused_linear_cross_entropy": false}.'
        )

    @contextmanager
    def _errors_with_advice(self) -> Iterator[None]:
        """Context manager: adds advice to the error of a loss without logits, or of an overwritten input."""
        try:
            yield
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            if self.liger_report is not None and init_checks.IN_PLACE in str(error):
                error.add_note(init_checks.WHAT_FUSED_LAYERS_KEEP)
            reads_none = "NoneType" in str(error) or error.args == ("logits",)
            unpacks_logits = str(error).startswith("not enough values to unpack")  # `loss, logits = model(...)[:2]`
            if (reads_none or unpacks_logits) and self.uses_fused_head and self.overrides_compute_loss:
                error.add_note(self._advice_on_logits())
            raise

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train as the stock trainer does, with the features that the arguments ask for."""
        self._apply_head_options()  # before TRL loads the data, because it may score rows then
        self._ops_of_token = None
        self._packing_faults = {}
        with ExitStack() as stack:
            runs = [stack.enter_context(feature.around_training(self)) for feature in FEATURES]
            self._step_runners = [run for run in runs if run is not None]
            stack.callback(self._step_runners.clear)
            return super().train(*args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)
        if self.args.should_save and not is_dummy(state_dict):
            for feature in FEATURES:
                feature.after_save(self, Path(output_dir or self.args.output_dir))

    def wants_part(self, part: str) -> bool:
        return bool(self.uses_liger and (getattr(self.args, "liger_config", None) or {}).get(part, True))

    def _apply_liger(self, model: nn.Module, options: HeadOptions | None = None) -> None:
        """Patch `model` as the arguments ask. Raise if the user's own loss would not be used.

        `options` are for calls with `fused_lm_head=True`. None: the defaults of `HeadOptions`.
        """
        init_checks.refuse_before_patching(self, model)
        if not self.uses_liger:
            return
        changed = [feature.before_patch(model, self) for feature in FEATURES]
        # The user's switches, and those that this trainer or the launch adds.
        config = getattr(self.args, "liger_config", None)
        unfused = self.unfused_reason(model) if self.wants_part("fused_linear_cross_entropy") else None
        if unfused is not None:
            config = (config or {}) | {"fused_linear_cross_entropy": False}
        parallel = self.accelerator.parallelism_config
        if parallel is not None and parallel.cp_enabled:  # each GPU has a part of every row, and runs ring attention
            config = (config or {}) | {"varlen_attention": False}
        self.liger_report = self._patched.patch(model, config, options, forget_others=self.model_init is not None)
        for operations in changed:
            self.liger_report.operations |= operations
        if unfused is not None:  # the user did not switch it off, so the report gives the reason instead of "off"
            part = self.liger_report["fused_linear_cross_entropy"]
            part.enabled = True
            part.skipped = {"lm_head": unfused}
        if self.args.process_index == 0:
            logger.info(self.liger_report.one_line())

    def unfused_reason(self, model: nn.Module) -> str | None:
        """Return why the loss needs the logits of `model`, so its head is not fused; None if it can be fused."""
        return None

    @property
    def _wants_tokens(self) -> bool:
        return getattr(self.args, "eval_predictions", "logits") == "tokens"

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        self._apply_head_options()
        gathers = self._wants_tokens and not prediction_loss_only
        # With `eval_predictions="tokens"` the stock method computes the loss alone, and `_with_predictions` gathers the
        # tokens in its calls of the model.
        self._loss_only = prediction_loss_only or gathers
        self._predicted = [] if gathers else None
        try:
            with self._errors_with_advice():
                outputs = super().prediction_step(model, inputs, self._loss_only, ignore_keys)
            if self._predicted is None:
                return outputs
            predictions = dict(self._predicted[-1])  # KTO scores the mismatched pairs for its KL estimate first
            return outputs[0], predictions, predictions.pop("labels")
        finally:
            self._loss_only = False
            self._predicted = None

    def _without_needless_mask(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """Return `model`, or for compiled training a stand-in that drops attention masks of ones."""
        if self.args.torch_compile and self.uses_liger and self.model.training:
            return registry.without_mask_of_ones(model, base_model_of(self.model))
        return model

    def _with_predictions(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """Return `model`, or while predictions are gathered a stand-in that asks for them in calls with labels."""
        predicted = self._predicted
        if predicted is None:
            return model

        def forward(**call: Any) -> Any:
            if call.get("labels") is None and call.get("shift_labels") is None:
                return model(**call)
            request = replace(HeadRequest.taken_from(call), token_predictions=True)
            outputs = run_request(model, request, **call)
            predicted.append(outputs["predictions"])
            return outputs

        return forward

    def _finish_init(self) -> None:
        self._packing_faults = {}
        sharding = "FSDP" if getattr(self.args, "fsdp", None) else None
        fault = launch_problem(os.environ, self.accelerator, sharding) if self.uses_liger else None
        if fault:
            raise ValueError(fault)
        for feature in FEATURES:
            feature.check_trainer(self)
        if self.overrides_token_loss:
            init_checks.refuse_a_second_loss(self)
            init_checks.refuse_unfit_for_own_loss(self)
        if self._wants_tokens:
            init_checks.refuse_token_predictions(self)
        if self.uses_liger:
            init_checks.refuse_packed_rows_that_mix(self)
            init_checks.refuse_adapters_without_parameters(self.model)
        if self.uses_fused_head and self.overrides_compute_loss:
            logger.info(self._advice_on_logits())
        # Not a text: with transformers 5.17 TRL sets one for GRPO, so that the trainer does not scale the loss again.
        if self.uses_fused_head and callable(self.compute_loss_func):
            also = " and TRL's metrics cost a second forward" if self.stock_class() is not Trainer else ""
            logger.info(f"compute_loss_func gets logits, so they are built{also}. Override token_loss to avoid that.")
