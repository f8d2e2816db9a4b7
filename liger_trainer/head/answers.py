"""Answers the calls of a model with a fused LM head: one function for each kind of `HeadRequest`.

Each of them runs the model's own forward with stand-ins for the logits, and computes from its outputs what the call
asks for.
"""

import copy
import dataclasses
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.utils import ModelOutput

from liger_trainer.head.deferred import DeferredLogits, defer_logits, materialize
from liger_trainer.head.module import (
    MakeStandIn,
    head_reason,
    intercept,
    longest_rows_of_stand_ins,
    report_unfused,
    why_not_fusable,
)
from liger_trainer.head.outputs import TOKEN_OUTPUTS, FusedLMOutput
from liger_trainer.head.request import ModelCall
from liger_trainer.head.scores import predictions, token_scores, vocab_mean
from liger_trainer.varlen import registry


def answer(call: ModelCall) -> Any:
    """Return what the request of `call` asks for."""
    consumer = call.request.logits_consumer
    if consumer is not None:
        return consumer(functools.partial(_outputs_with_stand_ins, call))
    if call.request.token_scores:
        return _token_scores(call)
    if call.request.label_smoothing:
        return _smoothed_loss(call)
    if call.skip_logits:
        return _from_stand_ins(call, functools.partial(_own_outputs, call))
    # None: real logits, even if this call runs inside another one that has stand-ins.
    outputs = intercept(call.head, None, call.run)
    return _own_outputs(call, outputs) if call.request.token_predictions else outputs


# Running the model's own forward


class _StandIns:
    """Makes the stand-ins of one call of a model. The head gets None where it has to return real logits."""

    def __init__(self, call: ModelCall):
        self._call = call
        self._gradient_modes = _gradient_modes()
        self._longest_rows = longest_rows_of_stand_ins(call.model)
        self._made: list[weakref.ref[DeferredLogits]] = []

    def __call__(self, hidden: torch.Tensor, vocab_size: int) -> DeferredLogits | None:
        # The head is called under another gradient mode than the model, or inside a checkpoint. The loss, which runs
        # after that, would be computed in the wrong mode, or the checkpoint's second run would not match the first.
        if _gradient_modes() != self._gradient_modes:
            return None
        if self._longest_rows is not None and hidden.shape[-2] > self._longest_rows:
            return None
        # The head of the call, not the module that was called inside it: PEFT wraps a head that it saves, and the
        # wrapper may be the sharded unit, whose calls gather the parameters.
        logits = defer_logits(hidden, self._call.head, vocab_size)
        if not torch.compiler.is_compiling():
            self._made.append(weakref.ref(logits))
        return logits

    def materialize_kept(self) -> None:
        """Build the logits of stand-ins that the model has kept. Later the head's weights will have changed."""
        for reference in self._made:
            logits = reference()
            if logits is not None:
                logits.materialize("keeping it after the model's call")


def _gradient_modes() -> tuple[bool, Any]:
    """Return whether gradients are on, and the hook of the innermost checkpoint, which would call the head again."""
    if torch.compiler.is_compiling():
        return torch.is_grad_enabled(), None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    in_checkpoint = hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"
    return torch.is_grad_enabled(), hooks[0] if in_checkpoint else None


def _run_with_stand_ins(call: ModelCall, stand_ins: MakeStandIn) -> Any:
    """Run the model's own forward. The head returns stand-ins, or real logits if it cannot be fused now.

    Adapters and hooks come and go after patching, so every call asks again (`ModelCall.unfused`). The head also returns
    real logits if gradients are switched inside the forward, or inside a checkpoint (`_StandIns`).
    """
    reason = call.unfused
    if not torch.compiler.is_compiling() and torch._C._dynamo.eval_frame.get_eval_frame_callback():
        # A callback without a traced call: Dynamo compiles functions of the model one by one. Those that get a stand-in
        # cannot be compiled.
        reason = "torch.compile has not compiled its call as a whole"
        torch.compiler.disable(report_unfused)(call.model, reason)
    elif reason is not None:
        report_unfused(call.model, reason)
    run = call.run
    if torch.compiler.is_compiling():
        run = functools.partial(registry.run_without_masks, call)
    return intercept(call.head, stand_ins if reason is None else None, run)


def _outputs_with_stand_ins(call: ModelCall) -> Any:
    """Return the outputs of the model's own forward, with stand-ins.

    A consumer may change the gradient mode or the adapters before it calls this, so both are looked up again.
    """
    unfused = why_not_fusable(call.head, call.options.cast_lm_head_to_fp32)
    return _run_with_stand_ins(call._replace(unfused=unfused), _StandIns(call))


def _from_stand_ins(call: ModelCall, use: Callable[[Any], Any]) -> Any:
    """Return `use(outputs)` of the model's own forward. Stand-ins that the model has kept then become real."""
    stand_ins = _StandIns(call)
    outputs = _run_with_stand_ins(call, stand_ins)
    result = use(outputs)
    del outputs  # the last reference to stand-ins that the model has not kept
    stand_ins.materialize_kept()
    return result


# The model's own outputs


def _own_outputs(call: ModelCall, outputs: Any) -> Any:
    """Return the outputs of the model's own forward without stand-ins, and with predictions if they are asked for."""
    shown = _without_stand_ins(outputs)
    if call.request.token_predictions and call.has_labels:
        shown["predictions"] = predictions(*call.shifted(_field(outputs, "logits")))
    return shown


def _without_stand_ins(outputs: Any) -> Any:
    """Return a `ModelOutput` without the fields that are stand-ins. Other outputs get real logits."""
    if not isinstance(outputs, ModelOutput):
        return tree_map(materialize, outputs, is_leaf=lambda x: x is not outputs)
    stand_ins = [name for name, value in outputs.items() if isinstance(value, DeferredLogits)]
    # Fast: outputs with the fields of their class are built again. A traced output has no keys to compare.
    if torch.compiler.is_compiling() or vars(outputs).keys() == getattr(outputs, "__dataclass_fields__", {}).keys():
        return type(outputs)(**{name: value for name, value in outputs.items() if name not in stand_ins})
    # Slow: these have more attributes than the fields of their class, so they are copied.
    outputs = copy.copy(outputs)
    for name in stand_ins:
        OrderedDict.__delitem__(outputs, name)  # `ModelOutput` forbids deletion
        object.__setattr__(outputs, name, None)
    return outputs


def _field(outputs: object, name: str) -> Any:
    """Return a field of what a model's own forward returns, or None."""
    return outputs.get(name) if isinstance(outputs, dict) else getattr(outputs, name, None)


# Scores of each label

# Classes that have returned the auxiliary loss of experts from their own forward. For the others each call puts a hook
# on the backbone, and a backbone with a new hook is not replayed (`varlen/graphs/snapshot.py`).
_computes_aux_loss: weakref.WeakSet[type] = weakref.WeakSet()


def _token_scores(call: ModelCall) -> FusedLMOutput:
    """Answer a call with `fused_lm_head=True`."""
    router_logits: list[Any] = []

    def scored(outputs: Any) -> FusedLMOutput:
        fields = _score_fields(call, outputs)
        if call.request.logits_observer is not None:
            fields["observed"] = call.request.logits_observer(_field(outputs, "logits"))
        aux_loss = _field(outputs, "aux_loss")
        if aux_loss is not None:
            _computes_aux_loss.add(type(call.model))
        elif call.kwargs.get("output_router_logits"):
            aux_loss = _aux_loss_as_trl(call, router_logits)
        if aux_loss is not None:
            config: Any = call.model.config
            weight = getattr(config.get_text_config(), "router_aux_loss_coef", 0.0)
            fields["loss"] = fields["loss"] + weight * aux_loss
            fields["aux_loss"] = aux_loss
        return FusedLMOutput(**fields)

    def keep_router_logits(module: nn.Module, args: tuple, outputs: object) -> None:
        router_logits.append(_field(outputs, "router_logits"))

    if not call.kwargs.get("output_router_logits") or type(call.model) in _computes_aux_loss:
        return _from_stand_ins(call, scored)
    backbone: Any = call.model.base_model
    hook = backbone.register_forward_hook(keep_router_logits)
    try:
        return _from_stand_ins(call, scored)
    finally:
        hook.remove()


def _smoothed_loss(call: ModelCall) -> FusedLMOutput:
    """Answer a call with `label_smoothing` alone as `LabelSmoother` of transformers does, without an auxiliary loss."""
    call = call._replace(
        options=dataclasses.replace(call.options, temperature=1.0),
        # The loss needs only the sum of the log-probabilities, so all labels get the same gradient.
        request=dataclasses.replace(call.request, token_outputs=(), uniform_grad=True),
    )
    fields = _from_stand_ins(call, functools.partial(_score_fields, call))
    loss = fields["loss"]
    if call.kwargs.get("num_items_in_batch") is None:
        has_labels = fields["label_mask"].any()
        # Without labels `LabelSmoother` divides 0 by 0. TRL does not, and neither does `_score_fields`.
        loss = torch.where(has_labels, loss, torch.nan)
    return FusedLMOutput(loss=loss, predictions=fields["predictions"])


def _score_fields(call: ModelCall, outputs: Any) -> dict[str, Any]:
    """Compute the fields of `FusedLMOutput` that `call` asks for, from the outputs of the model's own forward."""
    options = call.options
    wanted = call.token_outputs
    all_logits = _field(outputs, "logits")
    logits, target = call.shifted(all_logits)
    if "hidden_states" in wanted and not isinstance(logits, DeferredLogits):
        reason = head_reason(call.model) or "this call built real logits"
        raise ValueError(f"token_outputs has 'hidden_states', but {reason}.")
    fields = token_scores(
        logits,
        target,
        tuple([name for name in TOKEN_OUTPUTS if name in wanted or name == "log_probs"]),
        temperature=options.temperature,
        label_smoothing=call.request.label_smoothing,
        uniform_grad=call.request.uniform_grad,
        in_fp32=options.cast_lm_head_to_fp32,
        on_host=call.labels_on_host(),
    )
    mask = target.to(fields["log_probs"].device) != -100
    fields["label_mask"] = mask
    count = call.kwargs.get("num_items_in_batch")
    if count is None:
        count = mask.sum().clamp(min=1)
    elif isinstance(count, torch.Tensor):
        count = count.to(mask.device)
    fields["loss"] = -fields["log_probs"].sum() / count
    fields["hidden_states"] = logits.hidden if "hidden_states" in wanted else None
    fields["vocab_mean"] = vocab_mean(all_logits, options.temperature) if "vocab_mean" in wanted else None
    fields["predictions"] = predictions(logits, target) if call.request.token_predictions else None
    return fields


def _aux_loss_as_trl(call: ModelCall, router_logits: list[Any]) -> torch.Tensor | float:
    """Compute Mixtral's auxiliary loss of experts, as TRL does for a model that computes none itself.

    Raises:
        ValueError: The backbone returned no router logits, or the config has no `num_experts`.
    """
    model_config: Any = call.model.config
    config = model_config.get_text_config()
    has_router_logits = bool(router_logits and router_logits[-1])
    if not has_router_logits or not hasattr(config, "num_experts"):
        name = type(call.model).__name__
        raise ValueError(
            f"{name} computes no auxiliary loss, and TRL's needs router logits of its backbone and num_experts of its "
            "config, which are missing. Set router_aux_loss_coef to 0.0."
        )
    mask = call.kwargs.get("attention_mask")
    return load_balancing_loss_func(router_logits[-1], config.num_experts, config.num_experts_per_tok, mask)
