"""`liger-trainer merge`: the merged model equals base plus adapter and is an ordinary model; and its refusals."""

import json
import re
import shutil

import pytest
import torch
from recipe_fixtures import command, write_model
from tiny_models import tiny_model, tiny_tokenizer

TARGETS = ["q_proj", "v_proj", "down_proj", "lm_head"]
IDS = torch.arange(3, 19).reshape(2, 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base, and an adapter for it with a non-zero B."""
    from peft import LoraConfig, get_peft_model

    folder = tmp_path_factory.mktemp("merge")
    base = tiny_model("llama")
    base.save_pretrained(folder / "base")
    base.name_or_path = base.config._name_or_path = str(folder / "base")
    model = get_peft_model(base, LoraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder / "adapter")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(folder / "adapter")
    return folder


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


def test_merged_model_gives_the_logits_of_the_adapter(folder, tmp_path, capsys):
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    code, out, err = command(capsys, "merge", folder / "adapter", tmp_path / "merged")
    assert code == 0, err
    assert out.startswith(f"{tmp_path / 'merged'}: ")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not hasattr(merged, "peft_config") and not list((tmp_path / "merged").glob("adapter*"))
    with_adapter = logits(AutoPeftModelForCausalLM.from_pretrained(folder / "adapter"))
    assert (with_adapter - logits(AutoModelForCausalLM.from_pretrained(folder / "base"))).abs().max() > 0.1
    torch.testing.assert_close(logits(merged), with_adapter, rtol=1e-5, atol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template == "{{ messages }}"


def test_a_model_of_images(tmp_path, capsys):
    """Gemma 3, because its processor needs no package: model, adapter (on the tower too) and processor."""
    from image_models import image_batch, image_model, processor_of
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForImageTextToText, AutoProcessor

    base = image_model("gemma3")
    batch = image_batch(base)
    base.save_pretrained(tmp_path / "base")
    base.name_or_path = base.config._name_or_path = str(tmp_path / "base")
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)).eval()
    model.save_pretrained(tmp_path / "adapter")
    processor_of("gemma3").save_pretrained(tmp_path / "adapter")
    code, out, err = command(capsys, "merge", tmp_path / "adapter", tmp_path / "merged")
    assert code == 0, err
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(**batch).logits, model(**batch).logits, rtol=1e-4, atol=1e-4)
    assert type(AutoProcessor.from_pretrained(tmp_path / "merged")).__name__ == "Gemma3Processor"


def save_tied(folder, adapter):
    """Save a tied base and a trained adapter for it."""
    from peft import LoraConfig, get_peft_model

    base = tiny_model("llama", tie_word_embeddings=True)
    base.save_pretrained(folder / "base")
    base.name_or_path = base.config._name_or_path = str(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")
    model = get_peft_model(base, LoraConfig(r=4, task_type="CAUSAL_LM", **adapter))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter) * parameter.requires_grad
    model.save_pretrained(folder / "adapter")


@pytest.mark.parametrize(
    "adapter",
    [
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [5, 6], "lm_head": [5, 8]}},
        {"target_modules": ["q_proj"], "trainable_token_indices": [5, 6]},
    ],
    ids=str,
)
def test_an_adapter_on_a_tied_head_or_on_tied_embeddings_changes_what_it_has_changed(adapter, tmp_path, capsys):
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    save_tied(tmp_path, adapter)
    code, _, err = command(capsys, "merge", tmp_path / "adapter", tmp_path / "merged")
    assert code == 0, err
    with_adapter = logits(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter"))
    assert (with_adapter - logits(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))).abs().max() > 0.1
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(merged, with_adapter, rtol=1e-4, atol=1e-4)


def test_what_peft_leaves_unmerged_is_refused(tmp_path, capsys):
    save_tied(tmp_path, {"target_modules": ["q_proj", "lm_head"], "trainable_token_indices": [5, 6]})
    code, _, err = command(capsys, "merge", tmp_path / "adapter", tmp_path / "merged")
    assert code == 2 and "PEFT does not merge a LoRA and trainable_token_indices on one layer, as on lm_head" in err
    assert not (tmp_path / "merged").exists()


def test_dtype(folder, tmp_path, capsys):
    """Merges in the base's dtype or in the requested one. bf16 rounds once, after the sum in fp32."""
    from safetensors.torch import load_file

    for dtype in ("float32", "bfloat16"):
        assert command(capsys, "merge", folder / "adapter", tmp_path / dtype, "--dtype", dtype)[0] == 0
    exact, rounded = (load_file(tmp_path / dtype / "model.safetensors") for dtype in ("float32", "bfloat16"))
    assert {tensor.dtype for tensor in rounded.values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in exact.values()} == {torch.float32}
    for name, tensor in exact.items():
        assert rounded[name].equal(tensor.bfloat16()), name
    assert json.loads((tmp_path / "bfloat16" / "config.json").read_text())["dtype"] == "bfloat16"


def of_two_dtypes(model_type):
    """A bf16 model with an fp32 router, which transformers keeps because of its name or its class."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if model_type == "deepseek_v3":
        model = tiny_model(model_type, dtype=torch.bfloat16)
    else:
        config = AutoConfig.for_model(
            model_type,
            vocab_size=131,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_experts=4,
            moe_topk=2,
            pad_token_id=0,
        )
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if "mlp.gate." in name:
            tensor.data = torch.randn(tensor.shape)
    return model


@pytest.mark.parametrize("model_type", ["deepseek_v3", "hunyuan_v1_moe"])
def test_a_router_in_fp32_is_not_rounded(model_type, tmp_path, capsys):
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    of_two_dtypes(model_type).save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    base.save_pretrained(tmp_path / "stock")
    get_peft_model(base, LoraConfig(target_modules=["q_proj", "q_a_proj"])).save_pretrained(tmp_path / "adapter")
    assert command(capsys, "merge", tmp_path / "adapter", tmp_path / "merged")[0] == 0
    got, want = (load_file(tmp_path / folder / "model.safetensors") for folder in ("merged", "stock"))
    assert {tensor.dtype for tensor in want.values()} == {torch.float32, torch.bfloat16}
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype and got[name].equal(tensor), name


def test_a_tokenizer_with_more_tokens(folder, tmp_path, capsys):
    """The adapter holds embeddings that were resized for the user's own tokens."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = tiny_model("llama")
    base.name_or_path = base.config._name_or_path = str(folder / "base")
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<new>", "<newer>"])
    base.resize_token_embeddings(len(tokenizer))
    model = get_peft_model(base, LoraConfig(r=4, target_modules=TARGETS[:2], task_type="CAUSAL_LM"))
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    tokenizer.save_pretrained(tmp_path / "adapter")
    code, _, err = command(capsys, "merge", tmp_path / "adapter", tmp_path / "merged")
    assert code == 0, err
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.config.vocab_size == len(tokenizer)
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-5, atol=1e-5)


def test_another_base(folder, tmp_path, capsys):
    """--model says where the base is now."""
    moved = named_base(folder, tmp_path / "adapter", "/gone/base")
    code, _, err = command(capsys, "merge", moved, tmp_path / "merged")
    assert code == 2 and "'/gone/base', but that folder does not exist" in err and "--model" in err
    code, _, err = command(capsys, "merge", moved, tmp_path / "merged", "--model", folder / "base")
    assert code == 0, err


def named_base(folder, adapter, name):
    """Write a copy of the adapter, in the folder `adapter`, that names another base."""
    adapter.mkdir(parents=True)
    for file in (folder / "adapter").iterdir():
        (adapter / file.name).write_bytes(file.read_bytes())
    config = json.loads((adapter / "adapter_config.json").read_text()) | {"base_model_name_or_path": name}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    return adapter


@pytest.mark.parametrize("name", ["base", "./base", "models/llama/base"])
@pytest.mark.parametrize("run", ["out", "out/checkpoint-4"])
def test_a_base_named_by_a_relative_path(name, run, folder, tmp_path, capsys, monkeypatch):
    """The base is found next to output_dir from any folder, or in the working directory."""
    adapter = named_base(folder, tmp_path / "project" / run, name)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    code, _, err = command(capsys, "merge", adapter, tmp_path / "merged")
    (line,) = err.strip().splitlines()
    assert code == 2 and repr(name) in line and "Say where the base is with --model." in line
    for place in ("project", "elsewhere"):
        base = tmp_path / place / name
        base.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(folder / "base", base)
        code, _, err = command(capsys, "merge", adapter, tmp_path / f"merged_{place}")
        assert code == 0, err
        shutil.rmtree(base)


def test_refusals(folder, tmp_path, capsys):
    full = tmp_path / "full"
    full.mkdir()
    (full / "precious.txt").write_text("mine")
    prompt = tmp_path / "prompt"
    prompt.mkdir()
    config = {"peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
    (prompt / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(folder / "base")}))
    other = tmp_path / "other"
    tiny_model("llama", hidden_size=64).save_pretrained(other)
    for argv, message in (
        ((folder / "adapter", tmp_path / "new", "--model", other), "cannot be merged into .*size mismatch"),
        ((folder / "adapter", full), f"OUTPUT_DIR is '{full}', which is not empty"),
        ((folder / "adapter", full / "precious.txt"), "which is not empty"),
        ((folder / "base", tmp_path / "new"), "has no adapter_config.json. Give the output_dir of a training"),
        ((tmp_path / "nowhere", tmp_path / "new"), "ADAPTER_DIR is '.*nowhere', "),
        ((prompt, tmp_path / "new"), "PROMPT_TUNING. Its tokens stand before the text"),
    ):
        code, _, err = command(capsys, "merge", *argv)
        assert code == 2, argv
        assert re.search(message, err), (message, err)
        assert not (tmp_path / "new").exists()
    assert (full / "precious.txt").read_text() == "mine" and len(list(full.iterdir())) == 1


def test_a_trained_recipe(tmp_path, capsys, monkeypatch):
    """Merges the output_dir of a recipe with use_peft."""
    from recipe_fixtures import write_recipe, write_rows
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    write_model(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl")
    recipe = write_recipe(
        tmp_path, use_peft=True, lora_r=4, lora_target_modules=["q_proj", "v_proj"], learning_rate=0.1
    )
    assert command(capsys, "train", recipe)[0] == 0
    code, _, err = command(capsys, "merge", tmp_path / "out", tmp_path / "merged")
    assert code == 0, err
    merged, trained = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("merged", "out"))
    torch.testing.assert_close(logits(merged), logits(trained), rtol=1e-5, atol=1e-5)
    assert (logits(merged) - logits(AutoModelForCausalLM.from_pretrained(tmp_path / "model"))).abs().max() > 1e-3
