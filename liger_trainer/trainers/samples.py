"""Implements `sample_prompts`: answers fixed prompts during training, without changing the training.

Answers are greedy, so they need no random numbers, and the model runs in evaluation mode. The mode of each module and
the generation config are restored. Gradient checkpointing and captured steps only apply in training mode.
"""

import gc
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

from liger_trainer._logging import logger
from liger_trainer.data.answers import Prompt, answer, encode, end_tokens
from liger_trainer.feature import Feature, FeatureTrainer
from liger_trainer.head.module import base_model_of

SAMPLES = "samples.jsonl"
_TRACKERS_OF_TEXT = ("TensorBoardCallback", "WandbCallback", "TrackioCallback")  # others only take numbers


@dataclass
class SampleFields:
    """The config fields of `sample_prompts`."""

    sample_prompts: list[str] | None = field(
        default=None,
        metadata={
            "help": "Two or three prompts to answer before the first step, every `sample_steps` steps and after the "
            "last step. The answers are logged, sent to TensorBoard, wandb or trackio, and added to samples.jsonl in "
            "`output_dir`. Training is bit for bit the same as without them."
        },
    )
    sample_steps: int = field(default=100, metadata={"help": "Number of steps between answers to `sample_prompts`."})
    sample_max_new_tokens: int = field(
        default=64, metadata={"help": "Maximum number of tokens in an answer to `sample_prompts`."}
    )


class SamplesArguments(Protocol):
    """The trainer arguments of `sample_prompts`."""

    sample_prompts: list[str] | None
    sample_steps: int
    sample_max_new_tokens: int


class SampledTrainer(FeatureTrainer, Protocol):
    """The trainer attributes that `sample_prompts` reads. It writes none."""

    args: SamplesArguments
    model: nn.Module
    processing_class: Any  # a tokenizer, a processor of images or None
    callback_handler: CallbackHandler
    rows_are_chats: bool
    system_prompt: str | None

    def add_callback(self, callback: TrainerCallback) -> None:
        """Call `callback` at the events of the training."""

    def get_tp_size(self) -> int:
        """Return how many processes hold parts of each layer."""


class Samples(Feature[SamplesArguments, SampledTrainer]):
    """Answers `sample_prompts` while a trainer trains."""

    def check(self, args: SamplesArguments) -> None:
        prompts = args.sample_prompts
        if prompts is not None and not _is_list_of_texts(prompts):
            raise ValueError(f"sample_prompts is {prompts!r}; expected a list of texts. Put each prompt into it.")
        if prompts is not None and not prompts:
            raise ValueError("sample_prompts is an empty list. Add prompts, or leave it out.")
        for name in ("sample_steps", "sample_max_new_tokens"):
            if getattr(args, name) < 1:
                raise ValueError(f"{name} is {getattr(args, name)}; expected 1 or more.")

    def check_trainer(self, trainer: SampledTrainer) -> None:
        prompts = getattr(trainer.args, "sample_prompts", None)  # stock arguments have no such field
        if not prompts:
            return
        reason = _why_no_answers(trainer)
        if reason is not None:
            raise ValueError(f"sample_prompts is set, but {reason}. Remove sample_prompts.")
        trainer.add_callback(_SampleCallback(trainer))


def _is_list_of_texts(value: Any) -> bool:
    """Return whether `value` is a list of texts. In a single text, each letter would count as a prompt."""
    return isinstance(value, (list, tuple)) and all(isinstance(text, str) for text in value)


def _learned_positions(model: nn.Module) -> int | None:
    """Return the number of rows in the model's table of positions, or None if it has no table.

    Rotary embeddings and ALiBi need no table. `max_position_embeddings` does not tell: models with ALiBi have it too.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    limit = getattr(text, "max_position_embeddings", None)
    if getattr(text, "rope_parameters", None) or not isinstance(limit, int):
        return None
    return limit if any(_is_position_table(name, tensor, limit) for name, tensor in _tensors(model)) else None


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _is_position_table(name: str, tensor: torch.Tensor, limit: int) -> bool:
    """Return whether `tensor` has a row for each position, like GPT-2's `wpe.weight` or OPT's `embed_positions`."""
    rows_before = len(tensor) - limit if tensor.dim() == 2 else -1  # OPT's table has two rows before the first position
    return rows_before in (0, 1, 2) and ("pos" in name or "wpe" in name)


def _why_no_answers(trainer: SampledTrainer) -> str | None:
    if getattr(trainer.processing_class, "tokenizer", trainer.processing_class) is None:
        return "the trainer has no processing_class to tokenize them"
    if not hasattr(base_model_of(trainer.model), "generate"):
        return f"{type(base_model_of(trainer.model)).__name__} does not generate text"
    if any(config.is_prompt_learning for config in getattr(trainer.model, "peft_config", {}).values()):
        return "the adapter is a learned prompt, which is not part of the model"
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or trainer.get_tp_size() > 1:
        return "the model is sharded over processes (FSDP, DeepSpeed, tensor parallelism)"
    return None


class _SampleCallback(TrainerCallback):
    """Answers the prompts on the main process."""

    def __init__(self, trainer: SampledTrainer) -> None:
        self.trainer = trainer
        self._said_out_of_memory = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._check_lengths(args)
        if state.global_step == 0:  # in a resumed run, the earlier run has already answered
            self._answer(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % args.sample_steps == 0 or state.global_step >= state.max_steps:
            self._answer(args, state, control)

    def _check_lengths(self, args: Any) -> None:
        """ValueError for a prompt that `generate` cannot answer. It would end the training at a later step."""
        limit = _learned_positions(base_model_of(self.trainer.model))
        for text in args.sample_prompts:
            tokens = len(self._ids_of(text))
            if tokens == 0:
                raise ValueError(f"sample_prompts has {text!r}, which has no tokens. Write a prompt, or remove it.")
            read = tokens + args.sample_max_new_tokens - 1  # the model does not read the last token of an answer
            if limit is not None and read > limit:
                raise ValueError(
                    f"sample_prompts has {text!r} of {tokens} tokens, and with sample_max_new_tokens="
                    f"{args.sample_max_new_tokens} the model's {limit} positions are too few. Lower "
                    "sample_max_new_tokens, or shorten the prompt."
                )

    def _ids_of(self, text: str) -> list[int]:
        trainer = self.trainer
        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        return encode(tokenizer, _as_trained(text, trainer, tokenizer))

    def _answer(self, args: Any, state: Any, control: Any) -> None:
        if not state.is_world_process_zero:
            return
        trainer = self.trainer
        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        lines = {}
        for number, text in enumerate(args.sample_prompts, 1):
            new = self._answer_or_none(text, tokenizer, args, state)
            if new is None:
                continue
            answer_text = tokenizer.decode(new, skip_special_tokens=True)
            lines[number] = {"step": state.global_step, "prompt": text, "answer": answer_text}
        self._log_answers(args, state, control, lines)

    def _answer_or_none(self, text: str, tokenizer: Any, args: Any, state: Any) -> list[int] | None:
        """The tokens of an answer; None if memory has run out, which costs this answer and not the training.

        This process answers alone, and calls no other one: the others train on without knowing of it.
        """
        try:
            with _in_evaluation(self.trainer.model):
                model = base_model_of(self.trainer.model)
                ids = self._ids_of(text)
                return answer(model, [ids], end_tokens(model, tokenizer), args.sample_max_new_tokens)[0]
        except torch.OutOfMemoryError as error:
            if not self._said_out_of_memory:
                self._said_out_of_memory = True
                logger.warning(
                    f"sample_prompts: memory ran out in step {state.global_step} while {text!r} was answered, and the "
                    f"answer is left out, as later ones may be. Lower sample_max_new_tokens, which is "
                    f"{args.sample_max_new_tokens}. ({' '.join(str(error).split())[:200]})"
                )
        # Here the error is gone, and with it the frames that held the cache of keys and values.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return None

    def _log_answers(self, args: Any, state: Any, control: Any, lines: dict[int, dict[str, Any]]) -> None:
        for line in lines.values():
            logger.info(f"step {line['step']}: {line['prompt']!r} -> {line['answer']!r}")
        if args.output_dir is not None:
            os.makedirs(args.output_dir, exist_ok=True)
            first = state.global_step == 0  # a new run overwrites the file of an earlier run in this folder
            with open(Path(args.output_dir, SAMPLES), "w" if first else "a", encoding="utf-8") as file:
                file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines.values())
        logs = {f"sample_{number}": f"{line['prompt']}\n\n{line['answer']}" for number, line in lines.items()}
        for callback in self.trainer.callback_handler.callbacks:
            if type(callback).__name__ in _TRACKERS_OF_TEXT:
                # Not `Trainer.log`: it would add the text to the history, and TRL's would reset its metrics.
                callback.on_log(args, state, control, model=self.trainer.model, logs=logs)


def _as_trained(text: str, trainer: SampledTrainer, tokenizer: Any) -> Prompt:
    """Return the prompt in the form of the rows: as a message after their system prompt, or as text."""
    if not trainer.rows_are_chats or not tokenizer.chat_template:
        return text
    system = [] if trainer.system_prompt is None else [{"role": "system", "content": trainer.system_prompt}]
    return [*system, {"role": "user", "content": text}]


@contextmanager
def _in_evaluation(model: nn.Module) -> Iterator[None]:
    """Context manager: `model` in evaluation mode. Afterwards the random state and all modes are restored."""
    was_training = model.training
    modes = [(module, module.training) for module in model.modules()]
    devices = sorted({parameter.device for parameter in model.parameters() if parameter.is_cuda}, key=str)
    model.eval()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        model.train(was_training)  # a class may do more than set modes, such as transformers' classes with use_kernels
        for module, training in modes:
            module.training = training
