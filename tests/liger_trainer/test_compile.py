"""`torch.compile(fullgraph=True)` of a patched model: one graph, the same loss and gradients."""

import pytest
import torch
from tiny_models import collate, ragged_rows, tiny_model

from liger_trainer import apply_liger

CALLS = {"labels": {}, "smoothing": {"label_smoothing": 0.1}, "trl": {"fused_lm_head": True, "uniform_grad": True}}


def loss_and_gradients(model, batch, **kwargs):
    model.zero_grad()
    loss = model(**batch, **kwargs).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2"])
def test_traces_without_a_break(model_type, call):
    model, batch = tiny_model(model_type).train(), collate(ragged_rows(4))
    apply_liger(model)
    want = loss_and_gradients(model, batch, **CALLS[call])
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for got, ref in zip(loss_and_gradients(compiled, batch, **CALLS[call]), want, strict=True):
        torch.testing.assert_close(got, ref, rtol=1e-4, atol=1e-6)
