"""The trainers on a GPU, where the Triton kernels run: CUDA_VISIBLE_DEVICES=0 pytest tests/liger_trainer/test_gpu.py"""

import copy

import pytest
import torch
from datasets import Dataset
from tiny_models import PARITY_SET, collate, ragged_rows, tiny_model, tiny_tokenizer
from transformers import Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from liger_trainer import LigerSFTConfig, LigerSFTTrainer, LigerTrainer, LigerTrainingArguments, apply_liger

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def run(trainer_class, args_class, model, tmp_path, **options):
    sft = issubclass(trainer_class, SFTTrainer)
    args = args_class(
        output_dir=str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=1,
        learning_rate=1e-2, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
        **({"bf16": False, "gradient_checkpointing": False} | options),
    )  # fmt: skip
    rows = ragged_rows()
    if sft:
        extra = {"train_dataset": Dataset.from_list(rows), "processing_class": tiny_tokenizer()}
    else:
        extra = {"train_dataset": rows, "data_collator": collate}
    trainer = trainer_class(model=copy.deepcopy(model), args=args, **extra)
    trainer.train()
    steps = [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]
    return torch.tensor(steps, dtype=torch.float64), trainer


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("model_type", PARITY_SET)
def test_fp32_parity(model_type, checkpointing, tmp_path):
    model = tiny_model(model_type)
    options = {"gradient_checkpointing": checkpointing}
    for ours, stock in (
        ((LigerTrainer, LigerTrainingArguments), (Trainer, TrainingArguments)),
        ((LigerSFTTrainer, LigerSFTConfig), (SFTTrainer, SFTConfig)),
    ):
        want, _ = run(*stock, model, tmp_path, **options)
        got, _ = run(*ours, model, tmp_path, **options)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=0)


def test_bf16_parity_and_the_kernels_that_ran(tmp_path):
    from torch.profiler import ProfilerActivity, profile

    model = tiny_model("llama", dtype=torch.bfloat16)
    want, _ = run(SFTTrainer, SFTConfig, model, tmp_path, bf16=True)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        got, _ = run(LigerSFTTrainer, LigerSFTConfig, model, tmp_path, bf16=True)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=0)
    ran = {event.key for event in profiler.key_averages()}
    for kernel in ("_rms_norm_fwd_kernel", "_rms_norm_bwd_kernel", "_rope_kernel", "_swiglu_fwd_kernel", "_row_kernel"):
        assert any(kernel in name for name in ran), f"{kernel} did not run"


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_compiled_step(model_type):
    model, batch = tiny_model(model_type).cuda().train(), {k: v.cuda() for k, v in collate(ragged_rows(4)).items()}
    apply_liger(model)
    want = model(**batch).loss
    want.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss = torch.compile(model, fullgraph=True)(**batch).loss
    loss.backward()
    torch.testing.assert_close(loss, want, rtol=1e-4, atol=0)
    for p, ref in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad, ref, rtol=1e-3, atol=1e-4 * ref.abs().max().item())
