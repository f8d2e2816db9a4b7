"""The calls that a model with a fused LM head answers: its own `forward` runs, and no logits are built for the loss.

`install_fused_head(model)` binds a forward to the model that answers four kinds of call:

- `model(..., labels=...)`: In training mode, the model's own loss code gets `DeferredLogits`, so the fused kernel
  computes the loss, and the output has `logits=None`. In eval mode, the output has real logits. With `skip_logits=True`
  or `skip_logits=False` a call chooses one or the other, whatever the mode.
- `model(..., labels=..., fused_lm_head=True)`: What TRL's trainers ask for (`trl.trainer.utils.add_fused_lm_head`). The
  output has `log_probs`, `entropy`, ... of each next-token label, see `FusedLMOutput`.
- `model(..., scored_by=f)`: The result of `f(run)`, which is called inside the model's forward, where weights that are
  sharded have been gathered. `run()` is the model's own forward, whose logits are then `DeferredLogits`.
- Any other call is left to the model's own forward.

Calls with labels take `token_predictions=True`, for metrics: the output then has `predictions`, a dict of `token_ids`,
`log_probs`, `ranks` and `labels`, see `liger_triton.TokenRanks`.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.utils import ModelOutput

from liger_trainer._logging import logger
from liger_trainer.head import masks
from liger_trainer.head.deferred import DeferredLogits
from liger_trainer.head.find import FusedHeadBinding, head_options, head_reason, output_head
from liger_trainer.head.module import LoRA, capture, innermost, is_captured, why_not_fusable
from liger_trainer.head.outputs import TOKEN_OUTPUTS, FusedLMOutput, HeadOptions, LossRequest
from liger_trainer.head.real_logits import scores_of_logits, smoothed_loss_sum
from liger_trainer.head.vocab_mean import vocab_mean
from liger_trainer.instance.binding import call_previous
from liger_trainer.instance.hooks import replaced_forward
from liger_trainer.varlen.decide import leaves_padding_out, plan_of_call, states_shown
from liger_trainer.varlen.padding import Plan, running
from liger_triton import linear_cross_entropy, linear_logprobs, linear_token_ranks, token_ranks

_OF_A_LOSS = ("labels", "shift_labels", "num_items_in_batch")  # from which a model would compute a loss
_OF_EVERY_POSITION = {"hidden_states", "vocab_mean"}  # TRL's ORPO and CPO log the mean over padding too


@functools.cache
def fused_forward_of(model_class: type[nn.Module]) -> Callable:
    """The forward to bind to models of one class, with the signature of the class's own.

    `Trainer` and `generate` read that signature to see which arguments the model takes.
    """

    @functools.wraps(model_class.forward)
    def forward(
        self: nn.Module,
        *args: Any,
        fused_lm_head: bool = False,
        skip_logits: bool | None = None,
        label_smoothing: float = 0.0,
        token_predictions: bool = False,
        token_outputs: tuple[str, ...] | None = None,
        uniform_grad: bool = False,
        scored_by: Callable[[Callable[[], Any]], Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        options = head_options(self)
        if options is None:  # the head has been removed, but somebody's wrapper still calls this forward
            return _own_forward(self, args, kwargs)
        leaves_out = leaves_padding_out(self)
        shown: str | None = None  # what the answer has of every position
        if fused_lm_head or label_smoothing or scored_by is not None:
            kwargs = _without_cache(self, kwargs)
        without_labels = {name: value for name, value in kwargs.items() if name not in _OF_A_LOSS}
        if scored_by is not None:  # `shift_labels` then say only which positions are scored
            answer = functools.partial(_scored, self, args, without_labels, options, scored_by)
        elif fused_lm_head or label_smoothing:
            request = LossRequest(
                kwargs.get("labels"), kwargs.get("shift_labels"), kwargs.get("num_items_in_batch"), label_smoothing,
                token_predictions, token_outputs, uniform_grad,
            )  # fmt: skip
            score = _token_outputs if fused_lm_head else _smoothed_loss
            answer = functools.partial(score, self, args, without_labels, options, request)
            of_all = _OF_EVERY_POSITION.intersection(_wanted_outputs(options, request))
            shown = f"the call asks for {', '.join(sorted(of_all))}" if of_all else None
        else:
            skip_logits = self.training if skip_logits is None else skip_logits
            if leaves_out:
                shown = states_shown(self, kwargs) if skip_logits else "the call returns logits"
            answer = functools.partial(_own_outputs, self, args, kwargs, options, skip_logits, token_predictions)
        if not leaves_out:
            return answer()
        plan = plan_of_call(self, args, kwargs, shown, functools.partial(_why_unfit, self, options))
        with running(plan):  # None too: calls may lie in others
            return answer()

    forward.__name__ = "forward"
    # The signature takes the place of `__wrapped__`: accelerate's `unwrap_model` takes forwards that have a
    # `__wrapped__` for wrappers of its own and removes them.
    forward.__signature__ = inspect.signature(model_class.forward)  # type: ignore[attr-defined]
    del forward.__wrapped__
    return forward


def _why_unfit(model: nn.Module, options: HeadOptions, plan: Plan) -> str | None:
    """What keeps the batch from going through the backbone by `plan`: code of the user's, or a head that is not fused.

    Such code would get zeros for what stock computes for padding.
    """
    why = masks.why_not_ours(model)
    if why is not None or not plan.leaves_out:
        return why
    binding = FusedHeadBinding.of(model)
    replaced = None if binding is None else replaced_forward(model, binding.previous)
    if replaced is not None:
        return f"{replaced} on the {type(model).__name__} may read what is computed for padding"
    unfused = why_not_fusable(output_head(model), options.cast_lm_head_to_fp32)
    return None if unfused is None else f"the LM head is not fused, since {unfused}"


def _without_cache(model: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call that returns scores only, for which keys and values would be kept for nothing."""
    if kwargs.get("use_cache") is not None or kwargs.get("past_key_values") is not None:
        return kwargs
    return kwargs | {"use_cache": False} if _knows_cache(type(model)) else kwargs  # type: ignore[arg-type]


@functools.cache
def _knows_cache(model_class: type[nn.Module]) -> bool:
    return "use_cache" in inspect.signature(model_class.forward).parameters


def _scored(model: nn.Module, args: tuple, kwargs: dict[str, Any], options: HeadOptions, scored_by: Callable) -> Any:
    """What `scored_by` makes of the model's own forward."""
    return scored_by(lambda: _run_deferred(model, args, kwargs, options))


def _own_outputs(
    model: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    options: HeadOptions,
    skip_logits: bool,
    token_predictions: bool,
) -> Any:
    """What the model's own forward returns; in training without the logits that its loss was computed from."""
    labels, shift_labels = kwargs.get("labels"), kwargs.get("shift_labels")
    if (labels is None and shift_labels is None) or not skip_logits:
        return _run_with_logits(model, args, kwargs)
    outputs = _run_deferred(model, args, kwargs, options)
    if isinstance(outputs, ModelOutput):
        predictions = _predictions(*_shifted(outputs.logits, labels, shift_labels)) if token_predictions else None
        outputs = type(outputs)(**{k: v for k, v in outputs.items() if not isinstance(v, DeferredLogits)})
        if token_predictions:
            outputs["predictions"] = predictions
        return outputs
    return tuple(x.materialize() if isinstance(x, DeferredLogits) else x for x in outputs)


def _own_forward(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call the forward that the model would have without ours."""
    return call_previous(model, FusedHeadBinding, args, kwargs)


def _run_with_logits(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run the model's own forward so that its head returns real logits, even inside another call that defers them."""
    head = output_head(model)
    if head is None or not is_captured(innermost(head)):
        return _own_forward(model, args, kwargs)
    return capture(innermost(head), None, functools.partial(_own_forward, model, args, kwargs))


def _run_deferred(model: nn.Module, args: tuple, kwargs: dict[str, Any], options: HeadOptions) -> Any:
    """Run the model's own forward so that its head returns `DeferredLogits`, or real logits if it cannot be fused now.

    Adapters and hooks come and go after patching, so every call asks again whether the head can be fused.
    """
    outer = output_head(model)
    head = innermost(outer)
    reason = why_not_fusable(outer, options.cast_lm_head_to_fp32)
    if reason is not None:
        _report_unfused(model, reason)
        return _own_forward(model, args, kwargs)
    # PEFT wraps a head that it saves, and the wrapper may be the sharded unit: parameters are read in calls of it.
    stand_in = DeferredLogits if outer is head else functools.partial(_deferred_logits_of, outer)
    run = functools.partial(masks.run_without_masks, functools.partial(_own_forward, model), model, args, kwargs)
    return capture(head, stand_in, run)


def _deferred_logits_of(outer: nn.Module, hidden: torch.Tensor, _: nn.Module, vocab_size: int) -> DeferredLogits:
    """The stand-in for the logits of `outer`, whatever module inside it has been called."""
    return DeferredLogits(hidden, outer, vocab_size)


def _report_unfused(model: nn.Module, reason: str) -> None:
    """Say in the log and in the model's report that its head is not fused."""
    if torch.compiler.is_compiling():
        return
    binding = FusedHeadBinding.of(model)
    if binding is not None and binding.place is not None:
        binding.place.keeps_its_code(reason)
    logger.warning_once(
        f"The LM head of {type(model).__name__} is not fused: {reason}. "
        "Full logits are built instead, so the numbers are right, but no memory is saved."
    )


def _logits_and_targets(
    model: nn.Module, args: tuple, kwargs: dict[str, Any], options: HeadOptions, request: LossRequest
) -> tuple[Any, torch.Tensor | DeferredLogits, torch.Tensor]:
    """Run the model without labels, and return its outputs, the rows of logits that predict a label, and the labels."""
    if request.labels is None and request.shift_labels is None:
        raise ValueError(
            "labels is None; pass labels=(B, S) or shift_labels=(B, S) with fused_lm_head or label_smoothing."
        )
    outputs = _run_deferred(model, args, kwargs, options)
    return outputs, *_shifted(outputs.logits, request.labels, request.shift_labels)


def _shifted(
    logits: torch.Tensor | DeferredLogits, labels: torch.Tensor | None, shift_labels: torch.Tensor | None
) -> tuple[torch.Tensor | DeferredLogits, torch.Tensor]:
    """The logits that predict a label, with the labels: those of the next tokens, or `shift_labels` as they are."""
    if shift_labels is not None:
        return logits, shift_labels
    assert labels is not None, "a call has labels or shift_labels"
    return logits[:, :-1], labels[:, 1:]


def _predictions(logits: torch.Tensor | DeferredLogits, target: torch.Tensor) -> dict[str, torch.Tensor]:
    """What `FusedLMOutput.predictions` holds, for logits and the labels that they predict."""
    if isinstance(logits, DeferredLogits) and not logits.is_materialized:
        token_ids, log_probs, ranks = logits.fused(linear_token_ranks, target)
    else:
        logits = logits.materialize() if isinstance(logits, DeferredLogits) else logits
        token_ids, log_probs, ranks = token_ranks(logits, target.to(logits.device))
    return {"token_ids": token_ids, "log_probs": log_probs, "ranks": ranks, "labels": target.to(token_ids.device)}


def _wanted_outputs(options: HeadOptions, request: LossRequest) -> tuple[str, ...]:
    """The names of the outputs of a call with `fused_lm_head=True`."""
    return options.outputs if request.token_outputs is None else request.token_outputs


def _token_outputs(
    model: nn.Module, args: tuple, kwargs: dict[str, Any], options: HeadOptions, request: LossRequest
) -> FusedLMOutput:
    """Answer a call with `fused_lm_head=True`."""
    wanted = _wanted_outputs(options, request)
    outputs, logits, target = _logits_and_targets(model, args, kwargs, options, request)
    scoring = {"temperature": options.temperature, "label_smoothing": request.label_smoothing}
    per_token = [name for name in TOKEN_OUTPUTS if name in wanted or name == "log_probs"]
    if isinstance(logits, DeferredLogits) and not logits.is_materialized:
        scores = logits.fused(
            _fp32_logprobs if options.cast_lm_head_to_fp32 else linear_logprobs,
            target,
            outputs=tuple(per_token),
            uniform_grad=request.uniform_grad,
            **scoring,
        )
        scores = dict(zip(TOKEN_OUTPUTS, scores, strict=True))
    else:
        scores = scores_of_logits(
            logits.materialize() if isinstance(logits, DeferredLogits) else logits, target, **scoring
        )
    target = target.to(scores["log_probs"].device)
    mask = target != -100
    count = mask.sum().clamp(min=1) if request.num_items_in_batch is None else request.num_items_in_batch
    loss = -scores["log_probs"].sum() / count
    aux_loss = outputs.get("aux_loss")
    if aux_loss is not None:
        loss = loss + getattr(model.config.get_text_config(), "router_aux_loss_coef", 0.0) * aux_loss
    hidden = None
    if "hidden_states" in wanted:
        if not isinstance(logits, DeferredLogits):
            raise ValueError(f"token_outputs has 'hidden_states', but {head_reason(model)}.")
        hidden = logits.hidden
    scores = {name: value if name in per_token else None for name, value in scores.items()}
    scores["vocab_mean"] = vocab_mean(outputs.logits, options.temperature) if "vocab_mean" in wanted else None
    predictions = _predictions(logits, target) if request.token_predictions else None
    return FusedLMOutput(
        loss=loss, label_mask=mask, aux_loss=aux_loss, hidden_states=hidden, predictions=predictions, **scores
    )


def _smoothed_loss(
    model: nn.Module, args: tuple, kwargs: dict[str, Any], options: HeadOptions, request: LossRequest
) -> FusedLMOutput:
    """Answer a call with `label_smoothing` alone: the loss of `transformers.trainer_pt_utils.LabelSmoother`.

    It does not contain an auxiliary loss, as it does not in the stock trainer.
    """
    _, logits, target = _logits_and_targets(model, args, kwargs, options, request)
    if isinstance(logits, DeferredLogits) and not logits.is_materialized:
        loss_sum = logits.fused(linear_cross_entropy, target, reduction="sum", label_smoothing=request.label_smoothing)
    else:
        logits = logits.materialize() if isinstance(logits, DeferredLogits) else logits
        loss_sum = smoothed_loss_sum(logits, target, request.label_smoothing)
    count = (target != -100).sum().clamp(min=1) if request.num_items_in_batch is None else request.num_items_in_batch
    predictions = _predictions(logits, target) if request.token_predictions else None
    return FusedLMOutput(loss=loss_sum / torch.as_tensor(count, device=loss_sum.device), predictions=predictions)


def _fp32_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    lora: LoRA | None = None,
    lora_input: torch.Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """`linear_logprobs` with the projection in fp32 and outside autocast, which TRL calls `cast_lm_head_to_fp32`."""
    lora = lora and (lora[0].float(), lora[1].float(), lora[2])
    with torch.autocast(hidden.device.type, enabled=False):
        return linear_logprobs(
            hidden.float(),
            weight.float(),
            target,
            None if bias is None else bias.float(),
            lora=lora,
            lora_input=None if lora_input is None else lora_input.float(),
            **kwargs,
        )
