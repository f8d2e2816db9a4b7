"""LoRA on GPTQ and AWQ bases, loaded by gptqmodel, compared with the stock layers on the same bases."""

import copy
import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from recipe_fixtures import command, write_recipe
from safetensors.torch import save_file
from tiny_models import assert_same_step, collate, ragged_rows, step, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AwqConfig, GPTQConfig

from liger_trainer import apply_liger
from liger_trainer.lora import layers as lora

pytest.importorskip("optimum")
gptq = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch")
awq = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch_awq")

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
RTOL = {torch.float32: 5e-6, torch.bfloat16: 8e-2}  # stock differs by up to 0.05, because it rounds every step to bf16
KINDS = {  # bits, numbers in a group, activation order
    "gptq": ("gptq", 4, 32, False),
    "gptq-8": ("gptq", 8, 32, False),
    "gptq-order": ("gptq", 4, 32, True),
    "gptq-row": ("gptq", 4, -1, False),
    "awq": ("awq", 4, 32, False),
    "awq-row": ("awq", 4, -1, False),
}
CLASSES = {"gptq": gptq.TorchLinear, "awq": awq.AwqTorchLinear}


@pytest.fixture(autouse=True)
def uncompiled():
    """Turn off gptqmodel's compiled dequantisation, which takes a minute here."""
    with torch.compiler.set_stance("force_eager"):
        yield


def quantised_weight(weight, method, bits, group, ordered):
    """The tensors of a checkpoint for weight (N, K)."""
    n, k = weight.shape
    group = k if group < 0 else group
    g_idx = (torch.randperm(k) if ordered else torch.arange(k)) // group
    of_group = weight[:, g_idx.argsort(stable=True)].view(n, -1, group)
    low, high = of_group.amin(2).clamp(max=0), of_group.amax(2).clamp(min=0)
    scales = (high - low) / (2**bits - 1)
    zeros = (-low / scales).round()
    if method == "awq":
        layer = awq.AwqTorchLinear(bits, group, False, False, k, n, register_buffers=True)
        linear = torch.nn.Linear(k, n, bias=False)
        linear.weight.data = weight
        layer.pack(linear, scales.half(), zeros)
        return {name: layer.get_buffer(name) for name in ("qweight", "qzeros", "scales")}
    numbers = (weight / scales[:, g_idx] + zeros[:, g_idx]).round().clamp(0, 2**bits - 1)

    def packed(rows):  # the first dimension, packed into 32-bit words
        parts = rows.to(torch.int64).unflatten(0, (-1, 32 // bits))
        words = sum(part << (bits * i) for i, part in enumerate(parts.unbind(1)))
        return words.to(torch.uint32).view(torch.int32)

    packed_zeros = packed(zeros).t().contiguous()
    return {"qweight": packed(numbers.t()), "qzeros": packed_zeros, "scales": scales.t().half(), "g_idx": g_idx.int()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a checkpoint of each kind."""

    def save(kind, bias=False):
        if (kind, bias) in made:
            return made[kind, bias]
        folder = tmp_path_factory.mktemp("model")
        (method, bits, group, ordered) = KINDS[kind]
        model, tensors = tiny_model("llama", attention_bias=bias, **SIZES), {}
        model.save_pretrained(folder)
        torch.manual_seed(7)
        for name, t in model.state_dict().items():
            if name.endswith("proj.weight"):
                for of, made_of in quantised_weight(t.float(), *KINDS[kind]).items():
                    tensors[name.removesuffix("weight") + of] = made_of.contiguous()
            else:
                tensors[name] = t.half()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {
            "quant_method": method,
            "bits": bits,
            "group_size": group,
            "desc_act": ordered,
            "sym": False,
            "zero_point": True,
            "format": "gemm" if method == "awq" else "gptq_v2",
        }
        (folder / "config.json").write_text(json.dumps(config))
        made[kind, bias] = folder
        return folder

    made = {}
    return save


def quantised(folder, kind, dtype=torch.bfloat16, **options):
    method, bits, *_ = KINDS[kind]
    backend = {"gptq": GPTQConfig(bits=bits, backend="gptq_torch"), "awq": AwqConfig(bits=bits, backend="torch_awq")}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=backend[method])
    torch.manual_seed(3)
    projections = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
    options = {"r": 4, "target_modules": projections, "init_lora_weights": False} | options
    return get_peft_model(model, LoraConfig(**options)).train()


def patched(model, monkeypatch, mlp=True):
    monkeypatch.setattr(lora, "LEAST_WORK", 0)
    options = {"rms_norm": False, "rope": False, "fused_linear_cross_entropy": False, "rebuild_above_mib": 0}
    return apply_liger(model, options | {"swiglu": mlp})["lora"]


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dtype", RTOL, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_equals_stock(kind, dtype, bias, saved, monkeypatch):
    for mlp in (False, True):
        stock, model = (quantised(saved(kind, bias), kind, dtype) for _ in range(2))
        report = patched(model, monkeypatch, mlp)
        assert len(report.swapped) == 14 and not report.skipped
        assert {name.split()[1] for name in report.swapped.values()} == {CLASSES[KINDS[kind][0]].__name__}
        computes_otherwise = kind.startswith("awq") and dtype == torch.float32  # in fp16, and PEFT's code runs
        assert_same_step(step(model), step(stock), 0 if computes_otherwise else RTOL[dtype], floor=0)
        if dtype == torch.bfloat16:
            assert_same_step(step(model, autocast=dtype), step(stock, autocast=dtype), RTOL[dtype], floor=0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_base_has_the_bits_of_stock(kind, saved, monkeypatch):
    """With B = 0, the output and the gradient of x equal the base's."""
    stock, model = (quantised(saved(kind), kind, init_lora_weights=True) for _ in range(2))
    patched(model, monkeypatch)
    torch.manual_seed(5)
    x = torch.randn(64, 64, dtype=torch.bfloat16)
    dy = torch.randn(64, 128, dtype=torch.bfloat16)
    found = []
    for one in (model, stock):
        layer = one.base_model.model.model.layers[0].mlp.up_proj
        given = x.clone().requires_grad_()
        y = layer(given)
        y.backward(dy)
        found.append((y, given.grad))
    assert "forward" in model.base_model.model.model.layers[0].mlp.up_proj.__dict__
    assert all(torch.equal(got, want) for got, want in zip(*found, strict=True))


@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_no_weight_is_kept_unpacked(kind, saved, monkeypatch):
    def kept_by(model):
        kept = set()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.add(tuple(t.shape)) or t, lambda t: t):
            model(**collate(ragged_rows(4)))
        return kept & {(128, 64), (64, 128)}

    stock, model = (quantised(saved(kind), kind) for _ in range(2))
    patched(model, monkeypatch)
    assert kept_by(stock) and not kept_by(model)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["gptq-order", "awq"])
def test_checkpointed(kind, reentrant, saved, monkeypatch):
    stock, model = (quantised(saved(kind), kind) for _ in range(2))
    patched(model, monkeypatch)
    for one in (stock, model):
        one.enable_input_require_grads()
        one.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same_step(step(model), step(stock), RTOL[torch.bfloat16], floor=0)


@pytest.mark.parametrize(
    ("kind", "dtype", "dropout"), [("gptq", torch.float32, 0.5), ("awq", torch.bfloat16, 0.0)], ids=["gptq", "awq"]
)
def test_dropout_disabled_and_copied(kind, dtype, dropout, saved, monkeypatch):
    stock, model = (quantised(saved(kind), kind, dtype, lora_dropout=dropout) for _ in range(2))
    patched(model, monkeypatch, mlp=False)  # its gate rounds differently
    want = step(stock)
    assert_same_step(step(model), want, RTOL[dtype], floor=0)
    assert_same_step(step(copy.deepcopy(model)), want, RTOL[dtype], floor=0)
    rows = collate(ragged_rows(4))
    for one in (stock, model):
        one.eval()
    with torch.no_grad():
        got, want = model(**rows).logits, stock(**rows).logits
        assert (got - want).norm() <= 0.02 * want.norm()
        with model.disable_adapter(), stock.disable_adapter():
            assert torch.equal(model(**rows).logits, stock(**rows).logits)


def test_a_class_with_kernels_of_its_own_keeps_its_code(saved):
    folder = saved("gptq")
    settings = {"dtype": torch.bfloat16, "quantization_config": GPTQConfig(bits=4, backend="gptq_torch_fused")}
    model = AutoModelForCausalLM.from_pretrained(folder, **settings)
    report = apply_liger(get_peft_model(model, LoraConfig(target_modules=["q_proj"])))["lora"]
    assert not report.swapped and set(report.skipped.values()) == {
        "its base is a TorchFusedLinear, and peft.tuners.lora.gptq.GPTQLoraLinear has its own code for it"
    }


def test_a_base_that_rotates_its_input_keeps_its_code(saved):
    model = quantised(saved("gptq"), "gptq")
    model.base_model.model.model.layers[0].mlp.down_proj.base_layer.online_full_had = True
    report = apply_liger(model)["lora"]
    assert len(report.swapped) == 13
    assert set(report.skipped.values()) == {"its base rotates its input, or has a gptqmodel adapter"}


def test_a_recipe_gets_a_class_that_trains(saved, tmp_path, capsys):
    folder = saved("gptq-8")
    tiny_tokenizer().save_pretrained(folder)
    row = {"instruction": "one two", "input": "", "output": "three"}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    options = {"model_name_or_path": str(folder), "use_peft": True, "lora_target_modules": ["q_proj"], "max_steps": 2}
    code, out, err = command(capsys, "train", write_recipe(tmp_path, **options))
    assert code == 0, err
    assert "lora 2/2" in out and "varlen_attention 1/1" in out and "not proven" not in out
    code, _, err = command(capsys, "fit", write_recipe(tmp_path, **options))
    assert code == 2 and "a checkpoint in gptq" in err
