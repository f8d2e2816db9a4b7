"""A recipe: a flat YAML file of the fields of `RecipeArguments`, of the trainer's config and of `trl.ModelConfig`.

Parsed with TRL's parser. What that lets through is refused here before it runs: unknown and repeated keys, keys under
the wrong heading, and values of the wrong YAML type.
"""

import dataclasses
import difflib
import enum
import re
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from liger_trainer.paths import shipped


class RecipeError(ValueError):
    """Something in a recipe, or in what it names, that the user can mend; the message names key, value and mend."""


@dataclass
class RecipeArguments:
    """The keys of a recipe that belong neither to the trainer's config nor to TRL's `ModelConfig`."""

    trainer: str = field(
        default="sft", metadata={"help": "Which trainer runs the recipe: a name of the table under Trainers."}
    )
    dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "A .json, .jsonl, .parquet or .csv file, a folder of such files, or the name of a Hub dataset. "
            "A relative path is looked up from the working directory, then from the folder of the recipe."
        },
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Name of the configuration of a Hub dataset."})
    dataset_train_split: str = field(
        default="train", metadata={"help": "Split to train on. The rows of a single file are its split 'train'."}
    )
    dataset_eval_split: str | None = field(default=None, metadata={"help": "Split to evaluate on."})
    eval_fraction: float | None = field(
        default=None,
        metadata={
            "help": "Share of the training rows, between 0 and 1, drawn with `seed` and held out for evaluation."
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
            "of dotted paths of functions such as my_module.my_reward. Rewards add up, weighted by `reward_weights`."
        },
    )

    def __post_init__(self):
        if self.eval_fraction is not None and not 0 < self.eval_fraction < 1:
            raise RecipeError(
                f"eval_fraction is {self.eval_fraction}; expected a number between 0 and 1, such as 0.05."
            )
        if self.eval_fraction is not None and self.dataset_eval_split is not None:
            raise RecipeError(
                f"eval_fraction ({self.eval_fraction}) and dataset_eval_split ({self.dataset_eval_split!r}) are both "
                "set; keep one of them."
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


TRAINERS = {
    "sft": TrainerEntry(
        "LigerSFTConfig", "LigerSFTTrainer", (("messages",), ("prompt", "completion"), ("text",), ("input_ids",))
    ),
    "dpo": TrainerEntry("LigerDPOConfig", "LigerDPOTrainer", (("chosen", "rejected"),)),
    "orpo": TrainerEntry("LigerORPOConfig", "LigerORPOTrainer", (("chosen", "rejected"),)),
    "cpo": TrainerEntry("LigerCPOConfig", "LigerCPOTrainer", (("chosen", "rejected"),)),
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
    """A parsed recipe. `chosen` holds what the file and the command line set, as `--dry_run` prints it."""

    path: Path
    entry: TrainerEntry
    args: RecipeArguments
    training: Any
    model: Any
    chosen: dict[str, Any]

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.chosen, sort_keys=False, allow_unicode=True)


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
        f"RECIPE is {name!r}: no such file, and no shipped recipe of that name.{_nearest(key, names)} "
        f"Shipped: {', '.join(names)}."
    )


def parse_recipe(name: str, overrides: list[str] = ()) -> Recipe:
    """Read the recipe `name` (path or shipped name), with `overrides` such as `["--max_steps", "5"]` on top.

    Raises:
        RecipeError: Unknown, repeated or misplaced key, value of the wrong type, or values that exclude each other.
        SystemExit: 2, for an override that the parser cannot convert; 0 after `--help`.
    """
    path = find_recipe(name)
    values = _load_yaml(path)
    entry = _trainer_entry(path, values, overrides)
    parser, owners = _parser(entry)
    _refuse_unknown_keys(path, values, owners)
    values = {key: _checked(path, key, value, owners[key].hints[key]) for key, value in values.items()}

    defaults = {action.dest: action.default for action in parser._actions}
    parser.set_defaults_with_config(**values)
    namespace, rest = parser.parse_known_args(list(overrides))
    if rest:
        raise RecipeError(_unknown_option(rest[0], owners))
    chosen = {
        key: value
        for key, value in vars(namespace).items()
        if key in owners and (key in values or value != defaults[key])
    }
    try:
        args, training, model = parser.parse_args_into_dataclasses(list(overrides), look_for_args_file=False)
    except (ValueError, TypeError) as error:
        raise RecipeError(f"{path}: {error}{_bf16_hint(error)}") from error
    _check_needs(path, entry, args, training)
    return Recipe(path, entry, args, training, model, {key: _plain(value) for key, value in chosen.items()})


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
    if getattr(training, "teacher_model_name_or_path", "") is None:
        raise RecipeError(
            f"{path}: {entry.trainer} needs teacher_model_name_or_path; set it to a folder, or to a model on the Hub."
        )


@dataclass(frozen=True)
class _Owner:
    name: str
    hints: dict[str, Any]


def _parser(entry: TrainerEntry):
    """TRL's parser over the three dataclasses of `entry`, and for each key the class that has it."""
    from trl import ModelConfig, TrlParser

    import liger_trainer

    dataclass_types = (RecipeArguments, getattr(liger_trainer, entry.config), ModelConfig)
    parser = TrlParser(
        dataclass_types,
        prog="liger-trainer train",
        usage="liger-trainer train RECIPE [--dry_run] [--key value ...]",
        allow_abbrev=False,  # an abbreviation is a misspelling that happens to work
    )
    owners = {}
    for cls in dataclass_types:
        owner = _Owner(cls.__name__, typing.get_type_hints(cls))
        owners |= {f.name: owner for f in dataclasses.fields(cls) if f.init}
    return parser, owners


class _Loader(yaml.SafeLoader):
    """YAML in which a repeated key is an error, and `2e-5` a number as in YAML 1.2 (in 1.1 it is a string)."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise RecipeError(f"line {key_node.start_mark.line + 1}: the key {key!r} is there twice; keep one.")
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _load_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # noqa: S506 - a SafeLoader
    except RecipeError as error:
        raise RecipeError(f"{path}, {error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise RecipeError(
            f"{path} holds {type(values).__name__}; expected a mapping of keys to values, one `key: value` a line."
        )
    return values


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


def _nearest(key: str, known, form: str = "Did you mean {}?") -> str:
    match = difflib.get_close_matches(key, list(known), n=1, cutoff=0.5)
    return " " + form.format(match[0]) if match else ""


def _unknown_option(option: str, owners) -> str:
    if not option.startswith("--"):
        return f"{option!r} on the command line belongs to no option; options after RECIPE are written --key value."
    key = option[2:].partition("=")[0].replace("-", "_")
    if not (near := _nearest(key, owners, "Did you mean --{}?")):
        near = " `liger-trainer train RECIPE --help` lists all options."
    return f"--{key} is not an option.{near}"


# What `from_pretrained` itself takes under a name that is also a key of the recipe.
_SHARED_WITH_MODEL_INIT = {"dtype", "attn_implementation", "trust_remote_code", "router_aux_loss_coef"}


def _refuse_unknown_keys(path: Path, values: dict, owners) -> None:
    for key, value in values.items():
        if key in owners:
            continue
        inside = [k for k in value if k in owners] if isinstance(value, dict) else []
        if inside:
            raise RecipeError(
                f"{path}: {key!r} is not a key, and a recipe has no sections. Move {', '.join(inside)} to the left "
                "margin."
            )
        near = _nearest(key, owners) or " `liger-trainer train RECIPE --help` lists all keys."
        raise RecipeError(f"{path}: {key!r} (with value {value!r}) is not a key of a recipe.{near}")
    init = values.get("model_init_kwargs")
    for key in init if isinstance(init, dict) else ():
        if key in owners and key not in _SHARED_WITH_MODEL_INIT:
            raise RecipeError(
                f"{path}: {key!r} stands under model_init_kwargs but belongs to {owners[key].name}. Move it "
                "to the left margin."
            )


_TYPE_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "a string", dict: "a mapping"}
_YAML_NAMES = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    dict: "a mapping",
    list: "a list",
}


def _options(hint) -> tuple:
    """The members of a union; any other hint by itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _fits(value, hint) -> bool:
    origin = typing.get_origin(hint) or hint
    if origin is Literal:
        return value in typing.get_args(hint) and type(value) in {type(option) for option in typing.get_args(hint)}
    if origin is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if origin is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if origin is list:
        members = typing.get_args(hint)
        return isinstance(value, list) and (
            not members or all(any(_fits(v, o) for o in _options(members[0])) for v in value)
        )
    if origin is Any:
        return True
    if isinstance(origin, type) and issubclass(origin, enum.Enum):
        return value in {member.value for member in origin}
    return isinstance(value, origin)


def _expected(hint) -> str:
    origin = typing.get_origin(hint) or hint
    if origin is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(hint)))
    if origin is list:
        members = typing.get_args(hint)
        return f"a list of {_expected(members[0]).removeprefix('a ')}s" if members else "a list"
    if isinstance(origin, type) and issubclass(origin, enum.Enum):
        return "one of " + ", ".join(repr(member.value) for member in origin)
    return _TYPE_NAMES.get(origin, getattr(origin, "__name__", str(origin)))


def _checked(path: Path, key: str, value, hint):
    """`value` as the parser wants it. RecipeError where its YAML type is none that `hint` allows."""
    options = _options(hint)
    enums = [o for o in options if isinstance(o, type) and issubclass(o, enum.Enum)]
    if value is False and any("no" in {member.value for member in o} for o in enums):
        return "no"  # `save_strategy: no` is the boolean false in YAML
    if key == "resume_from_checkpoint" and isinstance(value, bool):
        return str(value).lower()
    # Where an enum stands beside str, its members are all there is: any other string fails later, far from the recipe.
    allowed = [o for o in options if o is not str] if enums else options
    if any(_fits(value, o) for o in allowed):
        return value
    expected = " or ".join(_expected(o) for o in allowed if o is not type(None))
    got = "empty" if value is None else f"{value!r}, {_YAML_NAMES.get(type(value), 'a ' + type(value).__name__)}"
    raise RecipeError(f"{path}: {key} is {got}; expected {expected}.")


def _plain(value):
    if isinstance(value, enum.Enum):
        return value.value
    return value


def _bf16_hint(error: Exception) -> str:
    if "bf16" not in str(error):
        return ""
    return " Without a GPU that computes in bf16, set `bf16: false` in the recipe or pass --bf16 false."
