"""One of torchao's fp8 layers whose weight has been gathered in eight bits, as FSDP2 does it, in one process.

torchao's own methods make what FSDP2 would gather, and its own layer is what ours is compared with: on a GPU bit for
bit, on a CPU, where it multiplies in fp32 (`emulate`), to rounding.
"""

import copy
import importlib

import pytest
import torch
from tiny_models import tiny_model
from torch import nn
from torch.utils.checkpoint import checkpoint

from liger_trainer import apply_liger
from liger_trainer.fp8 import layers as float8
from liger_triton.float8_cast import fault_of_device

pytest.importorskip("torchao", reason="torchao is not installed")
from torchao.float8 import CastConfig, Float8LinearConfig, convert_to_float8_training  # noqa: E402
from torchao.float8.float8_linear import Float8Linear  # noqa: E402
from torchao.float8.float8_training_tensor import Float8TrainingTensor  # noqa: E402

GPU = torch.cuda.is_available() and fault_of_device(torch.device("cuda", 0)) is None
DEVICE = "cuda" if GPU else "cpu"
DTYPES = {torch.float32: 1e-6, torch.bfloat16: 3e-3}
VARIANTS = {
    "torchao's default": {},
    "powers of two": {"round_scales_to_power_of_2": True},  # torchao rounds that of a gathered weight in no case
    "e4m3 gradients": {"cast_config_grad_output": CastConfig(target_dtype=torch.float8_e4m3fn)},
}


@pytest.fixture(autouse=True)
def twins(monkeypatch):
    if not GPU:
        cast = importlib.import_module("liger_triton.float8_cast")
        monkeypatch.setattr(cast, "runs_triton", lambda *tensors: False)


@pytest.fixture
def ours(monkeypatch):
    """The classes of the weights that our function has multiplied."""
    seen = []

    def counted(x, weight, *args, own=float8.float8_linear, **options):
        seen.append(type(weight))
        return own(x, weight, *args, **options)

    monkeypatch.setattr(float8, "float8_linear", counted)
    return seen


def assert_same(got, want, rtol):
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        if GPU:
            assert torch.equal(a, b)
        else:
            assert (a.float() - b.float()).norm() <= rtol * b.float().norm()


def layers(bias=False, **options):
    """(patched, torchao's own), of wrapped weights that have not been gathered."""
    model = nn.Sequential(nn.Linear(64, 96, bias=bias, device=DEVICE))
    config = Float8LinearConfig(emulate=not GPU, enable_fsdp_float8_all_gather=True, pad_inner_dim=True, **options)
    stock = convert_to_float8_training(model, config=config)[0]
    patched = copy.deepcopy(stock)
    report = apply_liger(patched)["float8"]
    return patched, stock, report


def gathered(layer, dtype):
    """What FSDP2 puts in the place of the weight for a call, and what it puts back."""
    sharded = layer.weight
    bits, scales = sharded.fsdp_pre_all_gather(None)
    weight = nn.Parameter(sharded.fsdp_post_all_gather(bits, scales, dtype)[0])
    layer._parameters["weight"] = weight
    return weight, sharded


@pytest.mark.parametrize("dtype, rtol", DTYPES.items(), ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_the_numbers_are_torchao_s(options, bias, dtype, rtol, ours):
    """`dtype` is that of FSDP2's policy; the weight itself is in fp32."""
    patched, stock, report = layers(bias, **options)
    assert len(report.swapped) == 1
    ours.clear()
    x = torch.randn(3, 16, 64, device=DEVICE).to(dtype).requires_grad_()  # torchao pads no rows
    dy, results = torch.randn(3, 16, 96, device=DEVICE).to(dtype), []
    for layer in (patched, stock):
        weight, _ = gathered(layer, dtype)
        y = layer(x)
        results.append([y, *torch.autograd.grad(y, [x, weight, *([layer.bias] if bias else [])], dy)])
    assert ours == [Float8TrainingTensor]
    assert_same(*results, rtol)


@pytest.mark.parametrize("checkpointed", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
def test_bits_that_are_freed_and_gathered_again(checkpointed, ours):
    """Into the same tensor, with a scale of its own, which FSDP2 sets."""
    patched, stock, _ = layers()
    ours.clear()
    x = torch.randn(3, 16, 64, device=DEVICE, requires_grad=True)
    results = []
    for layer in (patched, stock):
        weight, sharded = gathered(layer, torch.float32)
        bits = weight._data.clone()
        y = layer(x) if checkpointed is None else checkpoint(layer, x, use_reentrant=checkpointed)
        weight._data.untyped_storage().resize_(0)
        weight._data.untyped_storage().resize_(bits.nbytes)
        weight._data.view(torch.uint8).copy_(bits.view(torch.uint8))
        sharded.fsdp_post_all_gather((bits,), (weight._scale.clone(),), torch.float32, out=weight)
        y.square().sum().backward()
        results.append([x.grad, weight.grad])
        x.grad = None
    assert set(ours) == {Float8TrainingTensor}
    assert_same(*results, 1e-5)


def test_between_calls_that_are_gathered(ours):
    """Without gradients; and with the weight that it has when it is not sharded."""
    patched, stock, _ = layers()
    ours.clear()
    x = torch.randn(3, 16, 64, device=DEVICE)
    outputs = []
    for layer in (patched, stock):
        _, sharded = gathered(layer, torch.float32)
        with torch.no_grad():
            outputs.append([layer(x)])
        layer._parameters["weight"] = sharded
        outputs[-1].append(layer(x).detach())
    assert ours[0] is Float8TrainingTensor and len(ours) == 2
    assert_same(*outputs, 1e-6)


def test_no_rows(ours):
    """The gradient is zeros, as a process without rows has to send one."""
    patched, _, _ = layers()
    weight, _ = gathered(patched, torch.bfloat16)
    patched(torch.empty(0, 64, device=DEVICE, dtype=torch.bfloat16)).sum().backward()
    assert type(weight.grad) is torch.Tensor and weight.grad.shape == weight.shape and not weight.grad.any()


def test_a_weight_that_is_still_sharded_is_left_to_torchao(ours):
    """As under tensor parallelism."""
    patched, _, report = layers()
    ours.clear()

    class Sharded(torch.Tensor):
        pass

    plain = patched.weight.t().t().detach()
    patched._parameters["weight"] = nn.Parameter(plain.as_subclass(Sharded))
    patched(torch.randn(16, 64, device=DEVICE))
    assert not ours and "is a Sharded, and was not gathered for the call" in report.skipped[""]


def test_a_formula_that_changes_is_not_swapped(monkeypatch):
    """As if a release of torchao meant something else by the scale of what is gathered."""
    own = Float8Linear.forward

    def forward(self, input):
        y = own(self, input)
        return y * 1.01 if type(self.weight) is Float8TrainingTensor else y

    monkeypatch.setattr(Float8Linear, "forward", forward)
    _, _, report = layers()
    assert not report.swapped
    assert all("bits and the scale of a weight that is gathered in fp8" in why for why in report.skipped.values())


def test_a_model_with_wrapped_weights(ours):
    """All layers share one proof."""
    config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=True)
    model = convert_to_float8_training(
        tiny_model("llama"), config=config, module_filter_fn=lambda module, name: name != "lm_head"
    )
    assert len(apply_liger(model)["float8"].swapped) == 14
    assert len(ours) <= 4 * 4  # in two dtypes, wrapped and gathered, for each of four shapes at most
