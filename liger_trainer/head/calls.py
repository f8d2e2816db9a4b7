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

import copy
import dataclasses
import functools
import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.utils import ModelOutput

from liger_trainer.head import masks
from liger_trainer.head.deferred import DeferredLogits, defer_logits, materialize
from liger_trainer.head.module import (
    FusedHeadBinding,
    base_model_of,
    bind_all,
    caps_in_chunks,
    capture,
    head_options,
    head_reason,
    output_head,
    report_unfused,
    who_sees_outputs,
    why_model_needs_logits,
    why_not_fusable,
)
from liger_trainer.head.outputs import EXTRA_OUTPUTS, TOKEN_OUTPUTS, FusedLMOutput, HeadOptions
from liger_trainer.head.scores import predictions, token_scores, vocab_mean
from liger_trainer.instance.binding import bind, call_previous, in_place_of
from liger_trainer.instance.hooks import replaced_forward
from liger_trainer.instance.report import Place
from liger_trainer.varlen.decide import bound_backbone, decide, states_shown
from liger_trainer.varlen.host_copies import values_of
from liger_trainer.varlen.padding import Plan, cache_of, running

_OF_A_LOSS = ("labels", "shift_labels", "num_items_in_batch")  # from which a model would compute a loss
_OF_EVERY_POSITION = {"hidden_states", "vocab_mean"}  # TRL's ORPO and CPO log the mean over padding too


class _Call(NamedTuple):
    """A call of the model's own forward, the options of its head, and what else the call asks of the head."""

    model: nn.Module
    head: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    options: HeadOptions
    is_scored: bool  # the model's own code then computes no loss
    label_smoothing: float
    token_predictions: bool
    token_outputs: tuple[str, ...]  # fields of `FusedLMOutput`
    uniform_grad: bool  # promises that the upstream gradients of all labels are equal, which saves a product

    def run(self) -> Any:
        """Run the forward that the model would have without ours."""
        left_out = _OF_A_LOSS if self.is_scored else ()
        kwargs = {name: value for name, value in self.kwargs.items() if name not in left_out}
        return call_previous(self.model, FusedHeadBinding, self.args, kwargs)

    def shifted(self, logits: Any) -> tuple[Any, torch.Tensor]:
        """The logits that predict a label, with the labels: those of the next tokens, or `shift_labels` as they are."""
        labels, shift_labels = self.kwargs.get("labels"), self.kwargs.get("shift_labels")
        if shift_labels is not None:
            return logits, shift_labels
        if labels is None:
            raise ValueError(
                "labels is None; pass labels=(B, S) or shift_labels=(B, S) with fused_lm_head or label_smoothing."
            )
        return logits[:, :-1], labels[:, 1:]

    def labels_on_host(self) -> torch.Tensor | None:
        """The labels of `shifted` on the CPU, or None where the host does not know them."""
        shift_labels = self.kwargs.get("shift_labels")
        labels = self.kwargs["labels"] if shift_labels is None else shift_labels
        if torch.compiler.is_compiling() or labels.device.type == "cpu":
            return None
        known = values_of(labels)[0]
        if known.device.type != "cpu":
            return None
        return known[:, 1:] if shift_labels is None else known


def install_fused_head(model: nn.Module, options: HeadOptions | None = None, place: Place | None = None) -> str | None:
    """Bind the fused forward to `model`. Where it is bound, or a wrapper calls it, only `options` and `place` change.

    A model whose head cannot be fused, because of a DoRA on it for example, answers the same calls from real logits. A
    model without a head is left alone.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): Model with an LM head.
        options (`HeadOptions`, *optional*): Defaults of calls with `fused_lm_head=True`.
        place (`Place`, *optional*): What is told if the head stops being fused. Unset: as given before.

    Returns:
        `str` or `None`: None where the head is fused, else why real logits are built.

    Raises:
        ValueError: `options.outputs` has an unknown name.
    """
    model, options = base_model_of(model), options or HeadOptions()
    head = output_head(model)
    if unknown := set(options.outputs) - {*TOKEN_OUTPUTS, *EXTRA_OUTPUTS}:
        raise ValueError(f"outputs has {sorted(unknown)}; expected names from {[*TOKEN_OUTPUTS, *EXTRA_OUTPUTS]}.")
    reason = head_reason(model, options)
    if head is None:
        return reason
    binding = FusedHeadBinding.of(model)
    if binding is None:
        forward = _forward_of(type(model))  # type: ignore[arg-type] # mypy takes no class for hashable
        binding = bind(model, FusedHeadBinding(forward))
    binding.options, binding.place, binding.aside = options, place or binding.place, False
    if reason is None:
        bind_all(head)
        masks.install(model)
    return reason


@functools.cache
def _forward_of(model_class: type[nn.Module]) -> Callable:
    """The forward to bind to models of one class."""
    takes_cache = "use_cache" in inspect.signature(model_class.forward).parameters

    @in_place_of(model_class.forward)
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
        assert options is not None, "a binding that has been removed steps aside"
        backbone = bound_backbone(self)
        shown: str | None = None  # what the answer has of every position
        is_scored = bool(fused_lm_head or label_smoothing or scored_by is not None)
        asked = options.outputs if token_outputs is None else token_outputs
        call = _Call(
            self, output_head(self), args, kwargs, options, is_scored, label_smoothing, token_predictions, asked,
            uniform_grad,
        )  # fmt: skip
        if is_scored and takes_cache and cache_of(kwargs) is None:
            kwargs["use_cache"] = bool(kwargs.get("use_cache"))  # off by default, since only scores are wanted
        if scored_by is not None:  # `shift_labels` then say only which positions are scored
            answer = functools.partial(scored_by, functools.partial(_deferred, call))
        elif is_scored:
            answer = functools.partial(_token_outputs if fused_lm_head else _smoothed_loss, call)
            of_all = _OF_EVERY_POSITION.intersection(asked)
            shown = f"the call asks for {', '.join(sorted(of_all))}" if of_all else None
        else:
            labelled = kwargs.get("labels") is not None or kwargs.get("shift_labels") is not None
            skip_logits = labelled and (self.training if skip_logits is None else skip_logits)
            if skip_logits and (why := who_sees_outputs(self)) is not None:
                report_unfused(self, why)
                skip_logits = False
            if backbone is not None:
                shown = states_shown(self, backbone, kwargs) if skip_logits else "the call returns logits"
            answer = functools.partial(_own_outputs, call, skip_logits)
        if backbone is None:
            return answer()
        plan, reason = decide(self, backbone, args, kwargs, shown, functools.partial(_why_unfit, call))
        if reason is not None and reason.instead is not None:
            backbone.tell(reason.text, reason.instead)
        with running(plan):  # None too: calls may lie in others
            return answer()

    return forward


def _why_unfit(call: _Call, plan: Plan) -> str | None:
    """Name what would see zeros where stock computes padding: code of the user's, or a head that is not fused."""
    why = masks.why_not_ours(call.model)
    if why is not None or not plan.leaves_out:
        return why
    binding = FusedHeadBinding.of(call.model)
    replaced = None if binding is None else replaced_forward(call.model, binding.previous)
    if replaced is not None:
        return f"{replaced} on the {type(call.model).__name__} may read what is computed for padding"
    unfused = why_not_fusable(call.head, call.options.cast_lm_head_to_fp32)
    return None if unfused is None else f"the LM head is not fused, since {unfused}"


def _own_outputs(call: _Call, skip_logits: bool) -> Any:
    """Return what the model's own forward does; in training without the logits that its loss was computed from."""

    def shown(outputs: Any) -> Any:
        kept = _without_stand_ins(outputs)
        if call.token_predictions:
            kept["predictions"] = predictions(*call.shifted(_field(outputs, "logits")))
        return kept

    if not skip_logits:
        return capture(call.head, None, call.run)  # real ones, even within another call
    return _deferred(call, shown)


def _without_stand_ins(outputs: Any) -> Any:
    """The `ModelOutput` of the model's own forward without the fields that are stand-ins. Others have real logits."""
    if not isinstance(outputs, ModelOutput):
        return tree_map(materialize, outputs, is_leaf=lambda x: x is not outputs)
    taken = [name for name, value in outputs.items() if isinstance(value, DeferredLogits)]
    if torch.compiler.is_compiling() or vars(outputs).keys() == getattr(outputs, "__dataclass_fields__", {}).keys():
        return type(outputs)(**{name: value for name, value in outputs.items() if name not in taken})
    outputs = copy.copy(outputs)  # it has more than its class; this takes longer, and traced copies have no keys
    for name in taken:
        OrderedDict.__delitem__(outputs, name)  # a `ModelOutput` refuses
        object.__setattr__(outputs, name, None)
    return outputs


def _field(outputs: Any, name: str) -> Any:
    """A field of what a model's own forward returns, or None."""
    return outputs.get(name) if isinstance(outputs, dict) else getattr(outputs, name, None)


def _deferred(call: _Call, use: Callable[[Any], Any] | None = None) -> Any:
    """Run the model's own forward so that its head returns `DeferredLogits`, or real logits if it cannot be fused now.

    Adapters and hooks come and go after patching, so every call asks again. The head also returns real logits where
    gradients are switched inside the forward, or in a checkpoint.

    Returns what `use` makes of the outputs. A stand-in that the model has kept then becomes real, since the head's
    weights will change. Without `use`, the outputs are returned with their stand-ins.
    """
    made: list[weakref.ref[DeferredLogits]] = []
    called_in = _gradient_modes()

    def stand_in(hidden: torch.Tensor, vocab_size: int) -> DeferredLogits | None:
        if _gradient_modes() != called_in or caps_in_chunks(call.model, hidden.shape[-2]):
            return None
        # PEFT wraps a head that it saves, and the wrapper may be the sharded unit: parameters are read in calls of it.
        logits = defer_logits(hidden, call.head, vocab_size)
        if not torch.compiler.is_compiling():
            made.append(weakref.ref(logits))
        return logits

    run = functools.partial(masks.run_without_masks, call) if torch.compiler.is_compiling() else call.run
    if not torch.compiler.is_compiling() and torch._C._dynamo.eval_frame.get_eval_frame_callback():
        # The functions that would get a stand-in are compiled one by one, and cannot be.
        reason: str | None = "torch.compile has not compiled its call as a whole"
        torch.compiler.disable(report_unfused)(call.model, reason)
    else:
        reason = why_model_needs_logits(call.model) or why_not_fusable(call.head, call.options.cast_lm_head_to_fp32)
        if reason is not None:
            report_unfused(call.model, reason)
    outputs = capture(call.head, stand_in if reason is None else None, run)
    if use is None:
        return outputs
    result = use(outputs)
    del outputs
    for reference in made:
        if (kept := reference()) is not None:
            kept.materialize("keeping it after the model's call")
    return result


def _gradient_modes() -> tuple[bool, Any]:
    """Return whether gradients are on, and the checkpoint that we are in, if any: it would call the head again."""
    hooks: Any = None if torch.compiler.is_compiling() else torch._C._autograd._top_saved_tensors_default_hooks(True)
    in_checkpoint = hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"
    return torch.is_grad_enabled(), hooks[0] if in_checkpoint else None


def _token_outputs(call: _Call) -> FusedLMOutput:
    """Answer a call with `fused_lm_head=True`."""
    routers: list[Any] = []

    def scored(outputs: Any) -> FusedLMOutput:
        found, aux_loss = _scores(call, outputs), _aux_loss(call, outputs, routers)
        if aux_loss is not None:
            weight = getattr(call.model.config.get_text_config(), "router_aux_loss_coef", 0.0)
            found |= {"loss": found["loss"] + weight * aux_loss, "aux_loss": aux_loss}
        return FusedLMOutput(**found)

    if not call.kwargs.get("output_router_logits"):
        return _deferred(call, scored)
    hook = call.model.base_model.register_forward_hook(lambda *seen: routers.append(_field(seen[-1], "router_logits")))
    try:
        return _deferred(call, scored)
    finally:
        hook.remove()


def _smoothed_loss(call: _Call) -> FusedLMOutput:
    """Answer a call with `label_smoothing` alone as `LabelSmoother` of transformers does, without an auxiliary loss."""
    options = dataclasses.replace(call.options, temperature=1.0)
    call = call._replace(options=options, token_outputs=(), uniform_grad=True)  # the sum of log-probabilities is enough
    found = _deferred(call, lambda outputs: _scores(call, outputs))
    loss = found["loss"]
    if call.kwargs.get("num_items_in_batch") is None:
        has_labels = found["label_mask"].any()
        loss = torch.where(has_labels, loss, torch.nan)  # `LabelSmoother` divides 0 by 0, TRL's calls do not
    return FusedLMOutput(loss=loss, predictions=found["predictions"])


def _scores(call: _Call, outputs: Any) -> dict[str, Any]:
    """The fields of `FusedLMOutput` that `call` asks for, of what the model's own forward has returned."""
    options, wanted, all_logits = call.options, call.token_outputs, _field(outputs, "logits")
    logits, target = call.shifted(all_logits)
    if "hidden_states" in wanted and not isinstance(logits, DeferredLogits):
        reason = head_reason(call.model) or "this call built real logits"
        raise ValueError(f"token_outputs has 'hidden_states', but {reason}.")
    scores = token_scores(
        logits, target, tuple(name for name in TOKEN_OUTPUTS if name in wanted or name == "log_probs"),
        temperature=options.temperature, label_smoothing=call.label_smoothing, uniform_grad=call.uniform_grad,
        in_fp32=options.cast_lm_head_to_fp32, on_host=call.labels_on_host(),
    )  # fmt: skip
    mask = target.to(scores["log_probs"].device) != -100
    count = call.kwargs.get("num_items_in_batch")
    count = mask.sum().clamp(min=1) if count is None else count
    count = count.to(mask.device) if isinstance(count, torch.Tensor) else count
    return scores | {
        "loss": -scores["log_probs"].sum() / count,
        "label_mask": mask,
        "hidden_states": logits.hidden if "hidden_states" in wanted else None,
        "vocab_mean": vocab_mean(all_logits, options.temperature) if "vocab_mean" in wanted else None,
        "predictions": predictions(logits, target) if call.token_predictions else None,
    }


def _aux_loss(call: _Call, outputs: Any, routers: list) -> torch.Tensor | None:
    """The model's auxiliary loss of experts or, where a call asks for router logits, Mixtral's, as TRL computes it."""
    aux_loss = _field(outputs, "aux_loss")
    if aux_loss is not None or not call.kwargs.get("output_router_logits"):
        return aux_loss
    config, mask = call.model.config.get_text_config(), call.kwargs.get("attention_mask")
    if not (routers and routers[-1]) or not hasattr(config, "num_experts"):
        name = type(call.model).__name__
        raise ValueError(
            f"{name} computes no auxiliary loss, and TRL's needs router logits of its backbone and num_experts of its "
            "config, which are missing. Set router_aux_loss_coef to 0.0."
        )
    return load_balancing_loss_func(routers[-1], config.num_experts, config.num_experts_per_tok, mask)
