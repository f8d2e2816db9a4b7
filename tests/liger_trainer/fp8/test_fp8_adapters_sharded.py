"""Adapters and Medusa heads on a frozen FP8 base under FSDP2 and DDP: two CPU processes compared with one."""

import pytest
import torch
from frozen_bases import LAYERS, adapted, built, fresh_state, frozen
from launching import in_processes, in_processes_fsdp2
from peft import PeftModel
from safetensors.torch import load_file
from tiny_models import assert_same_gradients, assert_same_step, step, tiny_model

from liger_trainer.fp8.frozen_layer import FrozenFloat8Linear
from liger_trainer.fp8.quantize_base import prepare_for_shards


def layers_of(model):
    return [module for module in model.modules() if type(module) is FrozenFloat8Linear]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """(folder, the first rank's results) for each way to train."""
    folder = {mode: tmp_path_factory.mktemp(mode) for mode in ("fsdp2", "ddp", "alone")}
    for out in folder.values():
        tiny_model("llama").save_pretrained(out / "model")
    in_processes_fsdp2(folder["fsdp2"], "frozen_sharded.py", "fsdp2", folder["fsdp2"])
    in_processes("frozen_sharded.py", "ddp", folder["ddp"])
    in_processes("frozen_sharded.py", "ddp", folder["alone"], processes=1)
    return {mode: (out, torch.load(out / "found.pt")) for mode, out in folder.items()}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["fp32", "from a file", "checkpointed", "bf16", "experts", "medusa"])
def test_two_processes_train_as_one(case, ranks):
    """Without 16-bit arithmetic, FSDP2 is bit-equal to DDP. With it, DDP uses autocast and FSDP2 gathers bf16."""
    sharded, whole, one = (ranks[mode][1][case] for mode in ("fsdp2", "ddp", "alone"))
    for bytes_of_two, bytes_of_one in zip(sharded["base"], one["base"], strict=True):
        assert torch.equal(bytes_of_two.flatten(), bytes_of_one.flatten())
    assert sharded["held"] == one["held"] / 2 and whole["held"] == one["held"], "half of the base on each rank"
    assert sharded["swapped"] == whole["swapped"] == one["swapped"] == (4 if case == "experts" else LAYERS)
    assert sharded["blocks"] == one["blocks"] == (2 if case == "experts" else 0)
    # The router loss that TRL adds is not a sum over tokens: each process has its own
    assert_same_gradients(whole["grads"], one["grads"], 1e-2 if case == "experts" else 1e-5, floor=0)
    if case == "bf16":
        assert sharded["gathered"] == "torch.bfloat16"
        assert sharded["losses"] == pytest.approx(one["losses"], rel=5e-3)
    else:
        assert_same_gradients(sharded["grads"], whole["grads"], rtol=0)
        assert sharded["losses"] == whole["losses"] == pytest.approx(one["losses"], rel=1e-3)


@pytest.mark.slow
def test_saved_resumed_and_merged(ranks):
    """Only the adapter is saved, in whole tensors, and it merges into the base in the original precision."""
    folder, found = ranks["fsdp2"]
    for case, resumed in (("fp32", "resumed"), ("medusa", "medusa, resumed")):
        assert found[resumed]["losses"] == found[case]["losses"]
    assert len(list(folder.rglob("model*.safetensors"))) == 1, "none but the one that was read"
    heads = [
        load_file(folder / case / "saved" / "medusa_heads" / "medusa_lm_head.safetensors")
        for case in ("medusa", "medusa, resumed")
    ]
    assert len(heads[0]) == 6 and all(torch.equal(heads[1][name], tensor) for name, tensor in heads[0].items())
    saved, again = (load_file(folder / case / "saved" / "adapter_model.safetensors") for case in ("fp32", "resumed"))
    assert len(saved) == 2 * LAYERS and saved.keys() == again.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in saved.items())
    merged = PeftModel.from_pretrained(tiny_model("llama"), folder / "fp32" / "saved").merge_and_unload()
    a, b = (saved[f"base_model.model.model.layers.0.mlp.up_proj.lora_{part}.weight"] for part in "AB")
    before = tiny_model("llama").model.layers[0].mlp.up_proj.weight
    torch.testing.assert_close(merged.model.layers[0].mlp.up_proj.weight, before + 2 * b @ a)


def test_words_of_16_bits():
    """Layers that FSDP2 shards compute the same, are not converted, and keep their parameter names in a state."""
    model, want = frozen(), frozen()
    prepare_for_shards(model)
    layers = layers_of(model)
    bits, scale = layers[0].bits, layers[0].scale
    assert bits.dtype == scale.dtype == torch.bfloat16 and scale.shape == (len(bits), 2)
    prepare_for_shards(model)
    assert layers[0].bits is bits
    assert_same_step(step(model), step(want), rtol=0)
    for convert in (lambda m: m.to(torch.float16), lambda m: m.float(), lambda m: m.bfloat16()):
        convert(model)
        for layer, other in zip(layers, layers_of(want), strict=True):
            assert torch.equal(layer.float8.bits.view(torch.uint8), other.bits) and not layer.bits.requires_grad
            assert torch.equal(layer.float8.scale, other.scale) and torch.equal(layer.weight, other.weight)
    state = model.state_dict()
    again = frozen()
    with pytest.raises(RuntimeError, match="Missing key|Unexpected key|size mismatch|is an fp8 layer"):
        again.load_state_dict(state)
    prepare_for_shards(again)
    assert not any(again.load_state_dict(state))
    for layer, other in zip(layers_of(again), layers, strict=True):
        assert torch.equal(layer.bits.view(torch.uint8), other.bits.view(torch.uint8))
    assert all(name.endswith(("bits", "scale")) for name in state if "base_layer" in name)


@pytest.mark.usefixtures("any_device", "fresh_accelerator")
def test_a_later_trainer_that_shards(tmp_path, monkeypatch):
    """It need not ask for fp8."""
    model = built(adapted(), tmp_path).model
    fresh_state()
    from liger_trainer import LigerTrainer

    own = LigerTrainer._apply_liger

    def sharding(self, *args, **kwargs):
        self.is_fsdp_enabled = True
        own(self, *args, **kwargs)

    monkeypatch.setattr(LigerTrainer, "_apply_liger", sharding)
    trainer = built(model, tmp_path, fp8=False)
    assert {layer.bits.dtype for layer in layers_of(trainer.model)} == {torch.bfloat16}
