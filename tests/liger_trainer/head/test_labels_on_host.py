"""The head finds the rows with a label in the values that the host remembers for a batch."""

from types import SimpleNamespace

import torch
from tiny_models import tiny_model

import liger_trainer.head.scores
from liger_trainer import apply_liger
from liger_trainer.head.request import ModelCall
from liger_trainer.varlen.host_copies import remember

VALUES = torch.tensor([[-100, 5, 7, 9], [3, -100, 4, 8]])


def labels_of_a_device(remembered=True):
    """Labels without a real device, so that reading them fails."""
    labels = torch.empty(2, 4, dtype=torch.long, device="meta")
    if remembered:
        remember(labels, VALUES)
    return labels


def known(**kwargs):
    return ModelCall.labels_on_host(SimpleNamespace(kwargs=kwargs))


def test_labels_are_shifted_as_the_head_s_targets():
    assert torch.equal(known(labels=labels_of_a_device()), VALUES[:, 1:])
    assert torch.equal(known(labels=VALUES, shift_labels=labels_of_a_device()), VALUES)


def test_labels_that_are_not_known_or_were_written_to_are_not_taken():
    assert known(labels=labels_of_a_device(remembered=False)) is None
    assert known(labels=VALUES) is None, "a CPU has nothing to wait for"
    labels = labels_of_a_device()
    labels.fill_(1)
    assert known(labels=labels) is None


def test_they_reach_the_head(monkeypatch):
    model = tiny_model("llama")
    apply_liger(model)
    got = []
    scores = liger_trainer.head.scores
    stock = scores.targets_on_host
    monkeypatch.setattr(scores, "targets_on_host", lambda values: got.append(values) or stock(values))
    monkeypatch.setattr(ModelCall, "labels_on_host", lambda call: VALUES[:, 1:])
    ids = VALUES.clamp(min=0)
    model(input_ids=ids, labels=VALUES, fused_lm_head=True)
    assert len(got) == 1 and torch.equal(got[0], VALUES[:, 1:])
