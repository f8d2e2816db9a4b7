"""rope against an oracle of complex products. Its index lists are written per layout, so it shares no code with the
twin."""

import pytest
import torch

from liger_triton import reference, rope

DTYPES = [torch.float32, torch.bfloat16]
B, S = 2, 5

LAYOUTS = {
    "llama": {},
    "gpt_oss": {"cos_layout": "single"},
    "deepseek_v3": {"interleaved": True, "out_interleaved": False},
    "half-in-interleaved-out": {"interleaved": False, "out_interleaved": True},
    "glm4": {"interleaved": True},
    "cohere": {"interleaved": True, "cos_layout": "interleaved", "cast": "input"},
    "gptj": {"interleaved": True, "cos_layout": "single", "unsqueeze_dim": 2},
    "deepseek_v4": {"interleaved": True, "cos_layout": "single", "rotate_last": True, "cast": "input"},
    "gpt_neox-last": {"rotate_last": True},
}


def angles(rot, device, cos_layout="half", dtype=torch.float32, batch=B, seq=S):
    theta = torch.rand(batch, seq, rot // 2, device=device) * 6
    doubled = {"half": theta.repeat(1, 1, 2), "interleaved": theta.repeat_interleave(2, dim=-1), "single": theta}
    return tuple(f(doubled[cos_layout]).to(dtype) for f in (torch.cos, torch.sin))


def oracle(
    q,
    k,
    cos,
    sin,
    interleaved=False,
    out_interleaved=None,
    cos_layout="half",
    rotate_last=False,
    cast=None,
    unsqueeze_dim=1,
):
    half = cos.shape[-1] if cos_layout == "single" else cos.shape[-1] // 2
    step = 2 if cos_layout == "interleaved" else 1
    cos, sin = (t[..., : step * half : step].double().unsqueeze(unsqueeze_dim) for t in (cos, sin))
    out_interleaved = interleaved if out_interleaved is None else out_interleaved

    def turn(x):
        first = x.shape[-1] - 2 * half if rotate_last else 0
        pairs = torch.arange(2 * half).view(half, 2)
        halves = torch.arange(2 * half).view(2, half).T
        read, write = ((pairs if neighbours else halves) + first for neighbours in (interleaved, out_interleaved))
        z = torch.complex(x[..., read[:, 0]], x[..., read[:, 1]]) * torch.complex(cos, sin)
        y = x.clone()
        y[..., write[:, 0]], y[..., write[:, 1]] = z.real, z.imag
        return y

    return turn(q), None if k is None else turn(k)


def heads(q_heads, k_heads, d, dtype, device, unsqueeze_dim=1, seq=S):
    """Return q and k as from a projection: (B, S, H, D) in memory, transposed where the heads come first."""
    q, k = (torch.randn(B, seq, h, d, device=device).to(dtype) for h in (q_heads, k_heads))
    return [(t.transpose(1, 2) if unsqueeze_dim == 1 else t).requires_grad_() for t in (q, k)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rot", [pytest.param(20, id="full"), pytest.param(12, id="partial")])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_matches_float64(layout, rot, dtype, device, check_close):
    """20, 12 and their halves are not powers of two. One head of k is multi-latent attention."""
    q, k = heads(3, 1, 20, dtype, device, layout.get("unsqueeze_dim", 1))
    cos, sin = angles(rot, device, layout.get("cos_layout", "half"))
    check_close(lambda q, k: rope(q, k, cos, sin, **layout), lambda q, k: oracle(q, k, cos, sin, **layout), [q, k])


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_is_the_twin(layout, device):
    q, k = heads(3, 2, 20, torch.float32, device, layout.get("unsqueeze_dim", 1))
    cos, sin = angles(12, device, layout.get("cos_layout", "half"))
    for got, want in zip(rope(q, k, cos, sin, **layout), reference.rope(q, k, cos, sin, **layout), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_many_tiles(device, check_close):
    """Heads of 128 use tiles of 32 rows: 2 * 5 * 7 rows of q are three tiles, the last partial, followed by k."""
    q, k = heads(7, 3, 128, torch.float32, device)
    cos, sin = angles(128, device)
    check_close(lambda q, k: rope(q, k, cos, sin), lambda q, k: oracle(q, k, cos, sin), [q, k])


@pytest.mark.parametrize("view", ["contiguous", "of-fused-qkv", "sliced", "expanded", "column-stride", "seq-first"])
def test_strides(view, device, check_close):
    q = torch.randn(B, 4, S, 16, device=device)
    k = torch.randn(B, 2, S, 16, device=device)
    if view == "of-fused-qkv":
        fused = torch.randn(B, S, 8, 16, device=device)
        q, k = fused[:, :, :4].transpose(1, 2), fused[:, :, 4:6].transpose(1, 2)
    elif view == "sliced":  # MLA: the rotary part is a slice of a longer head
        q, k = (torch.randn(B, h, S, 40, device=device)[..., 24:] for h in (4, 2))
    elif view == "expanded":
        k = k[:, :1].expand(B, 4, S, 16)
    elif view == "column-stride":
        q, k = q.transpose(-1, -2).contiguous().transpose(-1, -2), k
    elif view == "seq-first":
        q, k = (t.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for t in (q, k))
    cos, sin = angles(16, device)
    inputs = [q.detach().requires_grad_(), k.detach().requires_grad_()]
    check_close(lambda q, k: rope(q, k, cos, sin), lambda q, k: oracle(q, k, cos, sin), inputs)


def test_keeps_memory_order_and_inputs(device, triton_only):
    q, k = heads(4, 2, 16, torch.float32, device)
    copy = q.detach().clone()
    q_out, k_out = rope(q, k, *angles(16, device))
    assert (q_out.stride(), k_out.stride()) == (q.stride(), k.stride())
    dq = torch.randn_like(q)
    dq_copy = dq.clone()
    (q_grad,) = torch.autograd.grad(q_out, q, dq)
    assert q_grad.stride() == q.stride()  # so that reshaping back to the projection's (B, S, H * D) is a view
    assert torch.equal(q, copy) and torch.equal(dq, dq_copy)
    assert q_out.data_ptr() != q.data_ptr() and q_grad.data_ptr() != dq.data_ptr()


@pytest.mark.parametrize("layout", ["of-one-batch", "two-dimensional", "strided", "complex-views"])
def test_cos_layouts_in_memory(layout, device, check_close):
    q, k = heads(3, 2, 16, torch.float32, device)
    cos, sin = angles(16, device, batch=B)
    options = {}
    if layout == "of-one-batch":
        cos, sin = cos[:1], sin[:1]
    elif layout == "two-dimensional":  # (S, C), as vision towers and packed inputs have it, with q (S, H, D)
        q, k = (t.detach()[0].transpose(0, 1).requires_grad_() for t in (q, k))
        cos = cos[0]
        sin = sin[0]
        options = {"unsqueeze_dim": -2}
    elif layout == "strided":
        cos, sin = cos.transpose(0, 1).contiguous().transpose(0, 1), sin
    elif layout == "complex-views":
        freqs = torch.polar(torch.ones(B, S, 8, device=device), torch.rand(B, S, 8, device=device))
        cos = freqs.real
        sin = freqs.imag
        options = {"cos_layout": "single", "interleaved": True}
    check_close(lambda q, k: rope(q, k, cos, sin, **options), lambda q, k: oracle(q, k, cos, sin, **options), [q, k])


def test_unsqueeze_dim_0(device, check_close):
    """cos is (H, S, C) for q (B, H, S, D): each head has its own angles, shared by the batch."""
    q, k = heads(3, 3, 16, torch.float32, device)
    cos, sin = angles(16, device, batch=3)
    options = {"unsqueeze_dim": 0}
    check_close(lambda q, k: rope(q, k, cos, sin, **options), lambda q, k: oracle(q, k, cos, sin, **options), [q, k])


@pytest.mark.parametrize("cast", ["promote", "input"])
@pytest.mark.parametrize("cos_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("q_dtype, k_dtype", [(DTYPES[1], DTYPES[1]), (DTYPES[0], DTYPES[1])], ids=str)
def test_dtypes(q_dtype, k_dtype, cos_dtype, cast, device):
    q, _ = heads(3, 2, 16, q_dtype, device)
    _, k = heads(3, 2, 16, k_dtype, device)
    cos, sin = angles(12, device, dtype=cos_dtype)
    got, want = (f(q, k, cos, sin, cast=cast) for f in (rope, reference.rope))
    for x, y, z in zip((q, k), got, want, strict=True):
        assert y.dtype == z.dtype == (x.dtype if cast == "input" else torch.promote_types(x.dtype, cos_dtype))
        torch.testing.assert_close(y, z, rtol=1e-2, atol=1e-2)
    (got[0].float().sum() + got[1].float().sum()).backward()
    assert (q.grad.dtype, k.grad.dtype) == (q_dtype, k_dtype)


def test_backward_undoes_forward(device):
    """A rotation keeps lengths, so half the squared length of the result has the input as its gradient."""
    q, k = heads(3, 2, 20, torch.float32, device)
    q_out, k_out = rope(q, k, *angles(20, device), interleaved=True, out_interleaved=False)
    (q_out.pow(2).sum() / 2 + k_out.pow(2).sum() / 2).backward()
    torch.testing.assert_close(q.grad, q.detach())
    torch.testing.assert_close(k.grad, k.detach())


def test_without_k(device, check_close):
    q, _ = heads(3, 1, 20, torch.float32, device)
    cos, sin = angles(12, device)
    assert rope(q, None, cos, sin)[1] is None
    check_close(lambda q: rope(q, None, cos, sin), lambda q: oracle(q, None, cos, sin), [q])


@pytest.mark.parametrize("only", [0, 1], ids=["q", "k"])
def test_one_of_two_used(only, device):
    """The other gets gradient zero, and its kernel rows must not read a missing upstream gradient."""
    tensors = heads(3, 2, 16, torch.float32, device)
    rope(*tensors, *angles(16, device))[only].sum().backward()
    other = tensors[1 - only].grad
    assert other is None or not other.any()
    assert tensors[only].grad.any()


def test_gradient_of_cos_comes_from_the_twin(device):
    q, k = heads(3, 2, 16, torch.float32, device)
    cos, sin = angles(16, device)
    cos.requires_grad_()
    rope(q, k, cos, sin)[0].sum().backward()
    assert cos.grad is not None and cos.grad.any()


def test_second_backward_raises(device):
    q, k = heads(3, 2, 16, torch.float32, device)
    loss = rope(q, k, *angles(16, device))[0].sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_nan_stays_in_its_pair(device):
    q, k = heads(3, 2, 16, torch.float32, device)
    with torch.no_grad():
        q[0, 1, 2, 3] = float("nan")
    q_out, k_out = rope(q, k, *angles(16, device))
    assert q_out[0, 1, 2, [3, 11]].isnan().all() and q_out.isnan().sum() == 2 and not k_out.isnan().any()


def test_empty(device):
    q, k = heads(3, 2, 16, torch.float32, device, seq=0)
    q_out, k_out = rope(q, k, *angles(16, device, seq=0))
    (q_out.sum() + k_out.sum()).backward()
    assert q_out.shape == q.grad.shape == (B, 3, 0, 16)


@pytest.mark.parametrize("with_k", [True, False], ids=["q-and-k", "q"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernel", "twin"])
def test_compiles(dtype, with_k, device, check_compiled):
    cos, sin = angles(12, device)
    q, k = heads(3, 2, 16, dtype, device)
    check_compiled(lambda q, k: rope(q, k, cos, sin, interleaved=True), [q, k if with_k else None])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"cos": torch.ones(1, 5, 8), "sin": torch.ones(1, 5, 16)}, "expected cos and sin of one shape"),
        ({"cos": torch.ones(1, 5, 7), "sin": torch.ones(1, 5, 7)}, "7 numbers of a head are rotary; expected an even"),
        ({"cos": torch.ones(1, 5, 32), "sin": torch.ones(1, 5, 32)}, "32 numbers of a head are rotary"),
        ({"cos_layout": "single"}, "with cos_layout='single', 32 numbers"),
        ({"cos_layout": "double"}, "cos_layout is 'double'; expected one of 'half', 'interleaved', 'single'"),
        ({"cast": "float"}, "cast is 'float'; expected one of 'promote', 'input'"),
        ({"unsqueeze_dim": 2}, r"which do not broadcast to the \(2, 3, 5\) of q"),
        ({"unsqueeze_dim": 7}, r"unsqueeze_dim is 7, cos \(1, 5, 16\); .* 0 to 2, or -4 to -2"),
        ({"unsqueeze_dim": 3}, r"unsqueeze_dim is 3, cos \(1, 5, 16\)"),
        ({"unsqueeze_dim": -1}, r"unsqueeze_dim is -1, cos \(1, 5, 16\)"),
        ({"k": torch.ones(2, 2, 4, 16)}, r"do not broadcast to the \(2, 2, 4\) of k"),
        ({"k": torch.ones(2, 2, 5, 8)}, "of one head size"),
        ({"k": torch.ones(2, 5, 16)}, "as many in both"),
        ({"sin": torch.ones(1, 5, 16, device="meta")}, "sin is torch.float32 on meta"),
        ({"q": torch.ones(2, 3, 5, 16, dtype=torch.int64)}, "q is torch.int64"),
    ],
)
def test_bad_input(change, message):
    given = {"q": torch.ones(2, 3, 5, 16), "k": torch.ones(2, 2, 5, 16)}
    given |= {"cos": torch.ones(1, 5, 16), "sin": torch.ones(1, 5, 16)} | change
    with pytest.raises(ValueError, match=message):
        rope(**given)


@pytest.mark.gpu
def test_offsets_past_int32():
    """q has 2**31 + 2**21 elements. The last token equals a call on it alone."""
    q = torch.randn(1, 2**17 + 128, 128, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    cos, sin = angles(128, "cuda", batch=1, seq=q.shape[2])
    tail = [t[..., -3:, :] for t in (q, cos, sin)]
    for interleaved in (False, True):
        q_out, _ = rope(q, None, cos, sin, interleaved=interleaved, cast="input")
        want, _ = rope(tail[0], None, *tail[1:], interleaved=interleaved, cast="input")
        assert torch.equal(q_out[:, :, -3:], want)
