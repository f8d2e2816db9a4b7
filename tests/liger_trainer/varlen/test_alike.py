"""Layers that keep a state run rows of very different lengths in groups of like length."""

import pytest
import torch
from torch import nn
from varlen_batches import ON, assert_same_with_states, batch, drawn_model, rows_of

from liger_trainer import apply_liger
from liger_trainer.varlen import alike, state_layers
from liger_trainer.varlen.alike import groups_by_length
from liger_trainer.varlen.rows import NotForRows, Rows
from liger_trainer.varlen.state_layers import run_side_by_side

CPU = torch.device("cpu")
LENGTHS = (7, 1, 20, 13, 19, 2)
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("granitemoehybrid", "nemotron_h")]


@pytest.fixture
def worthwhile(monkeypatch):
    """Every cut that saves padding is made."""
    monkeypatch.setattr(alike, "WORTHWHILE", 1)


def padded_tokens(lengths, groups):
    return sum(len(group) * max(lengths[row] for row in group) for group in groups)


def test_one_group_where_padding_is_small():
    assert groups_by_length([500]) == [[0]]
    assert groups_by_length([512] * 8) == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert groups_by_length([600, 100, 300, 250]) == [[0, 1, 2, 3]]


def test_groups_have_rows_of_like_length():
    lengths = [60, 2000, 64, 500, 58, 480, 61, 1900]
    assert groups_by_length(lengths) == [[1, 7], [0, 2, 3, 4, 5, 6]]
    lengths = [64] * 40 + [900, 300, 310, 1000]
    assert groups_by_length(lengths) == [[40, 41, 42, 43], [*range(40)]]


@pytest.mark.parametrize("seed", range(20))
def test_groups_hold_every_row_once_and_each_cut_saves_enough(seed):
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 2049, (int(torch.randint(1, 60, (), generator=draw)),), generator=draw).tolist()
    groups = groups_by_length(lengths)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    assert all(group == sorted(group) for group in groups)
    assert 1 <= len(groups) <= alike.MOST_GROUPS
    saved = len(lengths) * max(lengths) - padded_tokens(lengths, groups)
    assert saved >= (len(groups) - 1) * alike.WORTHWHILE


class Running(nn.Module):
    """Adds up the tokens of each row, and notes the batches it has seen."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, hidden_states, positions=None, mask=None, scale=2.0):
        self.seen.append(tuple(hidden_states.shape[:2]))
        total = (hidden_states + positions[0]).cumsum(1) * scale
        return total if mask is None else total * mask[..., None], None


@pytest.mark.parametrize("batch_rows", [1, 2])
def test_outputs_and_gradients_of_groups_are_those_of_all_rows(batch_rows, worthwhile):
    lengths = [*LENGTHS, 40]
    rows, layer = Rows(lengths, CPU, batch_rows), Running()
    shape = (batch_rows, rows.tokens // batch_rows, 3)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    call = {"hidden_states": x, "positions": (torch.randn(shape, dtype=torch.float64),), "mask": None, "scale": 3.0}
    got, nothing = run_side_by_side(layer, call, ["mask"], rows)
    assert nothing is None
    assert len(layer.seen) == len(rows.alike) == alike.MOST_GROUPS
    assert sum(count * longest for count, longest in layer.seen) < len(lengths) * max(lengths)
    alone = (x + call["positions"][0]).flatten(0, 1).split(lengths)
    wanted = torch.cat([row.cumsum(0) for row in alone]).view(shape) * 3.0
    torch.testing.assert_close(got, wanted)
    upstream = torch.randn_like(got)
    got_gradient, wanted_gradient = (torch.autograd.grad(out, x, upstream)[0] for out in (got, wanted))
    torch.testing.assert_close(got_gradient, wanted_gradient)


def test_a_tensor_that_is_not_of_tokens_cannot_be_joined(worthwhile):
    rows = Rows(list(LENGTHS), CPU)
    call = {"hidden_states": torch.randn(1, rows.tokens, 3), "mask": None}
    with pytest.raises(NotForRows, match="not of tokens"):
        run_side_by_side(lambda hidden_states, mask: (hidden_states, hidden_states.sum()), call, ["mask"], rows)


@pytest.mark.diagonal
@pytest.mark.parametrize("checkpointing", [None, True, False])
@pytest.mark.parametrize("name", ["bamba", "qwen3_5_text", *SLOW])
def test_a_model_in_groups_is_the_model_on_rows_alone(name, checkpointing, worthwhile, monkeypatch):
    model = drawn_model(name)
    call = batch(LENGTHS)
    count = (call["labels"][:, 1:] != -100).sum()
    model.zero_grad()
    total = torch.zeros(())
    for row in rows_of(call):
        alone = {name: torch.tensor([ids]) for name, ids in row.items()}
        if (alone["labels"][:, 1:] != -100).any():
            loss = model(**alone, num_items_in_batch=count, use_cache=False).loss
            loss.backward()
            total = total + loss.detach()
    wanted = total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert not apply_liger(model, ON)["varlen_attention"].skipped
    grouped = []
    joined = state_layers._joined
    monkeypatch.setattr(state_layers, "_joined", lambda found, rows: grouped.append(len(found)) or joined(found, rows))
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
        model.enable_input_require_grads()
        model.train()
    model.zero_grad()
    loss = model(**call, use_cache=False).loss
    loss.backward()
    got = loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert set(grouped) == {alike.MOST_GROUPS}
    assert_same_with_states(got, wanted)
