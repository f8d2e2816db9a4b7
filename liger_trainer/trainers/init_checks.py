"""Rejects what would train wrongly, and options that would be silently ignored, while a Liger trainer is built.

`LigerTrainerMixin` calls `refuse_before_patching` in `_apply_liger`, `refuse_packed_batch_that_mixes` in each step, and
the others in `_finish_init`.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn
from transformers import DataCollatorWithFlattening, Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from liger_trainer.head.classifier import is_classifier
from liger_trainer.head.module import base_model_of, has_fused_head, head_reason, output_head
from liger_trainer.head.outputs import EXTRA_OUTPUTS, TOKEN_OUTPUTS
from liger_trainer.patching.core.binding import Binding, own_class
from liger_trainer.patching.core.report import LigerReport
from liger_trainer.varlen.host_copies import values_of
from liger_trainer.varlen.proof.packed_rows import keeps_state, why_rows_mix

IN_PLACE = "needed for gradient computation has been modified by an inplace operation"  # PyTorch's words
_CAPPED = ("gemma2", "t5_gemma_module", "vaultgemma")  # Gemma 3 has the field in its config and never had the cap
WHAT_FUSED_LAYERS_KEEP = (
    "A fused layer saves its input itself; stock code may save a copy in another dtype. If the model writes to the "
    "input of a LoRA, a norm or a gate after the call, make it write to a copy, or switch the part off, for example "
    'with liger_config={"lora": false}.'
)


class UnpatchedArguments(Protocol):
    """The trainer arguments that are checked before a model is patched."""

    n_gpu: int
    use_liger_kernel: bool


class UnpatchedTrainer(Protocol):
    """The trainer attributes that are read before its model is patched. None is written."""

    args: UnpatchedArguments
    takes_classifiers: bool

    @property
    def uses_liger(self) -> bool:
        """Return whether the trainer patches its models."""

    @property
    def overrides_token_loss(self) -> bool:
        """Return whether a user's class overrides `token_loss`."""

    def wants_part(self, part: str) -> bool:
        """Return whether `liger_config` leaves this part on."""

    def stock_class(self) -> type:
        """Return the class of transformers or TRL that the trainer extends."""


class OwnLossTrainer(Protocol):
    """The trainer attributes that the checks of a user's `token_loss` read. They write none.

    Which arguments there are depends on the stock class.
    """

    args: Any
    accelerator: Any
    model: nn.Module
    token_outputs: tuple[str, ...]

    def unfused_reason(self, model: nn.Module) -> str | None:
        """Return why the loss needs the logits of `model`, or None."""


class PredictingTrainer(Protocol):
    """The trainer attributes that the check of `eval_predictions` reads. It writes none."""

    model: nn.Module
    liger_report: LigerReport | None
    gives_token_predictions: bool
    compute_loss_func: Any  # a user's function, or None

    @property
    def uses_fused_head(self) -> bool:
        """Return whether the model has a fused LM head."""

    def unfused_reason(self, model: nn.Module) -> str | None:
        """Return why the loss needs the logits of `model`, or None."""

    def stock_class(self) -> type:
        """Return the class of transformers or TRL that the trainer extends."""


class CollatingTrainer(Protocol):
    """The trainer attributes that the check of packed rows reads. TRL's trainers may also have `padding_free`."""

    model: nn.Module
    data_collator: Any  # a user's function, or a collator of transformers or TRL


def refuse_before_patching(trainer: UnpatchedTrainer, model: nn.Module) -> None:
    """ValueError if `model` cannot be patched as the arguments ask, or if the user's own loss would not be used."""
    name, args = type(trainer).__name__, trainer.args
    if not trainer.uses_liger:
        if trainer.overrides_token_loss:
            raise ValueError(f"{name} overrides token_loss, which needs use_liger=True; got use_liger=False.")
        bindings = [Binding.of(module) for module in model.modules()]
        if has_fused_head(model) or any(binding is not None and not binding.fallback_active for binding in bindings):
            raise ValueError(
                "use_liger is False, but another trainer or apply_liger has patched the model, so it would still use "
                "the kernels. Load the model again, or call remove_liger(model) first."
            )
        return
    pools = trainer.takes_classifiers and is_classifier(base_model_of(model)) and not trainer.overrides_token_loss
    if trainer.wants_part("fused_linear_cross_entropy") and output_head(model) is None and not pools:
        raise ValueError(
            f"use_liger=True swaps the loss for a fused LM head, but {head_reason(model)}. For such a model set "
            'liger_config={"fused_linear_cross_entropy": false}, or use_liger=False.'
        )
    if trainer.overrides_token_loss and not trainer.wants_part("fused_linear_cross_entropy"):
        raise ValueError(
            f"{name} overrides token_loss, which needs the fused LM head, but liger_config has "
            "fused_linear_cross_entropy: false. Remove that entry."
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"{args.n_gpu} GPUs are visible to this single process, so Trainer would use nn.DataParallel. Its replicas "
            "would all call the patched forwards of the first GPU's model. Start with accelerate launch or torchrun, "
            "make one GPU visible with CUDA_VISIBLE_DEVICES, or set use_liger=False."
        )
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    cap = getattr(text, "attn_logit_softcapping", None) if getattr(text, "model_type", None) in _CAPPED else None
    if cap is not None and text._attn_implementation == "sdpa":  # the default in transformers 5.17
        raise ValueError(
            f"attn_implementation is 'sdpa', which ignores the model's attn_logit_softcapping of {cap}. Load the model "
            "with attn_implementation='eager', or set attn_logit_softcapping to None to train without it."
        )
    if args.use_liger_kernel:
        raise ValueError(
            "use_liger_kernel is true, so liger-kernel would patch the model again when training starts. Remove "
            f"use_liger_kernel, or use {trainer.stock_class().__name__}."
        )


def refuse_a_second_loss(trainer: OwnLossTrainer) -> None:
    """ValueError if an option and the user's method both define the loss: one of them would be ignored."""
    for name, unset in (("label_smoothing_factor", 0.0), ("loss_type", "nll"), ("compute_loss_func", None)):
        value = getattr(trainer if name == "compute_loss_func" else trainer.args, name, unset)
        if value != unset:
            raise ValueError(
                f"{type(trainer).__name__} overrides token_loss, but {name} is {value!r}, and only one of them can "
                f"define the loss. Remove {name}, or do what it does in token_loss."
            )


def refuse_unfit_for_own_loss(trainer: OwnLossTrainer) -> None:
    """ValueError for unknown `token_outputs`, an LM head that is not fused, or labels that are not next tokens."""
    names, known = trainer.token_outputs, (*TOKEN_OUTPUTS, *EXTRA_OUTPUTS)
    for name in names:
        if name not in known:
            raise ValueError(f"token_outputs has the unknown name {name!r}; expected names of: {', '.join(known)}.")
    name = type(trainer).__name__
    why = trainer.unfused_reason(trainer.model)
    if why is not None:
        raise ValueError(
            f"{name} overrides token_loss, which needs the fused LM head, but {why}. Override compute_loss instead."
        )
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    if parallel is not None and parallel.sp_enabled:
        raise ValueError(
            f"{name} overrides token_loss, but with sp_size {parallel.sp_size} transformers computes the stock loss of "
            "each rank's part of a row instead. Set sp_size to 1, or override compute_loss."
        )
    why = _why_not_next_tokens(trainer.model)
    if why is not None:
        raise ValueError(
            f"{name} overrides token_loss, which scores each label as the next token, but {why}, so its labels would "
            "be off by one. Override compute_loss instead."
        )


def refuse_token_predictions(trainer: PredictingTrainer) -> None:
    """ValueError if `trainer` cannot give the predictions of `eval_predictions="tokens"`."""
    why = _why_no_token_predictions(trainer)
    if why is not None:
        raise ValueError(f"eval_predictions is 'tokens', but {why}. Set eval_predictions to 'logits'.")


def _why_no_token_predictions(trainer: PredictingTrainer) -> str | None:
    """Return the reason why `trainer` cannot give predictions of tokens, or None."""
    if not trainer.gives_token_predictions:
        return f"{type(trainer).__name__} does not compute metrics of tokens"
    if not trainer.uses_fused_head:
        unfused = None if trainer.liger_report is None else trainer.unfused_reason(trainer.model)
        return unfused or "the fused LM head that finds them is switched off (use_liger, liger_config)"
    shifted = _why_not_next_tokens(trainer.model)
    if shifted is not None:
        return f"{shifted}, and its labels are not the next tokens"
    if trainer.compute_loss_func is not None and trainer.stock_class() is Trainer:
        return "compute_loss_func is set, which needs the logits"
    return None


def refuse_packed_rows_that_mix(trainer: CollatingTrainer) -> None:
    """ValueError if batches pack several rows into one and the model would let them see each other.

    The collator makes the batch for this test. TRL's collators and trainers that pack rows have `padding_free`.
    """
    collator = trainer.data_collator
    flattens = isinstance(collator, DataCollatorWithFlattening) or bool(getattr(collator, "padding_free", False))
    packs = flattens or bool(getattr(trainer, "padding_free", False))
    why = why_rows_mix(trainer.model, collator) if packs else None
    if why is None:
        return
    ways = _advice_on_mixing(trainer.model)
    if getattr(collator, "return_position_ids", None) is False and not getattr(collator, "padding_free", False):
        ways = "Set return_position_ids of the collator to True: positions show where rows begin."
    raise ValueError(f"Rows are packed (packing, padding_free, or DataCollatorWithFlattening), but {why}. {ways}")


def refuse_packed_batch_that_mixes(model: nn.Module, inputs: Any, faults: dict[frozenset[str], str | None]) -> None:
    """ValueError if a user's collator packed rows into `inputs`, and the model would let them see each other.

    Such a batch has no mask, and positions that restart at 0. `faults` caches the answer by the arguments that mark
    where rows begin. The values of positions are only read for models that may mix rows.
    """
    if not isinstance(inputs, Mapping) or inputs.get("attention_mask") is not None:
        return
    positions = inputs.get("position_ids")
    if not isinstance(positions, torch.Tensor) or positions.ndim != 2 or positions.shape[0] != 1:
        return
    markers = frozenset(name for name in ("cu_seq_lens_q", "seq_idx") if inputs.get(name) is not None)
    if markers not in faults:
        lengths, indices = "cu_seq_lens_q" in markers, "seq_idx" in markers
        collator = DataCollatorWithFlattening(return_flash_attn_kwargs=lengths, return_seq_idx=indices)
        faults[markers] = why_rows_mix(model, collator)
    why = faults[markers]
    if why is not None and bool((values_of(positions)[0].diff() != 1).any()):
        raise ValueError(
            f"position_ids of a batch restart, so its rows are packed, but {why}. {_advice_on_mixing(model)}"
        )


def _advice_on_mixing(model: nn.Module) -> str:
    """Return advice for the error about packed rows that see each other in `model`."""
    if keeps_state(base_model_of(model)):
        return (
            "Train on padded rows: switch packing and padding_free off, or use a collator that pads instead of one "
            "that flattens, such as DataCollatorForSeq2Seq(tokenizer)."
        )
    return (
        'Switch packing and padding_free off, or load the model with attn_implementation="sdpa" and leave '
        "varlen_attention on in liger_config, which keeps rows apart in most decoders."
    )


def refuse_adapters_without_parameters(model: nn.Module) -> None:
    """ValueError if `target_parameters` of an adapter names parameters that are not adapted. PEFT only warns."""
    wrapped = [module for module in model.modules() if hasattr(module, "parameter_name")]  # PEFT's ParamWrapper
    for adapter, config in getattr(model, "peft_config", {}).items():
        adapted = {module.parameter_name for module in wrapped if adapter in getattr(module, "lora_A", ())}
        for name in getattr(config, "target_parameters", None) or ():
            if name.rpartition(".")[2] not in adapted:
                raise ValueError(
                    f"target_parameters of the adapter {adapter!r} names {name!r}, but no parameter of that name is "
                    "adapted. Experts that Mxfp4Config or fp8 keeps quantized get no adapters: load the model with "
                    "transformers.Mxfp4Config(dequantize=True); in a recipe, set load_in_4bit: false. Otherwise "
                    "correct the name, or remove it."
                )


def _why_not_next_tokens(model: nn.Module) -> str | None:
    """Return why the labels of `model` are not the next tokens of its input, or None."""
    model = base_model_of(model)
    name = own_class(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        return f"{name} is an encoder-decoder model"
    masked = name in MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()
    if masked or name.endswith(("ForMaskedLM", "ForPreTraining")):
        return f"{name} is a masked language model"
    return None
