"""What a micro-batch has changed is as it was before when it is run again, because it ran out of memory."""

import pytest
import torch
from auto_runs import At, build, same_bits, train
from counted_memory import CountedMemory

from liger_trainer import LigerTrainer


class Counting(LigerTrainer):
    """Counts tokens in tensors and in numbers, private and public, and shifts the labels that it is given in place."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._tokens, self.tokens, self.calls = torch.zeros(()), 0, 0
        self._of_each = {"train": [torch.zeros(())]}

    def compute_loss(self, model, inputs, *args, **kwargs):
        inputs["labels"][inputs["labels"] > 3] -= 1
        self._tokens += inputs["labels"].numel()
        self._of_each["train"][0] += inputs["labels"].sum()
        self.tokens += inputs["labels"].numel()
        self.calls += 1
        return super().compute_loss(model, inputs, *args, **kwargs)

    @property
    def counted(self):
        return self._tokens.item(), self._of_each["train"][0].item(), self.tokens, self.calls


def failing_once(trainer):
    """Runs out of memory once, in the backward pass, from when it is called."""
    failures = []

    def fail(weight):
        if not failures:
            failures.append(weight)
            raise torch.OutOfMemoryError("CUDA out of memory.")

    return lambda: trainer.model.model.layers[2].mlp.up_proj.weight.register_post_accumulate_grad_hook(fail)


def run_again(tmp_path, trainer_class, second):
    trainer = build(tmp_path, "auto", CountedMemory(), trainer_class=trainer_class)
    trainer.add_callback(At(4, failing_once(trainer), second))
    found = train(trainer)
    assert trainer.checkpointing.run_again == 1
    return found, trainer


@pytest.mark.parametrize("second", [False, True], ids=["first-micro-batch", "second-micro-batch"])
def test_what_is_counted_and_changed_in_place(second, tmp_path):
    ordinary = build(tmp_path, False, trainer_class=Counting)
    want = train(ordinary)
    got, trainer = run_again(tmp_path, Counting, second)
    assert same_bits(got, want)
    assert trainer.counted == ordinary.counted and trainer.calls == 16


def test_a_large_tensor_that_is_changed_in_place(tmp_path, monkeypatch):
    """Its values are not kept, so that the micro-batch would not be the same."""
    monkeypatch.setattr("liger_trainer.checkpointing.redo._OF_BATCH", 100)
    with pytest.raises(RuntimeError, match=r"has changed a tensor in place that it was given, \(3, \d+\) torch.int64"):
        run_again(tmp_path, Counting, False)
    want = train(build(tmp_path, False))
    assert same_bits(run_again(tmp_path, LigerTrainer, True)[0], want), "one that is not changed is no hindrance"
