"""`--dry_run` prints the recipe that runs: no option lost or added, and its data found from anywhere."""

import dataclasses
import json
import os
import typing

import pytest
import yaml
from recipe_fixtures import command, write_model, write_recipe, write_rows

import liger_trainer
from liger_trainer.command.recipe.read import TRAINERS, parse_recipe

# Options that a trainer needs, and options that do not work without a GPU.
NEEDED = {"bf16": False, "reward_funcs": ["boxed_answer"], "teacher_model_name_or_path": "nobody/teacher"}


def printed(path, *options):
    return parse_recipe(str(path), options).to_yaml()


def bare_recipe(tmp_path, name):
    """The shortest recipe of a trainer."""
    keys = {field.name for field in dataclasses.fields(getattr(liger_trainer, TRAINERS[name].config))}
    keys |= {"reward_funcs"} if TRAINERS[name].rewards else set()
    path = tmp_path / "bare.yaml"
    path.write_text(yaml.safe_dump({"trainer": name} | {key: v for key, v in NEEDED.items() if key in keys}))
    return path


# These refuse True: transformers does on a CPU, TRL does, or keys are missing here.
NOT_TRUE_ALONE = {
    "bf16",
    "fp16",
    "tf32",
    "bf16_full_eval",
    "fp16_full_eval",
    "use_liger_kernel",
    "load_best_model_at_end",
    "eval_on_start",
    "greater_is_better",
    "assistant_only_loss",
    "auto_find_batch_size",
    "use_vllm",
    "use_transformers_continuous_batching",
    "use_transformers_paged",
    "use_adaptive_entropy",
    "vllm_enable_sleep_mode",
    "vllm_importance_sampling_correction",
    "enable_jit_checkpoint",
    "fp8",
    "optimizer_in_backward",
    "do_eval",
    "do_predict",
}
NOT_TRUE_FOR = {"mtp": {"train_mtp"}}  # it freezes the model


def boolean_keys(name):
    """The boolean keys of the trainer's config and their defaults."""
    config = getattr(liger_trainer, TRAINERS[name].config)
    hints = typing.get_type_hints(config)
    return {f.name: f.default for f in dataclasses.fields(config) if hints[f.name] in (bool, bool | None)}


@pytest.mark.parametrize("name", TRAINERS)
def test_every_boolean_key_survives_and_nothing_else_is_printed(name, tmp_path):
    path, booleans = bare_recipe(tmp_path, name), boolean_keys(name)
    bare = yaml.safe_load(path.read_text())
    assert len(booleans) > 40 and "use_liger" in booleans
    assert yaml.safe_load(printed(path)) == bare
    for value in (True, False):
        refused = NOT_TRUE_ALONE | NOT_TRUE_FOR.get(name, set()) if value else {"do_train"}
        keys = [key for key in booleans if key not in refused]
        options = [word for key in keys for word in (f"--{key}", str(value).lower())]
        out = printed(path, *options)
        assert yaml.safe_load(out) == bare | dict.fromkeys(keys, value)
        saved = tmp_path / "printed.yaml"
        saved.write_text(out)
        first, again = parse_recipe(str(path), options), parse_recipe(str(saved))
        for key in booleans:
            assert getattr(again.training, key) == getattr(first.training, key), key
    twins = [key for key, default in booleans.items() if default is True]
    assert len(twins) >= 5
    out = printed(path, *(f"--no_{key}" for key in twins))
    assert yaml.safe_load(out) == bare | dict.fromkeys(twins, False)


VALUES = {
    "lora_target_modules": ["q_proj", "v_proj"],
    "learning_rate": 2e-5,
    "max_grad_norm": 1e20,
    "adam_epsilon": 1e-20,
    "max_length": None,
    "liger_config": {"rope": False, "swiglu": True},
    "model_init_kwargs": {"device_map": None, "rope_scaling": {"factor": 2.0}},
    "lr_scheduler_type": "cosine",
    "save_strategy": "no",
    "hub_strategy": "checkpoint",
    "run_name": "2e-5",
    "output_dir": "out: [of] 'düne' # no comment",
    "seed": 0,
    "dtype": "bfloat16",
    "prompt_template": "alpaca",
    "optim_target_modules": ["a", "b"],
    "resume_from_checkpoint": "true",
}


@pytest.mark.parametrize("source", ["file", "command line"])
def test_values_of_every_type_survive(source, tmp_path):
    only_in_a_file = {"max_length", "optim_target_modules"}
    wanted = {"use_peft": True, "push_to_hub": True, "bf16": False} | VALUES
    path, options = tmp_path / "recipe.yaml", []
    if source == "command line":
        wanted = {key: value for key, value in wanted.items() if key not in only_in_a_file}
        for key, value in wanted.items():
            if isinstance(value, list):
                words = value
            else:
                words = [value if isinstance(value, str) else json.dumps(value)]
            options += [f"--{key}", *words]
        path.write_text("{}")
    else:
        path.write_text(yaml.safe_dump(wanted).replace("run_name: 2e-5", "run_name: '2e-5'"))
    out = printed(path, *options)
    saved = tmp_path / "printed.yaml"
    saved.write_text(out)
    first, again = parse_recipe(str(path), options), parse_recipe(str(saved))
    assert set(first.explicit) == set(wanted)
    assert again.explicit == first.explicit
    for recipe in (first, again):
        for part in (recipe.training, recipe.model, recipe.args):
            for field in dataclasses.fields(part):
                if field.name in wanted:
                    assert getattr(part, field.name) == wanted[field.name], field.name


def test_the_printed_recipe_finds_its_data_from_anywhere(tmp_path, monkeypatch):
    folder = tmp_path / "recipes"
    folder.mkdir()
    path = write_recipe(folder)
    (folder / "rows.jsonl").write_text("{}")
    assert yaml.safe_load(printed(path))["dataset_name"] == str(folder / "rows.jsonl")
    monkeypatch.chdir(folder)  # found relative to the working directory, which may differ for the next command
    assert yaml.safe_load(printed(path))["dataset_name"] == str(folder / "rows.jsonl")
    path = write_recipe(
        folder, dataset_name=["rows.jsonl", "nobody/rows"], eval_dataset_name="rows.jsonl", eval_strategy="epoch"
    )
    several = yaml.safe_load(printed(path))
    assert several["dataset_name"] == [str(folder / "rows.jsonl"), "nobody/rows"]
    assert several["eval_dataset_name"] == str(folder / "rows.jsonl")
    path = write_recipe(folder, dataset_name="nobody/rows")
    assert yaml.safe_load(printed(path))["dataset_name"] == "nobody/rows", "a name on the Hub stays one"
    out = yaml.safe_load(printed("quickstart"))
    assert os.path.isabs(out["dataset_name"]) and os.path.isfile(out["dataset_name"])


@pytest.fixture
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dry")
    write_model(folder / "model")
    write_rows(folder / "rows.jsonl")
    turns = [{"role": "user", "content": "w3"}, {"role": "assistant", "content": "w4"}]
    chat = [{"messages": turns, "label": label} for label in (True, False)] * 2
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat))
    return folder


WRONG = {
    "a missing file": ({"dataset_name": "no.jsonl"}, "dataset_name is 'no.jsonl', but that file does not exist"),
    "wrong columns": ({"prompt_template": None}, "the trainer needs one of"),
    "a missing model": (
        {"model_name_or_path": "./nothing"},
        "'./nothing', but that folder does not exist",
    ),
    "an unknown model": ({"model_name_or_path": "foo/bar"}, "model_name_or_path is 'foo/bar', which AutoConfig cannot"),
    "no template": (
        {"dataset_name": "chat.jsonl", "prompt_template": None},
        "has no chat template. Set chat_template_path, such as chatml",
    ),
    "no template, and no key for one": (
        {"dataset_name": "chat.jsonl", "prompt_template": "last_turn", "trainer": "kto"},
        "has no chat template. Take a model with one: trainer: sft with chat_template_path: chatml saves it",
    ),
    "a missing template": (
        {"dataset_name": "chat.jsonl", "prompt_template": None, "chat_template_path": "no.jinja"},
        "chat_template_path is 'no.jinja', neither chatml",
    ),
    "an unknown model's template": (
        {"dataset_name": "chat.jsonl", "prompt_template": None, "chat_template_path": "foo/bar"},
        "chat_template_path is 'foo/bar', neither chatml, qwen, llama3",
    ),
    "a missing reward": (
        {"trainer": "grpo", "max_length": None, "reward_funcs": ["no.such"], "num_generations": 2},
        "reward_funcs has 'no.such'",
    ),
}


@pytest.mark.parametrize("keys, says", WRONG.values(), ids=WRONG)
def test_what_the_recipe_names_is_checked(keys, says, base, capsys):
    """The recipe is printed anyway."""
    path = write_recipe(base, **keys)
    code, out, err = command(capsys, "train", path, "--dry_run")
    assert code == 2 and says in err.strip().splitlines()[-1]
    assert yaml.safe_load(out)["max_steps"] == 4


def test_a_recipe_that_would_run(base, capsys):
    path = write_recipe(base, gradient_checkpointing=None)
    code, out, err = command(capsys, "train", path, "--activation_checkpointing", "false", "--dry_run")
    assert code == 0, err
    assert yaml.safe_load(out)["activation_checkpointing"] is False
    assert not (base / "out").exists()
