"""Run the backbone of a model on the real tokens of a batch only.

A padded batch becomes one row of its real tokens when it enters the backbone, and its outputs are put back where they
were (`unpad_plan.py`). Loss, gradients and hidden states of real tokens equal the padded batch's. A batch that is
packed already (`position_ids` that start again, without an `attention_mask`) takes the same attention. `decide.py`
chooses the calls that run this way, before the model's own forward.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from liger_trainer.patching.core.binding import Binding, SupportsGuardCheck, call_previous, in_place_of
from liger_trainer.patching.core.modules import modules_of
from liger_trainer.varlen.graphs.input_embeddings import Embedded
from liger_trainer.varlen.rows import AttentionKind, NotForRows, use_rows
from liger_trainer.varlen.shared_prompts import SharedPrompts
from liger_trainer.varlen.unpad_plan import UnpadPlan, current_plan, use_plan

COMPUTES_PADDING = "computes padding too"  # what a backbone does without a plan


class BackboneProof(NamedTuple):
    """The result of the proof of a model.

    Attributes:
        attention (`str`): The attention of its config.
        attention_kinds (`set[AttentionKind]`): What its layers attend by.
        padding_reason (`str` or None): Why only rows without padding go by their lengths, or None.
        mixes_rows (`bool`): Whether the rows of a packed row see each other with the model's own attention.
        forwards (`dict`): The classes of its modules, with their forwards.
        loss (`Callable`): The function that its forward calls for the loss.
        no_capture_reason (`str` or None): Why the backbone cannot be captured as CUDA graphs, or None. A capture begins
            at the embeddings, and some backbones compute something else from embeddings than from their ids.
        sees_both_ways (`bool`): Whether tokens of an image see each other, so that a batch of images stays as it is.
        sharing_proof_reason (`str` or None): Why rows that begin alike share nothing, or None.
        per_layer (`tuple[str, ...]`): The modules of the backbone that make embeddings for each layer from ids.
    """

    attention: str
    attention_kinds: set[AttentionKind]
    padding_reason: str | None
    mixes_rows: bool
    forwards: dict[type, Callable]
    loss: Callable
    no_capture_reason: str | None = None
    sees_both_ways: bool = False
    sharing_proof_reason: str | None = None
    per_layer: tuple[str, ...] = ()

    @property
    def keeps_state(self) -> bool:
        """Return whether there are layers that keep a state, which go by rows that lie side by side."""
        return AttentionKind.STATE in self.attention_kinds

    @property
    def no_sharing_reason(self) -> str | None:
        """Tell why rows that begin alike share nothing in any call, or return None."""
        return "its layers keep a state" if self.keeps_state else self.padding_reason or self.sharing_proof_reason

    @property
    def needs_row_attention(self) -> bool:
        """Return whether there are layers that need more than SDPA does in rows without padding."""
        return self.attention_kinds != {AttentionKind.CAUSAL}


class BackboneBinding(Binding):
    """The binding of a backbone.

    Attributes:
        proven (`BackboneProof`): The result of its proof.
        state_forward (`Callable` or None): The forward of its class that hands the rows of the call to layers that keep
            a state; None if it has no such layers.
        sharing (`SharedPrompts`): What rows that begin alike have shared.
    """

    key = "_liger_varlen"

    def __init__(
        self,
        function: Callable,
        proven: BackboneProof,
        state_forward: Callable | None = None,
        guards: SupportsGuardCheck | None = None,
    ):
        super().__init__(function, guards=guards)
        self.proven, self.state_forward = proven, state_forward
        self.sharing = SharedPrompts(proven.no_sharing_reason)
        self.known = dict(proven.forwards)  # other modules that turn out to be harmless are added

    @functools.cached_property
    def head_widths(self) -> set[int]:
        """Return the widths of queries that its attention layers name."""
        widths = set()
        for module in modules_of(self.module.to()):
            # With multi-head latent attention, `head_dim` is the part that is rotated.
            width = getattr(module, "qk_head_dim", None) or getattr(module, "head_dim", None)
            if isinstance(width, int):
                widths.add(width)
        return widths


@functools.cache
def _forward_of(backbone_class):
    names = list(inspect.signature(backbone_class.forward).parameters)[1:]

    @in_place_of(backbone_class.forward)
    def forward(self, *args, **kwargs):
        plan = current_plan()
        bound = BackboneBinding.of(self)
        if plan is None or bound is None or bound.fallback_active:
            return call_previous(self, BackboneBinding, args, kwargs)
        call = dict(zip(names, args, strict=False)) | kwargs
        if "use_cache" in names:  # a decoder's config may ask for a cache though the whole model's does not
            call["use_cache"] = False
        if plan.saved:
            found = _shared(self, bound, plan, call, len(args) > len(names))
            if found is not None:
                return found
            if plan.unshared is None:
                return bound.call_previous(args, kwargs)
            plan = plan.unshared
        # The decision was about the arguments of the whole model. The model around may have made others of them.
        if len(args) > len(names) or not plan.fits(call):
            _refuse_mixing(bound, plan, "its inputs are made by the model around it")
            if plan.graphs is not None:
                plan.graphs.summary.count("its mask or other inputs are made by the model around it")
            if plan.leaves_out and not bound.proven.sees_both_ways:  # the report has said that
                bound.report_fallback("its mask or other inputs are made by the model around it", COMPUTES_PADDING)
            return bound.call_previous(args, kwargs)
        try:
            return _run(self, bound, plan, call)
        except NotForRows as error:
            why = str(error)
        # Not within the `except`. In torch 2.11 a checkpointed layer that raises leaves its hooks on saved tensors in
        # place until its frames are gone.
        bound.fallback_active = True  # for good: a later call would raise again, after the layers before have run
        _refuse_mixing(bound, plan, why)
        bound.report_fallback(why, COMPUTES_PADDING)
        return bound.call_previous(args, kwargs)

    return forward


def _shared(backbone, bound: BackboneBinding, plan: UnpadPlan, call: dict[str, Any], is_unknown: bool):
    """Run `backbone` on rows that share, and return its outputs; None, with the reason noted, where they cannot."""
    if is_unknown or not plan.fits(call):
        bound.sharing.refuse("its inputs are made by the model around it")
        return None
    try:
        outputs = _run(backbone, bound, plan, call)
    except NotForRows as error:
        bound.sharing.refuse(str(error), for_good=True)
        return None
    bound.sharing.count(plan.rows.tokens, plan.saved)
    return outputs


def _refuse_mixing(bound: BackboneBinding, plan: UnpadPlan, why: str) -> None:
    """Raise `MixedRows` if the model's own code would run on packed rows and mix their states."""
    if bound.proven.keeps_state and not plan.leaves_out and not plan.rows.is_whole_batch:
        raise MixedRows.of(bound, why)


class MixedRows(ValueError):
    """Packed rows would see each other in the model's own attention or state layers, which would have to run."""

    @classmethod
    def of(cls, bound: BackboneBinding, why: str) -> "MixedRows":
        """Make the error that says `why` the model's own code would run."""
        return cls(
            f"Packed rows would see each other in {type(bound.module.to()).__name__}, because its own code has to run: "
            f"{why}. Take that away, or switch packing off."
        )


def _run(backbone, bound: BackboneBinding, plan: UnpadPlan, call: dict[str, Any]):
    """Call `backbone` on real tokens, by a replay where one is at hand, and return its outputs for the batch.

    Raises:
        NotForRows: A layer attends in a way that rows of uneven length cannot run.
    """
    packed = plan.unpad(call)
    state_forward = bound.state_forward
    if state_forward is not None and bound.previous is not None:
        raise NotForRows("its forward was replaced on the instance, and its layers keep a state")

    def own_forward(**given):
        if state_forward is not None:
            return state_forward(backbone, **given)
        return bound.call_previous((), given)

    def run_uncaptured(embedded: Embedded | None = None):
        """Run its own code, from `embedded` where its input embeddings have run already."""
        given = call if plan.only_replayed else packed
        if embedded is not None:
            given = embedded.in_place_of_ids(given)
        if plan.only_replayed:
            return own_forward(**given)
        with use_rows(plan.rows):
            return own_forward(**given)

    with use_plan(None):  # the plan is for this call, not for a backbone that is called inside
        if plan.graphs is None:
            outputs = run_uncaptured()
        else:
            outputs = plan.graphs.run(own_forward, run_uncaptured, plan.rows, packed)
    plan.used = True
    return plan.repad(outputs)


def binding_of(
    backbone,
    proven: BackboneProof,
    state_forward: Callable | None = None,
    guards: SupportsGuardCheck | None = None,
) -> BackboneBinding:
    """With it, calls of `backbone` that have a plan leave out padding, and layers attend to rows of uneven length."""
    return BackboneBinding(_forward_of(type(backbone)), proven, state_forward, guards)  # type: ignore[arg-type]
