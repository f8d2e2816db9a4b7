"""Medusa heads on real tokens only train as on padded batches."""

import copy

import pytest
import torch
from medusa_brute_force import medusa_trainer
from tiny_models import tiny_model


def logged(model, folder, varlen, side, tokens, **options):
    trainer = medusa_trainer(
        copy.deepcopy(model), folder, liger_config={"varlen_attention": varlen}, max_steps=3, logging_steps=1, **options
    )
    collate = trainer.data_collator

    def padded(rows):
        batch = collate(rows)
        if side == "right":
            return batch
        turned = {}
        for name, x in batch.items():
            width = batch["attention_mask"].sum(1)
            turned[name] = torch.stack([row.roll(x.shape[1] - int(n)) for row, n in zip(x, width, strict=True)])
        return turned

    trainer.data_collator = padded
    tokens.clear()  # left from the proof
    trainer.train()
    names = ("loss", "grad_norm", "medusa_head1_loss", "medusa_head2_accuracy")
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return torch.tensor([[log[name] for name in names] for log in logs], dtype=torch.float64)


@pytest.mark.diagonal
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("stage, targets", [(1, "hard"), (1, "soft"), (2, "hard")])
def test_losses_equal_padded_batches(stage, targets, side, tmp_path, tokens):
    model = tiny_model("llama")
    model.set_attn_implementation("sdpa")
    options = {"medusa_stage": stage, "medusa_targets": targets, "optim": "sgd", "learning_rate": 0.1}
    want = logged(model, tmp_path / "padded", False, side, tokens, **options)
    assert tokens == []
    got = logged(model, tmp_path / "varlen", True, side, tokens, **options)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    # In two of the batches padded on the left, the first token of a row has a label, which padding predicts.
    assert len(tokens) == (3 if side == "right" else 1)
