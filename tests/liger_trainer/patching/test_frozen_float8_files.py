"""Weights of a base in eight bits, on their way into a file or out of one."""

import pytest
import torch
from frozen_bases import adapted, frozen, step


@pytest.mark.parametrize("strict", [False, True])
def test_numbers_are_not_loaded_as_bits(strict):
    """PyTorch would round each number to an integer, which is the bits of another one."""
    model, numbers = frozen(), adapted().state_dict()
    want, before = step(model), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="q_proj.base_layer.weight is torch.float32, with no scale.*eight bits"):
        model.load_state_dict(numbers, strict=strict)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert step(model)["loss"] == want["loss"]


def test_bits_and_a_part_of_the_weights_are_loaded():
    """A state with neither weight nor scale of a layer, as that of an adapter is, changes neither."""
    model = frozen()
    want, state = step(model), model.state_dict()
    model.load_state_dict(state)
    model.load_state_dict({name: tensor for name, tensor in state.items() if "lora_" in name}, strict=False)
    assert step(model)["loss"] == want["loss"]
    converted = {name: tensor.bfloat16() if name.endswith("scale") else tensor for name, tensor in state.items()}
    with pytest.raises(RuntimeError, match="with a scale of torch.bfloat16 beside it"):
        model.load_state_dict(converted)
