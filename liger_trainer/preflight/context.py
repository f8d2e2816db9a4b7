"""Collects what the checks read: a trainer right before its first step."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from transformers import SchedulerType, TrainerCallback
from transformers.training_args import OptimizerNames

from liger_trainer.base_weights.unloaded import Base
from liger_trainer.feature import FeatureTrainer
from liger_trainer.head.module import base_model_of
from liger_trainer.patching.core.report import LigerReport
from liger_trainer.preflight.sequences import Sequence, TrainerWithRows, read_sequences


class PreflightArguments(Protocol):
    """The trainer arguments that the checks read. Some fields of TRL's configs are read too, where there are any."""

    skip_checks: list[str] | None
    device: torch.device
    learning_rate: float
    lr_scheduler_type: str | SchedulerType
    optim: str | OptimizerNames
    warmup_steps: float

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Return how many of the steps are warm-up."""


class PreflightTrainer(FeatureTrainer, TrainerWithRows, Protocol):
    """The trainer attributes that the checks read. They write none."""

    args: PreflightArguments
    processing_class: Any  # a tokenizer, a processor of images or None
    liger_report: LigerReport | None
    base_checkpoint: Base | None

    def add_callback(self, callback: TrainerCallback) -> None:
        """Call `callback` at the events of the training."""


@dataclass
class PreflightContext:
    """A trainer right before its first step.

    Attributes:
        trainer (`PreflightTrainer`): The trainer.
        steps (`int`): The number of steps to train.
    """

    trainer: PreflightTrainer
    steps: int

    @cached_property
    def sequences(self) -> list[Sequence]:
        return read_sequences(self.trainer)

    @cached_property
    def max_length(self) -> int | None:
        """The length at which rows are cut; None if they are not cut or the trainer does not know."""
        limit = getattr(self.trainer, "max_length", None)
        return getattr(self.trainer.args, "max_length", None) if limit is None else limit

    @cached_property
    def whole_sequences(self) -> list[Sequence]:
        """The sequences that were not cut.

        If the trainer does not know the limit, sequences of the longest length count as cut: they may be chunks of a
        longer text.
        """
        limit = self.max_length
        if limit is None and self.sequences:
            lengths = Counter(len(sequence.ids) for sequence in self.sequences)
            longest = max(lengths)
            limit = longest if lengths[longest] > 1 and not hasattr(self.trainer.args, "max_length") else None
        return [sequence for sequence in self.sequences if limit is None or len(sequence.ids) < limit]

    @cached_property
    def model(self) -> Any:
        """The model below an adapter and other wrappers."""
        return base_model_of(self.trainer.model)

    @cached_property
    def text_config(self) -> Any:
        config: Any = getattr(self.model, "config", None)
        return config.get_text_config() if hasattr(config, "get_text_config") else config

    @cached_property
    def tokenizer(self) -> Any:
        """The trainer's tokenizer, or its processor's; None if it has none."""
        reader = self.trainer.processing_class
        return getattr(reader, "tokenizer", reader)

    @cached_property
    def stop_tokens(self) -> set[int]:
        """The tokens at which `generate`, and servers that read the generation config, stop."""
        stops = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        if stops is None:
            return set()
        return set(stops) if isinstance(stops, list) else {stops}

    @cached_property
    def end_tokens(self) -> set[int]:
        """The tokens that may end an answer: the stop tokens, and the tokenizer's special tokens."""
        special: set[int] = set()
        if hasattr(self.tokenizer, "all_special_ids"):
            added = self.tokenizer.added_tokens_decoder.items()
            special = {*self.tokenizer.all_special_ids, *(number for number, token in added if token.special)}
            special -= {self.tokenizer.bos_token_id, self.tokenizer.unk_token_id}
            if self.tokenizer.pad_token_id != self.tokenizer.eos_token_id:
                special.discard(self.tokenizer.pad_token_id)
        return special | self.stop_tokens

    def name_of(self, token: int) -> str:
        """Return a token as text; without a tokenizer, its number."""
        return str(token) if self.tokenizer is None else repr(self.tokenizer.decode([token]))

    @cached_property
    def is_adapter(self) -> bool:
        return bool(getattr(self.trainer.model, "peft_config", None))

    @cached_property
    def on_gpu(self) -> bool:
        return str(self.trainer.args.device).startswith("cuda")
