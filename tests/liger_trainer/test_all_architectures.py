"""Every causal LM of transformers that can be built tiny: patched and unpatched must agree; the report tells the rest.

Run with `-m slow -s`. As a script, `python test_all_architectures.py [model type ...]`, it prints each report.
"""

import sys
import time
import warnings
from collections import Counter

import pytest
import torch
from parity_models import NO_HEAD, largest_difference
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from liger_trainer.patching import apply_liger

LIMIT = 2e-4  # fp32, of the largest element of a gradient; a wrong stand-in is off by 1e-2 and more
MAX_PARAMETERS = 30_000_000
SMALL = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 48, "n_positions": 128, "d_model": 64,
    "n_layers": 2, "n_heads": 4, "num_layers": 2, "num_heads": 4, "ffn_dim": 48, "rotary_dim": 8, "sliding_window": 16,
    "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "encoder_layers": 2,
    "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "word_embed_proj_dim": 64, "embedding_size": 64,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "top_k": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    "moe_num_experts": 4, "moe_k": 2, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "qk_nope_head_dim": 8, "qk_head_dim": 16, "first_k_dense_replace": 1, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 32,
    "mamba_expand": 2, "global_head_dim": 16, "vocab_size_per_layer_input": 131, "hidden_size_per_layer_input": 8,
    "depth": 1, "out_hidden_size": 64, "embed_dim": 32, "image_size": 28, "patch_size": 14, "dim_model": 64,
    "attention_hidden_size": 64, "lru_width": 64, "index_head_dim": 16, "index_n_heads": 2, "state_size": 8,
}  # fmt: skip
MULTIMODAL_ROPE = ("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "glm4v", "glm46v", "glm_ocr", "glmga", "paddleocr_vl")


def small_config(model_type):
    """The default config with what it knows of `SMALL`; its layer lists cut to two layers."""
    default = AutoConfig.for_model(model_type).to_dict()

    def shrink(values, text):
        own = {key: SMALL[key] for key in values if key in SMALL and isinstance(values[key], int | None)}
        if not text:
            own.pop("vocab_size", None)
        if "qk_rope_head_dim" in own:
            own |= {"head_dim": own["qk_rope_head_dim"], "num_key_value_heads": SMALL["num_attention_heads"]}
        if text and str(values.get("model_type")).startswith(MULTIMODAL_ROPE):
            section = [1, 1, 2] if "moe" in values["model_type"] else [2, 3, 3]  # sums to half of what is rotary
            own["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section}
        kinds = values.get("layer_types")
        if isinstance(kinds, list) and kinds:
            own["layer_types"] = [kinds[0], next((k for k in kinds if k != kinds[0]), kinds[0])]
        for key, value in values.items():
            if isinstance(value, dict) and key.endswith("_config") and value.get("model_type"):
                part = shrink(value, "text" in key or "llm" in key or "thinker" in key)
                own[key] = {"model_type": value["model_type"]} | part
        return own

    return AutoConfig.for_model(model_type, **shrink(default, True))


def build(model_type):
    """(model, None) or (None, why not)."""
    auto = AutoModelForCausalLM
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        auto = AutoModelForImageTextToText
    try:
        config = small_config(model_type)
        with torch.device("meta"):
            size = sum(p.numel() for p in auto.from_config(config).parameters())
        if size > MAX_PARAMETERS:
            return None, f"{size / 1e6:.0f}M parameters"
        torch.manual_seed(0)
        model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    except Exception as error:  # noqa: BLE001 - a config that needs its own hand; counted and listed
        return None, f"{type(error).__name__}: {str(error)[:80]}"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
            elif "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model, None


def loss_and_grads(model, ids):
    model.zero_grad()
    torch.manual_seed(1)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), grads


def check(model_type):
    """(verdict, detail, report or None). Verdicts: `same`, `different`, `not built`, `does not run`."""
    model, reason = build(model_type)
    if model is None:
        return "not built", reason, None
    ids = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(0))
    try:
        want = loss_and_grads(model, ids)
        again = loss_and_grads(model, ids)
    except Exception as error:  # noqa: BLE001 - needs pixels, audio, ...
        report = apply_liger(model, NO_HEAD)  # must not raise all the same
        return "does not run", f"{type(error).__name__}: {str(error)[:80]}", report
    noise = largest_difference(again, want)
    start = time.perf_counter()
    report = apply_liger(model, NO_HEAD)
    took = time.perf_counter() - start
    error = largest_difference(loss_and_grads(model, ids), want)
    text = f"{error:.1e} (noise {noise:.1e}), patched in {took:.2f} s"
    return ("same" if error <= max(LIMIT, 10 * noise) else "different"), text, report


def model_types():
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_architecture():
    """None differs. At least 200 run, and four fifths of those that have an operation get all of it swapped."""
    results = {model_type: check(model_type) for model_type in model_types()}
    verdicts = Counter(verdict for verdict, _, _ in results.values())
    print(verdicts)
    assert {name: detail for name, (verdict, detail, _) in results.items() if verdict == "different"} == {}
    assert verdicts["same"] >= 200
    for operation in ("rope", "swiglu", "geglu", "rms_norm", "layer_norm"):
        parts = [report[operation] for verdict, _, report in results.values() if verdict == "same"]
        having = [part for part in parts if part.found]
        complete = sum(not part.skipped for part in having)
        print(f"{operation}: {complete} complete of {len(having)}")
        assert complete >= 0.8 * len(having), operation


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    verdicts, has, full, why = Counter(), Counter(), Counter(), Counter()
    for one in sys.argv[1:] or model_types():
        verdict, detail, result = check(one)
        verdicts[verdict] += 1
        print(f"{one}: {verdict}: {detail}", flush=True)
        if result is not None:
            print("    " + result.one_line(), flush=True)
        if verdict == "same":
            for operation, part in result.operations.items():
                has[operation] += bool(part.found)
                full[operation] += bool(part.found and not part.skipped)
                why.update({(operation, reason) for reason in part.skipped.values()})
    print(dict(verdicts), {name: f"{full[name]}/{has[name]}" for name in has if has[name]})
    for (operation, reason), count in why.most_common():
        print(count, operation, reason)
