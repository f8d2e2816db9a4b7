"""The keys that a recipe adds to the trainer's config and TRL's `ModelConfig`, with their help texts."""

from dataclasses import dataclass, field
from typing import Literal

from liger_trainer.errors import RecipeError


@dataclass
class RecipeArguments:
    """The keys of a recipe that belong neither to the trainer's config nor to TRL's `ModelConfig`.

    Raises:
        RecipeError: A value is out of its range, or two keys say where the evaluation rows come from.
    """

    trainer: str = field(
        default="sft",
        metadata={"help": "The trainer that runs the recipe: a name from the table under Trainers."},
    )
    # None stands before str because transformers' parser then takes several words after the option.
    dataset_name: list[str] | None | str = field(
        default=None,
        metadata={
            "help": "A .json, .jsonl, .parquet or .csv file, a folder of such files, or the name of a Hub dataset; or "
            "a list of them, whose rows are joined. A relative path is looked up in the working directory first, and "
            "then in the folder of the recipe."
        },
    )
    dataset_config: str | None = field(
        default=None, metadata={"help": "The configuration of the Hub dataset, by its name."}
    )
    dataset_train_split: str = field(
        default="train", metadata={"help": "The split to train on. The rows of a file are its split 'train'."}
    )
    dataset_eval_split: str | None = field(default=None, metadata={"help": "The split to evaluate on."})
    eval_dataset_name: list[str] | None | str = field(
        default=None,
        metadata={
            "help": "A file of rows to evaluate on, or a list of such files. Their rows have the form of those in "
            "`dataset_name`, because the same template is applied to them."
        },
    )
    eval_fraction: float | None = field(
        default=None,
        metadata={
            "help": "The share of the training rows, between 0 and 1, that is drawn with `seed` and held out for "
            "evaluation."
        },
    )
    early_stopping_patience: int | None = field(
        default=None,
        metadata={
            "help": "Stop when `metric_for_best_model` (if unset, the loss of the evaluation) has not improved for "
            "this many evaluations. It needs `load_best_model_at_end: true`, `eval_strategy` and `save_strategy`."
        },
    )
    max_rows: int | None = field(
        default=None, metadata={"help": "Train on this many rows only, the first ones. If unset, on all rows."}
    )
    prompt_template: Literal["none", "alpaca", "sharegpt", "last_turn"] = field(
        default="none",
        metadata={
            "help": "'alpaca' turns rows of instruction, input and output into prompt and completion. 'sharegpt' turns "
            "conversations of from and value, with or without chosen and rejected, into messages. 'last_turn' splits "
            "messages into a prompt and, as the completion, the last turn. 'none' hands the rows to the trainer as "
            "they are."
        },
    )
    reward_funcs: list[str] | None = field(
        default=None,
        metadata={
            "help": "The reward functions of 'grpo' and 'rloo': a list of names from `liger_trainer.rewards` "
            "(boxed_answer), or of dotted paths of functions such as my_module.my_reward. A dotted path imports its "
            "module, which runs the module's code; the module is also looked up in the folder of the recipe and in "
            "the working directory. The rewards are added up, weighted by `reward_weights`."
        },
    )

    accelerate_config: str | None = field(
        default=None,
        metadata={
            "help": "An accelerate config, as a file or the name of a shipped one, such as fsdp2. It is applied under "
            "any launcher (torchrun, Ray, Flyte, Kubeflow) as accelerate launch --config_file would apply it, but for "
            "the number of processes and machines, which the launcher decides."
        },
    )

    overwrite_output_dir: bool = field(
        default=False,
        metadata={
            "help": "When training begins, delete the checkpoints and the model of an earlier run from `output_dir`. "
            "Without it, an `output_dir` with such a run in it is an error, unless `resume_from_checkpoint` goes on "
            "with that run."
        },
    )

    def __post_init__(self):
        if self.eval_fraction is not None and not 0 < self.eval_fraction < 1:
            raise RecipeError(
                f"eval_fraction is {self.eval_fraction}; expected a number between 0 and 1, such as 0.05."
            )
        sources = ("eval_fraction", "dataset_eval_split", "eval_dataset_name")
        given = [f"{name} ({getattr(self, name)!r})" for name in sources if getattr(self, name) is not None]
        if len(given) > 1:
            raise RecipeError(f"{' and '.join(given)} are both set; keep one of them.")
        for name in ("early_stopping_patience", "max_rows"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise RecipeError(f"{name} is {value}; expected 1 or more. Or leave it out.")
