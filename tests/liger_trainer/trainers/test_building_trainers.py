"""Building a trainer leaves nothing behind in TRL's modules, in other threads, or after an error."""

import threading

import pytest
import trl.trainer.distillation_trainer as trl_distillation
import trl.trainer.sft_trainer as trl_sft
from tiny_models import tiny_model
from trainer_parity import assert_same_training, build, method_rows, one, ours
from trl import SFTTrainer

from liger_trainer import (
    LigerSFTTrainer,
    apply_liger,
)
from liger_trainer.head.module import head_options

NAMES = ("add_fused_lm_head", "BaseTunerLayer")


def test_a_class_between_ours_and_trls(tmp_path):
    """Behind ours, its `__init__` would call TRL's own, with TRL's head. Before ours, it works."""

    class Between(SFTTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)

    class Wrong(LigerSFTTrainer, Between):
        pass

    class Right(Between, LigerSFTTrainer):
        pass

    config = ours("SFT")[1]
    with pytest.raises(TypeError, match="Between.__init__ comes between.*Put Between before the Liger trainer"):
        one("SFT", (Wrong, config), tmp_path)
    assert one("SFT", (Right, config), tmp_path).uses_fused_head


def test_two_trainers_of_two_threads(tmp_path):
    stock = [getattr(trl_sft, name) for name in NAMES]
    barrier, trainers = threading.Barrier(2), {}

    def build(name):
        (tmp_path / name).mkdir()
        barrier.wait(30)
        trainers[name] = one("SFT", ours("SFT"), tmp_path / name)

    threads = [threading.Thread(target=build, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [getattr(trl_sft, name) for name in NAMES] == stock
    assert all(trainer.uses_fused_head and trainer.liger_report["rope"].swapped for trainer in trainers.values())
    for trainer in trainers.values():
        assert "entropy" in head_options(trainer.model).outputs


def test_the_distillation_loss_leaves_trl_s_module_alone(tmp_path):
    names = ("ChunkedDivergenceFunction", "_use_triton", "_chunked_divergence_loss")
    stock = [getattr(trl_distillation, name) for name in names]
    trainer, seen = one("Distillation", ours("Distillation"), tmp_path), []
    trainer.model.register_forward_hook(lambda *_: seen.append([getattr(trl_distillation, name) for name in names]))
    trainer.teacher_model.model.register_forward_hook(
        lambda *_: seen.append([getattr(trl_distillation, name) for name in names])
    )
    trainer.train()
    assert len(seen) > 1 and all(globals_seen == stock for globals_seen in seen)


@pytest.mark.parametrize("patched", [False, True], ids=["plain", "patched-before"])
def test_after_a_refusal_under_mixed_precision(patched, tmp_path):
    """accelerate wraps the reference while a trainer is built, but no model twice. Its autocast must keep working."""
    model, reference = tiny_model("llama"), tiny_model("llama", seed=7)
    if patched:
        apply_liger(reference)
    options = {"bf16": True, "max_steps": 2}

    def trainer(model, reference, **more):
        given = {"ref_model": reference}
        return build(*ours("DPO"), model, tmp_path, method_rows("DPO"), trainer_options=given, **options, **more)

    want = trainer(model, reference)
    with pytest.raises(ValueError, match="label_smoothing_factor is 0.1"):
        trainer(model, reference, label_smoothing_factor=0.1)
    assert_same_training(trainer(model, reference), want, rtol=0.0)
