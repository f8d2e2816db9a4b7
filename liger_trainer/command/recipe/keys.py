"""The keys that a recipe adds to the trainer's config and TRL's `ModelConfig`, with their help texts.

To add a key, add a field here, and its rows in docs/recipes.md and docs/reference.md. Tests compare all three.
"""

import contextlib
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml

from liger_trainer.errors import RecipeError


def _key(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"help": meaning})


@dataclass
class RecipeArguments:
    """The keys of a recipe that belong neither to the trainer's config nor to TRL's `ModelConfig`."""

    trainer: str = _key("sft", "The trainer that runs the recipe: a name from the table under Trainers.")
    # None stands before str because transformers' parser then takes several words after the option.
    dataset_name: list[str] | None | str = _key(
        None,
        "A .json, .jsonl (.ndjson), .parquet, .csv (.tsv) or .txt file (a row is a line), a folder of such files of "
        "one kind, or the name of a Hub dataset. A list joins the rows of several. A relative path is looked up in the "
        "working directory first, and then in the folder of the recipe.",
    )
    columns: dict[str, str] | str | None | list[dict[str, str]] = _key(
        None,
        "Maps the trainer's or the template's columns to columns of the data, such as {prompt: question, completion: "
        "answer}. With {question: ..., answer: ...} the texts become turns of a chat. A list has one mapping for each "
        "name in `dataset_name`.",
    )
    system_prompt: str | None = _key(
        None, "A system prompt that goes before the messages of each row, such as 'Answer in one sentence.'"
    )
    train_on: list[str] | None = _key(
        None,
        "Learn the messages of these roles, such as [assistant]. A message with `train` or `weight` decides for "
        "itself. If unset, `assistant_only_loss` decides. For 'sft', 'medusa', 'eagle' and 'mtp'.",
    )
    dataset_weights: list[float] | None = _key(
        None,
        "How often a row is drawn from each of the data sets in `dataset_name`, such as [3, 1]. If unset, each is "
        "used to its end, one after the other.",
    )
    dataset_stopping_strategy: Literal["first_exhausted", "all_exhausted", "all_exhausted_without_replacement"] = _key(
        "first_exhausted",
        "When `dataset_weights` stops drawing, as in `datasets.interleave_datasets`: at the end of the first data "
        "set, or of all, where rows of the others are repeated or (without_replacement) are not.",
    )
    dataset_config: str | None = _key(None, "The configuration of the Hub dataset, by its name.")
    dataset_train_split: str = _key("train", "The split to train on. The rows of a file are its split 'train'.")
    dataset_eval_split: str | None = _key(None, "The split to evaluate on.")
    eval_dataset_name: list[str] | None | str = _key(
        None,
        "A file of rows to evaluate on, or a list of such files. Their rows have the form of those in "
        "`dataset_name`, because the same template is applied to them.",
    )
    eval_fraction: float | None = _key(
        None,
        "The share of the training rows, between 0 and 1, that is drawn with `seed` and held out for evaluation.",
    )
    early_stopping_patience: int | None = _key(
        None,
        "Stop when `metric_for_best_model` (if unset, the loss of the evaluation) has not improved for this many "
        "evaluations. It needs `load_best_model_at_end: true`, `eval_strategy` and `save_strategy`.",
    )
    max_rows: int | None = _key(None, "Train on this many rows only, the first ones. If unset, on all rows.")
    prompt_template: Literal["none", "alpaca", "sharegpt", "last_turn"] = _key(
        "none",
        "'alpaca' turns rows of instruction, input and output, with or without system and history, into prompt and "
        "completion. 'sharegpt' turns "
        "conversations of from and value, with or without chosen and rejected, into messages. 'last_turn' splits "
        "messages into a prompt and, as the completion, the last turn. 'none' hands the rows to the trainer as "
        "they are.",
    )
    reward_funcs: list[str] | None = _key(
        None,
        "The reward functions of 'grpo' and 'rloo': a list of names from `liger_trainer.data.rewards` (boxed_answer), "
        "or of dotted paths of functions such as my_module.my_reward. A dotted path imports its module, which "
        "runs the module's code; the module is also looked up in the folder of the recipe and in the working "
        "directory. The rewards are added up, weighted by `reward_weights`.",
    )
    accelerate_config: str | None = _key(
        None,
        "An accelerate config, as a file or the name of a shipped one, such as fsdp2. It is applied under any "
        "launcher (torchrun, Ray, Flyte, Kubeflow) as accelerate launch --config_file would apply it, but for the "
        "number of processes and machines, which the launcher decides.",
    )

    def __post_init__(self):
        if isinstance(self.columns, str):  # from the command line
            with contextlib.suppress(yaml.YAMLError):
                self.columns = yaml.safe_load(self.columns)
        mappings = self.columns if isinstance(self.columns, list) and self.columns else [self.columns]
        for mapping in mappings if self.columns is not None else ():
            texts = isinstance(mapping, dict) and all(isinstance(name, str) for name in mapping.values())
            empty = mapping == {} and mapping is self.columns  # in a list, {} is for a data set that needs no mapping
            if not texts or empty or len(mapping) != len(set(mapping.values())):
                raise RecipeError(
                    f"columns is {self.columns!r}; expected a mapping from the trainer's columns to columns of the "
                    "data, each named once, such as {prompt: question, completion: answer}."
                )
        if self.dataset_weights is not None:
            count = len(self.dataset_name) if isinstance(self.dataset_name, list) else 1
            if len(self.dataset_weights) != count or count < 2 or not all(0 < w < 1e9 for w in self.dataset_weights):
                raise RecipeError(
                    f"dataset_weights is {self.dataset_weights}; expected a number above 0 for each dataset_name."
                )
        if self.eval_fraction is not None and not 0 < self.eval_fraction < 1:
            raise RecipeError(f"eval_fraction is {self.eval_fraction}; expected a number between 0 and 1.")
        sources = ("eval_fraction", "dataset_eval_split", "eval_dataset_name")
        eval_sources = [name for name in sources if getattr(self, name) is not None]
        if len(eval_sources) > 1:
            raise RecipeError(f"{' and '.join(eval_sources)} are both set; keep one of them.")
        if self.eval_fraction is not None:
            self._refuse_repeated_rows()
        if self.train_on == []:
            raise RecipeError("train_on is an empty list; expected roles, such as [assistant].")
        for name in ("early_stopping_patience", "max_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RecipeError(f"{name} is {value}; expected 1 or more.")

    def _refuse_repeated_rows(self) -> None:
        """RecipeError if rows that are held out for evaluation would also be trained on."""
        repeats = None
        if self.dataset_weights is not None and self.dataset_stopping_strategy == "all_exhausted":
            repeats = "dataset_stopping_strategy is 'all_exhausted', which draws rows again"
        names = self.dataset_name if isinstance(self.dataset_name, list) else []
        repeated = [name for name in names if names.count(name) > 1]
        if repeated:
            repeats = f"dataset_name lists {repeated[0]!r} more than once"
        if repeats is not None:
            raise RecipeError(
                f"eval_fraction is {self.eval_fraction}, and {repeats}, so the held-out rows would be trained on too. "
                "Set eval_dataset_name to a file of other rows instead of eval_fraction."
            )
