"""Model types of transformers that write into their logits compute the stock model's numbers."""

import copy
from contextlib import nullcontext

import pytest
import torch
from architectures import build, left_padded_batch
from transformers import AutoModelForCausalLM, xLSTMConfig

from liger_trainer import apply_liger

CHUNK = 4  # rows of logits that xLSTM caps at a time


def chameleon():
    model, reason = build("chameleon")
    assert reason is None
    return model


def xlstm():
    """An xLSTM with logits large enough for its soft cap to show."""
    torch.manual_seed(0)
    config = xLSTMConfig(
        vocab_size=131,
        hidden_size=64,
        num_hidden_layers=2,
        num_blocks=2,
        num_heads=4,
        qk_dim_factor=1.0,
        output_logit_soft_cap=5.0,
        max_inference_chunksize=CHUNK,
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    return model


def loss_and_gradients(model, batch, **call):
    model.zero_grad()
    loss = model(**batch, use_cache=False, **call).loss
    if loss.requires_grad:
        loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients


@pytest.mark.diagonal
@pytest.mark.parametrize("call", [{"skip_logits": True}, {"fused_lm_head": True}], ids=["loss", "scores"])
@pytest.mark.parametrize("with_gradients", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("make", [chameleon, xlstm])
def test_the_step_of_a_model_that_writes_into_its_logits(make, mode, with_gradients, call):
    stock = make().train(mode == "train")
    patched = copy.deepcopy(stock)
    apply_liger(patched)
    batch = left_padded_batch()
    gradient_mode = nullcontext() if with_gradients else torch.no_grad()
    with gradient_mode:
        want, want_gradients = loss_and_gradients(stock, batch)
        got, gradients = loss_and_gradients(patched, batch, **call)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
    assert gradients.keys() == want_gradients.keys()
    for name, gradient in want_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-5 * gradient.abs().max(), msg=name)
