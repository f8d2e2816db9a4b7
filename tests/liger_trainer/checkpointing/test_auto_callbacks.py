"""`activation_checkpointing: auto` where which weights are trained changes: by a callback, or for a reference."""

import dpo_runs
import pytest
import torch
from auto_runs import At, build, same_bits, train
from counted_memory import CountedMemory
from peft import LoraConfig
from tiny_models import tiny_model
from transformers import TrainerCallback

from liger_trainer import LigerDPOTrainer


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


def test_an_adapter_that_is_switched_off_for_the_reference(tmp_path):
    """PEFT takes `requires_grad` from its weights meanwhile. That is over when the next micro-batch begins."""

    def run(checkpointing, memory=None):
        trainer = dpo_runs.build(
            LigerDPOTrainer, tiny_model("llama"), tmp_path, (2, 1), dpo_runs.pairs(16), gradient_checkpointing=False,
            activation_checkpointing=checkpointing,
            trainer_options={"peft_config": LoraConfig(r=4, target_modules=dpo_runs.LORA)},
        )  # fmt: skip
        trainer.device_memory = memory
        return train(trainer), trainer.checkpointing

    want, _ = run(False)
    got, chosen = run("auto", CountedMemory())
    assert same_bits(got, want)
    assert chosen.most > 0
