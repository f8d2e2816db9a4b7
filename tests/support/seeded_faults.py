"""Sixteen faults of a training that raise no error, each in a TRL trainer and in ours, and the messages about them."""

import contextlib
import json
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from base_checkpoints import write_base
from datasets import Dataset
from peft import LoraConfig
from tiny_models import tiny_model, tiny_tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, TrainerCallback
from trl import SFTConfig, SFTTrainer

from liger_trainer import LigerSFTConfig, LigerSFTTrainer

_TURN = "{% for m in messages %}{{ m['role'] == 'user' and 'w3 ' or 'w4 ' }}"
_ANSWER = "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
# The end of a turn comes after the end of the marked answer, and inside it
END_OUTSIDE = _TURN + _ANSWER + "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %} </s> {% endfor %}"
END_INSIDE = _TURN + _ANSWER + " </s>{% endgeneration %}{% else %}{{ m['content'] }} </s>{% endif %} {% endfor %}"


@dataclass(frozen=True)
class Fault:
    """A fault: its name, the check that should find it, how to build it, and words of TRL's report.

    `said_by_axolotl` is whether Axolotl 0.19 reports it, as axolotl_faults.py shows.
    """

    what: str
    check: str
    build: Callable[[bool, Path], Any]
    said_by_trl: str = ""
    needs_gpu: bool = False
    said_by_axolotl: str = "no"


class _Stop(Exception):
    """Raised before the first step."""


class _StopBeforeFirstStep(TrainerCallback):
    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise _Stop


def trainer(ours: bool, folder: Path, rows: list[dict], model: Any = None, **given: Any) -> Any:
    """An SFT trainer of six steps. `given` are fields of its config and arguments of the trainer."""
    names = ("processing_class", "data_collator", "peft_config")
    arguments = {name: given.pop(name) for name in names if name in given}
    defaults = {"learning_rate": 1e-3, "max_length": 64, "max_steps": 6, "per_device_train_batch_size": 2}
    config = (LigerSFTConfig if ours else SFTConfig)(
        output_dir=str(folder / "out"),
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        **(defaults | given),
    )
    arguments.setdefault("processing_class", tiny_tokenizer())
    return (LigerSFTTrainer if ours else SFTTrainer)(
        model=tiny_model("llama") if model is None else model,
        args=config,
        train_dataset=Dataset.from_list(rows),
        **arguments,
    )


def said_before_first_step(build: Callable[[], Any]) -> list[str]:
    """The warnings and errors while a trainer is built and starts to train, up to its first step."""
    said: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler = Kept(logging.WARNING)
    loggers = [logging.getLogger(name) for name in ("liger_trainer", "transformers", "trl")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught, contextlib.suppress(_Stop):
            warnings.simplefilter("always")
            built = build()
            built.add_callback(_StopBeforeFirstStep())
            built.train()
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    return said + [str(warning.message) for warning in caught]


def answers(n: int = 8, length: int = 4, prompt: int = 3, end: tuple[int, ...] = (2,)) -> list[dict]:
    """Rows of tokens: a prompt that is not learned, an answer, and an ending. Their lengths differ."""
    rows = []
    for i in range(n):
        asked = [5 + i] * prompt
        answer = [40 + i] * (length + i) + list(end)
        rows.append({"input_ids": asked + answer, "labels": [-100] * prompt + answer})
    return rows


def chats(n: int = 8) -> list[dict]:
    turns = [("user", "w10 w11"), ("assistant", "w12 w13")]
    return [{"messages": [{"role": role, "content": f"{text} w{20 + i}"} for role, text in turns]} for i in range(n)]


def with_template(template: str) -> Any:
    tokenizer = tiny_tokenizer()
    words = {**tokenizer.get_vocab(), "dummy": 130}  # TRL uses it to try a template
    del words["w130"]
    tokenizer.backend_tokenizer.model = WordLevel(words, unk_token="<pad>")
    tokenizer.chat_template = template
    return tokenizer


def _end_outside(ours: bool, folder: Path) -> Any:
    return trainer(ours, folder, chats(), assistant_only_loss=True, processing_class=with_template(END_OUTSIDE))


def _padding_is_end(ours: bool, folder: Path) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    rows = [{"input_ids": row["input_ids"]} for row in answers()]
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    return trainer(ours, folder, rows, processing_class=tokenizer, data_collator=collator)


def _no_end(ours: bool, folder: Path) -> Any:
    return trainer(ours, folder, answers(end=()))


def _other_end(ours: bool, folder: Path) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["w130"]})
    return trainer(ours, folder, answers(end=(130,)), processing_class=tokenizer)


def _two_begins(ours: bool, folder: Path) -> Any:
    rows = [{"input_ids": [1, 1, *row["input_ids"]], "labels": [-100, -100, *row["labels"]]} for row in answers()]
    return trainer(ours, folder, rows)


def _all_masked(ours: bool, folder: Path) -> Any:
    rows = [{"input_ids": row["input_ids"], "labels": [-100] * len(row["labels"])} for row in answers()]
    return trainer(ours, folder, rows, max_length=None)


def _answers_gone(ours: bool, folder: Path) -> Any:
    return trainer(ours, folder, answers(6) + answers(2, prompt=30), max_length=24)


def _answers_cut(ours: bool, folder: Path) -> Any:
    return trainer(ours, folder, answers(6) + answers(2, length=40), max_length=24)


def _loaded(folder: Path) -> Any:
    """A loaded model wide enough for learning rates to be judged."""
    tiny_model("llama", hidden_size=512, num_hidden_layers=1).save_pretrained(folder / "wide")
    return AutoModelForCausalLM.from_pretrained(folder / "wide")


def _rate_too_high(ours: bool, folder: Path) -> Any:
    return trainer(ours, folder, answers(), _loaded(folder), learning_rate=2e-2)


def _rate_too_low(ours: bool, folder: Path) -> Any:
    return trainer(ours, folder, answers(), learning_rate=1e-9)


def _long_warmup(ours: bool, folder: Path) -> Any:
    return trainer(ours, folder, answers(), warmup_steps=100)


def _eager(ours: bool, folder: Path) -> Any:
    return trainer(ours, folder, answers())


def _linear_attention(ours: bool, folder: Path) -> Any:
    model = tiny_model("qwen3_5_text")
    model.set_attn_implementation("sdpa")
    return trainer(ours, folder, answers(), model)


def _prediction_layers(ours: bool, folder: Path) -> Any:
    write_base(folder / "base", "qwen3_5_text")
    return trainer(ours, folder, answers(), AutoModelForCausalLM.from_pretrained(folder / "base"))


def _unserved_adapter(ours: bool, folder: Path) -> Any:
    adapter = LoraConfig(target_modules=["in_proj_a", "q_proj"], modules_to_save=["lm_head"])
    return trainer(ours, folder, answers(), tiny_model("qwen3_5_text"), peft_config=adapter)


def _new_tokenizer_class(ours: bool, folder: Path) -> Any:
    """A tokenizer as transformers 4 has saved it, which transformers 5 loads into a class of its own."""
    tiny_tokenizer().save_pretrained(folder / "tokenizer")
    path = folder / "tokenizer" / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config))
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    return trainer(ours, folder, answers(), processing_class=tokenizer)


FAULTS = (
    Fault(
        "The chat template leaves the end of a turn out of the answer",
        "end_token_learned",
        _end_outside,
        "end-of-turn token in the loss mask",
        said_by_axolotl="does not arise",
    ),
    Fault(
        "The padding token is the end token, and the collator masks both",
        "end_token_learned",
        _padding_is_end,
        said_by_axolotl="does not arise",
    ),
    Fault("Tokenized answers have no end", "end_token_learned", _no_end),
    Fault("Answers end with a token at which generation does not stop", "end_token_stops", _other_end),
    Fault("Rows begin with the begin token twice", "two_begin_tokens", _two_begins),
    Fault("All labels are -100", "nothing_learned", _all_masked),
    Fault("Prompts fill `max_length`, so that rows are left out", "cut_answers", _answers_gone, said_by_axolotl="yes"),
    Fault("Answers are cut by `max_length`", "cut_answers", _answers_cut, said_by_axolotl="yes"),
    Fault("A learning rate of 2e-2 for all weights", "learning_rate", _rate_too_high),
    Fault("A learning rate of 1e-9", "learning_rate", _rate_too_low),
    Fault("100 steps of warmup in a run of 6", "warmup", _long_warmup),
    Fault("Eager attention on a GPU", "slow_attention", _eager, needs_gpu=True, said_by_axolotl="not tried"),
    Fault(
        "Linear attention on a GPU without flash-linear-attention",
        "slow_layers",
        _linear_attention,
        needs_gpu=True,
        said_by_axolotl="not tried",
    ),
    Fault("The checkpoint has prediction layers, which are not loaded", "unloaded_weights", _prediction_layers),
    Fault("An adapter on `in_proj_a`, with `modules_to_save`", "served_adapter", _unserved_adapter),
    Fault(
        "The tokenizer is saved under a class that transformers 4 does not know",
        "tokenizer_class",
        _new_tokenizer_class,
    ),
)
