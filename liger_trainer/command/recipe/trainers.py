"""Lists the trainers that a recipe can name, each with its config, its columns and what else it needs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainerEntry:
    """A row of the table. `config` and `trainer` are names in `liger_trainer`, imported when they are used.

    `columns` are sets of columns: a dataset needs all columns of at least one set.
    """

    config: str
    trainer: str
    columns: tuple[tuple[str, ...], ...]
    images: bool = False  # whether rows may have pictures
    rewards: bool = False  # whether the trainer needs `reward_funcs`
    experimental: bool = False  # whether TRL keeps the trainer in `trl.experimental`


TRAINERS = {
    "sft": TrainerEntry(
        "LigerSFTConfig",
        "LigerSFTTrainer",
        (("messages",), ("prompt", "completion"), ("text",), ("input_ids",)),
        images=True,
    ),
    "dpo": TrainerEntry("LigerDPOConfig", "LigerDPOTrainer", (("chosen", "rejected"),), images=True),
    "orpo": TrainerEntry("LigerORPOConfig", "LigerORPOTrainer", (("chosen", "rejected"),), experimental=True),
    "cpo": TrainerEntry("LigerCPOConfig", "LigerCPOTrainer", (("chosen", "rejected"),), experimental=True),
    "kto": TrainerEntry(
        "LigerKTOConfig", "LigerKTOTrainer", (("prompt", "completion", "label"), ("chosen", "rejected")), images=True
    ),
    "grpo": TrainerEntry("LigerGRPOConfig", "LigerGRPOTrainer", (("prompt",),), images=True, rewards=True),
    "rloo": TrainerEntry("LigerRLOOConfig", "LigerRLOOTrainer", (("prompt",),), images=True, rewards=True),
    "reward": TrainerEntry("LigerRewardConfig", "LigerRewardTrainer", (("chosen", "rejected"),)),
    "distillation": TrainerEntry("LigerDistillationConfig", "LigerDistillationTrainer", (("prompt",),)),
    "medusa": TrainerEntry(
        "LigerMedusaConfig",
        "LigerMedusaTrainer",
        (("messages",), ("prompt", "completion"), ("text",), ("input_ids",)),
        images=True,
    ),
    "mtp": TrainerEntry(
        "LigerMTPConfig",
        "LigerMTPTrainer",
        (("messages",), ("prompt", "completion"), ("text",), ("input_ids",)),
    ),
    "eagle": TrainerEntry(
        "LigerEagleConfig",
        "LigerEagleTrainer",
        (("messages",), ("prompt", "completion"), ("text",), ("input_ids",)),
    ),
}
