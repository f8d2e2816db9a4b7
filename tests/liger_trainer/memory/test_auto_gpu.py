"""`activation_checkpointing: auto` on a GPU gives the same bits, whatever is kept or waits on the host.

CUDA_VISIBLE_DEVICES=0 pytest -m gpu tests/liger_trainer/memory/test_auto_gpu.py
"""

import gc
import os

import pytest
import torch
from memory_runs import At, same_bits
from tiny_models import ragged_rows
from transformers import LlamaConfig, LlamaForCausalLM, default_data_collator

from liger_trainer import LigerTrainer, LigerTrainingArguments
from liger_trainer.memory.device_memory import GIB

# Without it, cuBLAS may add in another order each time. PyTorch reads it at the first product on a GPU.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LENGTH = 2048


@pytest.fixture(autouse=True)
def deterministic():
    """Raise on nondeterminism: with `warn_only`, PyTorch's attention sums its gradients in varying order."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.set_per_process_memory_fraction(1.0)


def train(out, checkpointing, budget=None, callbacks=()):
    """Return losses and weights, the plan, and the peak of allocated bytes; assert that all of them are free again."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=2,
        use_cache=False,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    rows = [{"input_ids": torch.tensor((row["input_ids"] * LENGTH)[:LENGTH])} for row in ragged_rows(64)]
    args = LigerTrainingArguments(
        output_dir=str(out),
        max_steps=7,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        bf16=True,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        activation_checkpointing=checkpointing,
        memory_budget=budget,
        remove_unused_columns=False,
        cuda_graphs="false",  # captured rows of one length use another attention kernel; 'auto' is uncaptured
    )
    trainer = LigerTrainer(
        model=model,
        args=args,
        train_dataset=[row | {"labels": row["input_ids"]} for row in rows],
        data_collator=default_data_collator,
        callbacks=list(callbacks),
    )
    torch.cuda.reset_peak_memory_stats()
    trainer.train()
    chosen = trainer.checkpointing
    highest = max(torch.cuda.max_memory_allocated(), 0 if chosen is None else chosen.highest)
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    weights = {name: weight.cpu() for name, weight in model.state_dict().items()}
    del trainer, model
    gc.collect()
    torch.cuda.empty_cache()
    return (losses, weights), chosen, highest


def test_the_same_bits(tmp_path):
    (want, _, most), (full, _, least) = (train(tmp_path, checkpointing) for checkpointing in (False, True))
    assert same_bits(full, want)
    between = least + 0.2 * (most - least)
    on_host, chosen, highest = train(tmp_path, "auto", between / GIB)
    assert same_bits(on_host, want)
    assert chosen.most_on_host > 0 and highest <= between

    def less_memory():
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((least + 0.5 * (most - least)) / total)

    fewer, chosen, _ = train(tmp_path, "auto", callbacks=[At(4, less_memory)])
    assert same_bits(fewer, want)
    assert chosen.least < chosen.most == 12
