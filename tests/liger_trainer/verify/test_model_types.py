"""`verify` raises no false alarm on transformers' model types, each from its default config."""

import pytest
from verify_setups import failed

MODEL_TYPES = {
    "apertus": {},
    "arcee": {},
    "bamba": {},
    "bitnet": {},
    "bloom": {},
    "cohere": {},
    "cohere2": {},
    "deepseek_v3": {},
    "diffllama": {},
    "ernie4_5": {},
    "exaone4": {},
    "falcon": {},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "gemma4_text": {},
    "glm": {},
    "glm4": {},
    "glm4_moe": {},
    "gpt2": {},
    "gpt_neo": {},
    "gpt_neox": {},
    "gpt_oss": {},
    "gptj": {},
    "granite": {},
    "granitemoe": {},
    "granitemoehybrid": {},
    "helium": {},
    "hunyuan_v1_dense": {"head_dim": 128, "num_key_value_heads": 8},
    "jamba": {},
    "lfm2": {},
    "llama": {},
    "mamba2": {},
    "minicpm3": {},
    "minimax": {},
    "mistral": {},
    "mixtral": {},
    "mpt": {},
    "nanochat": {},
    "nemotron": {"num_key_value_heads": 8},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "olmoe": {},
    "opt": {},
    "phi": {},
    "phi3": {},
    "phimoe": {},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_moe": {},
    "qwen3_next": {},
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {},
    "vaultgemma": {},
    "zaya": {},
}
CAPPED = ("gemma2", "vaultgemma")


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_nothing_is_found_in_models_as_they_are(model_type):
    capped = {"attn_implementation": "eager"} if model_type in CAPPED else {}  # transformers 5.17 would take SDPA
    assert failed("SFT", model_type, config=MODEL_TYPES[model_type], model_init=capped) == {}
