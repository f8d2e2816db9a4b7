"""The recipes of Qwen3.5, Gemma 4 and Granite 4 on tiny checkpoints of these types: train, save, load, merge."""

import pytest
import torch
from architectures import small_config
from image_models import _TEXT as WITH_SECTIONS
from peft import PeftModel
from recipe_fixtures import command, losses, write_rows
from safetensors.torch import load_file, save_file
from tiny_models import tiny_tokenizer
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridModel

from liger_trainer.command.recipe.model_source import find_model
from liger_trainer.command.recipe.read import parse_recipe

IDS = torch.arange(3, 27).reshape(2, 12)
GEMMA4 = {
    "model_type": "gemma4_text",
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 8,
    "vocab_size": 131,
    "vocab_size_per_layer_input": 131,
    "sliding_window": 16,
    "final_logit_softcapping": 30.0,
}
GEMMA4_VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "position_embedding_size": 16,
}
RECIPES = {  # and the model type of the checkpoint
    "qwen3_5_4b/sft_lora_16gb": "qwen3_5",
    "qwen3_5_9b/sft_qlora_24gb": "qwen3_5",
    "qwen3_5_35b_a3b/sft_lora": "qwen3_5_moe",
    "gemma4_e4b/sft_lora": "gemma4",
    "granite4_h_tiny/sft_lora": "granitemoehybrid",
}


@pytest.fixture(autouse=True)
def tokenizers_alone(monkeypatch):
    """Load tokenizers instead of processors: these processors need torchvision for videos, and text does not."""
    monkeypatch.setattr(AutoProcessor, "from_pretrained", PreTrainedTokenizerFast.from_pretrained)


def write_checkpoint(model_type, folder):
    """Write a tiny checkpoint like the published one: an image model if the published one is."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    if model_type == "gemma4":
        config = AutoConfig.for_model(model_type, text_config=GEMMA4, vision_config=GEMMA4_VISION, audio_config=None)
    else:
        config = small_config(model_type)
    for name, value in WITH_SECTIONS.get(model_type.removesuffix("_moe"), {}).items():
        setattr(config.text_config, name, value)
    torch.manual_seed(0)
    auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return type(model)


def train(capsys, folder, recipe, **options):
    out = folder / f"out_{options.get('use_liger', 'true')}"
    words = {
        "model_name_or_path": folder / "base",
        "output_dir": out,
        "dataset_name": folder / "rows.jsonl",
        "max_length": 64,
        "max_steps": 4,
        "warmup_steps": 0,
        "learning_rate": 3e-2,
        "bf16": "false",
        "dtype": "float32",
        "logging_steps": 1,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "load_in_4bit": "false",
        "save_strategy": "no",
        "dataloader_pin_memory": "false",
        "use_cpu": "true",
    } | options
    code, out_text, err = command(
        capsys, "train", recipe, *(x for key, value in words.items() for x in (f"--{key}", value))
    )
    assert code == 0, err
    return out, out_text


QUICK = ("qwen3_5_35b_a3b/sft_lora", "gemma4_e4b/sft_lora", "granite4_h_tiny/sft_lora")  # one of each model type


@pytest.mark.parametrize(
    "recipe", [pytest.param(recipe, marks=() if recipe in QUICK else pytest.mark.slow) for recipe in RECIPES]
)
def test_from_its_first_line_to_the_merged_model(recipe, tmp_path, capsys):
    model_class = write_checkpoint(RECIPES[recipe], tmp_path / "base")
    write_rows(tmp_path / "rows.jsonl")
    options = {}
    if recipe.startswith("granite") and "router_logits" not in GraniteMoeHybridModel._can_record_outputs:
        # With transformers 5.17, TRL's trainer raises in the first step if the loss of Granite's routers has a weight.
        options["router_aux_loss_coef"] = 0.0
    out, said = train(capsys, tmp_path, recipe, **options)
    logged = losses(out)
    assert logged[4] < logged[1] and "Summary" in said and "varlen_attention" in said
    code, _, err = command(capsys, "merge", out, tmp_path / "merged", "--dtype", "float32")
    assert code == 0, err
    base, merged = (model_class.from_pretrained(tmp_path / name).eval() for name in ("base", "merged"))
    with torch.no_grad():
        before, after = base(input_ids=IDS).logits, merged(input_ids=IDS).logits
        adapted = PeftModel.from_pretrained(base, out).eval()(input_ids=IDS).logits
    assert (adapted - before).abs().max() > 1e-3
    torch.testing.assert_close(after, adapted, rtol=1e-4, atol=1e-4)
    trained = {name.split(".lora_")[0] for name, _ in PeftModel.from_pretrained(base, out).named_parameters()}
    assert not any("vision" in name or "visual" in name for name in trained if ".lora_" in name)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["qwen3_5_4b/sft_lora_16gb", "gemma4_e4b/sft_lora"])
def test_its_losses_equal_those_of_rows_with_padding(recipe, tmp_path, capsys):
    """TRL's own trainer cannot pack these rows, so it computes padding."""
    write_checkpoint(RECIPES[recipe], tmp_path / "base")
    write_rows(tmp_path / "rows.jsonl", 8)
    options = {"packing": "false", "per_device_train_batch_size": 4, "learning_rate": 1e-2}
    ours, stock = (losses(train(capsys, tmp_path, recipe, **options, use_liger=use)[0]) for use in ("true", "false"))
    assert ours == pytest.approx(stock, rel=1e-4) and len(ours) == 4


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_its_header_says(recipe):
    read = parse_recipe(recipe, ["--bf16", "false"])
    header = read.path.read_text().partition("\n\n")[0]
    assert ("has not run on a GPU yet" in header) is not ("it has run on one H200" in header)
    assert "liger-trainer merge" in header
    assert ("linear-attention]" in header) is recipe.startswith("qwen3_5")
    assert find_model(read.model.model_name_or_path).path == read.model.model_name_or_path


def test_the_head_of_a_frozen_image_model(tmp_path, capsys, monkeypatch):
    """The commands of the recipe's header, on a checkpoint with a vision tower and a head, as published."""
    # By the model's type this would be another class, which does not know the words of the tiny tokenizer.
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", PreTrainedTokenizerFast.from_pretrained)
    model_class = write_checkpoint("qwen3_5", tmp_path / "base")
    config = AutoConfig.from_pretrained(tmp_path / "base")
    stored = load_file(tmp_path / "base" / "model.safetensors")
    layer = f"model.language_model.layers.{config.text_config.layer_types.index('full_attention')}."
    size = config.text_config.hidden_size
    generator = torch.Generator().manual_seed(1)
    head = {"mtp.fc.weight": 0.2 * torch.randn(size, 2 * size, generator=generator)}
    head |= {
        f"mtp.{name}.weight": torch.zeros(size) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    }
    for name, tensor in stored.items():
        if name.startswith(layer):
            head[name.replace(layer, "mtp.layers.0.")] = tensor.clone()
    save_file(stored | head, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    write_rows(tmp_path / "rows.jsonl")
    out, said = train(capsys, tmp_path, "qwen3_5_4b/mtp", prompt_template="alpaca")
    logged = losses(out)
    assert logged[4] < logged[1] and "Summary" in said
    prompts = ("--prompts", tmp_path / "rows.jsonl", "--max_new_tokens", 8, "--max_rows", 2)
    code, evaluated, err = command(capsys, "mtp-eval", tmp_path / "base", out, *prompts)
    assert code == 0 and "MTP head: one guess" in evaluated, err
    code, _, err = command(capsys, "export", out, "--output", tmp_path / "served")
    assert code == 0, err
    served = load_file(tmp_path / "served" / "model.safetensors")
    assert served.keys() == (stored | head).keys()
    assert all(torch.equal(served[name], tensor) for name, tensor in stored.items())
    assert not torch.equal(served["mtp.fc.weight"], head["mtp.fc.weight"])
    model_class.from_pretrained(tmp_path / "served")
