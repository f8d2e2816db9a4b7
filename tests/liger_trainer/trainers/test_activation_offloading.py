"""TRL's `activation_offloading` leaves the head fused. Here it moves tensors from host memory to host memory."""

import functools

import pytest
import torch
import trl.trainer.sft_trainer as trl_sft
from tiny_models import tiny_model
from trainer_parity import run

from liger_trainer import LigerSFTTrainer

MOVED = []


@pytest.fixture(autouse=True)
def offloads_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cpu"))
    stock = functools.partial(trl_sft.get_act_offloading_ctx_manager, use_pin_memory=False, use_streams=False)

    def made(**options):
        manager = stock(**options, min_offload_size=0)
        pack = manager.pack_hook
        manager.pack_hook = lambda tensor: MOVED.append(tensor.shape) or pack(tensor)
        return manager

    monkeypatch.setattr(trl_sft, "get_act_offloading_ctx_manager", made)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_checkpointing": True},
        {"liger_config": {"rebuild_above_mib": 0}},
        {"gradient_checkpointing": True, "optimizer_in_backward": True, "max_grad_norm": 0.0},
    ],
    ids=["checkpointed", "rebuilt", "optimizer_in_backward"],
)
def test_the_head_stays_fused_and_the_numbers_the_same(options, tmp_path):
    model = tiny_model("llama", num_hidden_layers=1)
    want, _ = run(LigerSFTTrainer, model, tmp_path, **options)
    MOVED.clear()
    got, trainer = run(LigerSFTTrainer, model, tmp_path, activation_offloading=True, **options)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    assert MOVED and all(shape[-1:] != (131,) for shape in MOVED), "logits, or the rows of the head's weight"
    head = trainer.liger_report["fused_linear_cross_entropy"]
    assert head.swapped and not head.skipped
