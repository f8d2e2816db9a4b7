"""Transposes of fp8 matrices, for the input gradients of frozen fp8 weights."""

import pytest
import torch

from liger_triton.float8_cast import transposed

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    "shapes", [[(16, 16)], [(144, 272)], [(64, 128), (16, 128)], [(4096, 512), (1024, 512), (48, 512)]]
)
def test_transposes_side_by_side(shapes, device):
    codes = [torch.randint(0, 256, shape, device=device, dtype=torch.uint8) for shape in shapes]
    got = transposed([c.view(E4M3) for c in codes])
    assert torch.equal(got.view(torch.uint8), torch.cat(codes).t())
