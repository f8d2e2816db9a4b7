"""Options that would be silently ignored or reinterpreted: each is an error in one line, before anything is loaded."""

import json
import re
import shutil

import pytest
import torch
import yaml
from recipe_fixtures import command, losses, write_recipe, write_rows
from tiny_models import tiny_model, tiny_tokenizer
from transformers import BertConfig, BertForSequenceClassification

from liger_trainer.command.recipe.read import parse_recipe, recipe_names

WITHOUT_EFFECT = {
    "lora_r": ({"lora_r": 8}, "use_peft: true"),
    "lora_r as by default": ({"lora_r": 16}, "use_peft: true"),
    "lora_target_modules": ({"lora_target_modules": ["q_proj"]}, "use_peft: true"),
    "use_dora": ({"use_dora": True}, "use_peft: true"),
    "load_in_4bit": ({"load_in_4bit": True}, "use_peft: true"),
    "bnb_4bit_quant_type": ({"bnb_4bit_quant_type": "fp4", "use_peft": True}, "load_in_4bit: true"),
    "save_steps": ({"save_steps": 2, "save_strategy": "epoch"}, "save_strategy: steps"),
    "save_total_limit": ({"save_total_limit": 2}, "save_strategy: steps or epoch"),
    "eval_steps": ({"eval_steps": 2}, "eval_strategy: steps or epoch"),
    "load_best_model_at_end": ({"load_best_model_at_end": True}, "eval_strategy: steps or epoch"),
    "eval_on_start": ({"eval_on_start": True}, "eval_strategy: steps or epoch"),
    "do_train": ({"do_train": False}, "the command trains"),
    "memory_budget": ({"memory_budget": 70}, "activation_checkpointing: auto"),
    "eval_fraction": ({"eval_fraction": 0.25}, "eval_strategy: steps or epoch"),
    "save_strategy": ({"save_strategy": "best"}, "eval_strategy: steps"),
    "liger_config": ({"liger_config": {"experts": False}, "use_liger": False}, "use_liger: true"),
    "num_train_epochs": ({"num_train_epochs": 2}, "max_steps 4"),
    "dataset_stopping_strategy": ({"dataset_stopping_strategy": "all_exhausted"}, "dataset_weights"),
}


@pytest.mark.parametrize("keys, needs", WITHOUT_EFFECT.values(), ids=WITHOUT_EFFECT)
def test_an_option_without_effect_is_refused(keys, needs, request, tmp_path, capsys):
    key = request.node.callspec.id.partition(" ")[0]
    code, _, err = command(capsys, "train", write_recipe(tmp_path, **keys), "--dry_run")
    assert code == 2, "it would train as if the key were not there"
    assert f"{key} is {keys[key]!r}" in err and needs in err
    assert len(err.strip().splitlines()) == 1


def test_lora_keys_on_the_command_line(tmp_path, capsys):
    code, _, err = command(capsys, "train", write_recipe(tmp_path), "--lora_r", "8", "--dry_run")
    assert code == 2 and "lora_r is 8, which has no effect without use_peft: true" in err


def test_the_command_line_turns_off_what_the_file_has(tmp_path, capsys):
    """`--use_peft false` on a LoRA recipe is legal; options that the command line adds without effect are not."""
    path = write_recipe(
        tmp_path, use_peft=True, lora_r=8, save_strategy="steps", save_steps=2, max_steps=None, num_train_epochs=2
    )
    off = ("--use_peft", "false", "--save_strategy", "no", "--max_steps", "5")
    printed = yaml.safe_load(parse_recipe(str(path), off).to_yaml())
    assert printed["use_peft"] is False and printed["max_steps"] == 5
    assert not {"lora_r", "save_steps", "num_train_epochs"} & set(printed), "so that the printed recipe runs"
    code, _, err = command(capsys, "train", path, *off, "--lora_r", "4")
    assert code == 2 and "lora_r is 4" in err
    path = write_recipe(tmp_path, max_steps=28)
    code, _, err = command(capsys, "train", path, "--num_train_epochs", "1", "--dry_run")
    assert code == 2 and "num_train_epochs is 1.0, and max_steps 28" in err
    assert parse_recipe(str(path), ["--num_train_epochs", "1", "--max_steps", "-1"]).training.max_steps == -1
    path = write_recipe(tmp_path, eval_fraction=0.25, eval_strategy="steps", eval_steps=2)
    assert parse_recipe(str(path), ["--eval_strategy", "no"]).args.eval_fraction is None


@pytest.mark.parametrize("name", recipe_names())
def test_shipped_recipes_run_with_fewer_steps(name):
    if "qlora" in name:
        pytest.importorskip("bitsandbytes")
    assert parse_recipe(name, ["--bf16", "false", "--max_steps", "3"]).training.max_steps == 3


OUT_OF_RANGE = {
    "per_device_train_batch_size": 0,
    "per_device_eval_batch_size": -1,
    "gradient_accumulation_steps": 0,
    "max_steps": 0,
    "learning_rate": 0.0,
    "num_train_epochs": 0.0,
    "save_total_limit": 0,
    "logging_steps": 0,
    "weight_decay": -0.1,
    "max_grad_norm": -1.0,
    "warmup_steps": -3,
    "lora_alpha": 0,
    "lora_r": -8,
    "lora_dropout": 1.5,
    "max_length": -1,
    "neftune_noise_alpha": -1.0,
}


@pytest.mark.parametrize("key", OUT_OF_RANGE)
def test_a_value_out_of_range(key, tmp_path, capsys):
    keys = {"num_train_epochs": {"max_steps": None}}.get(key, {})
    if key == "save_total_limit":
        keys = {"save_strategy": "epoch"}
    code, _, err = command(capsys, "train", write_recipe(tmp_path, **keys, **{key: OUT_OF_RANGE[key]}), "--dry_run")
    assert code == 2 and f"{key} is {OUT_OF_RANGE[key]}; expected" in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("trainer", ["dpo", "kto", "orpo", "cpo"])
def test_a_negative_beta_would_train_towards_what_is_rejected(trainer, tmp_path, capsys):
    path = write_recipe(tmp_path, trainer=trainer, prompt_template=None, beta=-0.1)
    code, _, err = command(capsys, "train", path, "--dry_run")
    assert code == 2 and "beta is -0.1; expected a number of 0 or more" in err
    code, _, err = command(capsys, "train", path, "--beta", "0", "--dry_run")
    assert code == 2 and ("beta is 0, so no preference would be learned" in err) == (trainer in ("dpo", "kto"))


LIBRARIES_SAY = {
    "adam_beta2": (1.0, "Invalid beta parameter at index 1: 1.0"),
    "lr_scheduler_kwargs": ({"foo": 1}, "unexpected keyword argument 'foo'"),
    "optim": ("galore_adamw", "You need to install `galore_torch`"),
}


@pytest.mark.parametrize("key", LIBRARIES_SAY)
def test_a_value_that_a_library_refuses(key, folder, capsys):
    value, says = LIBRARIES_SAY[key]
    code, _, err = command(capsys, "train", write_recipe(folder, **{key: value}))
    assert code == 2 and says in err
    assert len([line for line in err.splitlines() if "error: " in line]) == 1 and "Traceback" not in err


@pytest.mark.parametrize("trainer", ["dpo", "kto", "cpo"])
def test_an_unknown_loss(trainer, folder, capsys):
    """TRL looks at the loss names of preference trainers only in the first step."""
    pairs = [
        {"prompt": f"a{n}", "chosen": " b", "rejected": " c", "completion": " b", "label": n > 1} for n in range(4)
    ]
    (folder / "pairs.json").write_text(json.dumps(pairs))
    keys = {"dataset_name": "pairs.json", "prompt_template": None, "loss_type": "sigmod"}
    code, _, err = command(capsys, "train", write_recipe(folder, trainer=trainer, **keys))
    assert code == 2 and "Traceback" not in err
    assert re.search("error: .*loss_type( is|: Unknown loss type:) '?sigmod", err.strip().splitlines()[-1])


def test_an_error_about_the_command_line_says_so(tmp_path, capsys):
    path = write_recipe(tmp_path)
    code, _, err = command(capsys, "train", path, "--weight_decay", "-1", "--seed", "3")
    assert code == 2 and f"{path} with --weight_decay: weight_decay is -1.0; expected a number of 0 or more." in err
    code, _, err = command(capsys, "train", path, "--logging_steps", "0")
    assert code == 2 and "logging_steps is 0.0; expected a number above 0.\n" in err
    code, _, err = command(capsys, "train", path, "--liger_config", "{rope")
    assert code == 2 and "--liger_config is '{rope', which is not valid JSON: Expecting property name" in err
    code, _, err = command(capsys, "train", write_recipe(tmp_path, weight_decay=-1), "--seed", "3")
    assert code == 2 and f"error: {path}: weight_decay is -1" in err


def test_trackers_that_are_unknown_or_not_installed(folder, capsys, monkeypatch):
    for written, named in (("tensorbord", "'tensorbord'"), ("None", "'None'"), ("null", "null")):
        path = write_recipe(folder, report_to=None)
        path.write_text(f"{path.read_text()}report_to: {written}\n")
        code, _, err = command(capsys, "train", path)
        assert code == 2 and f"report_to is {named}; expected none, all, or some of: " in err
        assert "loading the model" not in err
        assert written != "tensorbord" or "Did you mean tensorboard?" in err
    monkeypatch.setattr("transformers.integrations.integration_utils.is_wandb_available", lambda: False)
    code, _, err = command(capsys, "train", write_recipe(folder, report_to="wandb"))
    assert code == 2 and "report_to is 'wandb', and the package wandb is missing. Run `pip install wandb`, or" in err


def test_a_metric_that_no_evaluation_has(folder, capsys):
    keys = {"eval_fraction": 0.25, "eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    path = write_recipe(folder, **keys, load_best_model_at_end=True, metric_for_best_model="f1")
    code, _, err = command(capsys, "train", path)
    assert code == 2 and "metric_for_best_model" in err and "'f1'; expected one of: eval_loss" in err


def test_an_output_dir_that_cannot_be_written(folder, capsys):
    (folder / "file").write_text("")
    for output_dir in (folder / "file", folder / "file" / "below", "/proc/nothing/here"):
        code, _, err = command(capsys, "train", write_recipe(folder, output_dir=str(output_dir)))
        assert code == 2 and f"output_dir is {str(output_dir)!r}, which cannot be written" in err


def test_a_refused_run_leaves_no_folder(folder, capsys):
    new = {"output_dir": str(folder / "new")}
    refused = {
        "before the model is loaded": {"dataset_name": "missing.jsonl"},
        "after it is loaded": {"use_peft": True, "lora_r": 0},
    }
    for when, keys in refused.items():
        assert command(capsys, "train", write_recipe(folder, **new, **keys))[0] == 2
        assert not (folder / "new").exists(), when


def test_an_output_dir_without_a_name(folder, capsys):
    code, _, err = command(capsys, "train", write_recipe(folder), "--output_dir", "")
    assert code == 2 and "output_dir is empty. Set it" in err


@pytest.mark.parametrize("trainer", ["sft", "dpo"])
def test_a_key_that_the_model_does_not_know(trainer, folder, capsys):
    (folder / "pairs.jsonl").write_text('{"prompt": "w3 w4 ", "chosen": "w5", "rejected": "w6"}\n' * 4)
    pairs = {"dataset_name": "pairs.jsonl", "prompt_template": None} if trainer == "dpo" else {}
    path = write_recipe(folder, trainer=trainer, model_init_kwargs={"foo": 1}, **pairs)
    code, _, err = command(capsys, "train", path)
    assert code == 2 and re.search(r"error: \S+: model_init_kwargs: .*unexpected keyword argument 'foo'", err)


def test_what_a_library_refuses_when_the_trainer_is_built(folder, capsys, monkeypatch):
    code, _, err = command(capsys, "train", write_recipe(folder, use_peft=True, lora_task_type="CAUSAL"))
    assert code == 2 and "task types: SEQ_CLS" in err

    (folder / "model" / "model.safetensors").write_bytes(b"garbage " * 9)
    code, _, err = command(capsys, "train", write_recipe(folder))
    assert code == 2 and "deserializing" in err


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        torch.distributed.DistNetworkError("The client socket has timed out."),
        TypeError("'NoneType' object is not iterable"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("where", ["LlamaForCausalLM.from_pretrained", "Trainer.create_optimizer"])
def test_an_error_that_no_field_causes_keeps_its_traceback(error, where, folder, capsys, monkeypatch):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(f"transformers.{where}", fail)
    with pytest.raises(type(error), match=str(error)):
        command(capsys, "train", write_recipe(folder))


def test_modules_to_save_that_are_not_there(folder, capsys):
    path = write_recipe(folder, use_peft=True)
    code, _, err = command(capsys, "train", path, "--lora_modules_to_save", "foo")
    assert code == 2 and "lora_modules_to_save names 'foo'" in err
    code, _, err = command(capsys, "train", path, "--lora_target_modules", "q_proj", "foo")
    assert code == 2 and "lora_target_modules names 'foo'" in err
    code, _, err = command(capsys, "train", path, "--lora_modules_to_save", "lm_head")
    assert code == 0, err


def test_a_chat_template_that_is_not_there(folder, capsys):
    code, _, err = command(capsys, "train", write_recipe(folder), "--chat_template_path", folder / "nowhere.jinja")
    assert code == 2 and "nowhere.jinja', neither chatml" in err


def test_completion_only_loss_without_completions(folder, capsys):
    """TRL ignores it there: every token of the messages would count."""
    rows = [{"messages": [{"role": r, "content": "w3 w4"} for r in ("user", "assistant")]}] * 8
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = write_recipe(folder, prompt_template="none", completion_only_loss=True)
    code, _, err = command(capsys, "train", path)
    assert code == 2 and "completion_only_loss is true" in err
    assert "prompt_template: last_turn" in err and "assistant_only_loss: true" in err
    (folder / "model" / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }} {% endfor %}")
    code, _, err = command(capsys, "train", write_recipe(folder, prompt_template="last_turn"))
    assert code == 0, err
    shutil.rmtree(folder / "out")
    write_rows(folder / "rows.jsonl")
    code, _, err = command(capsys, "train", write_recipe(folder, completion_only_loss=True))
    assert code == 0, err


def test_a_text_field_that_is_not_read(folder, capsys):
    path = write_recipe(folder, dataset_text_field="txt")  # the rows are prompts and completions
    code, _, err = command(capsys, "train", path, "--dry_run")
    assert code == 2 and "dataset_text_field is 'txt', and the trainer reads other columns: prompt, completion." in err
    (folder / "rows.jsonl").write_text('{"txt": "w3 w4"}\n')
    assert command(capsys, "train", path, "--prompt_template", "none", "--dry_run")[0] == 0


MISSING = {
    "model.safetensors": "Error no file named model.safetensors",
    "tokenizer*": "a folder without a tokenizer. Save one there",
}


@pytest.mark.parametrize("missing", MISSING)
def test_a_model_folder_that_is_not_whole(missing, folder, capsys):
    for path in (folder / "model").glob(missing):
        path.unlink()
    code, _, err = command(capsys, "train", write_recipe(folder))
    assert code == 2 and MISSING[missing] in err and str(folder / "model") in err and "Traceback" not in err


def test_a_model_that_writes_no_text(folder, capsys):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertForSequenceClassification(BertConfig(vocab_size=131, **sizes)).save_pretrained(folder / "model")
    code, _, err = command(capsys, "train", write_recipe(folder))
    assert code == 2 and "a BertForSequenceClassification, not a causal language model" in err


def test_one_target_module(folder, capsys):
    path = write_recipe(folder, use_peft=True, lora_target_modules=["q_proj"])
    code, _, err = command(capsys, "train", path)
    assert code == 0, err
    assert parse_recipe(str(path), ["--lora_target_modules", "all-linear"]).model.lora_target_modules == "all-linear"


def test_the_recipe_decides_the_precision(folder, capsys, monkeypatch):
    assert command(capsys, "train", write_recipe(folder))[0] == 0
    fp32 = losses(folder / "out")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # set by `accelerate launch` from its mixed_precision
    code, _, err = command(capsys, "train", write_recipe(folder, output_dir=str(folder / "launched")))
    assert code == 0, err
    assert losses(folder / "launched") == fp32
    assert "bf16: false" in err and "mixed_precision: bf16" in err
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    _, _, err = command(capsys, "train", write_recipe(folder, bf16=True, use_cpu=True), "--dry_run")
    assert "mixed_precision" not in err


def test_rows_that_do_not_fill_a_batch(folder, capsys):
    keys = {"max_rows": 1, "per_device_train_batch_size": 2, "dataloader_drop_last": True}
    code, _, err = command(capsys, "train", write_recipe(folder, **keys))
    assert code == 2 and "No step was trained, because the rows do not fill a batch" in err
    assert not (folder / "out" / "model.safetensors").exists()


def test_a_run_too_short_to_log_a_loss(folder, capsys):
    """The summary gives the mean that transformers logs at the end, and the speed."""
    assert command(capsys, "train", write_recipe(folder))[0] == 0
    each = list(losses(folder / "out").values())
    mean = sum(each) / 4
    shutil.rmtree(folder / "out")
    path = write_recipe(folder, logging_steps=10, save_strategy="steps", save_steps=2)
    code, out, err = command(capsys, "train", path)
    assert code == 0
    assert f"  loss     {mean:.3f}, the mean of all steps\n" in out
    assert re.search(r"^  speed +\d+ tokens/s$", out, re.M)
    shutil.rmtree(folder / "out" / "checkpoint-4")
    code, out, err = command(capsys, "train", path, "--resume_from_checkpoint", folder / "out" / "checkpoint-2")
    assert code == 0 and f"  loss     {sum(each[2:]) / 2:.3f}, the mean of all steps\n" in out, err


def test_packing_that_lets_rows_see_each_other(folder, capsys):
    path = write_recipe(folder, packing=True, packing_strategy="wrapped", max_length=32)
    code, _, err = command(capsys, "train", path)
    assert code == 2 and "packing_strategy is 'wrapped'" in err and "packing_strategy: bfd" in err
    assert command(capsys, "train", path, "--packing_strategy", "bfd")[0] == 0


@pytest.mark.parametrize(
    "keys, said",
    [
        ({"lora_target_parameters": ["mlp.experts.down_proj"]}, r"lora_dropout is 0.05, .* Set lora_dropout: 0.0"),
        ({"lora_target_modules": "all-linear"}, r"lora_dropout is 0.05, .*'all-linear' means experts too. .*\[q_proj"),
        ({"lora_target_modules": "all-linear", "lora_dropout": 0.0, "use_dora": True}, "use_dora is True, .* experts"),
        ({}, "lora_target_modules is unset, and PEFT knows none for model type 'qwen3_moe'"),
    ],
)
def test_adapters_on_experts(keys, said, experts, capsys):
    code, _, err = command(capsys, "train", write_recipe(experts, use_peft=True, **keys))
    assert code == 2, err
    assert re.search(said, err.strip().splitlines()[-1])


def test_all_linear_of_a_mixture_is_told(experts, capsys):
    keys = {"use_peft": True, "lora_target_modules": "all-linear", "lora_dropout": 0.0, "max_steps": 1}
    code, _, err = command(capsys, "train", write_recipe(experts, **keys))
    assert code == 0, err
    assert "adapters on the experts too" in err


@pytest.fixture
def experts(tmp_path):
    """A folder with a tiny mixture of experts and rows."""
    tiny_model("qwen3_moe").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl")
    return tmp_path
