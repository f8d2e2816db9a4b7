"""gpt-oss experts kept in their checkpoint's 4-bit form, compared with the same checkpoint in 16 bits."""

import pytest
import torch
from base_checkpoints import write_gpt_oss
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny_models import tiny_model, tiny_tokenizer
from torch._subclasses import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import Mxfp4Config as Stock

from liger_trainer import LigerSFTConfig, LigerSFTTrainer, LigerTrainer, LigerTrainingArguments, apply_liger
from liger_trainer.base_weights.mxfp4 import Mxfp4Config, PackedGptOssExperts
from liger_trainer.fitting.meta_model import ModelSpec, on_meta, without_values

IDS = torch.arange(3, 27).reshape(2, 12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("mxfp4")
    write_gpt_oss(path)
    return path


def load(folder, packed, dtype=torch.bfloat16, **options):
    quantization = Mxfp4Config() if packed else Stock(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=quantization, **options)
    return model if packed else model.to(dtype)  # with an fp32 input, transformers 5.17 returns bf16 from experts


def adapted(model, seed=0):
    torch.manual_seed(seed)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))


def experts_of(model):
    return [module for module in model.modules() if isinstance(module, PackedGptOssExperts)]


def test_only_experts_stay_4_bit(folder):
    model, plain = load(folder, True), load(folder, False)
    assert len(experts_of(model)) == 2 and not experts_of(plain)
    for name, want in plain.named_parameters():
        path, _, last = name.rpartition(".")
        assert torch.equal(getattr(model.get_submodule(path), last), want), name
    stored = {name for name, p in model.named_parameters() if p.dtype == torch.uint8}
    assert len(stored) == 8 and not any(model.get_parameter(name).requires_grad for name in stored)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("patched", [False, True], ids=["stock", "ours"])
def test_the_same_bits_in_the_forward_pass(folder, patched, implementation):
    logits = []
    for packed in (True, False):
        model = load(folder, packed, experts_implementation=implementation).eval()
        if patched:
            assert len(apply_liger(model)["experts"].swapped) == 2
        with torch.no_grad():
            logits.append(model(IDS).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
def test_the_same_gradients(folder, checkpointing):
    """Adapters before and behind the experts get the same gradients from both forwards."""
    found = []
    for packed, patched in ((False, False), (True, False), (True, True)):
        model = adapted(load(folder, packed, torch.float32))
        if patched:
            report = apply_liger(model)
            assert len(report["experts"].swapped) == 2 and not report["experts"].skipped
            assert report["varlen_attention"].swapped
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()(input_ids=IDS, labels=IDS).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    for name, want in found[0].items():
        for got in found[1:]:
            torch.testing.assert_close(got[name], want, rtol=1e-4, atol=1e-5 * want.abs().max().item())
    assert all(want.abs().max() > 0 for want in found[0].values())


def train(model, out):
    rows = [{"input_ids": row, "labels": row} for row in IDS.repeat(4, 1).tolist()]
    args = LigerTrainingArguments(
        out,
        max_steps=4,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        activation_checkpointing=True,
        logging_steps=1,
    )
    trainer = LigerTrainer(model, args, train_dataset=rows)
    trainer.train()
    trainer.save_model(out)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_trained_saved_and_loaded_again(folder, tmp_path):
    """Losses equal those in 16 bits, no expert changes, and the adapter fits either base."""
    losses = [train(adapted(load(folder, packed, torch.float32)), tmp_path / str(packed)) for packed in (True, False)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and losses[0][-1] < losses[0][0]
    saved = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("True", "False")]
    assert saved[0].keys() == saved[1].keys() and all("lora" in name for name in saved[0])
    with torch.no_grad():
        logits = [
            PeftModel.from_pretrained(load(folder, packed, torch.float32), tmp_path / "True").eval()(IDS).logits
            for packed in (True, False)
        ]
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)


def test_saved_whole_it_is_the_checkpoint_again(folder, tmp_path):
    load(folder, True).save_pretrained(tmp_path)
    again, want = load(tmp_path, False).state_dict(), load(folder, False).state_dict()
    assert again.keys() == want.keys() and all(torch.equal(again[name], want[name]) for name in want)


def test_only_adapters_can_be_trained(folder, tmp_path):
    with pytest.raises(ValueError, match="attach trainable adapters"):
        train(load(folder, True), tmp_path)


def test_refuses_another_checkpoint(tmp_path):
    tiny_model("gpt_oss").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="the checkpoint is not in MXFP4"):
        load(tmp_path, True)
    config = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    other = tiny_model("llama")
    other.config.quantization_config = config
    other.save_pretrained(tmp_path / "llama")
    with pytest.raises(ValueError, match="LlamaForCausalLM has none in MXFP4"):
        load(tmp_path / "llama", True)


def test_fit_counts_the_bytes_that_are_stored(folder):
    config = AutoConfig.from_pretrained(folder)
    lora = LoraConfig(r=4, target_modules=["q_proj"])
    model = on_meta(ModelSpec(config, torch.bfloat16, lora, quantization=Mxfp4Config()))
    with FakeTensorMode():
        weights = without_values(model)
    counted = sum(weight.bytes() for weight in weights if not weight.trained)
    assert counted == sum(p.nbytes for p in load(folder, True).parameters())
    assert {weight.dtype for weight in weights if weight.trained} == {torch.float32}, "as PEFT makes them"


@pytest.mark.parametrize("targets", [["q_proj"], "all-linear"], ids=str)
def test_adapters_that_4_bit_experts_cannot_have_are_refused(folder, tmp_path, targets):
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = get_peft_model(load(folder, True), LoraConfig(r=4, target_modules=targets, target_parameters=names))
    with pytest.raises(ValueError, match="target_parameters .* names 'mlp.experts.gate_up_proj', but no parameter"):
        train(model, tmp_path)


def test_adapters_on_experts_in_16_bits_are_not_refused(folder, tmp_path):
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = get_peft_model(
        load(folder, False, torch.float32), LoraConfig(r=4, target_modules=["q_proj"], target_parameters=names)
    )
    assert train(model, tmp_path)


def test_sft_refuses_them_too(folder, tmp_path):
    args = LigerSFTConfig(str(tmp_path), use_cpu=True, report_to="none", bf16=False)
    rows = Dataset.from_list([{"input_ids": row, "labels": row} for row in IDS.tolist()])
    config = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    with pytest.raises(ValueError, match="target_parameters .* names 'mlp.experts.gate_up_proj'"):
        LigerSFTTrainer(
            load(folder, True), args, train_dataset=rows, processing_class=tiny_tokenizer(), peft_config=config
        )
