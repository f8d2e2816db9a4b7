"""What the patching is expected to do to the tiny models, and how two of them are compared."""

import torch
from tiny_models import VOCAB

# Per model: modules expected to be swapped, per operation. Nothing is left alone.
SWAPPED = {
    "llama": {"rms_norm": 5, "rope": 2, "swiglu": 2},
    "qwen3": {"rms_norm": 9, "rope": 2, "swiglu": 2},
    "qwen3_moe": {"rms_norm": 9, "rope": 2, "experts": 2},
    "gemma2": {"rms_norm": 9, "rope": 2, "geglu": 2},
    "gemma3_text": {"rms_norm": 13, "rope": 2, "geglu": 2},
    "gemma4_text": {"rms_norm": 18, "rope": 2, "geglu": 2},
    "cohere2": {"layer_norm": 3, "rope": 2, "swiglu": 2},
    "granite": {"rms_norm": 5, "rope": 2, "swiglu": 2},
    "glm4": {"rms_norm": 9, "rope": 2, "swiglu": 2},
    "deepseek_v3": {"rms_norm": 9, "rope": 2, "swiglu": 2, "experts": 1},
    "gpt_oss": {"rms_norm": 5, "rope": 2, "experts": 2},
    "qwen3_next": {"rms_norm": 8, "rope": 1, "swiglu": 2, "experts": 2},
    "bamba": {"rms_norm": 6, "rope": 1, "swiglu": 2},
    "nemotron": {"layer_norm": 5, "rope": 2},
    "seed_oss": {"rms_norm": 5, "rope": 2, "swiglu": 2},
    "phi": {"layer_norm": 3, "rope": 2},
    "qwen2_5_vl": {"rms_norm": 8, "rope": 3, "swiglu": 3},
}
NO_HEAD = {"fused_linear_cross_entropy": False}


def token_ids(rows=2, length=24, seed=3):
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def loss_and_grads(model, ids=None):
    """Loss and gradients by name, gradients cleared afterwards; a dropout draws the same numbers each time."""
    torch.manual_seed(8)
    ids = token_ids() if ids is None else ids
    model.zero_grad()
    loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), grads


# The decay of the gated delta rule. Its gradient is what is left of sums that cancel. In stock's qwen3_next it changes
# by 0.6e-5 to 2.7e-5 where all weights move by half of their last bit, and that of other weights by 0.7e-5 at most.
CANCELLING = ("linear_attn.A_log", "linear_attn.dt_bias")


def largest_difference(got, want):
    """Of two results of `loss_and_grads`: the largest relative difference of the loss or of any gradient.

    Relative to the largest element of that gradient, or to 1e-3 of the largest of all: k biases have noise around zero.
    A fifth of the difference counts for `CANCELLING`, in which processors differ by more than 1e-5.
    """
    assert got[1].keys() == want[1].keys()
    floor = 1e-3 * max(g.abs().max() for g in want[1].values())
    worst = ((got[0] - want[0]).abs() / want[0].abs()).item()
    for name, gradient in want[1].items():
        difference = (got[1][name] - gradient).abs().max() / gradient.abs().max().clamp(min=floor)
        worst = max(worst, difference.item() / (5 if name.endswith(CANCELLING) else 1))
    return worst
