"""An EAGLE-3 drafter on a target with real tokens only trains as on padded batches."""

import copy

import pytest
import torch
from eagle_brute_force import eagle_target, eagle_trainer


def logged(model, folder, varlen, side, tokens):
    torch.manual_seed(1)
    trainer = eagle_trainer(
        copy.deepcopy(model),
        folder,
        liger_config={"varlen_attention": varlen},
        max_steps=3,
        optim="sgd",
        learning_rate=0.1,
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
    names = ("loss", "grad_norm", "eagle_step1_loss", "eagle_step3_accuracy")
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return torch.tensor([[log[name] for name in names] for log in logs], dtype=torch.float64)


@pytest.mark.parametrize("side", ["right", "left"])
def test_losses_equal_padded_batches(side, tmp_path, tokens):
    """The hooks that read hidden states see only real tokens, or padded rows."""
    model = eagle_target()
    model.set_attn_implementation("sdpa")
    want = logged(model, tmp_path / "padded", False, side, tokens)
    assert tokens == []
    got = logged(model, tmp_path / "varlen", True, side, tokens)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    assert len(tokens) == 3, "the target left padding out in each step"
