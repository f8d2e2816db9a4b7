"""The trainers that a recipe can name, and for each its config, its columns and what else it needs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainerEntry:
    """A row of the table: the config and the trainer, by their names in `liger_trainer`, which are resolved on use.

    `columns` are sets of columns, and the rows of the dataset need all columns of at least one set. `metrics` are
    patterns of what an evaluation measures beside the metrics that TRL's code names; None if it may be anything.
    """

    config: str
    trainer: str
    columns: tuple[tuple[str, ...], ...]
    rewards: bool = False  # whether the trainer needs `reward_funcs`
    experimental: bool = False  # whether TRL keeps the trainer in `trl.experimental`
    metrics: tuple[str, ...] | None = ()


TRAINERS = {
    "sft": TrainerEntry(
        "LigerSFTConfig", "LigerSFTTrainer", (("messages",), ("prompt", "completion"), ("text",), ("input_ids",))
    ),
    "dpo": TrainerEntry("LigerDPOConfig", "LigerDPOTrainer", (("chosen", "rejected"),)),
    "orpo": TrainerEntry("LigerORPOConfig", "LigerORPOTrainer", (("chosen", "rejected"),), experimental=True),
    "cpo": TrainerEntry("LigerCPOConfig", "LigerCPOTrainer", (("chosen", "rejected"),), experimental=True),
    "kto": TrainerEntry(
        "LigerKTOConfig", "LigerKTOTrainer", (("prompt", "completion", "label"), ("chosen", "rejected"))
    ),
    # Reward functions may log metrics of their own.
    "grpo": TrainerEntry("LigerGRPOConfig", "LigerGRPOTrainer", (("prompt",),), rewards=True, metrics=None),
    "rloo": TrainerEntry("LigerRLOOConfig", "LigerRLOOTrainer", (("prompt",),), rewards=True, metrics=None),
    "distillation": TrainerEntry("LigerDistillationConfig", "LigerDistillationTrainer", (("prompt",),)),
    "medusa": TrainerEntry(
        "MedusaConfig",
        "LigerMedusaTrainer",
        (("messages",), ("prompt", "completion"), ("text",), ("input_ids",)),
        metrics=("lm_loss", "medusa_head*_loss", "medusa_head*_accuracy"),
    ),
}
