"""Build every causal LM of the installed transformers at a tiny size, and train one step with and without our swaps.

`compare(model_type)` compares one model type. As a script, this file compares the named ones, or all of them; with
`--write` it writes the section "Which models" of docs/architecture.md:

    python tests/support/architectures.py [--write] [model type ...]
"""

import functools
import inspect
import sys
import textwrap
import time
import warnings
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
import transformers
from checkout import ROOT
from tiny_models import LogitRows, largest_difference
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from liger_trainer.head.module import output_head
from liger_trainer.patching import apply_liger

LIMIT = 2e-4  # fp32, relative to the largest element of a gradient; a wrong replacement is off by 1e-2 or more
CHUNK = 3  # rows of logits that the fused head holds at a time here
MAX_PARAMETERS = 30_000_000
MODEL_TYPES = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = (f"<!-- {word} models -->\n" for word in ("begin", "end"))

# Config fields that are set where a config has them: sizes, plus scales and caps whose loss would show.
SMALL = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 48,
    "n_positions": 128,
    "d_model": 64,
    "n_layers": 2,
    "n_heads": 4,
    "num_layers": 2,
    "num_heads": 4,
    "ffn_dim": 48,
    "rotary_dim": 8,
    "sliding_window": 16,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "word_embed_proj_dim": 64,
    "embedding_size": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "top_k": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "moe_num_experts": 4,
    "moe_k": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 16,
    "first_k_dense_replace": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_expand": 2,
    "global_head_dim": 16,
    "vocab_size_per_layer_input": 131,
    "hidden_size_per_layer_input": 8,
    "depth": 1,
    "out_hidden_size": 64,
    "embed_dim": 32,
    "image_size": 28,
    "patch_size": 14,
    "dim_model": 64,
    "attention_hidden_size": 64,
    "lru_width": 64,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "state_size": 8,
    "ssm_state_size": 8,
}
SCALES = {
    "final_logit_softcapping": 5.0,
    "attn_logit_softcapping": 20.0,
    "logits_soft_cap": 5.0,
    "output_logit_soft_cap": 5.0,
    "logits_scaling": 3.0,
    "logit_scale": 0.3,
    "lm_head_multiplier": 0.4,
    "output_multiplier": 0.4,
    "residual_multiplier": 0.5,
    "embedding_multiplier": 2.0,
    "attention_multiplier": 0.3,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
# What single configs need in addition, by the model type of the config or of the part.
OWN = {
    "bailing_hybrid": {
        "num_expert_group": 2,
        "num_experts_per_token": 2,
        "num_experts": 4,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "bamba": {"attn_layer_indices": [1]},
    "big_bird": {"attention_type": "original_full"},
    "chameleon": {"vocabulary_map": {"<image>": 129, "IMGIMGAZ": 130}},
    "cohere_compass_text": {
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {kind: ROPE for kind in ("full_attention", "sliding_attention")},
    },
    "cosmos3_edge_text": {"rope_parameters": ROPE | {"mrope_section": [2, 3, 3]}},
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {
        "layer_types": ["indexed_attention", "indexed_attention"],
        "per_layer_config": None,
        "head_dim": 16,
        "num_key_value_heads": 4,
        "shared_experts_intermediate_size": 24,
    },
    "ernie4_5_vl_moe_text": {"rope_parameters": ROPE | {"mrope_section": [3, 3, 2]}},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "glm5_next_text": {"qk_rope_head_dim": 0, "head_dim": 0, "linear_head_dim": 16, "linear_num_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "downsample_rate": "1/2"},
    "hunyuan_vl_text": {"rope_parameters": ROPE | {"mrope_section": [2, 3, 3]}},
    "inkling2_vision": {"text_hidden_size": 64},
    "janus_vqgan": {"base_channels": 32, "num_patches": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"num_experts_per_token": 2, "num_experts": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"ffn_hidden_size": 48, "expert_ffn_hidden_size": 24, "zero_expert_num": 2, "moe_topk": 2},
    "mamba2": {"head_dim": 16, "num_heads": 8, "n_groups": 2},
    "mistral4": {"head_dim": 16},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "muse_spark_audio": {"num_hidden_layers": 4},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 120},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 120},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "ngram_vocab_size_base": 50,
        "split_ngram_parts": 2,
        "hc_lowrank": 16,
        "ple_layer_ids": [1],
        "ple_embed_dim": 16,
    },
    "radio": {"video_temporal_patch_size": 2},
    "reformer": {
        "is_decoder": True,
        "hash_seed": 0,
        "attn_layers": ["local", "lsh"],
        "axial_pos_embds": False,
        "attention_head_size": 16,
        "feed_forward_size": 48,
        "num_buckets": 4,
        "hidden_dropout_prob": 0.0,
        "local_attention_probs_dropout_prob": 0.0,
    },  # drawn from its own seed
    "unlimited_ocr_text": {"num_key_value_heads": 4},
    "xlm": {"emb_dim": 64},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "hybrid"],
        "attention_head_dim": 32,
        "attention_hidden_size": 128,
    },
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "attention_head_dim": 32, "attention_hidden_size": 128},
    "zaya": {"num_experts_per_tok": 1},
}
MULTIMODAL_ROPE = ("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "glm4v", "glm46v", "glm_ocr", "glmga", "paddleocr_vl")


@dataclass
class Comparison:
    """One model type. `verdict`: `same`, `different`, `raises`, `does not run` or `not built`; `detail` says more."""

    model_type: str
    verdict: str
    detail: str
    head: str = ""
    norms: str = ""
    rope: str = ""
    mlp: str = ""
    experts: str = ""
    kept: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """True if it trains the same step with its head fused and every module of each kind swapped."""
        cells = {self.norms, self.rope, self.mlp, self.experts}
        return self.verdict == "same" and self.head == "fused" and cells <= {"", "all"} and not self.kept

    @property
    def line(self) -> str:
        """Its row in the table of models in which something keeps its own code."""
        verdict = self.verdict if self.verdict == "same" else f"**{self.verdict}**"
        cells = (self.model_type, verdict, self.head, self.norms, self.rope, self.mlp, self.experts)
        cells += ("; ".join(self.kept),)
        return "| " + " | ".join(" ".join(cell.replace("|", "/").split()) for cell in cells) + " |"


def small_config(model_type):
    """The default config with the fields of `SMALL`, `SCALES` and `OWN` that it has, cut to two layers."""
    default = AutoConfig.for_model(model_type).to_dict()

    def shrink(values, text):
        own = {key: SMALL[key] for key in values if key in SMALL and isinstance(values[key], int | None)}
        own |= {key: SCALES[key] for key in values if key in SCALES and not isinstance(values[key], bool)}
        if not text:
            own.pop("vocab_size", None)
        if "qk_rope_head_dim" in own:
            own |= {"head_dim": own["qk_rope_head_dim"], "num_key_value_heads": SMALL["num_attention_heads"]}
        if text and str(values.get("model_type")).startswith(MULTIMODAL_ROPE):
            section = [1, 1, 2] if "moe" in values["model_type"] else [2, 3, 3]  # half of the rotary dimensions
            own["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section}
        kinds = values.get("layer_types")
        if isinstance(kinds, list) and kinds:
            own["layer_types"] = [kinds[0], next((k for k in kinds if k != kinds[0]), kinds[0])]
        for key, value in values.items():
            if isinstance(value, dict) and key.endswith("_config") and value.get("model_type"):
                part = shrink(value, "text" in key or "llm" in key or "thinker" in key)
                own[key] = {"model_type": value["model_type"]} | part
        return own | OWN.get(values.get("model_type"), {})

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
        model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager").train()
    except Exception as error:  # noqa: BLE001 - a config that needs settings of its own; counted and listed
        return None, _said(error)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
            elif "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model, None


def _said(error) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {(lines[1] if lines[0].endswith(':') and len(lines) > 1 else lines[0]).strip()}"


def left_padded_batch():
    """Two rows, the first padded on the left; the labels of padding and of a prompt are -100."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 100, (2, 13), generator=generator)
    mask = torch.ones(2, 13, dtype=torch.long)
    ids[0, :4], mask[0, :4] = SMALL["pad_token_id"], 0
    labels = ids.clone()
    labels[0, :7] = labels[1, :3] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def step(model):
    """Loss and gradients of the batch in training mode from one seed, and the logits that the model returned."""
    model.zero_grad()
    transformers.set_seed(1)  # same dropout, where a config has some
    batch = left_padded_batch()
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters:  # all tokens are text
        batch["mm_token_type_ids"] = torch.zeros_like(batch["input_ids"])
    outputs = model(**batch, use_cache=False)
    if outputs.loss is None:
        raise ValueError("it computes no loss from labels")
    outputs.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return (outputs.loss.detach(), grads), outputs.get("logits")


@functools.cache
def compare(model_type) -> Comparison:
    """Build, train a step, swap everything, train the same step."""
    model, reason = build(model_type)
    if model is None:
        return Comparison(model_type, "not built", reason)
    try:
        want, _ = step(model)
        if any(not grad.isfinite().all() for grad in want[1].values()):  # Qwen4 in transformers 5.17
            raise ValueError("its gradients with padding are not finite")
    except Exception as error:  # noqa: BLE001 - needs pixels, audio, ...
        apply_liger(model)  # must not raise either
        return Comparison(model_type, "does not run", _said(error))
    start = time.perf_counter()
    report = apply_liger(model)
    took = time.perf_counter() - start
    found = Comparison(model_type, "same", "", **swapped(report))
    vocab = output_head(model).weight.shape[0] if report["fused_linear_cross_entropy"].found else -1
    with pytest.MonkeyPatch.context() as patch, LogitRows(vocab) as seen:
        patch.setattr("liger_triton._chunks._CPU_CHUNK_BYTES", 4 * vocab * CHUNK)
        try:
            got, logits = step(model)
        except Exception as error:  # noqa: BLE001 - the caller is shown the error
            found.verdict, found.detail = "raises", _said(error)
            return found
    if found.head == "fused" and (logits is not None or seen.rows > CHUNK):
        found.head = "in full"
    error = largest_difference(got, want)
    found.detail = f"{error:.1e}, patched in {took:.2f} s"
    found.verdict = "same" if error <= LIMIT else "different"
    return found


def swapped(report) -> dict:
    """The cells of the table: how many modules of each kind were swapped out of how many, what was kept, and why."""
    cells = {}
    kinds = {
        "norms": ("rms_norm", "layer_norm"),
        "rope": ("rope",),
        "mlp": ("swiglu", "geglu"),
        "experts": ("experts",),
    }
    for cell, operations in kinds.items():
        done = sum(len(report[op].swapped) for op in operations)
        found = sum(report[op].found for op in operations)
        if found == 0:
            cells[cell] = ""
        else:
            cells[cell] = "all" if done == found else f"{done} of {found}"
    head = report["fused_linear_cross_entropy"]
    cells["head"] = "kept" if head.skipped else ""
    if head.swapped:
        cells["head"] = "fused"
    reasons = []
    for op in report.operations:
        if op != "varlen_attention":
            reasons += report[op].skipped.values()
    return cells | {"kept": tuple(dict.fromkeys(reasons))}  # eager attention never leaves padding out


KINDS = {"head": "LM head", "norms": "norms", "rope": "rotary", "mlp": "gated MLPs", "experts": "experts"}
TEXT = """\
Of the {ran} model types of transformers {version} that were compared, {same} have the same loss and the same gradients
in a training step after `apply_liger`, and {wrong} have not. In {kept} of them something keeps its own code, which is
right, only not faster. All modules of a kind are swapped in: {counts}.

Compared are all causal LMs and image-text models of transformers that train on text alone. Each is built tiny with
random weights and trained one step on a batch that is padded on the left. The loss and the gradient of every parameter
agree to {limit:g} of the largest element (fp32, eager attention). Towers are swapped, but not run here; a test of
its own trains 38 of the image-text models with pixels.

Everything is swapped, and the LM head is fused with the loss, in:

{whole}

In these something is not. *In full*: the model's own code does something with its logits, so they are built. An empty
cell: the model has no such module.

| model type | step | LM head | norms | rotary | gated MLPs | experts | what is kept, and why |
|---|---|---|---|---|---|---|---|
{lines}

Not compared, because they need pixels or audio, a package that is not installed, or a configuration by hand:

{others}

`python tests/support/architectures.py --write` writes this section (a minute), and `make test-all` checks it.
"""


def names(results) -> str:
    """A paragraph that names the model types in code style, so that a reader can search for each."""
    return textwrap.fill(", ".join(f"`{one.model_type}`" for one in results), 140, break_on_hyphens=False)


def section(results) -> str:
    """The section of docs/architecture.md."""
    others = [one for one in results if one.verdict in ("does not run", "not built")]
    ran = [one for one in results if one not in others]
    counts = []
    for kind, name in KINDS.items():
        having = [getattr(one, kind) for one in ran if getattr(one, kind) != ""]
        counts.append(f"{name} {sum(cell in ('all', 'fused') for cell in having)} of {len(having)}")
    same = sum(one.verdict == "same" for one in ran)
    return TEXT.format(
        version=transformers.__version__,
        limit=LIMIT,
        ran=len(ran),
        same=same,
        wrong=len(ran) - same,
        kept=sum(bool(one.kept) for one in ran),
        counts=", ".join(counts),
        others=names(others),
        whole=names(one for one in ran if one.whole),
        lines="\n".join(one.line for one in ran if not one.whole),
    )


def written() -> str:
    """The section as it stands on the page."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    results = []
    for model_type in [name for name in sys.argv[1:] if name != "--write"] or MODEL_TYPES:
        results.append(compare(model_type))
        print(results[-1].line, results[-1].detail, flush=True)
    print(Counter(one.verdict for one in results))
    if "--write" in sys.argv:
        if len(results) < len(MODEL_TYPES):
            sys.exit("--write makes the whole section: name no model types with it.")
        PAGE.write_text(PAGE.read_text().replace(written(), section(results)))
