"""On a GPU: attention by PyTorch's kernel for rows of uneven length against float64, and who waits for the GPU.

CUDA_VISIBLE_DEVICES=0 pytest -m gpu tests/liger_trainer/varlen/test_varlen_gpu.py
"""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from liger_trainer import apply_liger
from liger_trainer.varlen import attention, unpad_plan
from liger_trainer.varlen.host_copies import HostBatch
from liger_trainer.varlen.plan_batch import plan_batch
from liger_trainer.varlen.registry import sdpa_attention
from liger_trainer.varlen.rows import RowMask, Rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LENGTHS = (130, 1, 517, 0, 64, 300)
TOKENS = sum(LENGTHS)


def rows():
    return Rows(list(LENGTHS), torch.device("cuda"))


def exact(query, key, value, window, scale, upstream):
    """Output and gradients in float64, with the mask written out."""
    row = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).cuda()
    distance = torch.arange(TOKENS, device="cuda")[:, None] - torch.arange(TOKENS, device="cuda")
    seen = (distance >= 0) & (row[:, None] == row)
    seen = seen if window is None else seen & (distance < window)
    given = [x.detach().double().requires_grad_() for x in (query, key, value)]
    groups = query.shape[1] // key.shape[1]
    q, k, v = given[0], *(x.repeat_interleave(groups, 1) for x in given[1:])
    scores = (q @ k.mT * scale).masked_fill(~seen, float("-inf"))
    out = (scores.softmax(-1) @ v).transpose(1, 2)
    return out, torch.autograd.grad(out, given, upstream.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(
    "heads, kv_heads, dim, value_dim",
    [(4, 4, 64, 64), (8, 2, 128, 128), (4, 4, 192, 128), (2, 1, 256, 256), (4, 2, 80, 80)],
)
def test_kernel(heads, kv_heads, dim, value_dim, window, dtype, monkeypatch):
    monkeypatch.setattr(attention, "_row_by_row", None)  # the kernel takes it
    torch.manual_seed(0)
    shapes = (heads, dim), (kv_heads, dim), (kv_heads, value_dim)
    query, key, value = (
        torch.randn(1, TOKENS, n, width, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_()
        for n, width in shapes
    )
    scale = dim**-0.5
    got, _ = sdpa_attention(torch.nn.Module(), query, key, value, RowMask(rows(), window), scaling=scale)
    upstream = torch.randn_like(got)
    grads = torch.autograd.grad(got, (query, key, value), upstream)
    want, want_grads = exact(query, key, value, window, scale, upstream)
    bound = 3 * torch.finfo(dtype).eps
    for mine, theirs in zip((got, *grads), (want, *want_grads), strict=True):
        assert (mine.double() - theirs).norm() <= bound * theirs.norm()


def test_fp32_goes_row_by_row():
    query, key, value = (torch.randn(1, 4, TOKENS, 64, device="cuda") for _ in range(3))
    got, _ = sdpa_attention(torch.nn.Module(), query, key, value, RowMask(rows()))
    want, _ = exact(query, key, value, None, 64**-0.5, torch.zeros_like(got))
    assert (got.double() - want).norm() <= 1e-5 * want.norm()


@contextlib.contextmanager
def waits_are_errors():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_call_waits_for_nothing():
    """Neither the plan nor the backbone waits if the batch comes from the host. Otherwise the plan waits once."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
        use_cache=False,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).bfloat16()
    apply_liger(model, {"varlen_attention": True})
    ids, mask = torch.randint(3, 500, (4, 64)), torch.ones(4, 64, dtype=torch.long)
    mask[1, 40:] = 0
    padded = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    packed = {"input_ids": ids[:1], "position_ids": torch.arange(64)[None] % 32}
    for _ in range(2):  # the first call compiles
        for batch in (padded, packed):
            pinned = HostBatch({name: x.pin_memory() for name, x in batch.items()})
            with waits_are_errors() if _ else contextlib.nullcontext():
                call = pinned.to("cuda")
                plan = plan_batch(model.config, call)
                with unpad_plan.use_plan(plan):
                    model.model(**{name: x for name, x in call.items() if name != "labels"})
            assert plan.used
            again = plan_batch(model.config, {name: x.clone() for name, x in call.items()})
            assert again.rows.lengths == plan.rows.lengths
            assert plan.index is None or torch.equal(again.index, plan.index)


def test_padded_rows_in_bf16_are_as_near_to_fp32_as_stock_s():
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        attn_implementation="sdpa",
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    ids = torch.randint(3, 500, (8, 512), device="cuda")
    mask = torch.ones(8, 512, device="cuda", dtype=torch.long)
    for row in range(1, 8):
        mask[row, 512 - 60 * row :] = 0
    call = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    def step():
        model.zero_grad()
        loss = model(**call).loss
        loss.backward()
        return [loss.detach().double(), *(p.grad.double() for p in model.parameters())]

    want = step()
    model.bfloat16()
    stock = step()
    apply_liger(model, {"varlen_attention": True})
    ours = step()
    for mine, theirs, best in zip(ours, stock, want, strict=True):
        assert (mine - best).norm() <= 1.5 * (theirs - best).norm() + 1e-3 * best.norm()
    assert F.cosine_similarity(ours[1].flatten(), want[1].flatten(), dim=0) > 0.99


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_spread_over_two_gpus(tmp_path):
    """`device_map="auto"` does this, TRL's default in one process."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    first = {"model.embed_tokens": 0, "model.layers.0": 0, "model.rotary_emb": 0}
    spread = first | {"model.layers.1": 1, "model.norm": 1, "lm_head": 1}
    ids = torch.randint(0, 128, (3, 40), device="cuda:0")
    mask = (torch.arange(40, device="cuda:0") < torch.tensor([[40], [7], [21]], device="cuda:0")).long()
    call = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    losses, gradients = [], []
    for patched in (False, True):
        model = LlamaForCausalLM.from_pretrained(tmp_path, device_map=spread).train()
        if patched:
            assert apply_liger(model)["varlen_attention"].swapped
        loss = model(**call, use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
        gradients.append(model.model.layers[1].mlp.down_proj.weight.grad)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)
