"""Weights of an FP8 base that are saved, loaded, or copied for training."""

import pytest
import torch
from frozen_bases import LAYERS, adapted, frozen
from tiny_models import step


@pytest.mark.parametrize("strict", [False, True])
def test_numbers_are_not_loaded_as_bits(strict):
    """PyTorch would round each number to an integer, and the byte of that integer is another number."""
    model, numbers = frozen(), adapted().state_dict()
    want = step(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(
        RuntimeError,
        match=r"q_proj.base_layer is an fp8 layer.*its weight is \(32, 32\) torch.float32 and scale is missing",
    ):
        model.load_state_dict(numbers, strict=strict)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert step(model)[0] == want[0]


def test_bits_and_a_part_of_the_weights_are_loaded():
    """A state with neither weight nor scale of a layer, such as an adapter's, changes neither."""
    model = frozen()
    want, state = step(model), model.state_dict()
    model.load_state_dict(state)
    model.load_state_dict({name: tensor for name, tensor in state.items() if "lora_" in name}, strict=False)
    assert step(model)[0] == want[0]
    converted = {name: tensor.bfloat16() if name.endswith("scale") else tensor for name, tensor in state.items()}
    with pytest.raises(RuntimeError, match=r"and scale is \(32,\) torch.bfloat16"):
        model.load_state_dict(converted)
    for left_out in ("weight", "scale"):
        part = {name: tensor for name, tensor in state.items() if not name.endswith(f"base_layer.{left_out}")}
        with pytest.raises(RuntimeError, match=f"its .*{left_out} is missing"):
            model.load_state_dict(part, strict=False)
    assert step(model)[0] == want[0]


@pytest.mark.parametrize("strict", [False, True])
def test_bits_are_not_loaded_as_numbers(strict):
    """PyTorch would turn the byte 100 into the number 100."""
    model, bits = adapted(), frozen().state_dict()
    want = step(model)[0]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"size mismatch for .*q_proj.base_layer.weight.*\[1, 32, 32\]"):
        model.load_state_dict(bits, strict=strict)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert step(model)[0] == want


def test_a_state_takes_no_memory_of_its_own():
    """PEFT asks for the whole model's state each time it saves an adapter."""
    model = frozen()
    weights = [p.data_ptr() for p in model.parameters() if p.dtype == torch.uint8]
    assert len(weights) == LAYERS
    assert [t.data_ptr() for t in model.state_dict().values() if t.dtype == torch.uint8] == weights
