"""Weights computed on each read, such as spectral_norm's, on any part of a patched model.

Each read of such a weight may change it: spectral_norm takes a step of its power iteration. So a patched model reads it
as often as a stock one.
"""

import pytest
import torch
from side_by_side import REBUILT, assert_same_step, step
from tiny_models import tiny_model
from torch import nn
from torch.nn.utils import parametrizations, parametrize, spectral_norm, weight_norm

from liger_trainer import apply_liger

PARTS = ["lm_head", "model.layers.0.mlp.gate_proj", "model.layers.1.mlp.down_proj", "model.layers.0.self_attn.q_proj"]
NORM = "model.layers.0.input_layernorm"


class Counted(nn.Module):
    reads = 0

    def forward(self, weight):
        Counted.reads += 1
        return weight * (1 + 0.1 * Counted.reads)


WAYS = {
    "spectral_norm": parametrizations.spectral_norm,
    "weight_norm": parametrizations.weight_norm,
    "counted": lambda module: parametrize.register_parametrization(module, "weight", Counted()),
    "old spectral_norm": spectral_norm,
    "old weight_norm": weight_norm,
}


@pytest.mark.diagonal
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("part, way", [*((p, w) for p in PARTS for w in WAYS), (NORM, "counted")])
def test_a_weight_is_read_as_often_as_in_stock(part, way, when):
    results = []
    for is_ours in (False, True):
        Counted.reads = 0
        model = tiny_model("llama").train()
        if is_ours and when == "after":
            apply_liger(model, REBUILT)
        torch.manual_seed(5)
        WAYS[way](model.get_submodule(part))
        if is_ours and when == "before":
            apply_liger(model, REBUILT)
        for seed in (1, 2):
            loss, gradients = step(model, seed)
        results.append((loss, gradients, Counted.reads, {name: b.clone() for name, b in model.named_buffers()}))
    want, got = results
    assert got[2] == want[2]
    assert_same_step(got[:2], want[:2], "fp32")
    assert got[3].keys() == want[3].keys()
    for name, buffer in want[3].items():
        torch.testing.assert_close(got[3][name], buffer, msg=name)


def test_the_report_names_what_is_parametrised():
    model = tiny_model("llama")
    for part in (*PARTS, NORM):
        WAYS["counted"](model.get_submodule(part))
    report = apply_liger(model)
    assert set(report.skipped) == {"lm_head", "model.layers.0.mlp", "model.layers.1.mlp", NORM}
    assert all("parametri" in why.lower() for why in report.skipped.values()), report
