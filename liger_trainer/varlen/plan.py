"""What a call needs so that its backbone runs on real tokens only: which rows it has, and where their tokens are."""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from transformers.utils import ModelOutput

from liger_trainer.varlen.attention import Rows
from liger_trainer.varlen.counted import Counts, counts_of

COLUMNS, FROM_MASK = "columns", "mask"  # which positions a model gives tokens when it is given none
_PER_TOKEN = ("input_ids", "inputs_embeds", "position_ids")
_KNOWN_TENSORS = ("attention_mask", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", *_PER_TOKEN)


class Plan:
    """How one call goes through the backbone.

    Args:
        given (`dict`): The arguments of the call that it was made from.
        rows (`Rows`): The rows of real tokens.
        index (`torch.Tensor`, *optional*): int64 (N,): where in the flattened batch each real token is; None where
            the batch is one packed row.
        reaches_end (`bool`, *optional*, defaults to `True`): Whether there is a real token in the last column.

    Attributes:
        used (`bool`): Whether a backbone has run by it.
    """

    def __init__(self, given: dict[str, Any], rows: Rows, index: torch.Tensor | None = None, reaches_end: bool = True):
        self.given, self.rows, self.index, self.reaches_end, self.used = given, rows, index, reaches_end, False

    @property
    def leaves_out(self) -> bool:
        """Whether there is padding, for which nothing will be computed."""
        return self.index is not None

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
        if not self.leaves_out:
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
        if not self.leaves_out:
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
        assert self.index is not None  # `padded` has looked
        index = self.index.to(x.device)  # the last layer is on another GPU where accelerate has spread them
        return x.new_zeros(size, *x.shape[1:]).index_copy(0, index, x)


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
    if isinstance(mask, torch.Tensor) and mask.shape == tokens.shape[:2] and mask.device == tokens.device:
        counts = counts_of(mask, labels) if shift_labels is None else None
        if counts is not None:
            return _counted_plan(call, counts, mask.numel(), labels is not None)
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
    if (counts := counts_of(positions)) is not None:
        rows = Rows(counts.offsets, counts.tokens, counts.longest)
        return Plan(call, rows) if len(counts.offsets) > 2 else None
    inner = (positions[0].cpu().diff() != 1).nonzero()[:, 0] + 1  # waits for the device, once
    if inner.numel() == 0:
        return None
    offsets = torch.cat((inner.new_zeros(1), inner, inner.new_full((1,), length)))
    longest = int(offsets.diff().max())
    return Plan(call, Rows(offsets.to(tokens.device, torch.int32, non_blocking=True), length, longest))


def _counted_plan(call, counts: Counts, places: int, labelled: bool) -> Plan | None:
    """Of a padded batch of so many places whose rows the host has counted."""
    if counts.apart or (labelled and counts.missed) or counts.tokens in (0, places):
        return None
    return Plan(call, Rows(counts.offsets, counts.tokens, counts.longest), counts.where, counts.reaches_end)


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
    asked = torch.stack((apart, missed, real[:, -1].sum()))
    *lengths, apart, missed, last = torch.cat((count, asked)).tolist()  # waits for the device, once
    total = sum(lengths)
    if apart or missed or total in (0, batch * length):
        return None
    offsets = torch.zeros(batch + 1, dtype=torch.int32, device=mask.device)
    offsets[1:] = count.cumsum(0)
    # Where each row begins in the flattened batch, and among the real tokens.
    shift = torch.arange(batch, device=mask.device) * length + first - offsets[:-1]
    index = torch.arange(total, device=mask.device) + shift.repeat_interleave(count, output_size=total)
    return Plan(call, Rows(offsets, total, max(lengths)), index, reaches_end=last > 0)
