"""The backbone of a model, run on the real tokens of a batch only.

A padded batch (B, S) becomes one row of its N real tokens when it enters the backbone, with the positions that the
tokens would have had. What leaves the backbone is put back where it was, with zeros for padding. Loss, gradients and
hidden states of real tokens equal the padded batch's. A batch that is packed already (`position_ids` that start anew,
without an `attention_mask`) takes the same attention. Which calls go this way is found before the model's own forward
(`decide.py`).
"""

import contextlib
import contextvars
import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves
from transformers.utils import ModelOutput

from liger_trainer.patching.core.binding import Binding, Rests, call_previous, in_place_of
from liger_trainer.varlen.graphs.captured import BackboneGraphs
from liger_trainer.varlen.host_copies import values_of
from liger_trainer.varlen.known import Known, is_stale
from liger_trainer.varlen.rows import NotForRows, Rows, rows_known
from liger_trainer.varlen.shared_prompts import SharedPrompts
from liger_trainer.varlen.states import KIND

_PER_TOKEN = ("input_ids", "inputs_embeds", "visual_pos_masks", "per_layer_inputs")
_PER_IMAGE_TOKEN = "deepstack_visual_embeds"  # in the order of the tokens, of which none is padding
_KNOWN_TENSORS = (
    "attention_mask",
    "position_ids",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "seq_idx",
    _PER_IMAGE_TOKEN,
    *_PER_TOKEN,
)
_OF_THE_HEAD = ("labels",)  # Gemma 4's model of images hands them to its decoder, which does not read them

COMPUTES_PADDING = "computes padding too"  # what a backbone does without a plan


class Proven(NamedTuple):
    """The result of the proof of a model.

    Attributes:
        attention (`str`): The attention of its config.
        kinds (`set[str]`): What its layers attend by, as `Rows.kinds` has it.
        keeps_padding (`str` or None): Why only rows without padding go by their lengths, or None.
        mixes (`bool`): Whether the rows of a packed row see each other with the model's own attention.
        forwards (`dict`): The classes of its modules, with their forwards.
        loss (`Callable`): The function that its forward calls for the loss.
        needs_ids (`str` or None): Why the backbone cannot be captured, or None: given embeddings, with which a capture
            begins, it computes something else than given their ids, or its layers keep a state.
        sees_both_ways (`bool`): Whether tokens of an image see each other, so that a batch of images stays as it is.
        keeps_prompts (`str` or None): Why rows that begin alike share nothing, or None.
    """

    attention: str
    kinds: set[str]
    keeps_padding: str | None
    mixes: bool
    forwards: dict[type, Callable]
    loss: Callable
    needs_ids: str | None = None
    sees_both_ways: bool = False
    keeps_prompts: str | None = None

    @property
    def keeps_state(self) -> bool:
        """Return whether there are layers that keep a state, which go by rows that lie side by side."""
        return KIND in self.kinds

    @property
    def why_unshared(self) -> str | None:
        """Tell why rows that begin alike share nothing in any call, or return None."""
        return "its layers keep a state" if self.keeps_state else self.keeps_padding or self.keeps_prompts

    @property
    def is_local(self) -> bool:
        """Return whether there are layers that need more than SDPA does in rows without padding."""
        return self.kinds != {"causal"}


class BackboneBinding(Binding):
    """The binding of a backbone.

    Attributes:
        proven (`Proven`): The result of its proof.
        told (`Callable` or None): The forward of its class in which layers that keep a state are told where rows begin;
            None where it has none.
        sharing (`SharedPrompts`): What rows that begin alike have shared.
    """

    key = "_liger_varlen"

    def __init__(self, function: Callable, proven: Proven, told: Callable | None = None, guards: Rests | None = None):
        super().__init__(function, guards=guards)
        self.proven, self.told = proven, told
        self.sharing = SharedPrompts(proven.why_unshared)
        self.known = dict(proven.forwards)  # other modules that turn out to be harmless are added


class Plan:
    """The way of one call through the backbone.

    Args:
        given (`dict`): The arguments of the call that it was made from.
        rows (`Rows`): The rows of real tokens.
        index (`torch.Tensor`, *optional*): int64 (N,): where in the flattened batch each real token is; None where
            the batch has no padding.
        reaches_end (`bool`, *optional*, defaults to `True`): Whether there is a real token in the last column.

    Attributes:
        used (`bool`): Whether a backbone has run by it.
        graphs (`BackboneGraphs` or `None`): What may replay the backbone in place of its code.
        only_replayed (`bool`): Whether the call is as it came where it is not replayed: rows without padding in a model
            that needs no other attention for them than its own.
        saved (`int`): Tokens that are not computed, since rows share them.
        unshared (`Plan` or `None`): The plan of a call whose rows share, without that.
    """

    graphs: BackboneGraphs | None = None
    only_replayed: bool = False
    saved: int = 0
    unshared: "Plan | None" = None

    def __init__(self, given: dict[str, Any], rows: Rows, index: torch.Tensor | None = None, reaches_end: bool = True):
        self.given = given
        self.rows = rows
        self.index = index
        self.reaches_end = reaches_end
        self.used = False

    @property
    def leaves_out(self) -> bool:
        """Whether there is padding, for which nothing will be computed."""
        return self.index is not None

    def fits(self, call: dict[str, Any]) -> bool:
        """Return whether the backbone is called with what the plan was made from.

        A model of images and text makes the positions of its decoder, in one dimension or several: (..., B or 1, S).
        """
        shape = tokens_of(self.given).shape[:2]
        positions = call.get("position_ids")
        if call.get("attention_mask") is not self.given.get("attention_mask") or tokens_of(call).shape[:2] != shape:
            return False
        if positions is not self.given.get("position_ids"):
            known = self.leaves_out or self.rows.full
            of_tokens = positions is not None and positions.shape[-2:] in (shape, (1, shape[1]))
            if not (known and of_tokens):
                return False
        of_the_head = [name for name in _OF_THE_HEAD if call.get(name) is self.given.get(name)]
        others = [x for name, x in call.items() if name not in (*_KNOWN_TENSORS, *of_the_head)]
        for x in tree_leaves(others):
            if isinstance(x, torch.Tensor) and x.ndim > 0:  # a count is of no token
                return False
        return True

    def packed(self, call: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the backbone with one row of real tokens for the batch.

        Their positions are the columns where the call has none, as in every model that a proof accepts.
        """
        tokens = tokens_of(call)
        call = {name: x for name, x in call.items() if name not in _OF_THE_HEAD}
        # A mask of ones, since without one transformers looks for rows in the values of position_ids, and waits.
        shape = (self.rows.batch, self.rows.tokens // self.rows.batch)
        mask = torch.ones(shape, dtype=torch.long, device=tokens.device)
        if self.index is None:
            return call | {"attention_mask": mask}
        batch, length = tokens.shape[:2]
        packed = {}
        for name in _PER_TOKEN:
            x = call.get(name)
            if x is not None:
                packed[name] = self._taken(x)[None]  # by which a `Known` stays one
        positions = call.get("position_ids")
        if positions is None:
            positions = (self.index % length).unsqueeze(0)
        else:
            positions = positions.expand(*positions.shape[:-2], batch, length).flatten(-2)[..., None, self.index]
        return call | packed | {"attention_mask": mask, "position_ids": positions}

    def _taken(self, x: torch.Tensor) -> torch.Tensor:
        """What the real tokens have of x (B, S, ...)."""
        assert self.index is not None  # `packed` has looked
        taken = x.flatten(0, 1)[self.index]
        if not isinstance(x, Known) or is_stale(x):
            return taken
        (index,) = values_of(self.index)
        return taken if index.is_cuda else Known.around(taken, x.values.flatten(0, 1)[index])

    def padded(self, outputs):
        """Put every tensor of real tokens that the backbone has returned back into the shape of the batch."""
        if self.index is None:
            return outputs
        if isinstance(outputs, ModelOutput):
            padded = copy.copy(outputs)  # transformers may have added states of layers that its class does not know
            for name, x in outputs.items():
                padded[name] = self.padded(x)
            return padded
        if isinstance(outputs, tuple):
            return tuple(map(self.padded, outputs))
        if not isinstance(outputs, torch.Tensor):
            return outputs
        batch, length = self.given["attention_mask"].shape
        if outputs.shape[:2] == (1, self.rows.tokens):
            return self._spread(outputs[0], batch * length).unflatten(0, (batch, length))
        if outputs.ndim == 2 and outputs.shape[0] == self.rows.tokens:  # logits of a router
            return self._spread(outputs, batch * length)
        return outputs

    def _spread(self, x: torch.Tensor, size: int) -> torch.Tensor:
        assert self.index is not None  # `padded` has looked
        index = self.index.to(x.device)  # the last layer is on another GPU where accelerate has spread them
        return x.new_zeros(size, *x.shape[1:]).index_copy(0, index, x)


_plan: contextvars.ContextVar[Plan | None] = contextvars.ContextVar("plan of the running call", default=None)


@contextlib.contextmanager
def running(plan: Plan | None):
    """Within it, a backbone that is bound runs by `plan`."""
    token = _plan.set(plan)
    try:
        yield
    finally:
        _plan.reset(token)


def plan_of_call() -> Plan | None:
    """The plan of the running call of a model, until its backbone begins."""
    return None if torch.compiler.is_compiling() else _plan.get()


def tokens_of(call: dict[str, Any]) -> Any:
    """The ids (B, S) or embeddings (B, S, H) that a call brings, or None."""
    return call.get("inputs_embeds") if call.get("input_ids") is None else call["input_ids"]


def cache_of(call: dict[str, Any]) -> Any:
    """The keys and values of earlier tokens that a call brings, or None. transformers 5.24 gave it a new name."""
    return call.get("past_key_values") if call.get("cache") is None else call["cache"]


@functools.cache
def _forward_of(backbone_class):
    names = list(inspect.signature(backbone_class.forward).parameters)[1:]

    @in_place_of(backbone_class.forward)
    def forward(self, *args, **kwargs):
        plan = plan_of_call()
        bound = BackboneBinding.of(self)
        if plan is None or bound is None or bound.aside:
            return call_previous(self, BackboneBinding, args, kwargs)
        call = dict(zip(names, args, strict=False)) | kwargs
        if "use_cache" in names:  # a decoder's own config may ask for one where that of the whole model does not
            call["use_cache"] = False
        if plan.saved:
            found = _shared(self, bound, plan, call, len(args) > len(names))
            if found is not None:
                return found
            if plan.unshared is None:
                return call_previous(self, BackboneBinding, args, kwargs)
            plan = plan.unshared
        if len(args) > len(names) or not plan.fits(call):
            _refuse_mixing(bound, plan, "its inputs are made by the model around it")
            if plan.leaves_out and not bound.proven.sees_both_ways:  # the report has said that
                bound.tell("its mask or other inputs are made by the model around it", COMPUTES_PADDING)
            return call_previous(self, BackboneBinding, args, kwargs)
        try:
            with running(None):
                outputs = _run(self, plan, call)
        except NotForRows as error:
            bound.aside = True
            _refuse_mixing(bound, plan, str(error))
            bound.tell(str(error), COMPUTES_PADDING)
            return call_previous(self, BackboneBinding, args, kwargs)
        plan.used = True
        return plan.padded(outputs)

    return forward


def _shared(backbone, bound: BackboneBinding, plan: Plan, call: dict[str, Any], is_unknown: bool):
    """Run `backbone` on rows that share, and return its outputs; None, with the reason noted, where they cannot."""
    if is_unknown or not plan.fits(call):
        bound.sharing.refuse("its inputs are made by the model around it")
        return None
    try:
        with running(None):
            outputs = _run(backbone, plan, call)
    except NotForRows as error:
        bound.sharing.refuse(str(error), for_good=True)
        return None
    plan.used = True
    bound.sharing.count(plan.rows.tokens, plan.saved)
    return plan.padded(outputs)


def _refuse_mixing(bound: BackboneBinding, plan: Plan, why: str) -> None:
    """ValueError where the model's own code would run on packed rows whose states it does not keep apart."""
    if bound.proven.keeps_state and not plan.leaves_out and not plan.rows.full:
        raise MixedRows.of(bound, why)


class MixedRows(ValueError):
    """Packed rows would see each other in the model's own attention or state layers, which would have to run."""

    @classmethod
    def of(cls, bound: BackboneBinding, why: str) -> "MixedRows":
        """Make the error that says `why` the model's own code would run."""
        return cls(
            f"Packed rows would see each other in {type(bound.module.to()).__name__}, whose own code has to run: "
            f"{why}. Take that away, or switch packing off."
        )


def _run(backbone, plan: Plan, call: dict[str, Any]):
    """Call `backbone` on real tokens, by a replay where one is at hand."""
    packed = plan.packed(call)
    bound = BackboneBinding.of(backbone)
    told = None if bound is None else bound.told
    if told is not None and bound is not None and bound.previous is not None:
        raise NotForRows("its forward was replaced on the instance, and its layers keep a state")

    def own_forward(**given):
        return call_previous(backbone, BackboneBinding, (), given) if told is None else told(backbone, **given)

    def run_uncaptured(embeds: torch.Tensor | None = None):
        """Run its own code, from `embeds` where its input embedding has run already."""
        given = call if plan.only_replayed else packed
        if embeds is not None:
            given = {name: value for name, value in given.items() if name != "input_ids"} | {"inputs_embeds": embeds}
        if plan.only_replayed:
            return own_forward(**given)
        with rows_known(plan.rows):
            return own_forward(**given)

    if plan.graphs is None:
        return run_uncaptured()
    return plan.graphs.run(own_forward, run_uncaptured, plan.rows, packed)


def binding_of(backbone, proven: Proven, told: Callable | None = None, guards: Rests | None = None) -> BackboneBinding:
    """With it, calls of `backbone` that have a plan leave out padding, and layers attend to rows of uneven length."""
    return BackboneBinding(_forward_of(type(backbone)), proven, told, guards)  # type: ignore[arg-type]
