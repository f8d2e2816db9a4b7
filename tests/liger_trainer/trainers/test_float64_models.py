"""A float64 model trains as with the stock trainer."""

import pytest
import torch
from tiny_models import collate, ragged_rows, tiny_model
from torch.overrides import TorchFunctionMode
from transformers import Trainer, TrainingArguments

from liger_trainer import LigerTrainer, LigerTrainingArguments
from liger_trainer.verify.observed import KeepGradients


class WithoutCastsToFp32(TorchFunctionMode):
    """Keeps float64 where transformers writes `.float()` or `.to(torch.float32)`, as in norms and losses."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        narrows = func is torch.Tensor.float or (func is torch.Tensor.to and torch.float32 in args[1:])
        if narrows and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            return args[0]
        return func(*args, **(kwargs or {}))


def rows():
    """Two tokens of each row have labels. That makes eight, and dividing by eight is exact in fp32."""
    found = ragged_rows(4)
    for row in found:
        row["labels"] = [-100] * (len(row["labels"]) - 2) + row["input_ids"][-2:]
    return found


def one_step(trainer_class, args_class, folder, **options):
    """(loss, gradients, trainer) of one step."""
    kept, losses = KeepGradients(), []
    args = args_class(
        folder,
        max_steps=1,
        per_device_train_batch_size=4,
        optim="sgd",
        max_grad_norm=0.0,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        **options,
    )

    class Recording(trainer_class):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            losses.append(loss.detach())
            return loss

    model = tiny_model("llama", torch.float64)
    trainer = Recording(model, args, train_dataset=rows(), data_collator=collate, callbacks=[kept])
    trainer.train()
    return losses[0], kept.steps[0], trainer


@pytest.mark.parametrize("casts", [True, False], ids=["as it is", "without its casts to fp32"])
def test_one_step_equals_the_stock_trainer(casts, tmp_path):
    """The stock model rounds to fp32 in its norms and its loss. Without these casts, it stays float64 throughout."""
    with torch.overrides.BaseTorchFunctionMode() if casts else WithoutCastsToFp32():
        loss, grads, _ = one_step(Trainer, TrainingArguments, tmp_path)
        got_loss, got_grads, trainer = one_step(LigerTrainer, LigerTrainingArguments, tmp_path, use_liger=True)
    report = trainer.liger_report.operations
    assert all(report[name].swapped for name in ("rms_norm", "rope", "swiglu", "fused_linear_cross_entropy"))
    bound = 1e-6 if casts else 1e-12
    torch.testing.assert_close(got_loss.double(), loss.double(), rtol=1e-7, atol=0)  # ours is passed on in fp32
    assert got_grads.keys() == grads.keys()
    for name, want in grads.items():
        assert got_grads[name].dtype == want.dtype == torch.float64
        assert (got_grads[name] - want).norm() <= bound * want.norm(), name
