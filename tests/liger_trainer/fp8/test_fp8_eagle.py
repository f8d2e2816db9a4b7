"""`fp8` for an EAGLE-3 drafter quantises the frozen model to FP8. Needs no GPU."""

import pytest
import torch
from eagle_brute_force import DEPTH, eagle_target, eagle_trainer
from frozen_bases import fresh_state

from liger_trainer.fp8.frozen_layer import FrozenFloat8Linear

pytestmark = pytest.mark.usefixtures("fresh_accelerator", "no_torchao", "any_device")


def losses(trainer):
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def test_the_target_is_in_fp8(tmp_path):
    """Its linear layers are, but neither the LM head nor the drafter. Only the drafter trains."""
    torch.manual_seed(0)
    want = losses(eagle_trainer(eagle_target(), tmp_path))
    fresh_state()
    torch.manual_seed(0)
    trainer = eagle_trainer(eagle_target(), tmp_path, fp8=True)
    frozen = [name for name, module in trainer.model.named_modules() if type(module) is FrozenFloat8Linear]
    assert len(frozen) == 7 * DEPTH
    assert not any("eagle_drafter" in name or "lm_head" in name for name in frozen)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    got = losses(trainer)
    assert got == pytest.approx(want, rel=0.1) and got != pytest.approx(want, rel=1e-6)
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if "eagle_drafter" in name}
