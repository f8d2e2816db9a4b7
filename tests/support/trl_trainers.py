"""Build every TRL trainer that has a counterpart here, stock and ours, on rows of its kind."""

import torch
from tiny_models import text_rows, tiny_model
from trainer_parity import build, letters, pair_rows, words
from trl import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

import liger_trainer

STOCK = {
    "SFT": (SFTTrainer, SFTConfig),
    "DPO": (DPOTrainer, DPOConfig),
    "KTO": (KTOTrainer, KTOConfig),
    "GRPO": (GRPOTrainer, GRPOConfig),
    "RLOO": (RLOOTrainer, RLOOConfig),
    "ORPO": (ORPOTrainer, ORPOConfig),
    "CPO": (CPOTrainer, CPOConfig),
    "Distillation": (DistillationTrainer, DistillationConfig),
}


def ours(method):
    """Our trainer and its config, for a key of `STOCK`."""
    return getattr(liger_trainer, f"Liger{method}Trainer"), getattr(liger_trainer, f"Liger{method}Config")


def rows_of(method):
    """Eight rows that the trainers of `method` take."""
    generator = torch.Generator().manual_seed(4)
    if method == "SFT":
        return text_rows(8)
    if method in ("DPO", "ORPO", "CPO"):
        return pair_rows()
    rows = [{"prompt": words(generator, 2, 6)} for _ in range(8)]
    if method == "KTO":
        return [row | {"completion": f" w{i + 3} w9", "label": i % 3 != 1} for i, row in enumerate(rows)]
    return rows


def one(method, classes, folder, model=None, **options):
    """One trainer, `STOCK[method]` or `ours(method)`, with everything it needs: rows, a reference, a reward."""
    given = {}
    if method in ("GRPO", "RLOO"):
        options = {"num_generations": 2, "max_completion_length": 6} | options
        given = {"reward_funcs": letters}
    if method == "Distillation":
        options = {"max_completion_length": 6} | options
        given = {"teacher_model": tiny_model("llama", seed=7)}
    if method in ("DPO", "KTO"):
        given = {"ref_model": tiny_model("llama", seed=7)}
    if method == "RLOO":
        options["beta"] = 0.0  # otherwise it would load a reference
    model = model or tiny_model("llama")
    return build(*classes, model, folder, rows_of(method), trainer_options=given, **options)
