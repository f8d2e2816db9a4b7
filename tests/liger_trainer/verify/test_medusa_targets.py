"""`verify` looks up the targets of Medusa heads on its own, and they equal the trainer's targets."""

import pytest
import torch

from liger_trainer.head.targets import head_targets
from liger_trainer.verify.medusa import _targets

HEADS, LENGTH = 3, 17
STARTS = torch.tensor([0, 1, 4, 11])  # lengths of the documents in a packed row; the first has one token
LENGTHS = torch.tensor([[LENGTH], [9], [2]])


def padded(left):
    mask = (torch.arange(LENGTH) < LENGTHS).long()
    return {"attention_mask": mask.flip(1) if left else mask}


def positions():
    places = torch.arange(LENGTH)
    starts = torch.zeros(LENGTH, dtype=torch.long)
    starts[STARTS] = STARTS
    return (places - starts.cummax(0).values)[None]


DOCUMENTS = {
    "one a row": {},
    "padding on the right": padded(left=False),
    "padding on the left": padded(left=True),
    "position_ids": {"position_ids": positions()},
    "position_ids of images": {"position_ids": positions().expand(3, 1, LENGTH)},
    "seq_idx": {"seq_idx": (positions() == 0).cumsum(1) - 1},
    "cu_seq_lens_q": {"cu_seq_lens_q": torch.cat((STARTS, torch.tensor([LENGTH]))).int()},
}


@pytest.mark.parametrize("given", [pytest.param(given, id=name) for name, given in DOCUMENTS.items()])
def test_targets_agree(given):
    rows = 3 if "attention_mask" in given else 1
    labels = torch.randint(0, 50, (rows, LENGTH), generator=torch.Generator().manual_seed(0))
    labels[:, 5] = -100
    if "attention_mask" in given:
        labels = labels.masked_fill(given["attention_mask"] == 0, -100)
    inputs = {"labels": labels, **given}
    found = _targets(inputs, HEADS)
    assert torch.equal(found, head_targets(inputs, HEADS))
    assert (found[1:] != -100).any()
