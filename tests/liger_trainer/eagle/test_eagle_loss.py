"""The loss of `LigerEagleTrainer` against EAGLE-3 written out in float64: value, every gradient, metrics."""

import pytest
import torch
from eagle_brute_force import brute_force, eagle_target, eagle_trainer, with_random_drafter
from medusa_brute_force import packed_batch, ragged_batch

from liger_trainer.eagle.drafter import EagleDrafter
from liger_trainer.head.flat_rows import one_row
from liger_trainer.memory import rebuild
from liger_triton import rollout_attention

BATCHES = {"padded": ragged_batch, "packed": packed_batch}


def trained(model, tmp_path, batch, **options):
    """Loss, gradients of the drafter and metrics for one batch."""
    trainer = eagle_trainer(eagle_target(), tmp_path, **options)
    layers = trainer._layers
    trainer.model.eagle_drafter.load_state_dict(model.eagle_drafter.state_dict())
    loss = trainer.compute_loss(trainer.model.train(), dict(batch))
    loss.backward()
    gradients = {name: p.grad for name, p in trainer.model.eagle_drafter.named_parameters()}
    assert all(p.grad is None for n, p in trainer.model.named_parameters() if "eagle_drafter" not in n)
    return float(loss), gradients, trainer._mean_metrics("train"), layers


def assert_same(got, want, tolerance=1e-5):
    loss, gradients, metrics, _ = got
    assert loss == pytest.approx(want[0], rel=tolerance)
    assert gradients.keys() == want[1].keys()
    for name, grad in gradients.items():
        error = float((grad - want[1][name]).norm() / want[1][name].norm())
        assert want[1][name].norm() > 0 and error < tolerance, f"{name}: relative error {error:.1e}"
    for k, (step_loss, accuracy, count) in enumerate(want[2], 1):
        assert count > 0
        assert metrics[f"eagle_step{k}_loss"] == pytest.approx(step_loss, rel=tolerance)
        assert metrics[f"eagle_step{k}_accuracy"] == pytest.approx(accuracy)


@pytest.mark.diagonal
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", BATCHES)
def test_matches_float64(kind, recompute, tmp_path):
    batch = BATCHES[kind]()
    model = with_random_drafter(eagle_target())
    want = brute_force(model, batch, steps=3, decay=0.7)
    assert_same(trained(model, tmp_path, batch, gradient_checkpointing=recompute), want)


def test_seven_steps_and_rows_that_are_shorter(tmp_path):
    """Rows with fewer tokens than steps have targets for the first steps only."""
    batch = packed_batch(lengths=(9, 3, 12, 2))
    model = with_random_drafter(eagle_target())
    assert_same(trained(model, tmp_path, batch, eagle_steps=7), brute_force(model, batch, steps=7, decay=0.7))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("gather_below", [0.95, 0.0], ids=["few", "all"])
def test_rollouts_start_where_something_is_learned(gather_below, recompute, monkeypatch, tmp_path):
    """The tokens of prompts are keys and no more. Drafting from all tokens gives the same loss and gradients."""
    monkeypatch.setattr("liger_trainer.eagle.loss.GATHER_BELOW", gather_below)
    batch = packed_batch(lengths=(12, 5, 9))
    batch["labels"][batch["position_ids"] < 5] = -100
    model = with_random_drafter(eagle_target())
    sizes = []
    forward = EagleDrafter.forward

    def counted(*args):
        outputs = forward(*args)
        sizes.extend(len(x) for x in outputs)
        return outputs

    monkeypatch.setattr(EagleDrafter, "forward", counted)
    got = trained(model, tmp_path, batch, gradient_checkpointing=recompute)
    monkeypatch.undo()
    assert_same(got, brute_force(model, batch, steps=3, decay=0.7))
    known = batch["labels"].ne(-100) & model.eagle_drafter.t2d[batch["labels"].clamp(min=0)]
    wanted = {t - ahead for t in known[0].nonzero()[:, 0].tolist() for ahead in (2, 3, 4)}
    wanted = {t for t in wanted if t >= 0}
    if gather_below:
        assert set(sizes) == {len(wanted)} and len(wanted) < 20
    else:
        assert set(sizes) == {26}


def test_what_is_rebuilt_gives_the_same_gradients(monkeypatch, tmp_path):
    """Large tensors are computed again in the backward pass. Here every tensor counts as large."""
    batch = packed_batch(lengths=(9, 3))
    model = with_random_drafter(eagle_target())
    kept = trained(model, tmp_path, batch)
    asked = []
    get = rebuild._Rebuilt.get

    def counted(self, shape):
        asked.append(shape)
        return get(self, shape)

    monkeypatch.setattr(rebuild._Rebuilt, "get", counted)
    monkeypatch.setitem(rebuild.rebuildable.__kwdefaults__, "above", 0)
    monkeypatch.setattr(rebuild.call_rebuilding, "__defaults__", (False, 0))
    rebuilt = trained(model, tmp_path, batch)
    assert len(asked) == 3 * 2, "of three steps the product of the MLP and the norm in front of the attention"
    for name, grad in rebuilt[1].items():
        assert torch.equal(grad, kept[1][name]), name


@pytest.mark.parametrize("gather_below", [0.95, 0.0], ids=["few", "all"])
def test_later_steps_keep_keys_and_values_alone(gather_below, monkeypatch, tmp_path):
    """Not the memory of the queries that were computed with them."""
    monkeypatch.setattr("liger_trainer.eagle.loss.GATHER_BELOW", gather_below)
    seen = []

    def attention(q, k, v, own_keys, own_values, *rest, **options):
        seen.extend([k, v, *own_keys, *own_values])
        return rollout_attention(q, k, v, own_keys, own_values, *rest, **options)

    monkeypatch.setattr("liger_trainer.eagle.drafter.rollout_attention", attention)
    trained(with_random_drafter(eagle_target()), tmp_path, packed_batch(lengths=(12, 5, 9)))
    assert len(seen) == 2 * (2 + 3)
    for x in seen:
        assert x.is_contiguous() and x.untyped_storage().nbytes() == x.numel() * x.element_size()


def test_rows_padded_on_the_left(tmp_path):
    batch = ragged_batch(4)
    model = with_random_drafter(eagle_target())
    want = brute_force(model, batch, steps=3, decay=0.7)
    moved = {name: torch.empty_like(x) for name, x in batch.items()}
    for b, mask in enumerate(batch["attention_mask"]):
        for name, x in batch.items():
            moved[name][b] = x[b].roll(int((mask == 0).sum()))
    moved["position_ids"] = (moved["attention_mask"].cumsum(1) - 1).clamp(min=0)
    assert (moved["attention_mask"][:, 0] == 0).any()
    assert_same(trained(model, tmp_path, moved), want)


def test_the_loss_does_not_depend_on_how_a_batch_is_split(tmp_path):
    batch = ragged_batch(4)
    trainer = eagle_trainer(eagle_target(), tmp_path)
    count = batch["labels"][:, 1:].ne(-100).sum()
    whole = trainer.compute_loss(trainer.model.train(), dict(batch), num_items_in_batch=count)
    parts = []
    for b in range(4):
        row = {name: x[b : b + 1] for name, x in batch.items()}
        parts.append(trainer.compute_loss(trainer.model, row, num_items_in_batch=count))
    torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=0)


def test_nothing_to_guess(tmp_path):
    """A batch without labels gives a zero loss, and zero gradients because DDP waits for them."""
    batch = ragged_batch(2)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    trainer = eagle_trainer(eagle_target(), tmp_path)
    loss = trainer.compute_loss(trainer.model.train(), batch)
    loss.backward()
    assert loss == 0
    for name, p in trainer.model.eagle_drafter.named_parameters():
        assert p.grad is not None and not p.grad.any(), name


def test_a_model_that_caps_its_logits_is_refused(tmp_path):
    trainer = eagle_trainer(eagle_target("gemma2"), tmp_path)
    with pytest.raises(ValueError, match=r"caps its logits at 5.0, but servers do not do that"):
        trainer.compute_loss(trainer.model.train(), ragged_batch(2))


def test_under_autocast_hidden_states_are_in_16_bits():
    """The weights are fp32. In the norms too, they are rounded before they meet the hidden states."""
    drafter = with_random_drafter(eagle_target()).eagle_drafter.float()
    config = drafter.config
    rows = one_row(torch.arange(3, 40)[None])
    states = torch.randn(37, 3 * config.hidden_size).bfloat16()
    embedding = torch.randn(config.vocab_size, config.hidden_size).bfloat16()
    seen = []
    for norm in (drafter.norm, drafter.midlayer.input_layernorm, drafter.midlayer.hidden_norm):
        norm.register_forward_hook(lambda _, args, normed: seen.extend([args[0].dtype, normed.dtype]))
    drafter.midlayer.mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        outputs = drafter(states, embedding, rows, 3)
    seen += [x.dtype for x in outputs]
    assert set(seen) == {torch.bfloat16} and len(seen) == 2 * (1 + 3 + 3) + 3 + 3
    sum(x.float().sum() for x in outputs).backward()
    assert {p.grad.dtype for name, p in drafter.named_parameters() if name != "lm_head.weight"} == {torch.float32}
