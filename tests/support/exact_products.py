"""Products in eight bits without rounding on a CPU, so that torchao's layers and ours can be compared bit for bit."""

import importlib

import torch

from liger_triton import reference


def _product(a, a_inverse, b, b_inverse, dtype):
    """In float64 the sum of what has eight bits has no rounding, and so no order."""
    return (torch.mm(a.double(), b.double()) * (a_inverse.double() * b_inverse.double())).to(dtype)


def multiply_exactly():
    """For this process: what torchao multiplies in fp32 (`emulate`), each product with its own order of the sum, and
    our twin. The kernels make way for their twins, as Triton's interpreter rounds to fp8 wrongly."""
    torchao = importlib.import_module("torchao.float8.float8_ops")

    def mm(op, args, kwargs=None):
        a, b = args
        return _product(a._data, a._scale.reciprocal(), b._data, b._scale.reciprocal(), a._orig_dtype)

    torchao.FLOAT8_OPS_TABLE[torch.ops.aten.mm.default] = mm
    reference.float8_product = _product
    importlib.import_module("liger_triton.float8_cast").runs_triton = lambda *tensors: False
