"""Tiny models whose layers torchao has converted to fp8, on a CPU, where it multiplies in fp32 (`emulate`)."""

import dataclasses

from tiny_models import collate, ragged_rows, tiny_model
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from liger_trainer import apply_liger

LAYERS = 14  # two layers of seven projections


def not_the_head(module, name):
    return name != "lm_head"


def config_of(recipe=None, **options):
    """torchao's default config, or that of one of its recipes, with other `options`."""
    if recipe is None:
        return Float8LinearConfig(emulate=True, **options)
    return dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True, **options)


def fp8_model(kind="llama", *, config=None, **options):
    model = tiny_model(kind, **options)
    return convert_to_float8_training(model, config=config or config_of(), module_filter_fn=not_the_head).train()


def step(model):
    """Loss and the gradients of all parameters."""
    model.zero_grad()
    loss = model(**collate(ragged_rows(4))).loss
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters()}


def assert_same(got, want, rtol=5e-3):
    assert list(got) == list(want)
    for name, w in want.items():
        assert got[name].dtype == w.dtype
        assert (got[name].float() - w.float()).norm() <= rtol * w.float().norm() + 1e-7, name


def patched(model, **config):
    """With the other operations off, whose roundings would lead to other numbers in eight bits."""
    others = dict.fromkeys(("rms_norm", "rope", "swiglu", "geglu", "fused_linear_cross_entropy"), False)
    return apply_liger(model, others | config)["float8"]
