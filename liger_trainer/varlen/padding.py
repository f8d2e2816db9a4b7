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
from torch.utils._pytree import tree_leaves
from transformers.utils import ModelOutput

from liger_trainer._logging import logger
from liger_trainer.instance.binding import Binding, bind, call_previous, unbind
from liger_trainer.instance.report import Place
from liger_trainer.varlen.attention import NotForRows, Rows, is_registered_for, not_needed_by, rows_known
from liger_trainer.varlen.inside import why_whole

COLUMNS, FROM_MASK = "columns", "mask"  # which positions a model gives tokens when it is given none
_PER_TOKEN = ("input_ids", "inputs_embeds", "position_ids")
_KNOWN_TENSORS = ("attention_mask", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", *_PER_TOKEN)

_plan: contextvars.ContextVar = contextvars.ContextVar("plan of the running call", default=None)


class BackboneBinding(Binding):
    """What we remember about the forward that is bound to a backbone; see `install` for what the fields mean."""

    key = "_liger_varlen"

    def __init__(
        self, function: Callable, positions: str, packs: bool, forwards: frozenset | None, place: Place | None
    ):
        super().__init__(function, place=place)
        self.positions, self.packs, self.forwards = positions, packs, forwards
        self.known: dict[type, Callable] = {}  # classes of modules that may be inside, with their forwards


class Plan:
    """How one call goes through the backbone.

    Args:
        given (`dict`): The arguments of the call that it was made from.
        rows (`Rows`): The rows of real tokens.
        index (`torch.Tensor`, *optional*): int64 (N,): where in the flattened batch each real token is; None where
            the batch is one packed row.

    Attributes:
        used (`bool`): Whether a backbone has run by it.
    """

    def __init__(self, given: dict[str, Any], rows: Rows, index: torch.Tensor | None = None):
        self.given, self.rows, self.index, self.used = given, rows, index, False

    def fits(self, call: dict[str, Any]) -> bool:
        """Whether the backbone is called with what the plan was made from."""
        same = all(call.get(name) is self.given.get(name) for name in ("attention_mask", "position_ids"))
        others = tree_leaves([x for name, x in call.items() if name not in _KNOWN_TENSORS])
        same = same and _tokens_of(call).shape[:2] == _tokens_of(self.given).shape[:2]
        return same and not any(isinstance(x, torch.Tensor) and x.ndim > 0 for x in others)  # a count is of no token

    def packed(self, call: dict[str, Any], positions: str) -> dict[str, Any]:
        """The arguments of the backbone with one row of real tokens for the batch."""
        tokens = _tokens_of(call)
        # A mask of ones, since without one transformers looks for rows in the values of position_ids, and waits.
        mask = torch.ones((1, self.rows.tokens), dtype=torch.long, device=tokens.device)
        if self.index is None:
            return call | {"attention_mask": mask}
        batch, length = tokens.shape[:2]
        packed = {name: call[name] for name in _PER_TOKEN if call.get(name) is not None}
        if "position_ids" in packed:
            packed["position_ids"] = packed["position_ids"].expand(batch, length)
        packed = {name: x.flatten(0, 1)[self.index].unsqueeze(0) for name, x in packed.items()}
        if "position_ids" not in packed:
            columns = self.index % length
            packed["position_ids"] = (columns if positions == COLUMNS else self._places()).unsqueeze(0)
        return call | packed | {"attention_mask": mask}

    def _places(self) -> torch.Tensor:
        """Which of its row's tokens each token is."""
        starts = self.rows.offsets[:-1].long()
        lengths = self.rows.offsets.diff().long()
        return torch.arange(self.rows.tokens, device=starts.device) - starts.repeat_interleave(
            lengths, output_size=self.rows.tokens
        )

    def padded(self, outputs):
        """What the backbone has returned, with every tensor of real tokens put back into the shape of the batch."""
        if self.index is None:
            return outputs
        if isinstance(outputs, ModelOutput):
            return type(outputs)(**{name: self.padded(x) for name, x in outputs.items()})
        if isinstance(outputs, tuple):
            return tuple(map(self.padded, outputs))
        batch, length = self.given["attention_mask"].shape
        tokens = self.rows.tokens
        if isinstance(outputs, torch.Tensor) and outputs.shape[:2] == (1, tokens):
            return self._spread(outputs[0], batch * length).unflatten(0, (batch, length))
        if isinstance(outputs, torch.Tensor) and outputs.ndim == 2 and outputs.shape[0] == tokens:
            return self._spread(outputs, batch * length)  # logits of a router
        return outputs

    def _spread(self, x, size: int) -> torch.Tensor:
        return x.new_zeros(size, *x.shape[1:]).index_copy(0, self.index, x)


def leaves_padding_out(model) -> bool:
    """Whether calls of `model` may go through its backbone on real tokens; not while they are traced."""
    backbone = backbone_of(model)
    return backbone is not None and BackboneBinding.of(backbone) is not None and not torch.compiler.is_compiling()


def plan_of_call(model, args: tuple, call: dict[str, Any]) -> Plan | None:
    """How a call of `model` goes through its backbone on real tokens; None where the batch goes through as it is.

    `model` is one for which `leaves_padding_out`.
    """
    backbone = backbone_of(model)
    bound = BackboneBinding.of(backbone)
    if bound is None or bound.aside or args:
        return None
    plan = plan_of(model.config, call, call.get("labels"), call.get("shift_labels"))
    if plan is None or (plan.index is None and not bound.packs) or not is_registered_for(backbone):
        return None
    if (why := why_whole(backbone, bound.forwards, bound.known)) is not None:
        _say(backbone, why)
        return None
    return plan


@contextlib.contextmanager
def running(plan: "Plan | None"):
    """Within it, a backbone that is bound runs by `plan`."""
    token = _plan.set(plan)
    try:
        yield
    finally:
        _plan.reset(token)


def plan_of(config, call: dict[str, Any], labels=None, shift_labels=None) -> Plan | None:
    """How a call with the arguments `call` goes through the backbone without padding, or None where it stays as it is.

    Args:
        config ([`~transformers.PreTrainedConfig`]): Of the model.
        call (`dict`): `input_ids` (B, S) or `inputs_embeds` (B, S, H), and `attention_mask` (B, S), or `position_ids`
            (1, S) of a packed row.
        labels (`torch.Tensor`, *optional*): (B, S), each a label of the position before it.
        shift_labels (`torch.Tensor`, *optional*): (B, S), each a label of its own position.
    """
    tokens = _tokens_of(call)
    keeps, shows = (
        getattr(config, name, None) if call.get(name) is None else call[name]
        for name in ("use_cache", "output_attentions")
    )
    if keeps or shows or call.get("past_key_values") is not None or config._attn_implementation != "sdpa":
        return None
    if not isinstance(tokens, torch.Tensor) or tokens.ndim < 2:
        return None
    mask, positions = call.get("attention_mask"), call.get("position_ids")
    if positions is not None and (positions.ndim != 2 or positions.shape[0] not in (1, tokens.shape[0])):
        return None
    if mask is None:
        return _packed_plan(call, tokens)
    if mask.ndim == 2 and mask.shape == tokens.shape[:2]:
        return _padded_plan(call, mask, _next_labels(labels, shift_labels))
    return None


def _tokens_of(call):
    """The ids (B, S) or embeddings (B, S, H) that a call brings, or None."""
    return call.get("inputs_embeds") if call.get("input_ids") is None else call["input_ids"]


def _packed_plan(call, tokens) -> Plan | None:
    """Of a batch of one row in which several lie one after the other.

    Where they begin is read from the positions, as transformers does for SDPA; of `cu_seq_lens_q` it takes no notice.
    """
    length, positions = tokens.shape[1], call.get("position_ids")
    if positions is None or tokens.shape[0] != 1 or positions.shape[1] != length:
        return None
    inner = (positions[0].cpu().diff() != 1).nonzero()[:, 0] + 1  # waits for the device, once
    if inner.numel() == 0:
        return None
    offsets = torch.cat((inner.new_zeros(1), inner, inner.new_full((1,), length)))
    longest = int(offsets.diff().max())
    return Plan(call, Rows(offsets.to(tokens.device, torch.int32, non_blocking=True), length, longest))


def _next_labels(labels, shift_labels):
    """The label that each position predicts, or None without labels."""
    if shift_labels is not None:
        return shift_labels
    if labels is None:
        return None
    return torch.cat((labels[:, 1:], labels.new_full((labels.shape[0], 1), -100)), dim=1)


def _padded_plan(call, mask, labels) -> Plan | None:
    real = mask != 0
    batch, length = mask.shape
    count = real.sum(1)
    first, after = real.byte().argmax(1), length - real.flip(1).byte().argmax(1)
    apart = ((first + count != after) & (count > 0)).sum()  # rows with padding between their tokens
    if labels is None:
        missed = apart.new_zeros(())
    elif labels.shape != mask.shape or labels.device != mask.device:
        return None
    else:
        missed = ((labels != -100) & ~real).sum()
    *lengths, apart, missed = torch.cat((count, torch.stack((apart, missed)))).tolist()  # waits for the device, once
    total = sum(lengths)
    if apart or missed or total in (0, batch * length):
        return None
    offsets = torch.zeros(batch + 1, dtype=torch.int32, device=mask.device)
    offsets[1:] = count.cumsum(0)
    index = torch.nonzero_static(real.flatten(), size=total)[:, 0]
    return Plan(call, Rows(offsets, total, max(lengths)), index)


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


def install(
    backbone, positions: str, packs: bool = True, forwards: frozenset | None = None, place: Place | None = None
) -> None:
    """Have `backbone`, which has a `config`, leave out padding, and its layers attend to rows of uneven length.

    Args:
        backbone (`nn.Module`): What `backbone_of` has found.
        positions (`str`): `COLUMNS` where the model numbers the columns of a batch when it is given no positions,
            `FROM_MASK` where it numbers the real tokens of each row.
        packs (`bool`, *optional*, defaults to `True`): Whether a packed row takes our attention too.
        forwards (`frozenset`, *optional*): The forwards of modules that are known to work without padding. Unset: of
            any module.
        place (`Place`, *optional*): Where a reason to keep the model's own code is written down.
    """
    forward = _forward_of(type(backbone))  # type: ignore[arg-type]
    bind(backbone, BackboneBinding(forward, positions, packs, forwards, place))


def remove(backbone) -> None:
    """Undo `install`."""
    unbind(backbone, BackboneBinding)
    not_needed_by(backbone)


def _say(backbone, reason: str) -> None:
    bound = BackboneBinding.of(backbone)
    if bound is not None and bound.place is not None:
        bound.place.keeps_its_code(reason)
    logger.warning_once(f"{type(backbone).__name__} computes padding too: {reason}.")
