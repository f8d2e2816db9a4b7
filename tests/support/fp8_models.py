"""Tiny models with torchao's FP8 layers on a CPU (`emulate`), and FP8 matmuls without rounding."""

import dataclasses
import importlib

import torch
from tiny_models import tiny_model
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from liger_trainer import apply_liger
from liger_triton import reference


def _product(a, a_inverse, b, b_inverse, dtype):
    """Multiply in float64, where the sum of FP8 products is exact in any order."""
    return (torch.mm(a.double(), b.double()) * (a_inverse.double() * b_inverse.double())).to(dtype)


def multiply_exactly():
    """Compute torchao's emulated products, which sum in fp32 in their own order, and our twin exactly in this process.

    Kernels give way to their twins because Triton's interpreter rounds to FP8 wrongly.
    """
    torchao = importlib.import_module("torchao.float8.float8_ops")

    def mm(op, args, kwargs=None):
        a, b = args
        return _product(a._data, a._scale.reciprocal(), b._data, b._scale.reciprocal(), a._orig_dtype)

    torchao.FLOAT8_OPS_TABLE[torch.ops.aten.mm.default] = mm
    reference.float8_product = _product
    importlib.import_module("liger_triton.float8_cast").runs_triton = lambda *tensors: False


LAYERS = 14  # two layers of seven projections
RTOL = 5e-3  # for FP8 results


def not_the_head(module, name):
    return name != "lm_head"


def config_of(recipe=None, **options):
    """torchao's default config, or the config of one of its recipes, with other `options`."""
    if recipe is None:
        return Float8LinearConfig(emulate=True, **options)
    return dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True, **options)


def fp8_model(kind="llama", *, config=None, **options):
    model = tiny_model(kind, **options)
    return convert_to_float8_training(model, config=config or config_of(), module_filter_fn=not_the_head).train()


def patched(model, **config):
    """Patch with the other operations off: their rounding would lead to other FP8 numbers."""
    others = dict.fromkeys(("rms_norm", "rope", "swiglu", "geglu", "fused_linear_cross_entropy"), False)
    return apply_liger(model, others | config)["float8"]
