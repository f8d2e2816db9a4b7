"""Lays out the real tokens of a batch one after the other, as a drafter computes them, for padded and packed rows."""

from typing import Any, NamedTuple

import torch

from liger_trainer.head.targets import head_targets, token_positions
from liger_trainer.patching.core.probe import one_thread
from liger_trainer.varlen.host_copies import sent, values_of

_READ = ("input_ids", "labels", "position_ids", "seq_idx", "cu_seq_lens_q", "attention_mask")  # fields of a batch


class FlatRows(NamedTuple):
    """The T real tokens of a batch (B, S).

    Attributes:
        places (`torch.Tensor`): (T,) int64, the index of each token among the B * S positions of the batch.
        ids (`torch.Tensor`): (T,) int64.
        positions (`torch.Tensor`): (T,) int64, in its document.
        offsets (`torch.Tensor`): (documents + 1,) int32: where each document begins, and T.
        lengths (`list[int]`): Tokens of each document.
        size (`int`): B * S.
    """

    places: torch.Tensor
    ids: torch.Tensor
    positions: torch.Tensor
    offsets: torch.Tensor
    lengths: list[int]
    size: int

    @property
    def longest(self) -> int:
        """Return the tokens of the longest document."""
        return max(self.lengths)

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Return the real tokens (T, ...) of `x`: (B, S, ...) or, if the model left padding out itself, (1, T, ...).

        Raises:
            ValueError: `x` has neither number of tokens.
        """
        flat = x.flatten(0, 1)
        if len(flat) == len(self.places):
            return flat
        if len(flat) == self.size:
            return flat[self.places]
        raise ValueError(
            f"A layer of the model sees {tuple(x.shape)}, and the batch has {len(self.places)} real tokens. Set "
            "liger_config: {varlen_attention: false}."
        )


@one_thread()
def flat_rows(inputs: dict[str, Any]) -> FlatRows:
    """Find the real tokens of a batch and the documents that they belong to, by `token_positions`.

    The host knows the values of a batch from our trainers' dataloaders. For any other batch it waits for the device.
    """
    given = {name: inputs[name] for name in _READ if inputs.get(name) is not None}
    known = dict(zip(given, values_of(*given.values()), strict=True))
    ids = known["input_ids"]
    positions = token_positions(known)
    mask = known.get("attention_mask")
    real = torch.ones_like(ids, dtype=torch.bool)
    if mask is not None and mask.ndim == 2:
        real = mask.bool()
    places = real.flatten().nonzero()[:, 0]
    positions = positions.flatten().index_select(0, places)
    row = places // ids.shape[1]
    begins = torch.ones_like(places, dtype=torch.bool)
    begins[1:] = (positions[1:] != positions[:-1] + 1) | (row[1:] != row[:-1])
    starts = begins.nonzero()[:, 0]
    offsets = torch.cat([starts, starts.new_tensor([len(places)])]).int()
    lengths = offsets.diff().tolist()
    tensors = places, ids.flatten().index_select(0, places), positions, offsets
    if ids.device != inputs["input_ids"].device:
        tensors = tuple(sent(x, inputs["input_ids"].device) for x in tensors)
    return FlatRows(*tensors, lengths, ids.numel())


def one_row(ids: torch.Tensor) -> FlatRows:
    """Return the one row `ids` (1, n), without padding, as `FlatRows`."""
    return flat_rows({"input_ids": ids, "labels": ids})


def flat_targets(inputs: dict[str, Any], rows: FlatRows, steps: int) -> torch.Tensor:
    """Return class ids (steps + 1, T) of the target's vocabulary, -100 where there is nothing to guess.

    Index 0 is for the LM head. Index k has at t the label of the token k + 1 places further in the same document, which
    step k of the drafter guesses.
    """
    return head_targets(inputs, steps).flatten(1)[:, rows.places]
