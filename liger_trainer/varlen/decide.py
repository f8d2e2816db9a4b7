"""Decide whether a call runs on its real tokens, or on the batch as it is.

Padding is left out if all code that reads hidden states is known: the forwards of transformers that a proof has run
(`proof/backbone.py`), layers of PyTorch and of adapters that treat each token by itself, and the loss function of the
proof. Anything else may see rows or padding: a class or a function of the user's, a hook, an output of every position.
Then the batch goes through as it is, and the report names the reason.
"""

import functools
import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from liger_trainer.patching.core.binding import Binding
from liger_trainer.patching.core.hooks import hook_on, with_hooks
from liger_trainer.varlen import registry
from liger_trainer.varlen.graphs.backbone_graphs import BackboneGraphs
from liger_trainer.varlen.graphs.step_graphs import current_graphs
from liger_trainer.varlen.groups import SharingRule
from liger_trainer.varlen.model_parts import backbone_of, base_of, own_loss_of, why_forward_is_unknown, without_head
from liger_trainer.varlen.plan_batch import holds_packed_rows, plan_batch, rotates_by_length
from liger_trainer.varlen.randomness import what_is_random
from liger_trainer.varlen.rows import AttentionKind
from liger_trainer.varlen.unpad_plan import UnpadPlan
from liger_trainer.varlen.unpadded_backbone import COMPUTES_PADDING, BackboneBinding, MixedRows
from liger_triton.shared_attention import why_not

# They only make inputs require gradients. Other hooks of PEFT choose an adapter for each row, so they see rows.
HARMLESS_HOOKS = (
    "transformers.modeling_utils",
    "transformers.utils.",
    "peft.utils.",
    "peft.peft_model",
    "peft.helpers",
    "liger_trainer.varlen.taps",
)


# Calls of shared prompts can be captured with these kinds of attention.
_CAPTURED_SHARED = {AttentionKind.CAUSAL, AttentionKind.SINKS}


def bound_backbone(model) -> BackboneBinding | None:
    """Return the backbone's binding, or None if padding removal is not installed or the call is being traced."""
    backbone = None if torch.compiler.is_compiling() else backbone_of(model)
    return None if backbone is None else BackboneBinding.of(backbone)


class Reason(NamedTuple):
    """Why a call goes through the backbone as it is.

    Attributes:
        text (`str`): For the report and the log.
        instead (`str` or None): What the backbone does without a plan, for the log. None: this is not worth a line, as
            in generation.
    """

    text: str
    instead: str | None = None


class Decision(NamedTuple):
    """How a call of a model goes through its backbone.

    Attributes:
        plan (`UnpadPlan` or None): On real tokens; `plan.graphs` may replay it.
        reason (`Reason` or None): Why the call has no plan.
    """

    plan: UnpadPlan | None = None
    reason: Reason | None = None


@dataclass
class BackboneCall:
    """A call of a model, as the checks see it.

    Attributes:
        model ([`~transformers.PreTrainedModel`]): The model.
        backbone (`nn.Module`): Its backbone.
        bound (`BackboneBinding`): The binding of the backbone.
        args (`tuple`): Arguments by position.
        call (`dict`): Arguments by name.
        padding_reader_reason (`str` or None): Which output of the call covers every position, including padding.
        missed_padding_reason (`str` or None): Which code around the backbone would see zeros for padding.
        graphs (`BackboneGraphs` or None): The captures of the backbone, within the step of a trainer.
        sharing (`SharingRule` or None): When rows share their prompt. None: never.
    """

    model: Any
    backbone: nn.Module
    bound: BackboneBinding
    args: tuple
    call: dict[str, Any]
    padding_reader_reason: str | None
    missed_padding_reason: str | None
    graphs: BackboneGraphs | None = None
    sharing: SharingRule | None = None

    @functools.cached_property
    def plan(self) -> UnpadPlan | None:
        """Return the plan, or None if the rows of the call are not known.

        Rows without padding have one where layers need more than causal attention, and where they may be replayed.
        """
        proven, may_replay = self.bound.proven, self.graphs is not None
        with_full_batches = proven.needs_row_attention or may_replay
        sharing = None if self.padding_reader_reason is not None else self.sharing
        plan = plan_batch(self.model.config, self.call, proven.attention, with_full_batches, sharing)
        if plan is None:
            return None
        unshared = plan.unshared if plan.saved else plan
        if unshared is not None and unshared.rows.is_whole_batch and not unshared.leaves_out:
            # SDPA is the fastest for such rows, so our attention would gain nothing outside of a capture.
            unshared.only_replayed = not proven.needs_row_attention
        why = _why_unshared(self, plan) if plan.saved else None
        if why is not None:
            self.bound.sharing.refuse(why)
            return unshared
        return plan

    @property
    def has_no_padding(self) -> bool:
        """Return whether the batch has no padding. A batch of one padded row has some."""
        return self.plan is not None and self.plan.rows.is_whole_batch and not self.plan.leaves_out


def _why_unshared(asked: BackboneCall, plan: UnpadPlan) -> str | None:
    """Return why rows that start alike share nothing in this call, or None."""
    assert asked.sharing is not None, "the plan was made with it"
    if asked.bound.sharing.never is not None:
        return asked.bound.sharing.never
    why = _why_attention_cannot_share(asked)
    if why is not None:
        return why
    # Equal image tokens may stand for different images.
    if base_of(asked.model) is not asked.backbone:
        return "the model takes images too"
    if asked.graphs is not None and plan.rows.tokens + plan.saved < asked.sharing.least_uncaptured:
        is_captured_unshared = _why_never_captured(asked, shares=False) is None
        if is_captured_unshared and _why_never_captured(asked, shares=True) is not None:
            return "steps of few tokens are faster as CUDA graphs, and with windows, graphs cannot share prompts"
    return what_is_random(asked.model, without_head(asked.model))


def _why_attention_cannot_share(asked: BackboneCall) -> str | None:
    """Return why the attention of shared rows cannot run in this call, or None.

    A layer would find that out too, and the call would be made again. Under FSDP and ZeRO-3 it would then gather
    weights that other ranks, whose rows share nothing, do not gather.
    """
    device = asked.call["input_ids"].device
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    elif isinstance(asked.backbone, FSDPModule):
        dtype = torch.bfloat16  # its policy may cast weights, so their dtype says nothing
    else:
        dtype = asked.model.dtype
    for width in sorted(asked.bound.head_widths):
        why = why_not(torch.empty(0, 1, width, dtype=dtype, device=device))
        if why is not None:
            return why
    return None


_ROWS_UNKNOWN = Reason("its rows are not known")


def _why_as_it_is(asked: BackboneCall) -> Reason | None:
    """Return why the batch goes through the backbone as it is, or None.

    The order of the checks matters: each relies on what those above it have ruled out.
    """
    model, call = asked.model, asked.call
    bound, proven = asked.bound, asked.bound.proven
    if bound.fallback_active:
        return Reason("its own code has to run since an earlier call")
    if asked.args:
        return Reason("arguments are given by position")

    # Its outputs.
    is_padded = call.get("attention_mask") is not None
    if asked.padding_reader_reason is not None and is_padded and not asked.has_no_padding:
        trains = model.training and torch.is_grad_enabled()  # evaluation and generation want logits
        return Reason(asked.padding_reader_reason, COMPUTES_PADDING if trains else None)

    # Its rows.
    plan = asked.plan
    if plan is None:
        return _ROWS_UNKNOWN
    if proven.padding_reason is not None and not asked.has_no_padding:
        return Reason(proven.padding_reason)
    if proven.attention == "eager" and (call.get("output_attentions") or _of_config(model.config, "output_attentions")):
        return Reason("it returns the weights of attention")
    reaches_end = plan.reaches_end and call.get("position_ids") is None
    if plan.leaves_out and not reaches_end and rotates_by_length(model.config):
        return Reason("its rotary frequencies depend on the longest position, padding included")

    # The code that runs. If nothing has changed since a capture, that code was checked before the capture.
    # A call has a plan only while its config asks for the attention that was proven.
    why = registry.why_attention_is_not_ours(model, proven.attention)
    if why is None:
        why = _why_states_may_be_cut(asked.backbone, call)
    if why is None and plan.leaves_out:
        why = asked.missed_padding_reason
    unchanged = asked.graphs is not None and asked.graphs.find_snapshot()
    if why is None and not unchanged:
        why = _why_whole(model, asked.backbone, bound)
    if why is None:
        return None
    if proven.mixes_rows and not plan.leaves_out and not asked.has_no_padding:
        raise MixedRows.of(bound, why)
    return Reason(why, "attends with masks" if asked.has_no_padding else COMPUTES_PADDING)


def decide(
    model: Any,
    bound: BackboneBinding,
    args: tuple,
    call: dict[str, Any],
    padding_reader_reason: str | None,
    missed_padding_reason: str | None,
    sharing: SharingRule | None = None,
) -> Decision:
    """Decide how a call of `model` goes through its backbone, and report why one in training has no plan.

    For the arguments see `BackboneCall`.

    Raises:
        ValueError: The rows of a packed row would see each other in the model's own code, which has to run.
    """
    backbone: Any = bound.module.to()
    asked = BackboneCall(
        model, backbone, bound, args, call, padding_reader_reason, missed_padding_reason, sharing=sharing
    )
    step = current_graphs()
    if step is not None:
        proven = bound.proven
        around = functools.partial(without_head, model)
        asked.graphs = step.of(backbone, around, proven.keeps_state, proven.per_layer)
    reason = _why_as_it_is(asked)
    if reason is not None:
        plan = vars(asked).get("plan")  # the first checks may decide without one
        if plan is not None and plan.saved:
            bound.sharing.refuse(reason.text)
        # The stock layers would silently carry their state into the next row.
        if bound.proven.keeps_state and holds_packed_rows(call):
            needs = "; use_cache has to be False" if reason is _ROWS_UNKNOWN else ""
            raise MixedRows.of(bound, reason.text + needs)
        if asked.graphs is not None and torch.is_grad_enabled():  # generation would count each token
            asked.graphs.summary.count(reason.text)
        if reason.instead is not None:
            bound.report_fallback(reason.text, reason.instead)
        return Decision(None, reason)
    assert asked.plan is not None, "a call without a plan has a reason"
    if asked.graphs is not None:
        why = _why_never_captured(asked, bool(asked.plan.saved))
        if why is None:
            asked.plan.graphs = asked.graphs
        else:
            asked.graphs.summary.count(why)
    return Decision(asked.plan)


def _why_never_captured(asked: BackboneCall, shares: bool) -> str | None:
    """Return why no call of this model can be captured, or no call with shared prompts if `shares`; else None."""
    proven = asked.bound.proven
    if proven.no_capture_reason is not None:
        return proven.no_capture_reason
    if rotates_by_length(asked.model.config):
        return "its rotary frequencies depend on the longest position"
    if shares and not proven.attention_kinds <= _CAPTURED_SHARED:
        return "its rows share their prompts, and the keys that its windows see of them change with each batch"
    return None


def _why_states_may_be_cut(backbone: nn.Module, call: dict[str, Any]) -> str | None:
    """Return why the backbone may return the last states of each row alone, or None.

    transformers' Gemma 4 can, and its head cuts the states if the backbone has not. So `UnpadPlan` asks that backbone
    for all of them. The head of another model may rely on it.
    """
    kept = call.get("logits_to_keep")
    asks_for_all = kept is None or (isinstance(kept, int) and kept == 0)
    if asks_for_all or type(backbone).__module__.startswith("transformers.models.gemma4"):
        return None
    if "logits_to_keep" not in inspect.signature(type(backbone).forward).parameters:
        return None
    return "logits_to_keep is an argument of its decoder, which may return the last states alone"


# Readers of a model's outputs


def why_padding_is_read(model, bound: BackboneBinding, call: dict[str, Any]) -> str | None:
    """Name what the model's forward returns of every position, or hands to the user's loss function, or return None."""
    if call.get("labels") is None and call.get("shift_labels") is None:
        return "a call without labels returns logits"
    reason = why_positions_are_read(model, call)
    if reason is not None:
        return reason
    loss = model.__dict__.get("_loss_function", own_loss_of(model))  # what its forward calls
    if loss is not bound.proven.loss:
        return f"the loss function {getattr(loss, '__qualname__', loss)} may read logits of padding"
    return None


def why_positions_are_read(model, call: dict[str, Any]) -> str | None:
    """Name an argument of a call, or a field of the config, that asks for something of every position."""
    for name in ("output_hidden_states", "output_attentions", "output_router_logits", *call):
        asked = _of_config(model.config, name) if call.get(name) is None else call[name]
        if name.startswith("output_") and asked is not None and asked is not False:
            return f"{name} asks for what it computes for padding"
    if call.get("return_dict") is False:
        return "with return_dict=False, it returns logits"
    return None


def _of_config(config, name: str) -> Any:
    """Return `config.<name>`, falling back to the text config."""
    found = getattr(config, name, None)
    return getattr(config.get_text_config(), name, None) if found is None or found is False else found


def _why_whole(model, backbone, bound: BackboneBinding) -> str | None:
    """Name what has been put into the model that has to see a batch as it is: a hook, or code that is not proven.

    Every call asks this, and a model with adapters has thousands of modules.
    """
    known = bound.known
    if bound.state_forward is not None and bound.guards is not None:
        changed = bound.guards.broken(backbone)
        if changed is not None:
            return changed
    modules = without_head(model, backbone)
    hooked = set(with_hooks(modules))
    for module in modules:
        attributes = module.__dict__
        cls = type(module)
        # Only for a class that was not seen yet, or has another forward now: the check walks over the whole model.
        if known.get(cls) is not cls.forward:
            why = why_forward_is_unknown(model, bound.proven.forwards)
            if why is not None:
                return why
            known[cls] = cls.forward
        forward = attributes.get("forward")
        has_own_code = forward is None or (isinstance(forward, Binding) and forward.previous is None)
        if module is not model and (module in hooked or not has_own_code):
            ours = bound if module is backbone else Binding.of(module)
            why = hook_on(module, ours, HARMLESS_HOOKS)
            if why is not None:
                return f"{why} on a {cls.__name__} would see rows without padding"
        if attributes.get("_compiled_call_impl") is not None:
            return f"a {cls.__name__} is compiled by itself, so that each new length would compile it again"
    return None
