"""`activation_checkpointing: auto` in a trainer that skips batches, including the measured one."""

import memory_runs
import pytest
import torch
from memory_runs import Carries, build, memory_with, rows_of_one_length, same_bits, train

from liger_trainer import LigerTrainer

MEASURED = 1  # the number of the first measured micro-batch


class WithoutTheModel(LigerTrainer):
    """The loss of one batch does not come from the model."""

    skips = MEASURED

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return torch.zeros((), requires_grad=True) * 1 if self.state.global_step == self.skips else loss


class AfterAnError(LigerTrainer):
    """Catches an error in the forward pass of one batch, and trains on the first row alone."""

    skips = MEASURED

    def compute_loss(self, model, inputs, *args, **kwargs):
        if self.state.global_step != self.skips:
            return super().compute_loss(model, inputs, *args, **kwargs)

        def fail(*_):
            raise ValueError("this row is broken")

        hook = self.model.model.layers[3].mlp.register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="this row is broken"):
            super().compute_loss(model, inputs, *args, **kwargs)
        hook.remove()
        return super().compute_loss(model, {name: x[:1] for name, x in inputs.items()}, *args, **kwargs)


@pytest.mark.diagonal
@pytest.mark.parametrize("skips", [MEASURED, MEASURED + 1], ids=["measured", "planned"])
@pytest.mark.parametrize("trainer_class", [WithoutTheModel, AfterAnError])
def test_a_batch_that_is_skipped(trainer_class, skips, tmp_path, monkeypatch):
    """The next batch is measured, and layers keep their activations from then on."""
    monkeypatch.setattr(memory_runs, "uneven_rows", rows_of_one_length)
    monkeypatch.setattr(trainer_class, "skips", skips)
    options = {"max_steps": 5, "gradient_accumulation_steps": 1, "trainer_class": trainer_class}
    want = train(build(tmp_path, False, **options))
    trainer = build(tmp_path, "auto", memory_with(Carries()), **options)
    assert same_bits(train(trainer), want)
    assert trainer.checkpointing.kept == memory_runs.LAYERS
