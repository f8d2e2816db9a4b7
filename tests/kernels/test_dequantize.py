"""4-bit dequantization is bit-equal to bitsandbytes. Its tables are written down here."""

import pytest
import torch

from liger_triton import MXFP4Weight, dequantize_mxfp4, lora_linear, lora_mlp
from liger_triton._dispatch import INTERPRET
from liger_triton.dequantize import Nested, PackedWeight, dequantize_4bit

NF4 = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
]
FP4 = [0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25]
FP4 += [-number for number in FP4]
EXACT = {torch.float32: 0.0, torch.float16: 0.0, torch.bfloat16: 0.0 if torch.cuda.is_available() else 2**-7}


def stored(shape, blocksize, code, nested, device):
    """Return the arguments of `dequantize_4bit`, without the dtype, for random bytes."""
    count = shape[0] * shape[1]
    packed = torch.randint(256, ((count + 1) // 2, 1), dtype=torch.uint8, device=device)
    blocks, of_scales = -(-count // blocksize), None
    absmax = torch.rand(blocks, device=device) + 0.01
    if nested:
        absmax = torch.randint(256, (blocks,), dtype=torch.uint8, device=device)
        scales = torch.rand(-(-blocks // nested), device=device)
        offset = torch.tensor(0.37, device=device)
        of_scales = Nested(torch.linspace(-1, 1, 256, device=device), scales, nested, offset)
    return packed, torch.tensor(code, device=device), absmax, blocksize, torch.Size(shape), of_scales


def written_out(packed, code, absmax, blocksize, shape, nested):
    """Compute the numbers in fp32, one operation at a time."""
    if nested is not None:
        of_block = nested.absmax.repeat_interleave(nested.blocksize)[: absmax.numel()]
        absmax = (nested.code[absmax.long()] * of_block) + nested.offset
    numbers = torch.stack((packed.long() // 16, packed.long() % 16), -1).flatten()[: shape.numel()]
    return (code[numbers] * absmax.repeat_interleave(blocksize)[: shape.numel()]).view(shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("nested", [0, 256, 64])
@pytest.mark.parametrize("blocksize", [32, 64, 4096])
@pytest.mark.parametrize("code", [NF4, FP4], ids=["nf4", "fp4"])
@pytest.mark.parametrize("shape", [(16, 32), (24, 200), (3, 5), (7, 8)])  # 15 numbers do not fill whole words
def test_is_what_was_stored(shape, code, blocksize, nested, dtype, device):
    given = stored(shape, blocksize, code, nested, device)
    got, want = dequantize_4bit(*given, dtype), written_out(*given)
    assert got.dtype == dtype and got.shape == shape
    torch.testing.assert_close(got, want.to(dtype), rtol=EXACT[dtype], atol=0)


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32])
def test_bytes_of_another_dtype(storage, device):
    given = stored((24, 200), 64, NF4, 256, device)
    packed = given[0].view(-1).view(storage).unsqueeze(1)
    assert torch.equal(dequantize_4bit(packed, *given[1:], torch.float32), dequantize_4bit(*given, torch.float32))


def test_a_part_that_begins_within_a_word(device):
    packed, *others = stored((8, 16), 64, NF4, 0, device)
    shifted = torch.cat((packed[:1], packed))[1:]
    assert torch.equal(
        dequantize_4bit(shifted, *others, torch.float32), dequantize_4bit(packed, *others, torch.float32)
    )


class Stored:
    """A weight that counts how often it is unpacked, and how many of its matrices are alive at once."""

    def __init__(self, shape, device, dtype=torch.float32):
        self.matrix = torch.randn(shape, device=device, dtype=dtype)
        self.unpacked = 0
        self.weight = PackedWeight(self.matrix.shape, dtype, self.matrix.device, self.unpack, (self.matrix,))

    def unpack(self, dtype):
        self.unpacked += 1
        return self.matrix.to(dtype, copy=True)


def lora(n, k, device, rank=4):
    return torch.randn(rank, k, device=device).requires_grad_(), torch.randn(n, rank, device=device).requires_grad_()


def gradients(fn, tensors):
    out = fn()
    dy = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.device)
    return [out, *torch.autograd.grad(out, tensors, dy)]


def test_a_layer_unpacks_once_a_product_and_keeps_nothing(device):
    stored = Stored((24, 16), device)
    x = torch.randn(5, 16, device=device).requires_grad_()
    a, b = lora(24, 16, device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        got = gradients(lambda: lora_linear(x, stored.weight, lora=(a, b, 0.5)), (x, a, b))
    want = gradients(lambda: lora_linear(x, stored.matrix, lora=(a, b, 0.5)), (x, a, b))
    assert stored.unpacked == 2 and (24, 16) not in kept
    assert all(map(torch.equal, got, want))


def test_an_mlp_unpacks_once_a_product(device):
    gate, up, down = (Stored(shape, device) for shape in ((24, 16), (24, 16), (16, 24)))
    x = torch.randn(5, 16, device=device).requires_grad_()
    a, b = lora(24, 16, device)

    def run(*weights):
        g, u, d = weights
        return gradients(lambda: lora_mlp(x, (g, None, (a, b, 0.5)), (u, None, None), (d, None, None)), (x, a, b))

    got = run(gate.weight, up.weight, down.weight)
    assert all(map(torch.equal, got, run(gate.matrix, up.matrix, down.matrix)))
    assert [weight.unpacked for weight in (gate, up, down)] == [2, 2, 2]


def test_a_product_of_its_own(device):
    """int8 formats round the input in forward too, and multiply by the matrix in backward."""
    stored = Stored((24, 16), device)
    x = torch.randn(5, 16, device=device).requires_grad_()
    a, b = lora(24, 16, device)
    weight = stored.weight._replace(product=lambda rows: rows.round() @ stored.matrix.t())
    y, dx, *_ = gradients(lambda: lora_linear(x, weight, lora=(a, b, 0.5)), (x, a, b))
    want, want_dx, *_ = gradients(lambda: lora_linear(x, stored.matrix, lora=(a, b, 0.5)), (x, a, b))
    torch.testing.assert_close(y - want, (x.round() - x) @ stored.matrix.t(), rtol=1e-4, atol=1e-4)
    assert torch.equal(dx, want_dx)


def test_a_product_that_is_scaled_afterwards(device):
    """torchao's int8 scales the product. The twin's matrix includes the scale, and the gradient scales dy."""
    numbers = torch.randint(-127, 128, (24, 16), device=device).float()
    scale = torch.rand(24, device=device) + 0.5
    x = torch.randn(5, 16, device=device).requires_grad_()
    a, b = lora(24, 16, device)

    def product(rows):
        return rows @ numbers.t() * scale

    def unpack(dtype):
        return numbers.to(dtype, copy=True)

    weight = PackedWeight(numbers.shape, x.dtype, x.device, unpack, (numbers,), product, scale)
    matrix = numbers * scale[:, None]
    assert torch.equal(weight.to(torch.float32), matrix)
    got, want = (gradients(lambda w=w: lora_linear(x, w, lora=(a, b, 0.5)), (x, a, b)) for w in (weight, matrix))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("blocksize", [64, 128, 1024])
def test_bits_of_bitsandbytes(blocksize, kind, nested, dtype):
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(1024, 2048, device="cuda", dtype=dtype)
    packed, state = functional.quantize_4bit(weight, None, None, blocksize, nested, kind)
    of_scales = Nested(state.state2.code, state.state2.absmax, state.state2.blocksize, state.offset) if nested else None
    got = dequantize_4bit(packed, state.code, state.absmax, blocksize, state.shape, of_scales, dtype)
    assert torch.equal(got, functional.dequantize_4bit(packed, state))


SIZES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # of an e2m1, without the sign


def mxfp4(shape, device, dtype=torch.bfloat16, least=100, most=140):
    experts, n, k = shape
    blocks = torch.randint(256, (experts, n, k // 2), dtype=torch.uint8, device=device)
    return MXFP4Weight(
        blocks, torch.randint(least, most, (experts, n, k // 32), dtype=torch.uint8, device=device), dtype
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 32), (3, 5, 96), (2, 40, 544)])
def test_mxfp4_is_what_was_stored(shape, dtype, device):
    w = mxfp4(shape, device, dtype)
    code = torch.tensor(SIZES + [-size for size in SIZES], dtype=torch.float64)
    want = code[torch.stack((w.blocks & 15, w.blocks >> 4), -1).flatten(-2).long().cpu()]
    want *= (w.scales.double().cpu() - 127).exp2().repeat_interleave(32, -1)
    assert w.unpack().dtype == dtype and w.shape == torch.Size(shape)
    assert torch.equal(w.unpack().cpu(), want.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_mxfp4_of_all_scales_equals_transformers(dtype, device):
    """Test each number with each scale but 255 (NaN): zeros of both signs, subnormals, infinities."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    least = 2 if INTERPRET and dtype == torch.bfloat16 else 0  # the interpreter has no subnormal bf16
    scales = torch.arange(least, 255, dtype=torch.uint8, device=device).view(1, -1, 1).repeat(1, 1, 16)
    blocks = torch.arange(256, dtype=torch.uint8, device=device).view(1, 1, 16, 16).repeat(1, scales.shape[1], 1, 1)
    want = convert_moe_packed_tensors(blocks, scales, dtype=dtype).mT
    got = dequantize_mxfp4(blocks.flatten(-2), scales, dtype)
    assert torch.equal(got, want) and torch.equal(got.signbit(), want.signbit())


def test_mxfp4_refuses_what_does_not_belong_together(device):
    w = mxfp4((2, 3, 64), device)
    for blocks, scales in ((w.blocks, w.scales[..., :1]), (w.blocks.int(), w.scales), (w.blocks[:1], w.scales)):
        with pytest.raises(ValueError, match="16 bytes of blocks for each scale"):
            dequantize_mxfp4(blocks, scales, torch.float32)
