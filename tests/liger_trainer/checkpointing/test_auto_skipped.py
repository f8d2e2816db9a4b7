"""`activation_checkpointing: auto` in a trainer that skips batches, also the one that is measured."""

import auto_runs
import pytest
import torch
from auto_runs import build, memory_with, rows_of_one_length, same_bits, train
from counted_memory import Carries, CountedMemory

from liger_trainer import LigerTrainer

MEASURED = 1  # the number of the first micro-batch that is measured


class WithoutTheModel(LigerTrainer):
    """The loss of one batch does not come from the model."""

    skips = MEASURED

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return torch.zeros((), requires_grad=True) * 1 if self.state.global_step == self.skips else loss


class AfterAnError(LigerTrainer):
    """An error in the forward pass of one batch is caught, and the first row trained alone."""

    skips = MEASURED

    def compute_loss(self, model, inputs, *args, **kwargs):
        if self.state.global_step != self.skips:
            return super().compute_loss(model, inputs, *args, **kwargs)

        def fail(*_):
            raise ValueError("this row is no good")

        hook = self.model.model.layers[3].mlp.register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="no good"):
            super().compute_loss(model, inputs, *args, **kwargs)
        hook.remove()
        return super().compute_loss(model, {name: x[:1] for name, x in inputs.items()}, *args, **kwargs)


@pytest.mark.parametrize("skips", [MEASURED, MEASURED + 1], ids=["measured", "planned"])
@pytest.mark.parametrize("trainer_class", [WithoutTheModel, AfterAnError])
def test_a_batch_that_is_skipped(trainer_class, skips, tmp_path, monkeypatch):
    """The next one is measured, and layers keep their activations from then on."""
    monkeypatch.setattr(auto_runs, "uneven_rows", rows_of_one_length)
    monkeypatch.setattr(trainer_class, "skips", skips)
    options = {"max_steps": 5, "gradient_accumulation_steps": 1, "trainer_class": trainer_class}
    want = train(build(tmp_path, False, **options))
    trainer = build(tmp_path, "auto", memory_with(Carries()), **options)
    assert same_bits(train(trainer), want)
    assert trainer.checkpointing.kept == auto_runs.LAYERS


class WithoutTheEleventh(LigerTrainer):
    """A trainer whose steps catch an error, which one micro-batch has."""

    number = 0

    def training_step(self, *args, **kwargs):
        self.number += 1
        try:
            return super().training_step(*args, **kwargs)
        except ValueError:
            return torch.zeros(())

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        if self.number == 11:
            raise ValueError("this row is no good")
        return loss


def test_a_skipped_micro_batch_is_not_run_again(tmp_path):
    """The third one of the step does not fit. The first one is run again, and not the second."""
    options = {"max_steps": 4, "gradient_accumulation_steps": 3, "trainer_class": WithoutTheEleventh}
    want, failures = train(build(tmp_path, False, **options)), []
    trainer = build(tmp_path, "auto", CountedMemory(), **options)

    def fail(weight):
        if trainer.number == 12 and not failures:
            failures.append(weight)
            raise torch.OutOfMemoryError("CUDA out of memory.")

    trainer.model.model.layers[2].mlp.up_proj.weight.register_post_accumulate_grad_hook(fail)
    assert same_bits(train(trainer), want)
    assert trainer.checkpointing.run_again == 1
