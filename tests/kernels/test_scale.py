"""The scale kernel against a float64 product, and how `scaled` reuses memory."""

import pytest
import torch

from liger_triton._dispatch import use_triton
from liger_triton.known_gradients import launch_scale, scaled


@pytest.mark.parametrize(
    "shape, per_row", [((7, 5001), False), ((7, 5001), True), ((33,), False), ((8192,), False), ((3, 130), True)]
)
@pytest.mark.parametrize("in_place", [False, True])
def test_kernel(shape, per_row, in_place, device):
    if not use_triton(torch.empty(0, device=device)):
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1")
    torch.manual_seed(0)
    wide = torch.randn(*shape[:-1], shape[-1] + 3, device=device)  # rows with a stride of their own
    grad = wide[..., : shape[-1]] if len(shape) > 1 else torch.randn(shape, device=device)
    factor = torch.rand(shape[0], device=device) if per_row else torch.tensor(0.3, device=device)
    want = grad.double() * (factor.double()[:, None] if per_row else factor.double())
    out = grad if in_place else torch.full(shape, torch.nan, device=device)
    launch_scale(grad, factor, out)
    torch.testing.assert_close(out.double(), want, rtol=1e-6, atol=0)
    assert wide[..., shape[-1] :].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_scaled_rounds_once(dtype, device):
    grad, factor = torch.randn(9, 40, device=device), torch.tensor(1 / 3, device=device)
    got = scaled(grad.clone(), factor, dtype)
    assert torch.equal(got, (grad * factor).to(dtype))
    same = grad.to(dtype)
    got = scaled(same, factor, dtype)
    assert got is same
