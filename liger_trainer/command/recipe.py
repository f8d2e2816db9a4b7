"""A recipe: a flat YAML file of the fields of `RecipeArguments`, of the trainer's config and of `trl.ModelConfig`.

Parsed with TRL's parser. What that lets through is refused here before it runs: unknown and repeated keys, keys under
the wrong heading, and values of the wrong YAML type.
"""

import argparse
import dataclasses
import difflib
import os
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from liger_trainer.command.early_keys import refuse_unknown
from liger_trainer.command.launch import settle_precision
from liger_trainer.command.recipe_checks import check_scheduler, settle
from liger_trainer.command.recipe_values import checked, dump_yaml, load_yaml
from liger_trainer.errors import RecipeError
from liger_trainer.paths import find_beside, shipped


@dataclass
class RecipeArguments:
    """The keys of a recipe that belong neither to the trainer's config nor to TRL's `ModelConfig`."""

    trainer: str = field(
        default="sft", metadata={"help": "Which trainer runs the recipe: a name of the table under Trainers."}
    )
    # None before str: so transformers' parser takes several words after the option.
    dataset_name: list[str] | None | str = field(
        default=None,
        metadata={
            "help": "A .json, .jsonl, .parquet or .csv file, a folder of such files, or the name of a Hub dataset; or "
            "a list of them, whose rows are joined. A relative path is looked up from the working directory, then "
            "from the folder of the recipe."
        },
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Name of the configuration of a Hub dataset."})
    dataset_train_split: str = field(
        default="train", metadata={"help": "Split to train on. The rows of a single file are its split 'train'."}
    )
    dataset_eval_split: str | None = field(default=None, metadata={"help": "Split to evaluate on."})
    eval_dataset_name: list[str] | None | str = field(
        default=None,
        metadata={
            "help": "A file of rows to evaluate on, or a list of files, in the form of those of `dataset_name`: the "
            "same template is applied."
        },
    )
    eval_fraction: float | None = field(
        default=None,
        metadata={
            "help": "Share of the training rows, between 0 and 1, drawn with `seed` and held out for evaluation."
        },
    )
    early_stopping_patience: int | None = field(
        default=None,
        metadata={
            "help": "Stop once `metric_for_best_model` (unset: the evaluation's loss) has not improved in so many "
            "evaluations. Needs `load_best_model_at_end: true`, with `eval_strategy` and `save_strategy`."
        },
    )
    max_rows: int | None = field(
        default=None, metadata={"help": "Train on the first so many rows only. Unset: on all."}
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
            "help": "What 'grpo' and 'rloo' reward: a list of names out of `liger_trainer.rewards` (boxed_answer), or "
            "of dotted paths of functions such as my_module.my_reward. A dotted path imports the module, which runs "
            "its code; it is looked up in the folder of the recipe and in the working directory too. Rewards add up, "
            "weighted by `reward_weights`."
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
            raise RecipeError(
                f"{' and '.join(given)} are {'both' if len(given) == 2 else 'all'} set; keep one of them."
            )
        if self.early_stopping_patience is not None and self.early_stopping_patience < 1:
            raise RecipeError(
                f"early_stopping_patience is {self.early_stopping_patience}; expected 1 or more, or no "
                "early_stopping_patience at all."
            )
        if self.max_rows is not None and self.max_rows < 1:
            raise RecipeError(f"max_rows is {self.max_rows}; expected 1 or more, or no max_rows at all.")


@dataclass(frozen=True)
class TrainerEntry:
    """A row of the registry: names in `liger_trainer` (resolved on use), and sets of columns; rows need one of them."""

    config: str
    trainer: str
    columns: tuple[tuple[str, ...], ...]
    rewards: bool = False  # whether it wants `reward_funcs`
    experimental: bool = False  # whether TRL has it in `trl.experimental`


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
    "grpo": TrainerEntry("LigerGRPOConfig", "LigerGRPOTrainer", (("prompt",),), rewards=True),
    "rloo": TrainerEntry("LigerRLOOConfig", "LigerRLOOTrainer", (("prompt",),), rewards=True),
    "distillation": TrainerEntry("LigerDistillationConfig", "LigerDistillationTrainer", (("prompt",),)),
    "medusa": TrainerEntry(
        "MedusaConfig", "LigerMedusaTrainer", (("messages",), ("prompt", "completion"), ("text",), ("input_ids",))
    ),
}


@dataclass
class Recipe:
    """A parsed recipe. `chosen` holds what the file and the command line set, `words` the command line itself.

    `began` becomes true when training begins.
    """

    path: Path
    entry: TrainerEntry
    args: RecipeArguments
    training: Any
    model: Any
    chosen: dict[str, Any]
    words: tuple[str, ...] = ()
    began: bool = False

    def to_yaml(self) -> str:
        """The recipe as it runs, wherever this is saved: data found beside the recipe gets its full path."""
        values = dict(self.chosen)
        for key in ("dataset_name", "eval_dataset_name"):
            if (named := values.get(key)) is not None:
                paths = [self._full_path(name) for name in ([named] if isinstance(named, str) else named)]
                values[key] = paths[0] if isinstance(named, str) else paths
        return dump_yaml(values)

    def _full_path(self, name: str) -> str:
        path = find_beside(name, self.path.parent)
        return name if path is None else str(path.absolute())


def recipe_names() -> dict[str, Path]:
    """Shipped recipes by name, such as `llama3_8b/sft_alpaca`."""
    root = shipped("recipes")
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(root.rglob("*.yaml"))}


def describe(path: Path) -> str:
    """The first comment line of a recipe: its one-line description."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    if not first.startswith("# "):
        raise RecipeError(
            f"{path}: the first line is {first!r}; expected a comment that describes the recipe in one line."
        )
    return first[2:].strip()


def find_recipe(name: str) -> Path:
    """The file that `name` means: a path, or else a shipped recipe, with or without `.yaml`."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    names = recipe_names()
    if (key := name.removesuffix(".yaml")) in names:
        return names[key]
    raise RecipeError(
        f"RECIPE is {name!r}: no such file, and no shipped recipe of that name.{nearest(key, names)} "
        f"Shipped: {', '.join(names)}."
    )


def parse_recipe(name: str, overrides: list[str] = ()) -> Recipe:
    """Read the recipe `name` (path or shipped name), with `overrides` such as `["--max_steps", "5"]` on top.

    Raises:
        RecipeError: Unknown, repeated or misplaced key, value of the wrong type, or values that exclude each other.
        SystemExit: 0, after `--help`.
    """
    path = find_recipe(name)
    values = load_yaml(path)
    entry = _trainer_entry(path, values, overrides)
    refuse_unknown(path, values, list(overrides), nearest)
    parser, owners = _parser(entry)
    _refuse_unknown_keys(path, values, owners, entry)
    values = {key: checked(path, key, value, owners[key].hints[key]) for key, value in values.items()}
    parser.set_defaults_with_config(**values)  # what --help shows
    defaults = {key: owner.defaults[key] for key, owner in owners.items()}
    given = _given(parser, owners, overrides, entry)
    _check_two_names(path, values, given)
    chosen = settle(path, values, given, defaults)
    settle_precision(chosen.get("bf16"), chosen.get("fp16"))
    try:
        args, training, model = parser.parse_dict(chosen)
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise RecipeError(f"{path}: {error}{_bf16_hint(error)}") from error
    _check_needs(path, entry, args, training)
    if {"lr_scheduler_type", "lr_scheduler_kwargs"} & set(chosen):
        check_scheduler(path, training)
    if isinstance(model.lora_target_modules, str) and model.lora_target_modules.isidentifier():
        # TRL makes a string of a list of one, which peft takes for a pattern of full names: no layer's name is q_proj.
        model.lora_target_modules = [model.lora_target_modules]
    return Recipe(path, entry, args, training, model, chosen, (str(name), *overrides))


_NOT_GIVEN = object()


def _given(parser, owners, overrides: list[str], entry: TrainerEntry) -> dict[str, Any]:
    """What the command line sets, also where that is the default.

    Every key starts with a mark that is nobody's value, because afterwards a value cannot be told from a default (and
    a key with a `--no_` twin has two defaults).
    """

    def refuse(message):
        raise RecipeError(f"{message.rstrip('.')}. `liger-trainer train RECIPE --help` says what each option takes.")

    parser.error = refuse  # argparse would print the usage and exit
    namespace, rest = parser.parse_known_args(list(overrides), argparse.Namespace(**dict.fromkeys(owners, _NOT_GIVEN)))
    if rest:
        raise RecipeError(_unknown_option(rest[0], owners, entry))
    given = {key: value for key, value in vars(namespace).items() if key in owners and value is not _NOT_GIVEN}
    # argparse makes 20.0 of the 20 in `--save_steps 20`; messages and --dry_run show it as a file has it.
    whole = {key: int(value) for key, value in given.items() if isinstance(value, float) and value.is_integer()}
    return given | whole


# Two names of transformers' for one option; where both are set, it takes the second.
_TWO_NAMES = (
    ("gradient_checkpointing", "activation_checkpointing"),
    ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
)


def _check_two_names(path: Path, filed: dict[str, Any], given: dict[str, Any]) -> None:
    """Let the command line beat the file under either name of an option. RecipeError where two names disagree."""
    for names in _TWO_NAMES:
        if any(name in given for name in names):
            for name in names:
                filed.pop(name, None)
        values = [(filed | given).get(name) for name in names]
        if None not in values and values[0] != values[1]:
            raise RecipeError(
                f"{path}: {names[0]} is {values[0]} and {names[1]} is {values[1]}, which are two names of one option; "
                "keep one of them."
            )


def _check_needs(path: Path, entry: TrainerEntry, args: RecipeArguments, training) -> None:
    """RecipeError where a trainer lacks what it cannot do without, or a reward would never be computed."""
    if entry.rewards and not args.reward_funcs:
        raise RecipeError(
            f"{path}: {entry.trainer} needs reward_funcs; set a list, such as [boxed_answer] or [my_module.my_reward]."
        )
    if args.reward_funcs and not entry.rewards:
        with_rewards = [name for name, other in TRAINERS.items() if other.rewards]
        raise RecipeError(
            f"{path}: reward_funcs is {args.reward_funcs!r}, which {entry.trainer} does not compute. Remove it, or set "
            f"trainer to one of: {', '.join(with_rewards)}."
        )
    if args.early_stopping_patience is not None and not training.load_best_model_at_end:
        # With load_best_model_at_end transformers itself checks that the two strategies are there and agree.
        raise RecipeError(
            f"{path}: early_stopping_patience is {args.early_stopping_patience}, which needs load_best_model_at_end: "
            "true, and eval_strategy and save_strategy: steps or epoch, both the same. Add them, or remove "
            "early_stopping_patience."
        )
    if getattr(training, "teacher_model_name_or_path", "") is None:
        raise RecipeError(
            f"{path}: {entry.trainer} needs teacher_model_name_or_path; set it to a folder, or to a model on the Hub."
        )


@dataclass(frozen=True)
class _Owner:
    name: str
    hints: dict[str, Any]
    defaults: dict[str, Any]


def _parser(entry: TrainerEntry):
    """TRL's parser over the three dataclasses of `entry`, and for each key the class that has it."""
    from trl import ModelConfig, TrlParser

    import liger_trainer

    if entry.experimental:  # who names this trainer has chosen it, and need not be warned that TRL may change it
        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    dataclass_types = (RecipeArguments, getattr(liger_trainer, entry.config), ModelConfig)
    parser = TrlParser(
        dataclass_types,
        prog="liger-trainer train",
        usage="liger-trainer train RECIPE [--dry_run] [--preview [N]] [--key value ...]",
        allow_abbrev=False,  # an abbreviation is a misspelling that happens to work
    )
    owners = {}
    for cls in dataclass_types:
        fields = [f for f in dataclasses.fields(cls) if f.init]
        defaults = {f.name: None if f.default is dataclasses.MISSING else f.default for f in fields}
        owner = _Owner(cls.__name__, typing.get_type_hints(cls), defaults)
        owners |= {f.name: owner for f in fields}
    return parser, owners


def _trainer_entry(path: Path, values: dict, overrides: list[str]) -> TrainerEntry:
    """The registry's row, needed before the parser exists: the trainer decides which keys there are."""
    name = values.get("trainer", "sft")
    for i, word in enumerate(overrides):
        option, _, given = word.partition("=")
        if option == "--trainer":
            name = given or (overrides[i + 1] if i + 1 < len(overrides) else "")
    if not isinstance(name, str) or name not in TRAINERS:
        raise RecipeError(f"{path}: trainer is {name!r}; expected one of: {', '.join(TRAINERS)}.")
    return TRAINERS[name]


def nearest(key: str, known, form: str = "Did you mean {}?") -> str:
    match = difflib.get_close_matches(key, list(known), n=1, cutoff=0.5)
    return " " + form.format(match[0]) if match else ""


def _unknown_option(option: str, owners, entry: TrainerEntry) -> str:
    if not option.startswith("--"):
        return f"{option!r} on the command line belongs to no option; options after RECIPE are written --key value."
    key = option[2:].partition("=")[0].replace("-", "_")
    if (elsewhere := _elsewhere(key, entry)) is not None:
        return f"--{key} {elsewhere}"
    if not (near := nearest(key, owners, "Did you mean --{}?")):
        near = " `liger-trainer train RECIPE --help` lists all options."
    return f"--{key} is not an option.{near}"


# What `from_pretrained` itself takes under a name that is also a key of the recipe.
_SHARED_WITH_MODEL_INIT = {"dtype", "attn_implementation", "trust_remote_code", "router_aux_loss_coef"}


def _elsewhere(key: str, entry: TrainerEntry) -> str | None:
    """What to say of a key that `entry` does not have, and other trainers have."""
    import liger_trainer

    configs = {name: getattr(liger_trainer, other.config) for name, other in TRAINERS.items()}
    having = [name for name, config in configs.items() if key in {field.name for field in dataclasses.fields(config)}]
    if not having:
        return None
    (name,) = (name for name, other in TRAINERS.items() if other is entry)
    return f"is a key of the trainers {', '.join(having)}, and not of {name}. Remove it, or set another trainer."


def _refuse_unknown_keys(path: Path, values: dict, owners, entry: TrainerEntry) -> None:
    for key, value in values.items():
        if key in owners:
            continue
        inside = [k for k in value if k in owners] if isinstance(value, dict) else []
        if inside:
            raise RecipeError(
                f"{path}: {key!r} is not a key, and a recipe has no sections. Move {', '.join(inside)} to the left "
                "margin."
            )
        if (elsewhere := _elsewhere(key, entry)) is not None:
            raise RecipeError(f"{path}: {key!r} (with value {value!r}) {elsewhere}")
        near = nearest(key, owners) or " `liger-trainer train RECIPE --help` lists all keys."
        raise RecipeError(f"{path}: {key!r} (with value {value!r}) is not a key of a recipe.{near}")
    init = values.get("model_init_kwargs")
    for key in init if isinstance(init, dict) else ():
        if key in owners and key not in _SHARED_WITH_MODEL_INIT:
            raise RecipeError(
                f"{path}: {key!r} stands under model_init_kwargs but belongs to {owners[key].name}. Move it "
                "to the left margin."
            )


def _bf16_hint(error: Exception) -> str:
    if "bf16" not in str(error):
        return ""
    return " Without a GPU that computes in bf16, set `bf16: false` in the recipe or pass --bf16 false."
