"""Gated MLPs without adapters run many rows in slices in checkpointed layers, with stock's numbers."""

import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from side_by_side import assert_same_step, batch, model_of, patched, step

from liger_trainer.patching.core.contracts import KeepsValues

kernel = sys.modules["liger_triton.lora_mlp"]


@pytest.fixture
def inner(monkeypatch):
    """Make 8 rows count as many, and as a slice. Return a list with an entry for each computed slice."""
    monkeypatch.setattr(kernel, "SLICE_ABOVE", 0)
    monkeypatch.setattr(kernel, "SLICE_BYTES", 1)
    monkeypatch.setattr(kernel, "SLICE_UNIT", 8)
    called, compute = [], kernel._inner
    monkeypatch.setattr(kernel, "_inner", lambda *given: called.append(1) or compute(*given))
    return called


def on_attention(model):
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


@pytest.mark.diagonal
@pytest.mark.parametrize("wrap", [None, on_attention], ids=["all-weights", "frozen"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_a_step_equals_stock(model_type, dtype, wrap, inner):
    setting = ("sdpa", "checkpoint", dtype)
    want = step(model_of(setting, model_type, wrap))
    assert not inner
    model = patched(model_of(setting, model_type, wrap))
    assert_same_step(step(model), want, dtype)
    layers = model.config.get_text_config().num_hidden_layers
    rows = batch()["input_ids"].numel()
    passes = 3 if model_type == "gemma3_text" else 2  # its norm after the MLP needs the output again
    assert len(inner) == passes * layers * -(-rows // 8)


def test_not_where_layers_keep_what_they_need(inner):
    """Computing gate and up again would be extra work there. Without gradients it is none."""
    setting = ("sdpa", "kept", "fp32")
    want, model = step(model_of(setting)), patched(model_of(setting))
    assert_same_step(step(model), want, "fp32")
    assert not inner
    with torch.no_grad():
        loss = model(**batch()).loss
    assert inner
    torch.testing.assert_close(loss, want[0])


def test_not_in_layers_that_auto_measures(inner):
    """They must hold what they would keep."""
    setting = ("sdpa", "kept", "fp32")
    want, model = step(model_of(setting)), patched(model_of(setting))

    class Keep(KeepsValues):  # like the one in `policy.py`
        def __call__(self, x):
            return x

    with torch.autograd.graph.saved_tensors_hooks(Keep(), lambda x: x):
        assert_same_step(step(model), want, "fp32")
    assert not inner


def test_not_where_a_hook_is_on_a_projection(inner):
    setting = ("sdpa", "checkpoint", "fp32")
    want, model = step(model_of(setting)), patched(model_of(setting))
    seen = []
    for layer in model.model.layers:
        layer.mlp.up_proj.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    assert_same_step(step(model), want, "fp32")
    assert seen and not inner


def test_a_second_backward_pass(inner):
    """Gradients add to the existing ones."""
    setting = ("sdpa", "checkpoint", "fp32")
    stock, ours = model_of(setting), patched(model_of(setting))
    step(stock)
    step(ours)
    assert_same_step(step(ours, seed=2), step(stock, seed=2), "fp32")


def test_sharded(tmp_path, inner):
    """FSDP2 gathers a layer's weights in its call, and again for its recomputation."""
    from torch import distributed
    from torch.distributed.fsdp import fully_shard

    setting = ("sdpa", "checkpoint", "fp32")
    want = step(model_of(setting))
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = patched(model_of(setting))
        mesh = distributed.init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        loss, gradients = step(model)
        gradients = {name: gradient.full_tensor() for name, gradient in gradients.items()}
    finally:
        distributed.destroy_process_group()
    assert inner
    assert_same_step((loss, gradients), want, "fp32")
