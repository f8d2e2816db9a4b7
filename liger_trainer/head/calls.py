"""The fused LM head of a model: its own `forward` runs, and the loss is computed where the logits would have been.

`install_fused_head(model)` binds a forward to the model that answers four kinds of call:

- `model(..., labels=...)`: the model's own loss code meets `DeferredLogits`, so the loss comes from the fused kernel
  and the output has `logits=None`. In eval mode real logits are returned unless `skip_logits=True` is passed, as in
  training they are unless `skip_logits=False`.
- `model(..., labels=..., fused_lm_head=True)`: the contract of TRL's trainers (`trl.trainer.utils.add_fused_lm_head`):
  per-token `log_probs`, `entropy`, ... of the next-token labels, see `FusedLMOutput`.
- `model(..., scored_by=f)`: the result of `f(run)`, called inside the model's forward, where hooks and shards have the
  weights at hand; `run()` is the model's own forward, with `DeferredLogits` for logits.
- anything else: the model's own forward, untouched.

Calls with labels take `token_predictions=True`, for metrics: the output then has `predictions`, a dict of `token_ids`,
`log_probs`, `ranks` and `labels`, see `liger_triton.TokenRanks`.
"""

import functools
import inspect

import torch
from transformers.utils import ModelOutput

from liger_trainer._logging import logger
from liger_trainer.head import masks
from liger_trainer.head.deferred import DeferredLogits
from liger_trainer.head.find import KEY, head_options, head_reason, output_head
from liger_trainer.head.module import capture, innermost, is_captured, why_not_fusable
from liger_trainer.head.outputs import TOKEN_OUTPUTS, FusedLMOutput, LossRequest
from liger_trainer.head.real_logits import scores_of_logits, smoothed_loss_sum
from liger_trainer.head.vocab_mean import vocab_mean
from liger_trainer.instance.binding import binding_of, call_previous
from liger_triton import linear_cross_entropy, linear_logprobs, linear_token_ranks, token_ranks


@functools.cache
def fused_forward_of(model_class):
    """The forward for one class of model: `functools.wraps` keeps the signature that `Trainer` and `generate` read."""

    @functools.wraps(model_class.forward)
    def forward(
        self,
        *args,
        fused_lm_head=False,
        skip_logits=None,
        label_smoothing=0.0,
        token_predictions=False,
        token_outputs=None,
        uniform_grad=False,
        scored_by=None,
        **kwargs,
    ):
        if head_options(self) is None:  # removed, but still inside somebody's wrapper
            return call_previous(self, KEY, args, kwargs)
        if scored_by is not None:
            return scored_by(lambda: _captured(self, args, kwargs))
        labels, shift_labels = kwargs.get("labels"), kwargs.get("shift_labels")
        if fused_lm_head or label_smoothing:
            count = kwargs.pop("num_items_in_batch", None)
            labels, shift_labels = kwargs.pop("labels", None), kwargs.pop("shift_labels", None)
            asked = LossRequest(
                labels, shift_labels, count, label_smoothing, token_predictions, token_outputs, uniform_grad
            )
            return (_token_outputs if fused_lm_head else _smoothed)(self, args, kwargs, asked)
        skip_logits = self.training if skip_logits is None else skip_logits
        if (labels is None and shift_labels is None) or not skip_logits:
            return _plain(self, args, kwargs)
        outputs = _captured(self, args, kwargs)
        if isinstance(outputs, ModelOutput):
            predictions = _predictions(*_shifted(outputs.logits, labels, shift_labels)) if token_predictions else None
            outputs = type(outputs)(**{k: v for k, v in outputs.items() if not isinstance(v, DeferredLogits)})
            if token_predictions:
                outputs["predictions"] = predictions
            return outputs
        return tuple(x.materialize() if isinstance(x, DeferredLogits) else x for x in outputs)

    forward.__name__ = "forward"
    # In place of `__wrapped__`, by which accelerate's `unwrap_model` would take our forward for a wrapper of its own.
    forward.__signature__ = inspect.signature(model_class.forward)
    del forward.__wrapped__
    return forward


def _plain(model, args, kwargs):
    """The model's own forward with its own logits, also from inside another call of it."""
    head = output_head(model)
    if head is None or not is_captured(innermost(head)):
        return call_previous(model, KEY, args, kwargs)
    return capture(innermost(head), None, functools.partial(_call_own, model, args, kwargs))


def _captured(model, args, kwargs):
    """The model's own forward with the head returning `DeferredLogits`, where the head of this moment can be fused."""
    outer = output_head(model)
    head = innermost(outer)
    # Adapters and hooks come and go after patching: asked again at every call.
    reason = why_not_fusable(outer, head_options(model).cast_lm_head_to_fp32)
    if reason is not None:
        _say_unfused(model, reason)
        return call_previous(model, KEY, args, kwargs)
    # What PEFT wraps around a head that it saves may be the unit that is sharded: parameters are read in calls of that.
    stand_in = DeferredLogits if outer is head else functools.partial(_deferred, outer)
    run = functools.partial(masks.run_plain, functools.partial(_call_own, model), model, args, kwargs)
    return capture(head, stand_in, run)


def _call_own(model, args, kwargs):
    return call_previous(model, KEY, args, kwargs)


def _deferred(outer, hidden, _, vocab_size):
    return DeferredLogits(hidden, outer, vocab_size)


def _say_unfused(model, reason: str) -> None:
    if torch.compiler.is_compiling():
        return
    place = binding_of(model, KEY).place
    if place is not None:
        place.kept(reason)
    logger.warning_once(
        f"The LM head of {type(model).__name__} is not fused: {reason}. Full logits are built; the numbers are right."
    )


def _logits_and_targets(model, args, kwargs, asked: LossRequest):
    """Run the backbone without labels; returns the outputs, the (deferred) logits and the label of each row."""
    if asked.labels is None and asked.shift_labels is None:
        raise ValueError(
            "labels is None; pass labels=(B, S) or shift_labels=(B, S) with fused_lm_head or label_smoothing."
        )
    outputs = _captured(model, args, kwargs)
    return outputs, *_shifted(outputs.logits, asked.labels, asked.shift_labels)


def _shifted(logits, labels, shift_labels):
    """The logits that predict a label, and those labels: the next token's, or `shift_labels` as they are."""
    return (logits[:, :-1], labels[:, 1:]) if shift_labels is None else (logits, shift_labels)


def _predictions(logits, target) -> dict[str, torch.Tensor]:
    """`FusedLMOutput.predictions`."""
    if isinstance(logits, DeferredLogits) and not logits.is_materialized:
        found = logits.fused(linear_token_ranks, target)
    else:
        logits = logits.materialize() if isinstance(logits, DeferredLogits) else logits
        found = token_ranks(logits, target.to(logits.device))
    token_ids, log_probs, ranks = found
    return {"token_ids": token_ids, "log_probs": log_probs, "ranks": ranks, "labels": target.to(token_ids.device)}


def _token_outputs(model, args, kwargs, asked: LossRequest) -> FusedLMOutput:
    options = head_options(model)
    wanted = options.outputs if asked.token_outputs is None else asked.token_outputs
    outputs, logits, target = _logits_and_targets(model, args, kwargs, asked)
    scoring = {"temperature": options.temperature, "label_smoothing": asked.label_smoothing}
    per_token = [name for name in TOKEN_OUTPUTS if name in wanted or name == "log_probs"]
    if isinstance(logits, DeferredLogits) and not logits.is_materialized:
        scores = logits.fused(
            _fp32_logprobs if options.cast_lm_head_to_fp32 else linear_logprobs,
            target,
            outputs=tuple(per_token),
            uniform_grad=asked.uniform_grad,
            **scoring,
        )
        scores = dict(zip(TOKEN_OUTPUTS, scores, strict=True))
    else:
        scores = scores_of_logits(
            logits.materialize() if isinstance(logits, DeferredLogits) else logits, target, **scoring
        )
    target = target.to(scores["log_probs"].device)
    mask = target != -100
    count = mask.sum().clamp(min=1) if asked.num_items_in_batch is None else asked.num_items_in_batch
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
    predictions = _predictions(logits, target) if asked.token_predictions else None
    return FusedLMOutput(
        loss=loss, label_mask=mask, aux_loss=aux_loss, hidden_states=hidden, predictions=predictions, **scores
    )


def _smoothed(model, args, kwargs, asked: LossRequest) -> FusedLMOutput:
    """`transformers.trainer_pt_utils.LabelSmoother` on the next-token labels.

    There is no auxiliary loss in it, as in the stock trainer.
    """
    _, logits, target = _logits_and_targets(model, args, kwargs, asked)
    if isinstance(logits, DeferredLogits) and not logits.is_materialized:
        total = logits.fused(linear_cross_entropy, target, reduction="sum", label_smoothing=asked.label_smoothing)
    else:
        logits = logits.materialize() if isinstance(logits, DeferredLogits) else logits
        total = smoothed_loss_sum(logits, target, asked.label_smoothing)
    count = (target != -100).sum().clamp(min=1) if asked.num_items_in_batch is None else asked.num_items_in_batch
    predictions = _predictions(logits, target) if asked.token_predictions else None
    return FusedLMOutput(loss=total / torch.as_tensor(count, device=total.device), predictions=predictions)


def _fp32_logprobs(hidden, weight, target, bias=None, lora=None, lora_input=None, **kwargs):
    """`linear_logprobs` with the projection in fp32 outside autocast (TRL's `cast_lm_head_to_fp32`)."""
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
