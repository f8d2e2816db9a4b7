"""Recipes: shipped ones parse; misspelt, misplaced or mistyped keys stop; the command line beats the file."""

import dataclasses
import math
import re

import pytest
import torch
import yaml
from recipe_fixtures import ROOT, command, write_model, write_recipe

from liger_trainer.command.recipe.read import TRAINERS, RecipeArguments, parse_recipe, recipe_names
from liger_trainer.command.recipe.shipped_files import describe
from liger_trainer.command.run.train import _needs_reference
from liger_trainer.errors import RecipeError
from liger_trainer.paths import shipped

SHIPPED = sorted(recipe_names())
CONFIGS = {
    "single_gpu": "NO",
    "ddp": "MULTI_GPU",
    "fsdp2": "FSDP",
    "fsdp2_machines": "FSDP",
    "context_parallel": "FSDP",
    "zero2": "DEEPSPEED",
    "zero3": "DEEPSPEED",
}


def recipe_text(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


def test_names():
    assert {"quickstart", "llama3_8b/sft_alpaca", "llama3_8b/sft_alpaca_lora"} <= set(SHIPPED)
    assert {"quickstart_dpo", "llama3_8b/dpo_ultrafeedback"} <= set(SHIPPED)
    assert {"quickstart_medusa", "llama3_8b/medusa_stage1", "llama3_8b/medusa_stage2"} <= set(SHIPPED)
    assert {"llama3_8b/kto", "llama3_8b/grpo", "llama3_8b/reward"} <= set(SHIPPED)


def test_the_recipe_in_4_bits():
    from trl import get_quantization_config

    recipe = parse_recipe("llama3_8b/sft_alpaca_qlora", ["--bf16", "false"])
    config = get_quantization_config(recipe.model)
    assert config.load_in_4bit and config.bnb_4bit_quant_type == "nf4" and config.bnb_4bit_use_double_quant
    assert config.bnb_4bit_compute_dtype == torch.bfloat16
    plain = parse_recipe("llama3_8b/sft_alpaca_lora", ["--bf16", "false"])
    steps = [r.training.per_device_train_batch_size * r.training.gradient_accumulation_steps for r in (recipe, plain)]
    assert steps[0] == steps[1]


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipe_parses(name):
    """transformers refuses bf16 without a GPU, so bf16 is switched off here. Nothing else is."""
    recipe = parse_recipe(name, ["--bf16", "false"])
    assert recipe.training.use_liger is True
    assert describe(recipe.path).endswith(".")
    assert f"train {name}" in recipe.path.read_text(), "the header gives the command"


@pytest.mark.parametrize("name", CONFIGS)
def test_accelerate_config_parses(name):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(shipped("configs") / f"{name}.yaml"))  # refuses unknown keys
    assert str(config.distributed_type).split(".")[-1] == CONFIGS[name]
    if CONFIGS[name] == "FSDP":
        assert config.fsdp_config["fsdp_version"] == 2
        assert config.fsdp_config["fsdp_auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"
    sizes = config.parallelism_config
    if sizes:
        assert math.prod(sizes.values()) == config.num_processes
    if name.startswith("zero"):
        assert config.deepspeed_config["zero_stage"] == int(name[-1])


def test_all_configs_are_tested():
    assert {path.stem for path in shipped("configs").glob("*.yaml")} == set(CONFIGS)


def test_reference_of_a_gguf_model(monkeypatch):
    """The stock trainers cannot load a second copy themselves; under FSDP they need one even to precompute."""
    recipe = parse_recipe("quickstart_dpo", [])
    assert recipe.training.precompute_ref_log_probs and not _needs_reference(recipe)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert _needs_reference(recipe)
    assert not _needs_reference(parse_recipe("quickstart", []))


def test_command_line_beats_file_beats_default(tmp_path):
    path = write_recipe(tmp_path, max_steps=7, learning_rate=3e-4, use_liger=False)
    assert parse_recipe(str(path)).training.max_steps == 7
    recipe = parse_recipe(str(path), ["--max_steps", "9", "--use-liger", "true"])
    assert (recipe.training.max_steps, recipe.training.use_liger) == (9, True)
    assert recipe.training.learning_rate == 3e-4
    assert recipe.training.seed == 42  # in neither: use the default


def test_liger_config_from_file_and_command_line(tmp_path):
    path = write_recipe(tmp_path, liger_config={"rope": False})
    assert parse_recipe(str(path)).training.liger_config == {"rope": False}
    assert parse_recipe(str(path), ["--liger_config", '{"swiglu": false}']).training.liger_config == {"swiglu": False}


UNKNOWN = {
    "misspelt": ("max_step: 3", "'max_step' (with value 3) is not a key of a recipe. Did you mean max_steps?"),
    "another tool's name": (
        "lr: 1e-4",
        "'lr' (with value 0.0001) is not a key of a recipe. Did you mean learning_rate?",
    ),
    "another tool's batch size": ("batch_size: 4", "Did you mean per_device_train_batch_size?"),
    "model key": ("lora_alhpa: 8", "Did you mean lora_alpha?"),
    "twice": ("max_steps: 3\nmax_steps: 4", "line 2: the key 'max_steps' is there twice; keep one."),
    "trainer": ("trainer: sfd", f"trainer is 'sfd'; expected one of: {', '.join(TRAINERS)}."),
    "kernel": ("liger_config: {rmsnorm: false}", "rms_norm"),
    "no mapping": ("- max_steps", "does not map names to values; expected one `key: value` a line."),
    "nothing": ("", "does not map names to values; expected one `key: value` a line."),
    "not YAML": ("seed: 1\nmax_steps: [", "recipe.yaml is not valid YAML: while parsing a flow"),
}


@pytest.mark.parametrize("text, message", UNKNOWN.values(), ids=UNKNOWN)
def test_unknown_or_misplaced_key_exits_2(text, message, tmp_path, capsys):
    code, out, err = command(capsys, "train", recipe_text(tmp_path, text), "--bf16", "false", "--dry_run")
    assert code == 2 and out == ""
    assert message in err


def test_unknown_option_exits_2(tmp_path, capsys):
    path = write_recipe(tmp_path)
    code, _, err = command(capsys, "train", path, "--learning_rat", "1e-4")
    assert code == 2 and "--learning_rat is not a key of a recipe. Did you mean learning_rate?" in err
    code, _, err = command(capsys, "train", path, "--max_step", "3")  # argparse would take it for --max_steps
    assert code == 2 and "Did you mean max_steps?" in err
    code, _, err = command(capsys, "train", path, "max_steps=3")
    assert code == 2 and "'max_steps=3' on the command line belongs to no option" in err


WRONG_TYPE = {
    "int": ("max_steps: ten", "max_steps is 'ten'. Field 'max_steps' expected int, got str"),
    "int from float": ("max_steps: 1.5", "max_steps is 1.5. Field 'max_steps' expected int, got float"),
    "int from bool": ("seed: true", "seed is True. Field 'seed' expected int, got bool"),
    "bool": ("use_liger: maybe", "Field 'use_liger' expected bool, got str (value: 'maybe')"),
    "bool from int": ("packing: 1", "Field 'packing' expected bool, got int"),
    "float": ("learning_rate: fast", "Field 'learning_rate' expected float, got str"),
    "str": (
        "output_dir: 5",
        "output_dir is 5. Field 'output_dir' with value 5 doesn't match any type in ",
    ),
    "list": ("lora_target_modules: [1, 2]", "lora_target_modules is [1, 2]. Field 'lora_target_modules' with value"),
    "literal": ("prompt_template: vicuna", "expected one of ('none', 'alpaca', 'sharegpt', 'last_turn'), got vicuna"),
    "enum": (
        "save_strategy: sometimes",
        "save_strategy: sometimes is not a valid SaveStrategy, please select one of ['no', 'steps', 'epoch', 'best']",
    ),
    "empty": ("max_steps:", "max_steps is None. Field 'max_steps' expected int, got NoneType"),
    "mapping": ("dataset_name: {a: 1}", "dataset_name is {'a': 1}. Field 'dataset_name' with value"),
}


@pytest.mark.parametrize("text, message", WRONG_TYPE.values(), ids=WRONG_TYPE)
def test_wrong_type(text, message, tmp_path):
    with pytest.raises(RecipeError) as error:
        parse_recipe(str(recipe_text(tmp_path, text)), ["--bf16", "false"])
    assert message in str(error.value)


def test_wrong_type_on_the_command_line(tmp_path, capsys):
    path = write_recipe(tmp_path)
    code, _, err = command(capsys, "train", path, "--max_steps", "ten")
    assert code == 2 and "--max_steps" in err and "invalid int value: 'ten'" in err
    code, _, err = command(capsys, "train", path, "--use_liger", "maybe")
    assert code == 2 and "--use_liger" in err and "maybe" in err


def test_yaml_spellings_that_mean_what_they_look_like(tmp_path):
    """YAML 1.1 reads 2e-5 as a string, and no as false."""
    text = "learning_rate: 2e-5\nsave_strategy: no\neval_strategy: off\nbf16: no\nresume_from_checkpoint: true"
    training = parse_recipe(str(recipe_text(tmp_path, text))).training
    assert training.learning_rate == 2e-5
    assert (training.save_strategy.value, training.eval_strategy.value, training.bf16) == ("no", "no", False)
    assert training.resume_from_checkpoint == "true"


def test_excluding_values(tmp_path):
    for keys, message in (
        ({"eval_fraction": 1.5}, "eval_fraction is 1.5; expected a number between 0 and 1"),
        ({"eval_fraction": 0.1, "dataset_eval_split": "test"}, "are both set"),
        ({"eval_fraction": 0.1, "eval_dataset_name": "e.jsonl"}, "eval_fraction and eval_dataset_name are both set"),
        ({"max_rows": 0, "eval_fraction": 0.1}, "max_rows is 0; expected 1 or more"),
    ):
        with pytest.raises(RecipeError, match=message):
            parse_recipe(
                str(
                    write_recipe(
                        tmp_path,
                        eval_strategy="epoch",
                        **keys,
                    )
                )
            )


def test_bf16_without_gpu_says_what_to_do(tmp_path):
    with pytest.raises(RecipeError, match="--bf16 false"):
        parse_recipe(str(write_recipe(tmp_path, bf16=True)))


def test_a_list_on_the_command_line(tmp_path):
    path = str(write_recipe(tmp_path))
    assert parse_recipe(path, ["--dataset_name", "a.jsonl", "b.csv"]).args.dataset_name == ["a.jsonl", "b.csv"]
    alone = parse_recipe(path, ["--trainer", "dpo", "--dataset_name", "org/rows", "--loss_type", "ipo"])
    assert alone.args.dataset_name == "org/rows", "a text, as in a file, and as the model's card takes it"
    assert alone.training.loss_type == ["ipo"]


def test_several_words_after_an_option_that_takes_a_text_or_a_list(tmp_path):
    """The stock parser takes one word after such an option.

    As in `TrainingArguments` and in a file, ours takes a list.
    """
    path = str(write_recipe(tmp_path))
    recipe = parse_recipe(path, ["--report_to", "tensorboard", "trackio", "--seed", "3"])
    assert recipe.training.report_to == ["tensorboard", "trackio"] and recipe.training.seed == 3
    assert parse_recipe(path, ["--report_to=none"]).training.report_to == []
    recipe = parse_recipe(path, ["--optim", "galore_adamw", "--optim_target_modules", "all-linear"])
    assert recipe.training.optim_target_modules == "all-linear"


def test_a_text_where_a_list_of_texts_belongs(tmp_path):
    keys = {"trainer": "dpo", "use_peft": True, "lora_target_modules": "all-linear", "loss_type": "ipo"}
    recipe = parse_recipe(str(write_recipe(tmp_path, **keys)))
    assert recipe.model.lora_target_modules == "all-linear" and recipe.training.loss_type == ["ipo"]


def test_a_printed_recipe_parses_to_the_same(tmp_path):
    keys = {"model_name_or_path": "nobody/nothing", "liger_config": {"rope": False}, "use_peft": True}
    path = write_recipe(tmp_path, **keys)
    out = parse_recipe(str(path), ["--max_steps", "9", "--lora_target_modules", "q_proj", "v_proj"]).to_yaml()
    printed = yaml.safe_load(out)
    assert printed["max_steps"] == 9 and printed["model_name_or_path"] == "nobody/nothing"
    assert printed["lora_target_modules"] == ["q_proj", "v_proj"]
    assert "seed" not in printed
    again = parse_recipe(str(recipe_text(tmp_path, out)))
    first = parse_recipe(str(write_recipe(tmp_path, **keys)))
    assert again.training.max_steps == 9 and again.model.lora_target_modules == ["q_proj", "v_proj"]
    again.training.max_steps = first.training.max_steps
    assert again.training.to_dict() == first.training.to_dict()
    assert again.args == first.args


def test_help_lists_every_key(capsys):
    code, out, _ = command(capsys, "train", "quickstart", "--help", "all")
    assert code == 0
    for key in ("--prompt_template", "--use_liger", "--liger_config", "--lora_r", "--max_steps"):
        assert key in out


@pytest.mark.parametrize("name", ["quickstart", "llama3_8b/grpo"])
def test_help_names_every_key(name, capsys):
    code, out, _ = command(capsys, "train", name, "--help")
    assert code == 0 and max(map(len, out.splitlines())) <= 120
    recipe = parse_recipe(name, ["--bf16", "false"])
    named = set(re.findall(r"\w+", out))
    for part in (recipe.args, recipe.training, recipe.model):
        assert {field.name for field in dataclasses.fields(part) if field.init} <= named


@pytest.mark.parametrize(
    "word, shown, hidden",
    [
        ("learning_rate", ["learning_rate"], ["seed", "lora_r"]),
        ("--save-steps", ["save_steps"], ["save_strategy"]),
        ("model", ["lora_r", "dtype"], ["metric_for_best_model", "seed"]),
        ("ours", ["use_liger", "fp8"], ["bf16"]),
        ("eval", ["eval_steps", "eval_fraction"], ["save_steps"]),
    ],
)
def test_help_of_a_topic(word, shown, hidden, capsys):
    code, out, _ = command(capsys, "train", "quickstart", f"--help={word}")
    assert code == 0 and "default: " in out
    names = {text.split()[0].rstrip(",") for text in out.split("\n  --")[1:]}
    assert set(shown) <= names and not set(hidden) & names
    code, _, err = command(capsys, "train", "quickstart", "--help", "nothing_like_it")
    assert code == 2 and "expected a topic" in err


def test_every_command_has_help(capsys):
    said = command(capsys, "--help")[1]
    assert "import torch" not in said, "it says what a user can do"
    names = re.findall(r"^    ([a-z][\w-]+)", said, re.MULTILINE)
    assert {"train", "compare", "chat"} <= set(names)
    for name in names:
        code, out, _ = command(capsys, name, "--help")
        assert code == 0 and out.startswith(f"usage: liger-trainer {name}"), out


def test_docs_page_words_the_keys_as_help_does():
    page = (ROOT / "docs" / "recipes.md").read_text()
    for field in dataclasses.fields(RecipeArguments):
        default = "unset" if field.default is None else f"`{field.default}`"
        assert f"| `{field.name}` | {default} | {field.metadata['help']} |" in page, field.name
    for name, entry in TRAINERS.items():
        assert f"| `{name}` | `{entry.trainer}`, `{entry.config}` |" in page, name


def test_messages_of_the_command_line(tmp_path, capsys, monkeypatch):
    """Messages name the trainer of a foreign key, repeat numbers as written, end in one full stop, give full paths."""
    monkeypatch.chdir(tmp_path)
    path = write_recipe(tmp_path, trainer="distillation", max_length=64)
    code, _, err = command(capsys, "train", path)
    assert code == 2 and "'max_length' (with value 64) is a key of the trainers sft, dpo" in err
    assert "but LigerDistillationTrainer does not have it. Remove" in err and "Did you mean" not in err
    code, _, err = command(capsys, "train", write_recipe(tmp_path), "--reward_weights", "1")
    assert (
        code == 2
        and "--reward_weights is a key of the trainers grpo, rloo, but LigerSFTTrainer does not have it." in err
    )
    code, _, err = command(capsys, "train", write_recipe(tmp_path), "--save_steps", "20")
    assert code == 2 and "save_steps is 20.0, which has no effect" in err
    code, _, err = command(capsys, "train", write_recipe(tmp_path), "--bf16", "maybe")
    assert code == 2 and "maybe" in err and ".." not in err
    write_model(tmp_path / "model")
    code, _, err = command(capsys, "train", write_recipe(tmp_path).name, "--dataset_name", "nothing.jsonl")
    assert code == 2 and f"does not exist here or in {tmp_path}." in err
    code, _, err = command(capsys, "train")
    assert code == 2 and "required: RECIPE\n" in err


@pytest.mark.parametrize("text", ["? [a, b]\n: 1\n", "a: " + "[" * 3000], ids=["a list as a key", "nested"])
def test_yaml_that_no_recipe_can_be(text, folder, capsys):
    (folder / "recipe.yaml").write_text(text)
    code, _, err = command(capsys, "train", folder / "recipe.yaml")
    assert code == 2 and "recipe.yaml" in err
