"""`LigerMedusaConfig`: the arguments of `LigerMedusaTrainer`."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from liger_trainer.medusa.files import check_shape
from liger_trainer.trainers.sft_trainer import LigerSFTConfig


def schedule_of(name: str) -> Callable[[float], float]:
    """Return the weight of the heads, from 0 to 1, as a function of s, the share of training steps done.

    `constant`: 1. `linear`: s. `sine`: sin(pi / 2 * s). `sine_R`: sin(pi / 2 * min(s / R, 1)).

    Raises:
        ValueError: `name` is another one, or R is not above 0 and at most 1.
    """
    if name in ("constant", "linear"):
        return (lambda share: 1.0) if name == "constant" else (lambda share: share)
    match = re.fullmatch(r"sine(?:_(\d*\.?\d+))?", name) if isinstance(name, str) else None
    ramp = float(match[1] or 1) if match else 0.0
    if not 0 < ramp <= 1:
        raise ValueError(
            f"medusa_schedule is {name!r}; expected 'constant', 'linear', 'sine', or 'sine_R' with a number R above 0 "
            "and at most 1, such as 'sine_0.1'."
        )
    return lambda share: math.sin(math.pi / 2 * min(share / ramp, 1.0))


@dataclass
class LigerMedusaConfig(LigerSFTConfig):
    """[`LigerSFTConfig`] with the options of Medusa heads, for [`LigerMedusaTrainer`].

    The loss, with N the labels in the accumulated batch over all ranks and s / S the share of the training steps done:

        L = [stage 2: CE of the LM head] + schedule(s / S) * coefficient * sum over k = 1..K of decay^k * loss of head k

    Every term is summed over its rows and divided by the same N. Cai et al. 2024, arXiv:2401.10774, section 2.2.

    Raises:
        ValueError: A field is out of its range, or two exclude each other.
    """

    medusa_num_heads: int = field(
        default=3, metadata={"help": "K, the number of heads. Head k guesses the token k + 1 places ahead."}
    )
    medusa_num_layers: int = field(default=1, metadata={"help": "L, the number of residual blocks in each head."})
    medusa_tied: bool = field(
        default=True,
        metadata={
            "help": "True: all heads project with the LM head of the model. False: each trains its own copy, with "
            "vocabulary x hidden size parameters."
        },
    )
    medusa_stage: Literal[1, 2] = field(
        default=1,
        metadata={"help": "1: train the heads on a frozen model. 2: train the model (or its LoRA) and the heads."},
    )
    medusa_targets: Literal["hard", "soft"] = field(
        default="hard",
        metadata={
            "help": "'hard': cross-entropy with the labels. 'soft': Kullback-Leibler divergence from the model's own "
            "distribution for the same token, at positions with a label."
        },
    )
    medusa_decay: float = field(
        default=0.8, metadata={"help": "Head k weighs decay to the power of k. Above 0, at most 1."}
    )
    medusa_heads_coefficient: float | None = field(
        default=None, metadata={"help": "Weight of all heads together. Unset: 1 in stage 1, 0.2 in stage 2."}
    )
    medusa_schedule: str = field(
        default="constant",
        metadata={
            "help": "How the weight of the heads grows over the training steps: 'constant', 'linear' (from 0 to 1), "
            "'sine' (a quarter of a sine wave), or 'sine_R' such as 'sine_0.1': the sine over the first R of the "
            "steps, then 1. Evaluation takes the full weight."
        },
    )
    medusa_lr_multiplier: float | None = field(
        default=None,
        metadata={
            "help": "Learning rate of the heads, as a multiple of learning_rate. Unset: 1 in stage 1, 4 in stage 2."
        },
    )
    medusa_init_heads_from: str | None = field(
        default=None,
        metadata={"help": "Train these heads further: the output directory of an earlier Medusa training."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.medusa_stage not in (1, 2):
            raise ValueError(f"medusa_stage is {self.medusa_stage!r}; expected 1 (heads only) or 2 (model and heads).")
        if self.medusa_targets not in ("hard", "soft"):
            raise ValueError(f"medusa_targets is {self.medusa_targets!r}; expected 'hard' or 'soft'.")
        check_shape(self.medusa_num_heads, self.medusa_num_layers, self.medusa_tied)
        if not 0 < self.medusa_decay <= 1:
            raise ValueError(f"medusa_decay is {self.medusa_decay}; expected a number above 0 and at most 1.")
        if self.medusa_heads_coefficient is None:
            self.medusa_heads_coefficient = 1.0 if self.medusa_stage == 1 else 0.2
        if self.medusa_lr_multiplier is None:
            self.medusa_lr_multiplier = 1.0 if self.medusa_stage == 1 else 4.0
        for name in ("medusa_heads_coefficient", "medusa_lr_multiplier"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}; expected a number above 0.")
        schedule_of(self.medusa_schedule)


MedusaConfig = LigerMedusaConfig  # the old name; saved training_args.bin refer to it
