"""The gpt-oss recipe on a tiny MXFP4 checkpoint: trains adapters on attention and experts, and merges them."""

import io

import pytest
import torch
from base_checkpoints import write_gpt_oss
from recipe_fixtures import command, losses, write_rows
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from liger_trainer.command.recipe.model_source import dequantize_options
from liger_trainer.command.run import train as run_module

IDS = torch.arange(3, 27).reshape(2, 12)


def train(folder, capsys, use_liger, recipe="gpt_oss_20b/sft_lora", name=None):
    """The output folder after four steps of the recipe, by our trainer or by the stock one."""
    out, ours = folder / (name or f"out_{use_liger}"), str(use_liger).lower()
    code, _, err = command(
        capsys,
        "train",
        recipe,
        "--model_name_or_path",
        folder / "base",
        "--output_dir",
        out,
        "--dataset_name",
        folder / "rows.jsonl",
        "--max_length",
        64,
        "--max_steps",
        4,
        "--warmup_steps",
        0,
        "--learning_rate",
        3e-2,
        "--bf16",
        "false",
        "--dtype",
        "float32",
        "--logging_steps",
        1,
        "--packing",
        "false",
        "--use_liger",
        ours,
        "--activation_checkpointing",
        ours,
        "--gradient_accumulation_steps",
        1,
        "--dataloader_pin_memory",
        "false",
        "--use_cpu",
        "true",
    )
    assert code == 0, err
    return out


def test_trained_and_merged(tmp_path, capsys, monkeypatch):
    """Losses equal TRL's. The merged model has the logits of base and adapter; nothing is rounded."""
    from peft import PeftModel

    numbers = write_gpt_oss(tmp_path / "base")
    write_rows(tmp_path / "rows.jsonl")
    own = PreTrainedModel.from_pretrained.__func__
    with monkeypatch.context() as patched:  # transformers 5.17 returns bf16 from experts, and four steps drift apart
        in_fp32 = classmethod(lambda *args, **named: own(*args, **named).float())
        patched.setattr(PreTrainedModel, "from_pretrained", in_fp32)
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
        out, stock = (train(tmp_path, capsys, use_liger) for use_liger in (True, False))
    assert losses(out) == pytest.approx(losses(stock), rel=1e-4)
    assert losses(out)[4] < losses(out)[1]
    code, _, err = command(capsys, "merge", out, tmp_path / "merged", "--dtype", "float32")
    assert code == 0, err
    plain.eval()
    assert all(plain.get_parameter(name).double().equal(want) for name, want in numbers.items())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        before = plain(IDS).logits
        adapted = PeftModel.from_pretrained(plain, out).eval()(IDS).logits
        assert (adapted - before).abs().max() > 0.05
        torch.testing.assert_close(model(IDS).logits, adapted, rtol=1e-4, atol=1e-4)
    assert not hasattr(model.config, "quantization_config")


def test_experts_stay_4_bit_and_train_like_stock(tmp_path, capsys, monkeypatch):
    """The recipe for 16 GiB starts with TRL's loss on a 16-bit base, and its adapter is merged.

    Loading draws different random numbers, so the adapters start differently.
    """
    write_gpt_oss(tmp_path / "base")
    write_rows(tmp_path / "rows.jsonl")
    small = "gpt_oss_20b/sft_lora_16gb"
    out = train(tmp_path, capsys, True, small)
    monkeypatch.setattr(run_module, "quantization_of", lambda config, args: None)
    stock = train(tmp_path, capsys, False, small)
    assert losses(out)[1] == pytest.approx(losses(stock)[1], rel=1e-2)
    assert losses(out)[4] < losses(out)[1]
    code, _, err = command(capsys, "merge", out, tmp_path / "merged")
    assert code == 0, err
    assert not hasattr(AutoConfig.from_pretrained(tmp_path / "merged"), "quantization_config")


def test_4_bit_experts_get_no_adapter(tmp_path, capsys):
    write_gpt_oss(tmp_path / "base")
    write_rows(tmp_path / "rows.jsonl")
    code, _, err = command(
        capsys,
        "train",
        "gpt_oss_20b/sft_lora",
        "--model_name_or_path",
        tmp_path / "base",
        "--load_in_4bit",
        "true",
        "--dataset_name",
        tmp_path / "rows.jsonl",
        "--output_dir",
        tmp_path / "out",
        "--use_cpu",
        "true",
        "--bf16",
        "false",
        "--dataloader_pin_memory",
        "false",
    )
    assert code == 2 and "names 'mlp.experts.gate_up_proj'" in err and "load_in_4bit: false" in err, err


def test_chat_with_an_adapter(tmp_path, monkeypatch, capsys):
    """The base is loaded in 16 bits on request, because transformers keeps 4-bit experts on a GPU. It answers."""
    from peft import LoraConfig, get_peft_model

    write_gpt_oss(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapters = LoraConfig(target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    get_peft_model(base, adapters).save_pretrained(tmp_path / "adapter")
    asked, own = [], AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda *args, **named: asked.append(dict(named)) or own(*args, **named)
    )
    for name in ("adapter", "base"):
        monkeypatch.setattr("sys.stdin", io.StringIO("w3 w4"))
        code, out, err = command(capsys, "chat", tmp_path / name, "--temperature", "0", "--max_new_tokens", "6")
        assert code == 0 and out.strip(), err
    of_adapter, of_whole_model = asked
    assert of_adapter["quantization_config"].dequantize and "quantization_config" not in of_whole_model


def test_only_mxfp4_is_dequantised(tmp_path):
    write_gpt_oss(tmp_path)
    assert dequantize_options(AutoConfig.from_pretrained(tmp_path))["quantization_config"].dequantize
    assert dequantize_options(AutoConfig.for_model("llama")) == {}
