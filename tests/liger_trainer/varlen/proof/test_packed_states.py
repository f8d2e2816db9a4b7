"""Packed rows in models whose layers keep a state are refused, unless the collator's batch keeps them apart.

A tiny stock model on that batch decides: its rows see each other, it raises, or they stay apart.

    pytest -m slow tests/liger_trainer/varlen/proof/test_packed_states.py
"""

import functools
import sys

import pytest
import torch
from architectures import MODEL_TYPES
from attentions import with_own_attention
from installed_packages import install_packages
from transformers import DataCollatorWithFlattening
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from liger_trainer.varlen.model_parts import backbone_of
from liger_trainer.varlen.proof.packed_rows import keeps_state, why_rows_mix

KEEP_STATE = (
    "bailing_hybrid",
    "bamba",
    "deepseek_v4",
    "falcon_h1",
    "falcon_mamba",
    "glm5_next",
    "granitemoehybrid",
    "inkling2",
    "inkling2_loop",
    "inkling2_loop_text",
    "inkling2_text",
    "inkling_text",
    "jamba",
    "kimi_linear",
    "lara_mini",
    "lfm2",
    "lfm2_moe",
    "lfm2_vl",
    "lfm3",
    "lfm3_vl",
    "mamba",
    "mamba2",
    "minicpm_ocr",
    "minicpmv4_6",
    "minicpmv4_7",
    "minimax",
    "nemotron_h",
    "nemotron_h_omni",
    "olmo_hybrid",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "qwen4_exp",
    "qwen4_exp_text",
    "recurrent_gemma",
    "rwkv",
    "xlstm",
    "zamba",
    "zamba2",
    "zaya",
)
QUICK = ("qwen3_5_text", "lfm2", "lfm3", "zamba")
COLLATORS = {
    "positions": DataCollatorWithFlattening(),
    "lengths": DataCollatorWithFlattening(return_flash_attn_kwargs=True),
    "all": DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True),
    "no positions": DataCollatorWithFlattening(return_position_ids=False),
    "TRL's": DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True),
    "TRL's, multiples of 8": DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True, pad_to_multiple_of=8),
}
LENGTHS = (6, 3, 9)


def stay_apart_in_stock(model, collate) -> bool:
    """True if hidden states of packed rows equal those of single rows. An error means that they cannot be packed."""
    rows = [torch.arange(5, 5 + length).tolist() for length in LENGTHS]
    batch = dict(collate([{"input_ids": row, "labels": row} for row in rows]))
    batch.pop("labels")
    backbone = (backbone_of(model) or model.language_model).eval()
    with torch.no_grad():
        one_by_one = torch.cat([backbone(input_ids=torch.tensor([row]), use_cache=False)[0] for row in rows], 1)
        try:
            packed = backbone(**batch, use_cache=False)[0][:, : sum(LENGTHS)]
        except ValueError as error:
            assert "can't keep packed sequences apart" in str(error)
            return False
    return bool((packed - one_by_one).abs().max() < 1e-4 * one_by_one.abs().max())


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in KEEP_STATE]
)
def test_rows_of_every_collator(model_type):
    model, reason = with_own_attention(model_type)
    if model is None:
        pytest.skip(f"not built: {reason}")
    assert keeps_state(model)
    for name, collate in COLLATORS.items():
        assert (why_rows_mix(model, collate) is None) == stay_apart_in_stock(model, collate), name
    assert why_rows_mix(model) is not None


@pytest.mark.slow
def test_the_list_has_every_type_that_keeps_a_state():
    built = {name: with_own_attention(name)[0] for name in MODEL_TYPES}
    found = {name for name, model in built.items() if model is not None and keeps_state(model)}
    assert found <= {*KEEP_STATE}
    assert {name for name in KEEP_STATE if built.get(name) is not None} <= found


@pytest.mark.parametrize("name", COLLATORS)
def test_a_decoder_of_attention_alone(name):
    model, _ = with_own_attention("qwen3")
    assert (why_rows_mix(model, COLLATORS[name]) is None) == stay_apart_in_stock(model, COLLATORS[name])
    assert not keeps_state(model)


def test_another_attention_does_not_hide_the_state():
    """Kernels that read lengths keep attention apart. They do not run on a CPU, where state layers run without them."""
    model, _ = with_own_attention("qwen3_5_text")
    model.config._attn_implementation = "flash_attention_2"
    assert "packed rows see each other" in why_rows_mix(model, COLLATORS["positions"])
    other, _ = with_own_attention("qwen3")
    other.config._attn_implementation = "flash_attention_2"
    assert why_rows_mix(other, COLLATORS["positions"]) is None


def test_a_state_that_cannot_be_tried_is_refused(monkeypatch):
    model, _ = with_own_attention("qwen3_5_text")
    monkeypatch.setattr(type(model.model), "_from_config", None)
    assert "keep a state, and a small copy could not show" in why_rows_mix(model, COLLATORS["positions"])


@pytest.fixture
def packages(monkeypatch):
    """`install(module)` makes the functions of a modeling file call packages that need a GPU."""
    return functools.partial(install_packages, monkeypatch)


def test_with_packages_that_are_told_where_rows_begin(packages):
    """The packages' kernels raise on a CPU. Their arguments decide."""
    model, _ = with_own_attention("qwen3_5_text")
    scope = vars(sys.modules[type(model).__module__])
    packages(type(model).__module__)
    installed = dict(scope)
    ids = torch.arange(5, 12)[None]
    with pytest.raises(RuntimeError, match="no GPU"):
        model(input_ids=ids)
    assert why_rows_mix(model, COLLATORS["TRL's"]) is None
    assert why_rows_mix(model, COLLATORS["all"]) is None
    for name in ("positions", "lengths", "no positions"):
        assert "packed rows see each other" in why_rows_mix(model, COLLATORS[name]), name
    assert all(scope[name] is value for name, value in installed.items())


def test_a_rule_that_never_gets_the_offsets_is_noticed(packages):
    """Kimi-Linear passes `cu_seq_lens_q` on under this name, which its rule does not know."""
    model, _ = with_own_attention("kimi_linear")
    packages(type(model).__module__)
    for name, collate in COLLATORS.items():
        assert "packed rows see each other" in why_rows_mix(model, collate), name
