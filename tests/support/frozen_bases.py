"""A tiny model with adapters on a frozen FP8 base, one step of it, and trainers that ask for such a base."""

import peft
import pytest
import torch
import transformers.integrations.peft
from accelerate.state import AcceleratorState
from packaging.version import parse
from peft import LoraConfig, get_peft_model
from tiny_models import collate, ragged_rows, tiny_model
from torch import nn

from liger_trainer import LigerTrainer, LigerTrainingArguments
from liger_trainer.fp8.quantize_base import quantize_base

LAYERS = 14  # two layers of seven projections


def add_inside(model, config):
    """Have transformers add an adapter; skip the test if it needs a newer PEFT than is installed."""
    wanted = transformers.integrations.peft.MIN_PEFT_VERSION
    if parse(peft.__version__) < parse(wanted):
        pytest.skip(f"add_adapter of transformers {transformers.__version__} asks for PEFT {wanted}")
    model.add_adapter(config)


def adapted(dtype=torch.float32, model=None, **options):
    """A model with a LoRA on all its linear layers; no part of the LoRA is zero."""
    model = tiny_model("llama", dtype=dtype) if model is None else model
    torch.manual_seed(3)
    config = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False} | options
    return get_peft_model(model, LoraConfig(**config)).train()


def frozen(dtype=torch.float32, model=None, **options):
    """`adapted` with its base in FP8."""
    model = adapted(dtype, model, **options)
    quantize_base(model)
    return model


def distance(got, want):
    """The relative distance of the losses, and of all gradients together."""
    (loss, gradients), (want_loss, want_gradients) = got, want
    assert list(gradients) == list(want_gradients)
    apart = sum(((gradients[name] - grad).double() ** 2).sum() for name, grad in want_gradients.items())
    size = sum((grad.double() ** 2).sum() for grad in want_gradients.values())
    return abs(float(loss / want_loss) - 1), float((apart / size) ** 0.5)


def built(model, tmp_path, trainer_class=LigerTrainer, **options):
    """A trainer that asks for fp8. If `model` is a function, it is passed as `model_init`."""
    defaults = {
        "output_dir": str(tmp_path),
        "use_cpu": True,
        "report_to": "none",
        "fp8": True,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    args = LigerTrainingArguments(**(defaults | {k: v for k, v in options.items() if k != "use_vllm"}))
    if "use_vllm" in options:
        args.use_vllm = options["use_vllm"]
    given = {"model": model} if isinstance(model, nn.Module) else {"model_init": model}
    return trainer_class(
        **given, args=args, train_dataset=ragged_rows(), eval_dataset=ragged_rows(4), data_collator=collate
    )


def fresh_state():
    """Forget the precision of the process's first trainer, which accelerate keeps."""
    AcceleratorState._reset_state(True)
