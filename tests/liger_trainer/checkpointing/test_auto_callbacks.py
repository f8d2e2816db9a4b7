"""`activation_checkpointing: auto` while a callback changes which weights are trained."""

import pytest
import torch
from auto_runs import At, build, same_bits, train
from counted_memory import CountedMemory
from transformers import TrainerCallback


class OneLayerAfterTheOther(TrainerCallback):
    """Every two steps other layers are trained, as in LISA; in the first two nothing but the first and the fourth."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        model.requires_grad_(False)
        for number, layer in enumerate(model.model.layers):
            layer.requires_grad_(number % 3 == state.global_step // 2 % 3)


@pytest.mark.parametrize("second", [False, True], ids=["first-micro-batch", "second-micro-batch"])
def test_out_of_memory_when_weights_have_gradients_that_had_none_at_first(second, tmp_path):
    """What they were given before the lack of memory is taken away again."""
    failures = []

    def fails_once(weight):
        if not failures:
            failures.append(weight.grad)
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def run(checkpointing, memory=None):
        trainer = build(tmp_path, checkpointing, memory)
        trainer.create_optimizer()  # of all weights
        trainer.add_callback(OneLayerAfterTheOther())
        if memory is not None:
            weight = trainer.model.model.layers[2].self_attn.o_proj.weight
            trainer.add_callback(At(5, lambda: weight.register_post_accumulate_grad_hook(fails_once), second))
        return train(trainer), trainer.checkpointing

    want, _ = run(False)
    got, chosen = run("auto", CountedMemory())
    assert len(failures) == chosen.run_again == 1
    assert same_bits(got, want)
