"""`LigerTrainer`: `transformers.Trainer` with the model patched at init and the loss computed without logits."""

import difflib
import os
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from transformers import Trainer, TrainerCallback
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from liger_trainer import causal_mask
from liger_trainer._logging import logger
from liger_trainer.fused_head import (
    EXTRA_OUTPUTS,
    TOKEN_OUTPUTS,
    FusedLMOutput,
    HeadOptions,
    base_model_of,
    has_fused_head,
    head_reason,
    output_head,
)
from liger_trainer.lm_head import own_class
from liger_trainer.logged_loss import FilteredLoss
from liger_trainer.patched_models import PatchedModels
from liger_trainer.patching import LigerReport, apply_liger


class LigerTrainerMixin:
    """What every Liger trainer shares: patching at init, and the hook for a loss of one's own.

    A subclass changes the loss by overriding `token_loss`, which sees per-token quantities and never logits; the sum
    over tokens, the division by the number of labels in the accumulated batch over all ranks, and the metrics stay the
    stock trainer's:

    ```python
    class FocalTrainer(LigerSFTTrainer):
        def token_loss(self, outputs, inputs):
            p = outputs.log_probs.detach().exp()
            return -((1 - p) ** 2) * outputs.log_probs
    ```

    Attributes:
        token_outputs (`tuple[str, ...]`): What `token_loss` needs of `FusedLMOutput` beside `log_probs` and
            `label_mask`: any of `"entropy"`, `"log_sum_sq_probs"`, `"mean_logits"`, `"is_top1"`, `"hidden_states"`,
            `"vocab_mean"`. Another name is an error.
        loss_hook (`str` or `None`): Name of the method that a subclass overrides for a loss of its own.
        gives_token_predictions (`bool`): Whether `compute_loss` calls its model through `_collecting`, as
            `eval_predictions="tokens"` needs.
        liger_report (`LigerReport` or `None`): What was patched; `None` under `use_liger=False`.
    """

    token_outputs: tuple[str, ...] = ()
    loss_hook: str | None = "token_loss"
    gives_token_predictions: bool = False
    _predicted: list | None = None  # filled while `prediction_step` gathers what `compute_metrics` gets
    liger_report: LigerReport | None = None

    def token_loss(self, outputs: FusedLMOutput, inputs: dict) -> torch.Tensor:
        """Loss of each label; the trainer sums it and divides by the number of labels that count.

        The auxiliary loss of a mixture of experts is added to it, as it is to the stock trainer's loss, where the model
        computes one (`output_router_logits` in its config; `router_aux_loss_coef` in the arguments of TRL's trainers).

        Args:
            outputs (`FusedLMOutput`): Per-token fields, each (B, S - 1), fp32, for the labels `inputs["labels"][:, 1:]`
                ((B, S) for `inputs["shift_labels"]` where the batch has them); zero where `outputs.label_mask` is
                False.
            inputs (`dict`): The batch as given to the model.

        Returns:
            `torch.Tensor`: The shape of `outputs.label_mask`, not reduced. What it says where `label_mask` is False
            does not count.
        """
        return -outputs.log_probs

    @classmethod
    def _stock_class(cls) -> type:
        """The class of transformers or TRL that `cls` extends."""
        return next(base for base in cls.__mro__ if base.__module__.partition(".")[0] in ("trl", "transformers"))

    @property
    def uses_liger(self) -> bool:
        """Whether this is more than the stock trainer; arguments without `use_liger` say so."""
        return getattr(self.args, "use_liger", True)

    @property
    def has_own_loss(self) -> bool:
        return self.loss_hook == "token_loss" and type(self).token_loss is not LigerTrainerMixin.token_loss

    def _token_loss_of(self, outputs: FusedLMOutput, inputs: dict) -> torch.Tensor:
        """What `token_loss` returns, zero where there is no label. ValueError where it is not one loss per label."""
        per_token, mask = self.token_loss(outputs, inputs), outputs.label_mask
        shape = getattr(per_token, "shape", None)
        if shape != mask.shape:
            came = f"the {type(per_token).__name__} {per_token!r}" if shape is None else f"shape {tuple(shape)}"
            raise ValueError(
                f"token_loss returned {came}; expected one loss per label, {tuple(mask.shape)} (do not reduce: the "
                "trainer does)."
            )
        return per_token.masked_fill(~mask, 0.0)

    @property
    def head_is_ours(self) -> bool:
        return self.liger_report is not None and has_fused_head(self.model)

    def create_accelerator_and_postprocess(self) -> None:
        """As the stock trainer does, but losses and log-probs stay fp32 under FSDP2 with 16-bit arithmetic.

        accelerate has FSDP2 round all that a unit returns to the 16-bit type, in bf16 a sum of log-probs between 512
        and 1,024 nats to steps of 4. Hidden states are of that type anyhow.
        """
        super().create_accelerator_and_postprocess()
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        policy = getattr(plugin, "mixed_precision_policy", None)
        rounds = getattr(policy, "output_dtype", None) in (torch.bfloat16, torch.float16)
        if rounds and self.uses_liger:
            plugin.mixed_precision_policy = replace(policy, output_dtype=None)

    def training_step(self, *args, **kwargs):
        self._use_own_heads()
        with self._explaining_missing_logits():
            return super().training_step(*args, **kwargs)

    def _use_own_heads(self) -> None:
        """Score with this trainer's options, on models that another trainer may have been built for since.

        Raises:
            RuntimeError: The head was removed, and the trainer has a loss that needs it.
        """
        if self.liger_report is None:
            return
        for model, options in self._patched.use():
            self._without_head(model, options)
        if self.has_own_loss and not self.head_is_ours:
            raise RuntimeError(
                f"{type(self).__name__} overrides {self.loss_hook}, which needs the fused LM head, but remove_liger "
                "has taken it from the model. Call apply_liger(trainer.model), or build a new trainer."
            )

    @property
    def _overrides_compute_loss(self) -> bool:
        owner = next(base for base in type(self).__mro__ if "compute_loss" in vars(base))
        return owner.__module__.partition(".")[0] not in ("liger_trainer", "trl", "transformers")

    def _ways_to_a_loss_of_logits(self) -> str:
        hook = f"override {self.loss_hook} instead, which builds none; " if self.loss_hook else ""
        return (
            f"{type(self).__name__} overrides compute_loss. In training, a model that is called with labels returns "
            f"its loss and no logits (logits=None). If that compute_loss reads logits, {hook}call model(..., "
            'skip_logits=False); or set liger_config={"fused_linear_cross_entropy": false}.'
        )

    @contextmanager
    def _explaining_missing_logits(self):
        """Adds the ways out to an error of somebody's `compute_loss` that met `None` for logits."""
        try:
            yield
        except (AttributeError, KeyError, TypeError) as error:
            of_none = "NoneType" in str(error) or error.args == ("logits",)
            if of_none and self.head_is_ours and self._overrides_compute_loss:
                error.add_note(self._ways_to_a_loss_of_logits())
            raise

    def _without_head(self, model, options: HeadOptions) -> None:
        """`model` has lost its fused head since it was patched: see to it that the stock trainer's code runs."""

    def train(self, *args, **kwargs):
        """As the stock trainer does; with `logging_nan_inf_filter`, what is logged is filtered without a wait."""
        self._use_own_heads()  # rows may be scored while the data is loaded
        if not (self.uses_liger and self.args.logging_nan_inf_filter):
            return super().train(*args, **kwargs)
        step = self.training_step  # an override of it sees each loss as it is
        before = {name: value for name, value in vars(self).items() if name == "training_step"}

        def filtered_step(*args, **kwargs):
            return FilteredLoss.of(step(*args, **kwargs), 1 + self.state.global_step - self._globalstep_last_logged)

        self.training_step = filtered_step
        try:
            return super().train(*args, **kwargs)
        finally:
            del self.training_step
            vars(self).update(before)

    def _wants(self, part: str) -> bool:
        return bool(self.uses_liger and (getattr(self.args, "liger_config", None) or {}).get(part, True))

    def _apply_liger(self, model, options: HeadOptions | None = None) -> None:
        """Patch `model` as `args` say, and refuse what would leave the user's own loss unused.

        `options` are those of calls with `fused_lm_head=True`; unset, the defaults of `HeadOptions`.
        """
        if not self.uses_liger:
            if self.has_own_loss:
                raise ValueError(
                    f"{type(self).__name__} overrides {self.loss_hook}, which needs use_liger=True; got "
                    "use_liger=False."
                )
            return
        if self._wants("fused_linear_cross_entropy") and output_head(model) is None:
            raise ValueError(
                f"use_liger=True swaps the loss for a fused LM head, but {head_reason(model)}. For such a model set "
                'liger_config={"fused_linear_cross_entropy": false}, or use_liger=False.'
            )
        if self.has_own_loss and not self._wants("fused_linear_cross_entropy"):
            raise ValueError(
                f"{type(self).__name__} overrides {self.loss_hook}, which needs the fused LM head, but liger_config "
                "has fused_linear_cross_entropy: false. Remove that entry."
            )
        if self.args.n_gpu > 1:
            raise ValueError(
                f"{self.args.n_gpu} GPUs are visible to this one process, for which Trainer uses nn.DataParallel. Its "
                "replicas would all call the patched forwards of the first GPU's model. Start with accelerate launch "
                "or torchrun, make one GPU visible with CUDA_VISIBLE_DEVICES, or set use_liger=False."
            )
        if self.args.use_liger_kernel:
            raise ValueError(
                "use_liger_kernel is true, which has liger-kernel patch the model once more when training starts. "
                f"Remove use_liger_kernel, or use {self._stock_class().__name__}."
            )
        self._patched.about_to_patch(model)
        config, unfused = getattr(self.args, "liger_config", None), None
        if self._wants("fused_linear_cross_entropy") and (unfused := self._why_unfused(model)) is not None:
            config = (config or {}) | {"fused_linear_cross_entropy": False}
        self.liger_report = apply_liger(model, config, head_options=options)
        if unfused is not None:
            part = self.liger_report["fused_linear_cross_entropy"]
            part.enabled, part.skipped = True, {"lm_head": unfused}
        if has_fused_head(model):
            self._patched.remember(model, options or HeadOptions(), instead=self.model_init is not None)
        logger.info(self.liger_report.one_line())

    def _why_unfused(self, model) -> str | None:
        """Why the stock trainer's loss needs the logits of `model`, so that its head stays as it is; or None."""
        return None

    def _refuse_a_second_loss(self) -> None:
        """ValueError where another option for the loss comes with a `token_loss`: one of them would be ignored."""
        others = {
            "label_smoothing_factor": self.args.label_smoothing_factor or None,
            "loss_type": None if getattr(self.args, "loss_type", "nll") == "nll" else self.args.loss_type,
            "compute_loss_func": self.compute_loss_func,
        }
        for name, value in others.items():
            if value is not None:
                raise ValueError(
                    f"{type(self).__name__} overrides token_loss, and {name} is {value!r}: only one can be the loss. "
                    f"Remove {name}, or put what it does into token_loss."
                )

    def _refuse_unknown_outputs(self) -> None:
        names, known = self.token_outputs, (*TOKEN_OUTPUTS, *EXTRA_OUTPUTS)
        if isinstance(names, str):
            raise ValueError(f"token_outputs is {names!r}; expected a tuple of names, such as ({names!r},).")
        for name in names:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)[0]
                raise ValueError(
                    f"token_outputs has the unknown name {name!r}; did you mean {near!r}? Known names: "
                    f"{', '.join(known)}."
                )

    def _why_not_next_tokens(self) -> str | None:
        """Why the labels of the model are not the tokens that follow in its input, or None where they are."""
        model = base_model_of(self.model)
        name = own_class(model).__name__
        if getattr(model.config, "is_encoder_decoder", False):
            return f"{name} is an encoder-decoder model"
        masked = name in MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()
        if masked or name.endswith(("ForMaskedLM", "ForPreTraining")):
            return f"{name} is a masked language model"
        return None

    @property
    def _wants_tokens(self) -> bool:
        return getattr(self.args, "eval_predictions", "logits") == "tokens"

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        self._use_own_heads()
        if prediction_loss_only or not self._wants_tokens:
            with self._explaining_missing_logits():
                return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        self._predicted = []
        try:
            loss, _, _ = super().prediction_step(model, inputs, True, ignore_keys)
            predictions = dict(self._predicted[-1])  # KTO scores the mismatched pairs of its KL estimate first
        finally:
            self._predicted = None
        return loss, predictions, predictions.pop("labels")

    def _unmasking(self, model):
        """`model`, or where it is compiled for training a stand-in that calls it without masks of ones."""
        if self.args.torch_compile and self.model.training:
            return causal_mask.without_mask_of_ones(model, base_model_of(self.model))
        return model

    def _collecting(self, model):
        """`model`, or while token predictions are gathered a stand-in that asks for them in the calls with labels."""
        if self._predicted is None:
            return model

        def forward(**call):
            if call.get("labels") is None and call.get("shift_labels") is None:
                return model(**call)
            outputs = model(**call, token_predictions=True)
            self._predicted.append(outputs["predictions"])
            return outputs

        return forward

    def _refuse_token_predictions(self) -> None:
        """ValueError where `eval_predictions="tokens"` has no meaning."""
        why = None
        if not self.gives_token_predictions:
            why = f"{type(self).__name__} does not compute metrics of tokens"
        elif not self.head_is_ours:
            unfused = None if self.liger_report is None else self._why_unfused(self.model)
            why = unfused or "the fused LM head that finds them is switched off (use_liger, liger_config)"
        elif (other := self._why_not_next_tokens()) is not None:
            why = f"{other}, whose labels are not the tokens that follow"
        if why is not None:
            raise ValueError(f"eval_predictions is 'tokens', but {why}. Set eval_predictions to 'logits'.")

    def _finish_init(self) -> None:
        if self.has_own_loss:
            self._refuse_a_second_loss()
            self._refuse_unknown_outputs()
            if (why := self._why_unfused(self.model)) is not None:
                raise ValueError(
                    f"{type(self).__name__} overrides {self.loss_hook}, which needs the fused LM head, but {why}. "
                    "Override compute_loss instead."
                )
            if self.loss_hook == "token_loss" and (why := self._why_not_next_tokens()) is not None:
                raise ValueError(
                    f"{type(self).__name__} overrides token_loss, which scores each label as the token that follows, "
                    f"but {why}, and its labels would be off by one. Override compute_loss instead."
                )
        if self._wants_tokens:
            self._refuse_token_predictions()
        if self.liger_report is not None:
            self.add_callback(_ReportCallback(self))
        if self.head_is_ours and self._overrides_compute_loss:
            logger.info(self._ways_to_a_loss_of_logits())
        if self.head_is_ours and self.compute_loss_func is not None:
            also = " and TRL's metrics cost a second forward" if self._stock_class() is not Trainer else ""
            logger.info(f"compute_loss_func gets logits, so they are built{also}. Override token_loss to spare that.")


def why_peft_needs_logits(model) -> str | None:
    """Why a PEFT wrapper around `model` computes something from logits that have labels, or None."""
    for name, config in getattr(model, "peft_config", {}).items():
        if config.peft_type == "CPT":
            return f"the adapter {name!r} is CPT, which computes its own loss from logits"
    return None


class _ReportCallback(TrainerCallback):
    """Writes `liger_report.json` into `output_dir` when training starts."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero and args.output_dir is not None:
            os.makedirs(args.output_dir, exist_ok=True)
            self.trainer.liger_report.to_json(os.path.join(args.output_dir, "liger_report.json"))


class LigerTrainer(LigerTrainerMixin, Trainer):
    """[`~transformers.Trainer`] with the same losses, gradients and metrics, on fused kernels.

    Takes the arguments of `Trainer`; `args` is a [`LigerTrainingArguments`] (a plain `TrainingArguments` counts as
    `use_liger=True`). Training builds no (B, S, V) logits. Loss-only evaluation builds none either; with
    `compute_metrics` it does, as the metrics ask for them, unless `eval_predictions="tokens"`.

    Raises:
        ValueError: `use_liger=True` with a model that has no LM head, or unknown keys in `liger_config`.
    """

    gives_token_predictions = True
    _loss_only = False  # while `prediction_step` wants no logits

    def __init__(self, *args, **kwargs):
        self._patched = PatchedModels()
        with self._patched.undone_on_error():
            super().__init__(*args, **kwargs)
            if self.model_init is None:  # with model_init, call_model_init patches
                self._apply_liger(self.model)
            self._finish_init()

    def call_model_init(self, trial=None):
        model = super().call_model_init(trial)
        self._apply_liger(model)
        return model

    def _why_unfused(self, model) -> str | None:
        return why_peft_needs_logits(model)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self._loss_only and self.head_is_ours:
            inputs = {"skip_logits": True} | inputs
        if not self.head_is_ours or "labels" not in inputs or self.compute_loss_func is not None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        model = self._unmasking(self._collecting(model))
        wants_logits = return_outputs and not inputs.get("skip_logits", False)
        if self.has_own_loss:
            return super().compute_loss(
                self._own_loss_model(model, wants_logits), inputs, return_outputs, num_items_in_batch
            )
        smoother = self.label_smoother
        if smoother is None or not self._is_causal_lm():
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if wants_logits:  # the stock trainer knows a causal model by the name of its class, which FSDP2 changes
            self.label_smoother = partial(smoother, shift_labels=True)
        else:  # the model keeps its labels and smooths them itself
            self.label_smoother, inputs = None, {**inputs, "label_smoothing": smoother.epsilon}
        try:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        finally:
            self.label_smoother = smoother

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        self._loss_only = prediction_loss_only or self._wants_tokens
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        finally:
            self._loss_only = False

    def _refuse_token_predictions(self) -> None:
        super()._refuse_token_predictions()
        if self.compute_loss_func is not None:
            raise ValueError(
                "eval_predictions is 'tokens', and compute_loss_func is set, which needs the logits. Set "
                "eval_predictions to 'logits', or override token_loss instead of compute_loss_func."
            )

    def _is_causal_lm(self) -> bool:
        """The test by which the stock trainer shifts labels for its `LabelSmoother`, made right under FSDP2."""
        return own_class(base_model_of(self.model)).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()

    def _own_loss_model(self, model, wants_logits: bool):
        """Stand-in for `model` returning the loss of `token_loss`; `Trainer.compute_loss` scales it as any model's."""

        def forward(skip_logits=None, num_items_in_batch=None, **inputs):
            outputs = model(**inputs, fused_lm_head=True, token_outputs=("log_probs", *self.token_outputs))
            per_token = self._token_loss_of(outputs, inputs)
            count = outputs.label_mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
            loss = per_token.sum() / torch.as_tensor(count, device=per_token.device)
            if outputs.aux_loss is not None:
                loss = loss + self._aux_loss_weight() * outputs.aux_loss.to(loss.device)
            result = {"loss": loss}
            if wants_logits:
                labels = ("labels", "shift_labels")
                result["logits"] = model(**{k: v for k, v in inputs.items() if k not in labels}).logits
            return result

        return forward

    def _aux_loss_weight(self) -> float:
        """What the model's own forward multiplies its auxiliary loss by, when it adds that to a loss."""
        model = base_model_of(self.model)
        for owner in (model, model.config.get_text_config()):
            for name in ("router_aux_loss_coef", "aux_loss_coef"):
                if (weight := getattr(owner, name, None)) is not None:
                    return weight
        return 0.0
