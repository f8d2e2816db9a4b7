"""Heads and drafters learn the rows of a batch from the host, so that they do not wait for the device."""

import pytest
import torch

from liger_trainer.head.flat_rows import flat_rows
from liger_trainer.head.targets import head_targets
from liger_trainer.medusa.trainer import _labels_of_head
from liger_trainer.varlen.host_copies import HostBatch, values_of

PADDED = {"attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])}
PACKED = {  # as TRL's collator makes it: rows of 3, 1 and 4 tokens
    "position_ids": torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3]]),
    "seq_idx": torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2]], dtype=torch.int32),
    "cu_seq_lens_q": torch.tensor([0, 3, 4, 8], dtype=torch.int32),
}


def batch(fields):
    shape = fields.get("attention_mask", fields.get("position_ids")).shape
    ids = torch.arange(3, 11).view(shape)
    return {"input_ids": ids, "labels": ids.clone()} | fields


@pytest.mark.parametrize("fields", [PADDED, PACKED], ids=["padded", "packed"])
def test_the_rows_are_known_without_the_device(fields):
    """Tensors of the meta device have no values to read."""
    on_host = flat_rows(batch(fields))
    elsewhere = flat_rows(HostBatch(batch(fields)).to("meta"))
    assert elsewhere.lengths == on_host.lengths == ([3, 2] if fields is PADDED else [3, 1, 4])
    assert elsewhere.places.shape == on_host.places.shape
    assert elsewhere.places.is_meta
    assert elsewhere.of(torch.zeros(*batch(fields)["labels"].shape, 6, device="meta")).shape == (
        sum(on_host.lengths),
        6,
    )


def test_states_of_another_batch_are_refused():
    rows = flat_rows(batch(PADDED))
    assert torch.equal(rows.of(torch.arange(8.0).view(2, 4, 1)).flatten(), torch.tensor([0.0, 1, 2, 4, 5]))
    assert rows.of(torch.zeros(1, 5, 1)).shape == (5, 1), "a model that has left padding out"
    for shape in ((2, 3), (2, 5)):  # a layer that puts tokens before the text has more columns
        with pytest.raises(ValueError, match="A layer of the model sees"):
            rows.of(torch.zeros(*shape, 1))


def test_the_labels_of_a_medusa_step_are_known_without_the_device():
    given = batch(PADDED)
    moved = HostBatch(given).to("meta")
    first = _labels_of_head(moved, head_targets(moved, 2))
    assert first.is_meta
    assert torch.equal(values_of(first)[0], head_targets(given, 2)[0])
