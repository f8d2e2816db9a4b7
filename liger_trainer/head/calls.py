"""Binds the forward of a model with a fused LM head: the model's own `forward` runs, and the loss needs no logits.

`install_fused_head(model)` binds it. A call says by a `HeadRequest`, or by keywords, what it asks for:

- `model(..., labels=...)`: In training mode, the model's own loss code gets `DeferredLogits`, so the fused kernel
  computes the loss, and the output has `logits=None`. In eval mode, the output has real logits. With `skip_logits=True`
  or `skip_logits=False` a call chooses one or the other, whatever the mode.
- `model(..., labels=..., fused_lm_head=True)`: What TRL's trainers ask for (`trl.trainer.utils.add_fused_lm_head`). The
  output has `log_probs`, `entropy`, ... of each next-token label, see `FusedLMOutput`.
- `run_request(model, HeadRequest(logits_consumer=f), ...)`: `f` makes the answer from stand-ins for the logits.
- Any other call is left to the model's own forward.

In each call the forward first decides whether padding is left out (`varlen/decide.py`). Then `answers.py` makes the
answer.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from liger_trainer.head.answers import answer
from liger_trainer.head.module import (
    FusedHeadBinding,
    base_model_of,
    bind_all,
    head_reason,
    output_head,
    report_unfused,
    who_sees_outputs,
    why_not_fusable,
)
from liger_trainer.head.outputs import EXTRA_OUTPUTS, TOKEN_OUTPUTS, HeadOptions
from liger_trainer.head.request import HeadRequest, ModelCall
from liger_trainer.patching.core.binding import bind, call_previous, in_place_of, own_code
from liger_trainer.patching.core.hooks import replaced_forward
from liger_trainer.patching.core.report import ReportEntry
from liger_trainer.varlen import registry
from liger_trainer.varlen.decide import bound_backbone, decide, why_padding_is_read
from liger_trainer.varlen.plan_batch import holds_packed_rows
from liger_trainer.varlen.unpad_plan import cache_of, use_plan
from liger_trainer.varlen.unpadded_backbone import BackboneBinding

_OF_EVERY_POSITION = {"hidden_states", "vocab_mean"}  # these cover padding: TRL's ORPO and CPO log means over it too


def install_fused_head(
    model: nn.Module, options: HeadOptions | None = None, report_entry: ReportEntry | None = None
) -> str | None:
    """Bind the fused forward to `model`. If it is bound already, change only `options` and `report_entry`.

    If the head cannot be fused, for example because of a DoRA on it, the model answers the same calls from real logits.
    A model without a head is left alone.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): Model with an LM head.
        options (`HeadOptions`, *optional*): Defaults of calls with `fused_lm_head=True`.
        report_entry (`ReportEntry`, *optional*): The entry of the report that says if the head stops being fused.
            Unset: the earlier one stays.

    Returns:
        `str` or `None`: None if the head is fused, else why real logits are built.

    Raises:
        ValueError: `options.outputs` has an unknown name.
    """
    model = base_model_of(model)
    options = options or HeadOptions()
    known = [*TOKEN_OUTPUTS, *EXTRA_OUTPUTS]
    unknown = set(options.outputs) - set(known)
    if unknown:
        raise ValueError(f"outputs has {sorted(unknown)}; expected names from {known}.")
    head = output_head(model)
    reason = head_reason(model, options)
    if head is None:
        return reason
    binding = FusedHeadBinding.of(model)
    if binding is None:
        forward = _forward_of(type(model))  # type: ignore[arg-type] # mypy takes no class for hashable
        binding = bind(model, FusedHeadBinding(forward))
    binding.options = options
    binding.report_entry = report_entry or binding.report_entry
    binding.fallback_active = False
    if reason is None:
        bind_all(head)
        registry.install(model)
    return reason


@functools.cache
def _forward_of(model_class: type[nn.Module]) -> Callable:
    """Make the forward to bind to models of one class."""
    takes_cache = "use_cache" in inspect.signature(model_class.forward).parameters

    @in_place_of(model_class.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() and _continues_by_a_cache(kwargs):
            with own_code():
                return call_previous(self, FusedHeadBinding, args, kwargs)
        request = HeadRequest.taken_from(kwargs)
        call = _model_call(self, request, args, kwargs)
        if request.replaces_loss and takes_cache and cache_of(kwargs) is None:
            kwargs["use_cache"] = bool(kwargs.get("use_cache"))  # off by default: a call for scores reads no cache
        backbone = bound_backbone(self)
        if backbone is None:
            return answer(call)
        decision = decide(
            self,
            backbone,
            args,
            kwargs,
            _why_padding_is_read(call, backbone),
            _why_padding_would_be_missed(call),
            call.options.sharing,
        )
        with use_plan(decision.plan):  # also None, because this call may run inside another one that has a plan
            return answer(call)

    return forward


def _continues_by_a_cache(kwargs: dict[str, Any]) -> bool:
    """Return whether a call, made without gradients, continues rows by a cache, as `generate` does.

    Such a call runs the modules' own code, so that a model generates what it does unpatched. With kernels, a token took
    9 to 17 % longer on a GPU than unpatched (`benchmarks/generation.py`): for a few tokens, the Python around a kernel
    takes longer than the kernel saves. Other calls keep our code, so that every pass of a training computes the same
    numbers.
    """
    if torch.compiler.is_compiling() or cache_of(kwargs) is None or HeadRequest.is_in(kwargs):
        return False
    has_labels = kwargs.get("labels") is not None or kwargs.get("shift_labels") is not None
    return not has_labels and not holds_packed_rows(kwargs)


def _model_call(model: nn.Module, request: HeadRequest, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelCall:
    """Find out what a call of `model` needs of the head, and whether the head can be fused now."""
    # The bound model is transformers' own, so nothing has to be unwrapped here.
    bound = FusedHeadBinding.of(model)
    assert bound is not None and not bound.fallback_active, "a binding that has been removed falls back"
    options = bound.options
    head = model.get_output_embeddings()  # type: ignore[operator]
    assert head is not None, "a model without a head is not bound"
    replaces_loss = request.replaces_loss
    skip_logits = not replaces_loss and _skips_logits(model, request, kwargs)
    unfused = None
    if replaces_loss or skip_logits:  # other calls, such as generation's, get real logits whatever the reason
        unfused = why_not_fusable(head, options.cast_lm_head_to_fp32)
    return ModelCall(model, bound, head, args, kwargs, options, request, skip_logits, unfused)


def _skips_logits(model: nn.Module, request: HeadRequest, kwargs: dict[str, Any]) -> bool:
    """Return whether the model's own outputs are returned without logits: by default with labels, in training."""
    asked = model.training if request.skip_logits is None else request.skip_logits
    has_labels = kwargs.get("labels") is not None or kwargs.get("shift_labels") is not None
    if not asked or not has_labels:
        return False
    reason = who_sees_outputs(model)
    if reason is not None:
        report_unfused(model, reason)
    return reason is None


def _why_padding_is_read(call: ModelCall, backbone: BackboneBinding) -> str | None:
    """Return which output of the call covers every position, padding included, or None."""
    request = call.request
    if request.logits_consumer is not None:
        return None  # `shift_labels` say which positions are scored
    if request.replaces_loss:
        of_all = sorted(_OF_EVERY_POSITION.intersection(call.token_outputs))
        return f"the call asks for {', '.join(of_all)}" if of_all else None
    if not call.skip_logits:
        return "the call returns logits"
    return why_padding_is_read(call.model, backbone, call.kwargs)


def _why_padding_would_be_missed(call: ModelCall) -> str | None:
    """Return what would see zeros where the stock code computes padding, or None.

    That is code of the user's around the model, or a head that is not fused.
    """
    replaced = replaced_forward(call.model, call.bound.previous)
    if replaced is not None:
        return f"{replaced} on the {type(call.model).__name__} may read what is computed for padding"
    return None if call.unfused is None else f"the LM head is not fused, since {call.unfused}"
