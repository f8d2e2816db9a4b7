"""Keys that this machine cannot serve are refused with name, value and remedy."""

import importlib.util

import pytest
from recipe_fixtures import command, write_model, write_recipe, write_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packages")
    write_model(folder / "model")
    write_rows(folder / "rows.jsonl")
    return folder


REFUSED = {
    "load_in_4bit": ({"load_in_4bit": True, "use_peft": True}, "load_in_4bit is True: Using `bitsandbytes` 4-bit"),
    "optim": ({"optim": "paged_adamw_8bit"}, "optim is 'paged_adamw_8bit', and the package bitsandbytes is missing"),
    "report_to": ({"report_to": "tensorboard"}, "report_to is 'tensorboard', and the package tensorboard is missing"),
    "push_to_hub": ({"push_to_hub": True}, "push_to_hub is true, and HF_HUB_OFFLINE is set. Unset HF_HUB_OFFLINE"),
    "deepspeed": ({"deepspeed": "zero3.json"}, "deepspeed is 'zero3.json', and the package is missing: `pip install"),
    "use_liger_kernel": ({"use_liger_kernel": True}, "use_liger_kernel is true, which would have the package"),
    "attn_implementation": (
        {"attn_implementation": "flash_attention_3"},
        "attn_implementation is 'flash_attention_3': FlashAttention3",
    ),
    "lora_target_modules": (
        {"use_peft": True, "lora_target_modules": ["q_prj"]},
        "lora_target_modules is ['q_prj'], and the model has none of them. Did you mean q_proj? Its linear layers: ",
    ),
    "warmup_ratio": ({"warmup_ratio": 0.1}, "Set warmup_steps, which takes a share too: warmup_steps: 0.1 is a tenth"),
}


@pytest.mark.parametrize("keys, says", REFUSED.values(), ids=REFUSED)
def test_missing_packages_are_named(keys, says, folder, capsys, monkeypatch):
    absent = ("bitsandbytes", "tensorboard", "tensorboardX", "deepspeed")
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name in absent else find(name, *more))
    code, _, err = command(capsys, "train", write_recipe(folder, **keys))
    assert code == 2 and says in err
    assert err.count("recipe.yaml") == 1, err


def test_optimizers_of_other_packages_pass(folder, capsys):
    code, _, err = command(capsys, "train", write_recipe(folder, optim="adafactor", max_steps=1))
    assert code == 0, err


def test_a_tab_in_a_recipe(tmp_path, capsys):
    path = tmp_path / "recipe.yaml"
    path.write_text("model_name_or_path: model\ndataset_name:\n\t- rows.jsonl\n")
    code, _, err = command(capsys, "train", path)
    assert code == 2 and f"{path}, line 3: YAML is indented with spaces; replace the tab by spaces." in err


def test_a_missing_adapter_is_refused(tmp_path, capsys):
    code, _, err = command(capsys, "merge", tmp_path / "nowhere", tmp_path / "merged")
    assert code == 2 and "ADAPTER_DIR is " in err and "neither such a folder" in err
