"""`fp8` for an MTP head that trains alone quantises the frozen model to FP8. Needs no GPU."""

import pytest
import torch
from frozen_bases import fresh_state
from mtp_bases import SHAPES, mtp_trainer, write_base
from safetensors.torch import load_file

from liger_trainer.fp8.frozen_layer import FrozenFloat8Linear

pytestmark = pytest.mark.usefixtures("fresh_accelerator", "no_torchao", "any_device")


def test_the_model_is_in_fp8(tmp_path):
    """Its linear layers are, but neither the LM head nor the MTP head. The head alone trains, and keeps its dtype."""
    write_base(tmp_path / "base", layer_types=["full_attention"] * 2)
    losses = []
    for fp8 in (False, True):
        fresh_state()
        trainer = mtp_trainer(tmp_path / "base", tmp_path / str(fp8), alone=True, fp8=fp8)
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        trainer.train()
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    frozen = [name for name, module in trainer.model.named_modules() if type(module) is FrozenFloat8Linear]
    assert len(frozen) == 7 * 2
    assert not any("mtp." in name or "lm_head" in name for name in frozen)
    assert losses[1] == pytest.approx(losses[0], rel=0.1) and losses[1] != pytest.approx(losses[0], rel=1e-6)
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == SHAPES.keys()
    trainer.save_model()
    for name, tensor in load_file(tmp_path / "True" / "mtp.safetensors").items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, trainer.model.get_parameter(name)), name
