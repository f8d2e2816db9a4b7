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
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers.utils import ModelOutput

from liger_trainer import causal_mask
from liger_trainer._logging import logger
from liger_trainer.deferred import DeferredLogits
from liger_trainer.lm_head import bind_all, bind_head, innermost, unbind_head, why_not_fusable
from liger_trainer.patching.binding import bind, binding_of, call_previous, is_bound, unbind
from liger_trainer.patching.report import Place
from liger_triton import linear_cross_entropy, linear_logprobs, linear_token_ranks, token_ranks

_KEY = "_liger_head"  # of what `install_fused_head` binds
TOKEN_OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
EXTRA_OUTPUTS = ("hidden_states", "vocab_mean")


@dataclass
class FusedLMOutput(ModelOutput):
    """What `model(..., labels=labels, fused_lm_head=True)` returns.

    It has the fields of TRL's `FusedCausalLMOutput`, and the hidden states. Per-token fields are `(B, S - 1)` for
    next-token labels `(B, S)`, or `(B, S)` with `shift_labels`; they are zero where the label is -100, fp32 (`is_top1`:
    bool), and `None` where not asked for.

    Args:
        loss (`torch.Tensor`): Negative log-likelihood summed over the labels that count and divided by
            `num_items_in_batch` (their number when not passed), plus the model's weighted MoE auxiliary loss when
            router logits are requested.
        log_probs (`torch.Tensor`): Log-probability of each label; with `label_smoothing` e,
            `(1 - e) * log p(label) + e * mean_v log p(v)`.
        entropy (`torch.Tensor`): Entropy of the distribution, in nats.
        log_sum_sq_probs (`torch.Tensor`): `log(sum_v p_v ** 2)`, without gradient.
        mean_logits (`torch.Tensor`): Mean of the temperature-scaled logits, without gradient.
        is_top1 (`torch.Tensor`): Whether the label is the most likely token.
        label_mask (`torch.Tensor`): Whether the label is not -100.
        aux_loss (`torch.Tensor`, *optional*): MoE load-balancing loss.
        hidden_states (`torch.Tensor`, *optional*): The head's input `(B, S - 1, H)`, when asked for.
        vocab_mean (`torch.Tensor`, *optional*): Mean of each row of logits `(B, S)`, with a label or without, when
            asked for; without gradient.
        predictions (`dict`, *optional*): Under `token_predictions=True`: `token_ids` (the argmax), `log_probs` (of the
            model's own distribution, whatever temperature and label smoothing), `ranks` and `labels`, each `(B, S - 1)`
            and -100 where the label is.
    """

    loss: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    log_sum_sq_probs: torch.Tensor | None = None
    mean_logits: torch.Tensor | None = None
    is_top1: torch.Tensor | None = None
    label_mask: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None
    vocab_mean: torch.Tensor | None = None
    predictions: dict[str, torch.Tensor] | None = None


@dataclass
class HeadOptions:
    """What TRL fixes once per model in `add_fused_lm_head`."""

    temperature: float = 1.0
    cast_lm_head_to_fp32: bool = False
    outputs: tuple[str, ...] = ("log_probs",)


def install_fused_head(model, options: HeadOptions | None = None, place: Place | None = None) -> str | None:
    """Bind the fused forward to `model`. Where it is bound already, only `options` and `place` change.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): Model with an LM head.
        options (`HeadOptions`, *optional*): Defaults of calls with `fused_lm_head=True`. Unset: those of `HeadOptions`,
            whatever was installed before.
        place (`Place`, *optional*): Where a report is told that the head stopped being fused. Unset: where it was.

    Returns:
        `str` or `None`: None where the head is fused, else why real logits are built. With a head that cannot be fused
        (a DoRA on it, say) the same calls are answered from real logits; a model without any head is left alone.
    """
    model, options = base_model_of(model), options or HeadOptions()
    if output_head(model) is None:
        return head_reason(model)
    unknown = set(options.outputs) - {*TOKEN_OUTPUTS, *EXTRA_OUTPUTS}
    if unknown:
        raise ValueError(f"outputs has {sorted(unknown)}; known are {[*TOKEN_OUTPUTS, *EXTRA_OUTPUTS]}.")
    binding = binding_of(model, _KEY) or bind(model, _KEY, _fused_forward_of(type(model)), place=None)
    binding.options, binding.place = options, place or binding.place
    reason = head_reason(model)
    if reason is None:
        bind_all(output_head(model))
        causal_mask.install(model)
    return reason


def has_fused_head(model) -> bool:
    """Whether `install_fused_head` has been called on `model`.

    Asked of what was remembered, not of `model.forward`: accelerate wraps that one when training starts.
    """
    return head_options(model) is not None


def head_options(model) -> HeadOptions | None:
    """The options of the fused head of `model`, or None where it has none."""
    binding = binding_of(base_model_of(model), _KEY)
    return None if binding is None else binding.options


def remove_fused_head(model) -> None:
    """Undo `install_fused_head`: the `__dict__` of the model and of its head are as before.

    Where someone (accelerate) has since wrapped the forward, the wrapper stays and what it wraps calls the model's own.
    """
    model = base_model_of(model)
    for module in model.modules():
        unbind_head(module)
    causal_mask.uninstall(model)
    binding = binding_of(model, _KEY)
    if binding is None or is_bound(model, binding):
        unbind(model, _KEY)
    else:
        binding.options = None  # remembered: a later install must not bind a second forward around the wrapper


def base_model_of(model):
    """The transformers model inside `torch.compile` and a PEFT wrapper, or the model itself."""
    model = getattr(model, "_orig_mod", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def output_head(model):
    """The module that makes the logits of a transformers model, or None."""
    get_head = getattr(base_model_of(model), "get_output_embeddings", None)
    return None if get_head is None else get_head()


def head_reason(model) -> str | None:
    """Why `model` cannot have a fused head, or None."""
    head = output_head(model)
    if head is None:
        return f"{type(base_model_of(model)).__name__} has no LM head (get_output_embeddings() is None)"
    options = head_options(model)
    reason = why_not_fusable(head, options is not None and options.cast_lm_head_to_fp32)
    return None if reason is None else f"the LM head of {type(base_model_of(model)).__name__} cannot be fused: {reason}"


@functools.cache
def _fused_forward_of(model_class):
    """The forward for one class of model: `functools.wraps` keeps the signature that `Trainer` and `generate` read."""

    @functools.wraps(model_class.forward)
    def forward(
        self,
        *args,
        fused_lm_head=False,
        skip_logits=None,
        label_smoothing=0.0,
        token_predictions=False,
        scored_by=None,
        **kwargs,
    ):
        if head_options(self) is None:  # removed, but still inside somebody's wrapper
            return call_previous(self, _KEY, args, kwargs)
        if scored_by is not None:
            return scored_by(lambda: _captured(self, args, kwargs))
        labels, shift_labels = kwargs.get("labels"), kwargs.get("shift_labels")
        if fused_lm_head:
            return _token_outputs(self, args, kwargs, label_smoothing, token_predictions)
        if label_smoothing:
            return _smoothed(self, args, kwargs, label_smoothing, token_predictions)
        skip_logits = self.training if skip_logits is None else skip_logits
        if (labels is None and shift_labels is None) or not skip_logits:
            return call_previous(self, _KEY, args, kwargs)
        outputs = _captured(self, args, kwargs)
        if isinstance(outputs, ModelOutput):
            predictions = _predictions(*_shifted(outputs.logits, labels, shift_labels)) if token_predictions else None
            outputs = type(outputs)(**{k: v for k, v in outputs.items() if not isinstance(v, DeferredLogits)})
            if token_predictions:
                outputs["predictions"] = predictions
            return outputs
        return tuple(x.materialize() if isinstance(x, DeferredLogits) else x for x in outputs)

    forward.__name__ = "forward"
    return forward


def _captured(model, args, kwargs):
    """The model's own forward with the head returning `DeferredLogits`, where the head of this moment can be fused."""
    outer = output_head(model)
    head = innermost(outer)
    # Adapters and hooks come and go after patching: asked again at every call.
    reason = why_not_fusable(outer, head_options(model).cast_lm_head_to_fp32)
    if reason is not None:
        _say_unfused(model, reason)
        return call_previous(model, _KEY, args, kwargs)
    capture = bind_head(head)
    # What PEFT wraps around a head that it saves may be the unit that is sharded: parameters are read in calls of that.
    capture.stand_in = DeferredLogits if outer is head else functools.partial(_deferred, outer)
    try:
        return causal_mask.run_plain(functools.partial(_call_own, model), model, args, kwargs)
    finally:
        capture.stand_in = None


def _call_own(model, args, kwargs):
    return call_previous(model, _KEY, args, kwargs)


def _deferred(outer, hidden, _, vocab_size):
    return DeferredLogits(hidden, outer, vocab_size)


def _say_unfused(model, reason: str) -> None:
    if torch.compiler.is_compiling():
        return
    place = binding_of(model, _KEY).place
    if place is not None:
        place.kept(reason)
    logger.warning_once(
        f"The LM head of {type(model).__name__} is not fused: {reason}. Full logits are built; the numbers are right."
    )


def _logits_and_targets(model, args, kwargs):
    """Run the backbone without labels; returns the outputs, the (deferred) logits and the label of each row."""
    labels, shift_labels = kwargs.pop("labels", None), kwargs.pop("shift_labels", None)
    if labels is None and shift_labels is None:
        raise ValueError(
            "labels is None; pass labels=(B, S) or shift_labels=(B, S) with fused_lm_head or label_smoothing."
        )
    outputs = _captured(model, args, kwargs)
    return outputs, *_shifted(outputs.logits, labels, shift_labels)


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


def _token_outputs(model, args, kwargs, label_smoothing, token_predictions) -> FusedLMOutput:
    options = head_options(model)
    wanted = kwargs.pop("token_outputs", options.outputs)
    uniform_grad = kwargs.pop("uniform_grad", False)
    num_items = kwargs.pop("num_items_in_batch", None)
    outputs, logits, target = _logits_and_targets(model, args, kwargs)
    scoring = {"temperature": options.temperature, "label_smoothing": label_smoothing}
    per_token = [name for name in TOKEN_OUTPUTS if name in wanted or name == "log_probs"]
    if isinstance(logits, DeferredLogits) and not logits.is_materialized:
        scores = logits.fused(
            _fp32_logprobs if options.cast_lm_head_to_fp32 else linear_logprobs,
            target,
            outputs=tuple(per_token),
            uniform_grad=uniform_grad,
            **scoring,
        )
        scores = dict(zip(TOKEN_OUTPUTS, scores, strict=True))
    else:
        scores = _scores_of_logits(
            logits.materialize() if isinstance(logits, DeferredLogits) else logits, target, **scoring
        )
    target = target.to(scores["log_probs"].device)
    mask = target != -100
    count = mask.sum().clamp(min=1) if num_items is None else num_items
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
    scores["vocab_mean"] = _vocab_mean(outputs.logits, options.temperature) if "vocab_mean" in wanted else None
    predictions = _predictions(logits, target) if token_predictions else None
    return FusedLMOutput(
        loss=loss, label_mask=mask, aux_loss=aux_loss, hidden_states=hidden, predictions=predictions, **scores
    )


def _smoothed(model, args, kwargs, label_smoothing, token_predictions):
    """`transformers.trainer_pt_utils.LabelSmoother` on the next-token labels.

    There is no auxiliary loss in it, as in the stock trainer.
    """
    num_items = kwargs.pop("num_items_in_batch", None)
    _, logits, target = _logits_and_targets(model, args, kwargs)
    if isinstance(logits, DeferredLogits) and not logits.is_materialized:
        total = logits.fused(linear_cross_entropy, target, reduction="sum", label_smoothing=label_smoothing)
    else:
        logits = logits.materialize() if isinstance(logits, DeferredLogits) else logits
        total = F.cross_entropy(
            logits.float().flatten(0, -2), target.flatten(), reduction="sum", label_smoothing=label_smoothing
        )
    count = (target != -100).sum().clamp(min=1) if num_items is None else num_items
    predictions = _predictions(logits, target) if token_predictions else None
    return FusedLMOutput(loss=total / torch.as_tensor(count, device=total.device), predictions=predictions)


@torch.no_grad()
def _vocab_mean(logits, temperature: float) -> torch.Tensor:
    """Mean over the vocabulary of each row of (deferred) logits (B, S, V), divided by `temperature`: (B, S), fp32."""
    if not isinstance(logits, DeferredLogits) or logits.is_materialized:
        return (logits.materialize() if isinstance(logits, DeferredLogits) else logits).float().mean(-1) / temperature
    rows = logits.hidden.shape[:-1]
    return logits.fused(_mean_of_rows, torch.zeros(rows, dtype=torch.long, device=logits.hidden.device)) / temperature


def _mean_of_rows(hidden, weight, target, bias=None, *, lora=None, lora_input=None, logit_scale=1.0, softcap=None):
    """Mean over the vocabulary of each row of logits. Without a softcap the head is linear: x . mean(W), no product."""
    if softcap is not None:
        options = {"lora": lora, "lora_input": lora_input, "logit_scale": logit_scale, "softcap": softcap}
        return linear_logprobs(hidden, weight, target, bias, outputs=("mean_logits",), **options).mean_logits
    with torch.autocast(hidden.device.type, enabled=False):

        def times(x, vector):  # in pieces: an fp32 copy of all hidden states would be as large as they are, or twice
            return torch.cat([piece.float() @ vector for piece in x.flatten(0, -2).split(4096)]).view(x.shape[:-1])

        mean = times(hidden, weight.mean(0, dtype=torch.float32))
        if bias is not None:
            mean = mean + bias.mean(dtype=torch.float32)
        if lora is not None:
            lora_a, lora_b, scaling = lora
            inputs = hidden if lora_input is None else lora_input
            mean = mean + times(inputs, scaling * (lora_b.mean(0, dtype=torch.float32) @ lora_a.float()))
        return logit_scale * mean


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


def _scores_of_logits(logits, target, *, temperature, label_smoothing) -> dict:
    """The per-token outputs from real logits `(..., V)`, for a head that cannot be fused."""
    target = target.to(logits.device)
    mask = target != -100
    log_p = torch.log_softmax(logits.float() / temperature, dim=-1)
    log_probs = log_p.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    detached = log_p.detach()
    scores = {
        "log_probs": (1 - label_smoothing) * log_probs + label_smoothing * log_p.mean(-1)
        if label_smoothing
        else log_probs,
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "log_sum_sq_probs": torch.logsumexp(2 * detached, -1),
        "mean_logits": (logits.detach().float() / temperature).mean(-1),
        "is_top1": detached.argmax(-1) == target,
    }
    return {name: value.masked_fill(~mask, 0) for name, value in scores.items()}
