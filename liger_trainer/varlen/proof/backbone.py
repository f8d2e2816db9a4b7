"""Proves on a small copy of a model that padding can be left out, and finds what to bind to its backbone.

The proof runs four batches through two small copies with the same weights, one with the model's own code and one with
ours: a batch padded on the right, one padded on the left, a packed row, and one padded row. The logits of real tokens,
the loss and the gradients of all weights must agree. They differ if rows affect each other through anything but
attention, or if the loss counts padding. Layers that keep a state get the rows of the call (`state_layers.py`), and are
also recomputed in the backward pass.

If layers have a window, chunks, sinks or a soft cap, batches without padding run too. If only these agree, only batches
without padding use our attention. Further proofs decide about less: whether the backbone can be captured from its
embeddings (`embeddings_for_ids.py`), and whether rows that start alike may share their prompt (`alike_rows.py`).

In this file `own` is the small copy with the model's own code, and `ours` the one that leaves padding out. `around` is
the model around the decoder of a model of images, or the backbone itself.
"""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from liger_trainer.head.classifier import classifier_binding, is_classifier
from liger_trainer.patching.core import probe
from liger_trainer.patching.core.binding import Binding, bind, own_class
from liger_trainer.patching.core.pattern import PatchMatch, attempt
from liger_trainer.varlen import registry, unpad_plan, unpadded_backbone
from liger_trainer.varlen.model_parts import (
    backbone_of,
    base_of,
    code_of,
    own_loss_of,
    why_class_is_foreign,
    why_forward_is_unknown,
    why_not_transformers_own,
)
from liger_trainer.varlen.plan_batch import plan_batch
from liger_trainer.varlen.proof import image_masks
from liger_trainer.varlen.proof.alike_rows import why_prompts_cannot_be_shared
from liger_trainer.varlen.proof.compare import run, what_differs
from liger_trainer.varlen.proof.deferred_convolution import refuse_whole
from liger_trainer.varlen.proof.embeddings_for_ids import start_at_embeddings
from liger_trainer.varlen.proof.find_state_layers import StateLayers, find_state_layers, may_go_by_rows
from liger_trainer.varlen.proof.packed_rows import kernels_in_torch
from liger_trainer.varlen.proof.small_model import small_copy
from liger_trainer.varlen.rows import AttentionKind
from liger_trainer.varlen.state_layers import StateBinding

OPERATION = "varlen_attention"
_LENGTHS = (7, 1, 11, 12)  # rows longer and shorter than the window of a small copy
_WIDTH = max(_LENGTHS)
_OUTPUTS = {"loss", "logits", "aux_loss", "router_logits"}  # a call that returns router_logits computes padding
_MASKS_AROUND = "the model around its decoder makes the mask, and lets tokens of an image see each other"
_ON_ROWS = {False: "on rows side by side", True: "on a GPU, on rows one after the other; elsewhere side by side"}
_BY_OURS = "; on a GPU, its convolution by liger_triton.short_conv"
_IN_PARTS = ", which writes queries, keys and values as three tensors"
_ATTENDS_BY = {  # the kind of attention -> what runs it on a GPU
    AttentionKind.CAUSAL: "causal layers by SDPA, by PyTorch's varlen kernel where rows are of several lengths",
    AttentionKind.SLIDING_WINDOW: "sliding windows by PyTorch's varlen kernel",
    AttentionKind.CHUNKS: "chunks as rows of their own",
    AttentionKind.SINKS: "layers with sinks by PyTorch's varlen kernel",
    AttentionKind.SOFT_CAP: "layers with a soft cap by liger_triton.row_attention",
    AttentionKind.STATE: "layers that keep a state on rows side by side",
}


def find_backbone(model) -> Iterator[PatchMatch]:
    """Find the backbone of `model`, and bind a forward that leaves out padding if that is proven."""
    if not isinstance(model, PreTrainedModel):
        return
    around, backbone = base_of(model), backbone_of(model)
    if backbone is None:
        if model.get_output_embeddings() is not None:
            yield PatchMatch(OPERATION, type(model).__name__, model, "no part before its head was found", is_rare=True)
        return
    proven: Any = None
    state_layers: StateLayers | None = None
    mask_binding: Binding | None = None
    reason = _why_not(model, around, backbone)
    if reason is None:
        proven, state_layers, reason = _find_proof(model, backbone)
    if reason is None and around is not backbone and image_masks.made_by(around):
        if state_layers is not None:
            reason = _MASKS_AROUND
        else:
            mask_binding, reason = image_masks.binding_for(around)
    if reason is None:
        reason = why_forward_is_unknown(model, proven.forwards)
    name = next((name for name, module in model.named_modules() if module is backbone), model.base_model_prefix)
    if reason is not None:
        yield PatchMatch(OPERATION, name, backbone, reason, is_rare=True)
        return
    runs = "runs on real tokens" if proven.padding_reason is None else f"computes padding ({proven.padding_reason})"
    attention = [how for kind, how in _ATTENDS_BY.items() if kind in proven.attention_kinds]
    if proven.sees_both_ways:
        attention.append("a batch of images computes padding, as tokens of an image see each other")
    if state_layers is None:
        binding = unpadded_backbone.binding_of(backbone, proven)
    else:
        _settle_rows(model, state_layers)
        no_capture_reason = proven.no_capture_reason or _why_states_are_not_captured(state_layers)
        proven = proven._replace(no_capture_reason=no_capture_reason)
        binding = unpadded_backbone.binding_of(backbone, proven, state_layers.forward, state_layers.guards)
    yield PatchMatch(OPERATION, name, backbone, "; ".join([runs, *attention]), binding)
    if mask_binding is not None:
        around_name = next((name for name, module in model.named_modules() if module is around), "")
        yield PatchMatch(OPERATION, around_name, around, "leaves the masks of text to its decoder", mask_binding)
    if is_classifier(model):
        yield PatchMatch(
            OPERATION, type(model).__name__, model, "pools one token of each row", classifier_binding(model)
        )
    if state_layers is not None:
        for layer_name, layer, bound in state_layers.layers:
            yield PatchMatch(OPERATION, f"{name}.{layer_name}", layer, _how_it_runs(bound), bound)


def _find_proof(model, backbone) -> tuple[Any, StateLayers | None, str | None]:
    """Return (`BackboneProof`, the state layers that it is about, None), or (None, None, why nothing is proven)."""
    state_layers, states_reason = find_state_layers(backbone)
    if state_layers is not None:
        proven, states_reason = attempt(_prove_with_states, model)
        if states_reason is None:
            return proven, state_layers, None
    if model._is_stateful or backbone._is_stateful:
        return None, None, states_reason or "its layers keep a state, which goes from row to row"
    # The layers were only candidates. They may not keep a state after all, so that real tokens alone are enough.
    proven, reason = attempt(_prove, model)
    if reason is not None:
        return None, None, states_reason or reason
    return proven, None, None


def _settle_rows(model, state_layers: StateLayers) -> None:
    """Record in the bindings of layers that keep a state whether they may run on concatenated rows."""
    bindings = [binding for _, _, binding in state_layers.layers]
    by_rows = in_parts = False
    if _has_gpu() and all(may_go_by_rows(layer, binding) for _, layer, binding in state_layers.layers):
        in_parts = any(binding.in_parts for binding in bindings) and _is_proven_by_rows(model, state_layers, True)
        by_rows = in_parts or _is_proven_by_rows(model, state_layers, False)
    for binding in bindings:
        binding.by_rows = by_rows
        if in_parts and binding.in_parts is not None:
            binding.own = binding.in_parts


def _how_it_runs(binding: StateBinding) -> str:
    """Return how a layer that keeps a state runs, for the report."""
    text = _ON_ROWS[binding.by_rows]
    if binding.own is not None:
        text += _BY_OURS
    if binding.own is not None and binding.own is binding.in_parts:
        text += _IN_PARTS
    return text


def _why_states_are_not_captured(state_layers: StateLayers) -> str | None:
    """Return why layers that keep a state cannot be captured in CUDA graphs, or None."""
    for _, _, binding in state_layers.layers:
        if not binding.by_rows:
            return "its layers keep a state, and run on as many rows as a batch has"
        if binding.no_capture_reason is not None:
            return f"its layers keep a state, and {binding.no_capture_reason}"
    return None


def _has_gpu() -> bool:
    return torch.cuda.is_available()


def _why_not(model, around, backbone) -> str | None:
    """Return why no proof is tried, or None."""
    config = model.config
    if model.get_output_embeddings() is None and not is_classifier(model):
        return "it has no LM head"
    # A model with sinks or soft caps has no SDPA. If a model has it, eager attention was the user's choice.
    text = config.get_text_config()
    lacks_sdpa = model._supports_attention_backend and not model._supports_sdpa
    if text._attn_implementation != ("eager" if lacks_sdpa else "sdpa"):
        return f"attn_implementation is {text._attn_implementation!r}, which stays as it is"
    if config.is_encoder_decoder or type(getattr(backbone, "config", None)) is not type(text):
        return "the model is more than a decoder of text"
    if not isinstance(backbone, PreTrainedModel) or backbone is model:
        return "it has no backbone apart from its head"
    if around is not backbone and image_masks.made_by(around):
        _, failed = attempt(lambda whole: (image_masks.small_whole_copy(whole, probe.SEED, "sdpa"), None), model)
        if failed is not None:
            return _MASKS_AROUND
    return registry.why_attention_is_not_ours(model)


def _prove_with_states(model):
    """Prove a model with layers that keep a state, with and without checkpointing. They run on a padded batch."""
    with kernels_in_torch(model):
        proven, reason = _prove(model, with_states=True)
    if reason is None and proven.padding_reason is not None:
        return None, proven.padding_reason
    return proven, reason


def _is_proven_by_rows(model, state_layers: StateLayers, in_parts: bool) -> bool:
    """Return whether layers keep concatenated rows apart if their convolution and their rule get the row offsets.

    The copy's layers run the functions of the model's layers. With `in_parts`, these have a convolution that writes
    three tensors, and every call has to split its result. A package's rule is replaced, since it does not run on a CPU.
    """
    forwards: dict[type, Any] = {}
    for _, layer, binding in state_layers.layers:
        forwards[own_class(layer)] = (in_parts and binding.in_parts) or binding.own

    def prove(given):
        with kernels_in_torch(given), refuse_whole() if in_parts else contextlib.nullcontext():
            return _prove(given, with_states=True, by_rows=forwards)

    proven, reason = attempt(prove, model)
    return reason is None and proven is not None and proven.padding_reason is None


def _prove(model, with_states: bool = False, by_rows: dict[type, Any] | None = None):
    """Return (`BackboneProof`, None), or (None, what differs).

    `by_rows` has the forwards of state layers that get concatenated rows.

    The copy is of the whole model, with two exceptions. If the model takes images, only its decoder is copied, since
    the code around it sees the padded batch anyway. If that code makes masks, it is copied too, without its towers. Of
    a classifier, only the backbone is copied.
    """
    around, backbone = base_of(model), backbone_of(model)
    makes_masks = around is not backbone and bool(image_masks.made_by(around))
    is_whole = makes_masks or (around is backbone and not is_classifier(model))
    subject = model if is_whole else backbone
    attention = model.config.get_text_config()._attn_implementation
    copied_by = image_masks.small_whole_copy if makes_masks else small_copy
    own, ours = (copied_by(subject, probe.SEED, attention) for _ in range(2))
    reason = why_not_transformers_own(own)
    if reason is not None:
        return None, reason
    reason = why_class_is_foreign([model, around]) if makes_masks or not is_whole else None
    if reason is not None:
        return None, reason
    batches = _batches()
    right, left = batches[0].batch, batches[1].batch
    if subject is model:
        more = set(own(**right, use_cache=False)) - _OUTPUTS
        if more:
            return None, f"it returns {', '.join(sorted(more))} in addition to logits and loss"
    _, packed, padded = batches[2]
    mixes_rows = what_differs(run(own, packed), run(own, padded)) is not None
    attention_kinds: set[AttentionKind] = set()
    forwards = code_of([*own.modules(), model, around])
    proven = unpadded_backbone.BackboneProof(
        attention, attention_kinds, None, mixes_rows, forwards, own_loss_of(model), sees_both_ways=makes_masks
    )
    copied = ours if subject is backbone else backbone_of(ours)  # the backbone of the copy
    _bind(copied, proven, with_states, by_rows)
    more_batches = []
    if makes_masks:
        _bind_masks(base_of(ours))
        text = image_masks.batch_of_text(own, right)
        more_batches.append(_Batch("tokens that are said to be text", text, text))
    if subject is backbone:
        for what, batch, _ in batches[:2]:
            with_images = _with_images(own, batch)
            if with_images:
                more_batches.append(_Batch(f"images in {what}", with_images, with_images))

    reason = None
    for what, batch, stock_batch in (*batches, *more_batches):
        reason = reason or _differs(ours, batch, run(own, stock_batch), what, attention_kinds)
    # From here on `reason` says why padding is computed. Rows without padding may still need our attention.
    if proven.needs_row_attention:
        differs = _why_full_rows_differ(own, ours, right["input_ids"], attention_kinds)
        if differs is not None:
            return None, reason or differs
    if reason is not None and not proven.needs_row_attention:
        return None, reason
    if with_states:
        differs = _why_recomputed_differs(own, ours, batches[:3], proven)
        if differs is not None:
            return None, differs
    sees_both_ways = False
    if makes_masks and not with_states:
        sees_both_ways, differs = _with_masks_of_images(own, ours, right, left)
        if differs is not None:
            return None, differs
    proven = proven._replace(padding_reason=reason, sees_both_ways=sees_both_ways)
    may_share = around is backbone and not with_states  # rows with states share nothing in any case
    return _with_capture_and_sharing(proven, own, ours, copied, right, may_share), None


class _Batch(NamedTuple):
    """A batch of the proof.

    Attributes:
        what (`str`): Its name in reasons.
        batch (`dict`): The batch.
        stock_batch (`dict`): A padded batch from which the model's own code computes the same.
    """

    what: str
    batch: dict[str, Any]
    stock_batch: dict[str, Any]


def _batches() -> list[_Batch]:
    """Return the batches of text that every proof runs."""
    ids = torch.randint(3, 40, (len(_LENGTHS), _WIDTH), generator=probe.generator())
    real = torch.arange(_WIDTH) < torch.tensor(_LENGTHS)[:, None]
    right = _padded(ids, real)
    left = _padded(ids, real.flip(1))
    # A packed row has no positions of padding, so no label there, and no label for the first token of a row.
    padded = right | {"labels": right["labels"].masked_fill(~real, -100)}
    packed = {"input_ids": ids[real][None], "position_ids": torch.arange(_WIDTH).expand_as(ids)[real][None]}
    packed["labels"] = padded["labels"][real][None].masked_fill(packed["position_ids"] == 0, -100)
    return [
        _Batch("rows padded on the right", right, right),
        _Batch("rows padded on the left", left, left),
        _Batch("a packed row", packed, padded),
        _Batch("one padded row", _first(right), _first(right)),
    ]


def _why_full_rows_differ(own, ours, ids: torch.Tensor, attention_kinds: set[AttentionKind]) -> str | None:
    """Return what differs in rows without padding, or None."""
    full = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    for what, batch in (("rows without padding", full), ("one row without padding", _first(full))):
        differs = _differs(ours, batch, run(own, batch), what, attention_kinds)
        if differs is not None:
            return differs
    return None


def _with_capture_and_sharing(
    proven: unpadded_backbone.BackboneProof, own, ours, copied, batch: dict[str, Any], may_share: bool
) -> unpadded_backbone.BackboneProof:
    """Add to `proven` whether the backbone can be captured, and whether rows may share their prompts."""
    start, error = attempt(lambda copy: (start_at_embeddings(copy, copied, batch), None), ours)
    per_layer, no_capture_reason = start or ((), error)
    if no_capture_reason is not None:
        no_capture_reason = f"given embeddings in place of ids, {no_capture_reason}"
    sharing_proof_reason: str | None = "the model takes images too"
    if may_share:
        _, sharing_proof_reason = attempt(lambda copy: (None, why_prompts_cannot_be_shared(own, copy, copied)), ours)
    return proven._replace(
        no_capture_reason=no_capture_reason, sharing_proof_reason=sharing_proof_reason, per_layer=per_layer
    )


def _bind_masks(around) -> None:
    """Bind to the copy of `around` the forward that leaves masks to its decoder."""
    binding, reason = image_masks.binding_for(around)
    if binding is None:
        raise ValueError(reason)
    bind(around, binding)


def _with_masks_of_images(own, ours, *batches) -> tuple[bool, str | None]:
    """Return (whether any batch with images keeps its padding, what differs from the model's own code or None)."""
    used = []
    for batch in batches:
        batch = image_masks.batch_of_images(own, batch)
        plan = plan_batch(
            ours.config, batch | {"use_cache": False}, ours.config._attn_implementation, with_full_batches=True
        )
        with unpad_plan.use_plan(plan):
            got = run(ours, batch)
        apart = what_differs(got, run(own, batch))
        if plan is None or apart is not None:
            return False, f"with images, {apart or 'its rows are not known'}"
        used.append(plan.used)
    return not all(used), None


def _padded(ids: torch.Tensor, real: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a padded batch of `ids` (B, S). `real` (B, S) is False for padding."""
    # Labels have to be predicted from real tokens, but may be at a position of padding. The first column has no label.
    predicted = real.roll(1, 1) | (torch.arange(_WIDTH) == 0)
    return {"labels": ids.masked_fill(~predicted, -100), "input_ids": ids, "attention_mask": real.long()}


def _bind(
    copied, proven: unpadded_backbone.BackboneProof, with_states: bool, by_rows: dict[type, Any] | None = None
) -> None:
    """Bind to a small copy the forwards that will be bound to the model."""
    if not with_states:
        bind(copied, unpadded_backbone.binding_of(copied, proven))
        return
    state_layers, reason = find_state_layers(copied)
    if state_layers is None:
        raise ValueError(f"a small copy of it cannot be given rows: {reason or 'it has no layer that keeps a state'}")
    bind(copied, unpadded_backbone.binding_of(copied, proven, state_layers.forward, state_layers.guards))
    for _, layer, binding in state_layers.layers:
        if by_rows is not None:
            binding.own = by_rows[own_class(layer)]
            binding.rest = None  # `kernels_in_torch` has changed the globals that it would check
            binding.by_rows = binding.on_cpu = True
        bind(layer, binding)


def _why_recomputed_differs(own, ours, batches, proven: unpadded_backbone.BackboneProof) -> str | None:
    """Return what differs when layers are recomputed in the backward pass, or None.

    The context of the call is gone by then, so the rows have to be passed in the arguments of the layers.
    """
    if not proven.keeps_state:
        return "no layer was seen that keeps a state"
    reason = None
    for reentrant in (False, True) if ours.supports_gradient_checkpointing else ():
        for model in (own, ours):  # both, because with use_reentrant stock loses gradients of router logits
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": reentrant})
        for what, batch, stock_batch in batches:
            what = f"{what}, recomputed in the backward pass (use_reentrant={reentrant})"
            reason = reason or _differs(ours, batch, run(own, stock_batch), what, proven.attention_kinds)
        for model in (own, ours):
            disable = getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable
            disable()
    return reason


def _first(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the first row of a batch, as a batch of one. Attention returns other strides for it."""
    return {name: x[:1] for name, x in batch.items()}


def _differs(ours, batch, wanted, what: str, attention_kinds: set[AttentionKind]) -> str | None:
    """Return what differs, or None. Add the layers' kinds of attention to `attention_kinds`."""
    plan = plan_batch(
        ours.config, batch | {"use_cache": False}, ours.config._attn_implementation, with_full_batches=True
    )
    with unpad_plan.use_plan(plan):
        got = run(ours, batch)
    if plan is None or not plan.used:
        return f"with {what}, its backbone cannot be given real tokens alone"
    attention_kinds |= plan.rows.attention_kinds
    apart = what_differs(got, wanted)
    return None if apart is None else f"with {what}, {apart} from the padded batch"


def _with_images(decoder, batch) -> dict[str, Any]:
    """Return `batch` with the arguments that a model of images and text adds, if the decoder takes them."""
    names, config = inspect.signature(decoder.forward).parameters, decoder.config
    real, source = batch["attention_mask"].bool(), probe.generator()
    more: dict[str, Any] = {}
    if any(hasattr(module, "mrope_section") for module in decoder.modules()) or (
        "mrope_section" in (getattr(config, "rope_parameters", None) or {})
    ):
        more["position_ids"] = torch.randint(0, 20, (3, *real.shape), generator=source)
    if "deepstack_visual_embeds" in names and "visual_pos_masks" in names:
        images = real & (torch.rand(real.shape, generator=source) < 0.5)
        embeds = [probe.randn((int(images.sum()), config.hidden_size), source).requires_grad_() for _ in range(2)]
        more |= {"visual_pos_masks": images, "deepstack_visual_embeds": embeds}
    return batch | more if more else {}
