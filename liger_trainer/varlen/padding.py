"""The backbone of a model, run on the real tokens of a batch only.

A padded batch (B, S) becomes one row of its N real tokens when it enters the backbone, with the positions that the
tokens would have had, and what leaves the backbone is put back where it was, with zeros for padding. Loss, gradients
and hidden states of real tokens are those of the padded batch, and nothing between the embeddings and the last norm is
computed for padding. A batch that is packed already (`position_ids` that start anew, without an `attention_mask`) takes
the same attention.

What a call needs is found once, before the model's own forward, by `plan_of_call`: there the labels are known too. A
label that is predicted from a padding position (that of the first token of a row that is padded on the left) needs what
the model computes for padding, so such a batch runs as it is. So does a call that returns logits or hidden states,
since somebody may use those of padding (`head/calls.py`), and a model in which somebody has put a hook, or a module
whose code the proof of `patching/varlen.py` has not run.
"""

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from liger_trainer._logging import logger
from liger_trainer.instance.binding import Binding, bind, call_previous, unbind
from liger_trainer.instance.report import Place
from liger_trainer.varlen.attention import NotForRows, is_registered_for, not_needed_by, rows_known
from liger_trainer.varlen.inside import why_whole
from liger_trainer.varlen.plan import Plan, plan_of

_STATIC_ROPES = ("default", "linear", "yarn", "llama3", "proportional")

_plan: contextvars.ContextVar = contextvars.ContextVar("plan of the running call", default=None)


class BackboneBinding(Binding):
    """What we remember about the forward that is bound to a backbone; see `install` for what the fields mean."""

    key = "_liger_varlen"

    def __init__(
        self,
        function: Callable,
        positions: str,
        packs: bool,
        mixes: bool,
        by_length: bool,
        forwards: frozenset | None,
        place: Place | None,
    ):
        super().__init__(function, place=place)
        self.positions, self.packs, self.mixes, self.forwards = positions, packs, mixes, forwards
        self.by_length = by_length  # whether the longest position of a call decides how positions are rotated
        self.known: dict[type, Callable] = {}  # classes of modules that may be inside, with their forwards


def leaves_padding_out(model) -> bool:
    """Whether calls of `model` may go through its backbone on real tokens; not while they are traced."""
    backbone = backbone_of(model)
    return backbone is not None and BackboneBinding.of(backbone) is not None and not torch.compiler.is_compiling()


def plan_of_call(model, args: tuple, call: dict[str, Any], shows_padding: bool) -> Plan | None:
    """How a call of `model` goes through its backbone on real tokens; None where the batch goes through as it is.

    Args:
        model ([`~transformers.PreTrainedModel`]): One for which `leaves_padding_out`.
        args (`tuple`): Its arguments by position.
        call (`dict`): Its arguments by name.
        shows_padding (`bool`): Whether the answer has something of every position. A packed row has no padding.

    Raises:
        ValueError: The rows of a packed row would see each other in the model's own code, and something of the user's
            inside the backbone needs that code.
    """
    backbone = backbone_of(model)
    bound = BackboneBinding.of(backbone)
    if bound is None or bound.aside or args or (shows_padding and call.get("attention_mask") is not None):
        return None
    plan = plan_of(model.config, call, call.get("labels"), call.get("shift_labels"))
    if plan is None or not (plan.leaves_out or bound.packs):
        return None
    if plan.leaves_out and bound.by_length and not (plan.reaches_end and call.get("position_ids") is None):
        return None
    if not is_registered_for(backbone):
        why: str | None = "somebody has registered a function of their own for the attention 'sdpa' or for its mask"
    else:
        why = why_whole(backbone, bound, bound.forwards, bound.known)
    if why is None:
        return plan
    if bound.mixes and not plan.leaves_out:
        raise ValueError(
            f"Packed rows would see each other in {type(backbone).__name__}, whose own attention has to run: {why}. "
            "Take that away, or switch packing off."
        )
    computes_padding(model, why)
    return None


@contextlib.contextmanager
def running(plan: "Plan | None"):
    """Within it, a backbone that is bound runs by `plan`."""
    token = _plan.set(plan)
    try:
        yield
    finally:
        _plan.reset(token)


def backbone_of(model):
    """The part of a transformers model before its head, or None."""
    name = getattr(model, "base_model_prefix", "")
    return model._modules.get(name) if name else None


@functools.cache
def _forward_of(backbone_class):
    names = list(inspect.signature(backbone_class.forward).parameters)[1:]

    @functools.wraps(backbone_class.forward)
    def forward(self, *args, **kwargs):
        plan = None if torch.compiler.is_compiling() else _plan.get()
        bound = BackboneBinding.of(self)
        if plan is None or bound is None or bound.aside:
            return call_previous(self, BackboneBinding, args, kwargs)
        call = dict(zip(names, args, strict=False)) | kwargs
        if len(args) > len(names) or not plan.fits(call):
            return call_previous(self, BackboneBinding, args, kwargs)
        try:
            with running(None), rows_known(plan.rows):
                outputs = call_previous(self, BackboneBinding, (), plan.packed(call, bound.positions))
        except NotForRows as error:
            bound.aside = True
            _say(self, str(error))
            return call_previous(self, BackboneBinding, args, kwargs)
        plan.used = True
        return plan.padded(outputs)

    forward.__name__ = "forward"
    forward.__signature__ = inspect.signature(backbone_class.forward)
    del forward.__wrapped__
    return forward


def _rotates_by_length(config) -> bool:
    """Whether the rotary frequencies depend on the longest position of a call, as far as the config says."""
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [x for x in rope.values() if isinstance(x, dict)] or [rope]  # one for each kind of layer, or one for all
    return any(x.get("rope_type", "default") not in _STATIC_ROPES for x in ropes)


def install(
    backbone,
    positions: str,
    packs: bool = True,
    mixes: bool = False,
    forwards: frozenset | None = None,
    place: Place | None = None,
) -> None:
    """Have `backbone`, which has a `config`, leave out padding, and its layers attend to rows of uneven length.

    Args:
        backbone (`nn.Module`): What `backbone_of` has found.
        positions (`str`): `COLUMNS` where the model numbers the columns of a batch when it is given no positions,
            `FROM_MASK` where it numbers the real tokens of each row.
        packs (`bool`, *optional*, defaults to `True`): Whether a packed row takes our attention too.
        mixes (`bool`, *optional*, defaults to `False`): Whether its rows see each other in the model's own code.
        forwards (`frozenset`, *optional*): The forwards of modules that are known to work without padding. Unset: of
            any module.
        place (`Place`, *optional*): Where a reason to keep the model's own code is written down.
    """
    forward = _forward_of(type(backbone))  # type: ignore[arg-type]
    by_length = _rotates_by_length(backbone.config)
    bind(backbone, BackboneBinding(forward, positions, packs, mixes, by_length, forwards, place))


def remove(backbone) -> None:
    """Undo `install`."""
    unbind(backbone, BackboneBinding)
    not_needed_by(backbone)


def computes_padding(model, reason: str) -> None:
    """Say in the log and in the report of `model` that a batch goes through as it is, and why."""
    _say(backbone_of(model), reason)


def _say(backbone, reason: str) -> None:
    bound = BackboneBinding.of(backbone)
    if bound is not None and bound.place is not None:
        bound.place.keeps_its_code(reason)
    logger.warning_once(f"{type(backbone).__name__} computes padding too: {reason}.")
