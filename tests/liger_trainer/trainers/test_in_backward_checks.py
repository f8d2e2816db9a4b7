"""Options that `optimizer_in_backward` excludes, when arguments and trainers are built."""

import pytest
import torch
from accelerate.utils import DistributedType
from memory_runs import make
from tiny_models import collate, ragged_rows, tiny_model
from transformers.optimization import Adafactor

from liger_trainer import LigerSFTConfig, LigerTrainer, LigerTrainingArguments
from liger_trainer.trainers.optimizer_in_backward import InBackward


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_grad_norm": 1.0}, r"max_grad_norm is 1.0.*Set max_grad_norm: 0 \(its default is 1.0\)"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps is 4.*per_device_train_batch_size"),
        ({"fp16": True}, "fp16 is True.*Set bf16: true"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size is True.*Remove it"),
        ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint is True.*Remove it"),
        ({"optimizer_in_backward": "yes"}, "optimizer_in_backward is 'yes'; expected true or false"),
    ],
    ids=str,
)
def test_fields(options, says, tmp_path):
    given = {"max_grad_norm": 0.0, "optimizer_in_backward": True, "output_dir": str(tmp_path), "use_cpu": True}
    for args_class in (LigerTrainingArguments, LigerSFTConfig):
        with pytest.raises(ValueError, match=says):
            args_class(**(given | {"bf16": False} | options))
    LigerTrainingArguments(**(given | options | {"optimizer_in_backward": False}))


def test_the_default_of_max_grad_norm_is_refused_too(tmp_path):
    with pytest.raises(ValueError, match=r"max_grad_norm is 1.0.*or set optimizer_in_backward: false"):
        LigerTrainingArguments(output_dir=str(tmp_path), optimizer_in_backward=True, use_cpu=True)


class Own(torch.optim.AdamW):
    """A subclass that may look at all gradients."""


def trainer_of(tmp_path, **options):
    args = LigerTrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        optimizer_in_backward=True,
        max_grad_norm=0.0,
        use_liger=False,
        report_to="none",
        max_steps=2,
        save_strategy="no",
    )
    given = {"model": tiny_model("llama"), "args": args, "train_dataset": ragged_rows(), "data_collator": collate}
    return LigerTrainer(**(given | options))


@pytest.mark.parametrize("kind", [Own, torch.optim.LBFGS, torch.optim.Muon], ids=str)
def test_a_user_s_optimizers(kind, tmp_path):
    model = tiny_model("llama")
    weights = [p for p in model.parameters() if p.ndim == 2]
    with pytest.raises(ValueError, match=f"the optimizer is a .*{kind.__name__}, which may look at several"):
        trainer_of(tmp_path, model=model, optimizers=(kind(weights), None))
    with pytest.raises(ValueError, match=f"the optimizer is a .*{kind.__name__}, which may look at several"):
        trainer_of(tmp_path, optimizer_cls_and_kwargs=(kind, {"lr": 1e-3}))
    for known in (torch.optim.Adam(weights), Adafactor(weights)):
        trainer_of(tmp_path, model=model, optimizers=(known, None))


def test_an_optimizer_that_appears_in_training(tmp_path):
    class Making(LigerTrainer):
        def create_optimizer(self, *args, **kwargs):
            self.optimizer = Own(self.model.parameters())
            return self.optimizer

    trainer = trainer_of(tmp_path)
    trainer.__class__ = Making
    with pytest.raises(ValueError, match=r"the optimizer is a .*\.Own, which may look at several"):
        trainer.train()


def test_arguments_that_change_after_the_trainer_was_built(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.args.max_grad_norm = 1.0
    with pytest.raises(ValueError, match=r"max_grad_norm is 1.0"):
        trainer.train()


@pytest.mark.parametrize("kind", ["MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED"])
def test_several_devices(kind, tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.accelerator.state.distributed_type = DistributedType[kind]
    try:
        with pytest.raises(ValueError, match=rf"runs on several devices or is sharded \({kind}\).*one process"):
            InBackward().check_trainer(trainer)
    finally:
        trainer.accelerator.state.distributed_type = DistributedType.NO


def test_transformers_asks_for_the_norm_where_it_is_answered(tmp_path, monkeypatch):
    """transformers asks after the backward pass, when stock code would find no gradients."""
    asked = []
    answer = LigerTrainer._get_grad_norm

    def asking(self, model, grad_norm=None):
        asked.append(grad_norm)
        return answer(self, model, grad_norm)

    monkeypatch.setattr(LigerTrainer, "_get_grad_norm", asking)
    make(tmp_path, True, max_steps=2).train()
    assert asked == [None, None]
