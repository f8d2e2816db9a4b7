"""`activation_checkpointing: auto` with an adapter that is disabled for the reference."""

from memory_runs import CountedMemory, same_bits, train
from peft import LoraConfig
from tiny_models import ragged_pairs, tiny_model
from trainer_parity import LORA, build_dpo

from liger_trainer import LigerDPOTrainer


def test_an_adapter_that_is_switched_off_for_the_reference(tmp_path):
    """Meanwhile PEFT turns off its weights' `requires_grad`. It is back on when the next micro-batch starts."""

    def run(checkpointing, memory=None):
        trainer = build_dpo(
            LigerDPOTrainer,
            tiny_model("llama"),
            tmp_path,
            (2, 1),
            ragged_pairs(16),
            gradient_checkpointing=False,
            activation_checkpointing=checkpointing,
            trainer_options={"peft_config": LoraConfig(r=4, target_modules=LORA)},
        )
        trainer.device_memory = memory
        return train(trainer), trainer.checkpointing

    want, _ = run(False)
    got, chosen = run("auto", CountedMemory())
    assert same_bits(got, want)
    assert chosen.most > 0
