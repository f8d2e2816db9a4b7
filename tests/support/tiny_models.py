"""Tiny random models of real architectures, a tokenizer and rows, and one step of a model beside another's.

A test gets a model from `tiny_model`; rows of tokens from `ragged_rows`, or of text from `text_rows`, `kto_rows` and
`pair_rows`; and a batch of rows from `collate`. `step` gives the loss and the gradients of a batch, and
`assert_same_step` compares two such results. `LargestTensor` and `LogitRows` see the tensors that a step makes.
"""

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

VOCAB = 131  # a prime, so that no block size divides it
_DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# Settings specific to each family, with values that change the result: rot_dim >= 4, non-trivial scales and caps, both
# kinds of layers.
_OWN = {
    "llama": {},
    "qwen3": {},
    "qwen3_moe": _EXPERTS,
    "gemma2": {
        "final_logit_softcapping": 5.0,
        "attn_logit_softcapping": 20.0,
        "sliding_window": 16,
        "query_pre_attn_scalar": 8,
    },
    "gemma3_text": {"query_pre_attn_scalar": 8} | _TWO_KINDS,
    "gemma4_text": {
        "global_head_dim": 16,
        "final_logit_softcapping": 5.0,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
    }
    | _TWO_KINDS,
    "granite": {
        "logits_scaling": 3.0,
        "residual_multiplier": 0.5,
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.3,
    },
    "cohere2": {"logit_scale": 0.3, "sliding_window": 16},
    "glm4": {},
    "phi": {"partial_rotary_factor": 0.5},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16, "rope_scaling": None},
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"],
        "shared_expert_intermediate_size": 24,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "head_dim": 16,
    }
    | _EXPERTS,
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "head_dim": 16,
    },
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "bamba": {
        "mamba_d_state": 8,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_expand": 2,
        "mamba_n_groups": 2,
        "attn_layer_indices": [1],
    },
    "mistral": {"sliding_window": 16},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 16},
    "olmo3": _TWO_KINDS,
    "granite_swa": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "llama4_text": {
        "attention_chunk_size": 8,
        "floor_scale": 12,
        "intermediate_size_mlp": 48,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
        "moe_layers": [1],
    },
    "nemotron": {"partial_rotary_factor": 0.5},
    "seed_oss": {"residual_dropout": 0.1, "attention_dropout": 0.0},
    "qwen2_5_vl": {
        "text_config": {k: v for k, v in _DECODER.items() if k != "head_dim"}
        | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}},
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 32,
        },
    },
}
PARITY_SET = (
    "llama",
    "qwen3_moe",
    "gemma2",
    "gemma4_text",
    "cohere2",
    "granite",
    "glm4",
    "deepseek_v3",
    "gpt_oss",
    "qwen3_next",
    "phi",
    "qwen2_5_vl",
)


def tiny_model(model_type, dtype=torch.float32, seed=0, **config):
    """A random causal LM of `model_type`.

    Weights are larger than the default init, so that gradients are not all noise.
    """
    torch.manual_seed(seed)
    own = _OWN[model_type]
    config = AutoConfig.for_model(model_type, **((own if "text_config" in own else _DECODER | own) | config))
    config._attn_implementation = "eager"
    auto = AutoModelForImageTextToText if "text_config" in own else AutoModelForCausalLM
    model = auto.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
            elif "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def masked_lm():
    """A BERT. Its labels are not the next tokens."""
    options = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    return AutoModelForMaskedLM.from_config(AutoConfig.for_model("bert", vocab_size=131, **options))


def classifier():
    """A Llama that sorts sequences into two classes. It has no LM head."""
    config = AutoConfig.for_model(
        "llama",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=131,
        num_labels=2,
    )
    return AutoModelForSequenceClassification.from_config(config)


def tiny_tokenizer():
    """Whole words `w3` ... `w130`, padding 0, bos 1, eos 2."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def ragged_rows(n=16, seed=1, prompt=True):
    """Rows of 4 to 21 tokens. With `prompt`, the labels of a first part of random length are -100."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(n):
        length = int(torch.randint(4, 22, (), generator=generator))
        ids = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
        hidden = int(torch.randint(0, length // 2, (), generator=generator)) if prompt else 0
        rows.append({"input_ids": ids, "labels": [-100] * hidden + ids[hidden:]})
    return rows


def text_rows(n=16, seed=2):
    """Prompts and completions as text for `tiny_tokenizer`."""
    rows = []
    for row in ragged_rows(n, seed):
        words = [f"w{i}" for i in row["input_ids"]]
        rows.append({"prompt": " ".join(words[:3]), "completion": " " + " ".join(words[3:])})
    return rows


def words(generator, low, high):
    length = int(torch.randint(low, high, (), generator=generator))
    return text_of(torch.randint(3, VOCAB, (length,), generator=generator).tolist())


def text_of(ids):
    return " ".join(f"w{i}" for i in ids)


def kto_rows(n=8, seed=4):
    """Prompts with one labelled completion each, two good ones for each bad one."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {"prompt": words(generator, 2, 8), "completion": " " + words(generator, 2, 9), "label": i % 3 != 1}
        for i in range(n)
    ]


def pair_rows(n=8, seed=4):
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "prompt": words(generator, 2, 8),
            "chosen": " " + words(generator, 2, 9),
            "rejected": " " + words(generator, 2, 9),
        }
        for _ in range(n)
    ]


def ragged_pairs(n=8):
    """Prompts, chosen and rejected of very unequal lengths."""
    ids = [row["input_ids"] for row in ragged_rows(2 * n, seed=5)]
    return [
        {"prompt": text_of(a[:3]), "chosen": " " + text_of(a[3:]), "rejected": " " + text_of(b)}
        for a, b in zip(ids[:n], ids[n:], strict=True)
    ]


def collate(rows):
    """Right-pads `ragged_rows` to the longest."""
    width = max(len(row["input_ids"]) for row in rows)

    def padded(name, value):
        return torch.tensor([row[name] + [value] * (width - len(row[name])) for row in rows])

    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (width - len(row["input_ids"])) for row in rows])
    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100), "attention_mask": mask}


NO_HEAD = {"fused_linear_cross_entropy": False}


def whole_batch(rows=2, length=24, seed=3):
    """Rows of one length, all of it labelled."""
    ids = torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def gradients(model):
    """Copies of the gradients that `model` has now, by the names of its weights."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def step(model, call=None, autocast=None, seed=1, backwards=1, **options):
    """The loss of a batch, and all gradients by name. A dropout draws the same numbers in each call.

    `call` has the arguments of the model, by default four ragged rows; `options` are further ones.
    """
    call = collate(ragged_rows(4)) if call is None else call
    model.zero_grad()
    torch.manual_seed(seed)
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        loss = model(**{"use_cache": False} | call | options).loss
    for left in reversed(range(backwards)):
        loss.backward(retain_graph=left > 0)
    return loss.detach(), gradients(model)


def assert_same_gradients(got, want, rtol=1e-5, floor=1e-3):
    """Compare gradients by name: the same names in the same order, dtypes, and each tensor by the norm of its error.

    Errors are relative to each gradient's norm, or to `floor` times the largest norm. With a `floor` of 0, a gradient
    of nothing but rounding must agree too.
    """
    assert list(got) == list(want), got.keys() ^ want.keys()
    largest = max(grad.double().norm() for grad in want.values())
    for name, grad in want.items():
        assert got[name].dtype == grad.dtype, f"{name}: {got[name].dtype}, stock {grad.dtype}"
        error = (got[name].double() - grad.double()).norm()
        size = grad.double().norm()
        assert error <= rtol * max(size, floor * largest), f"{name}: error {error:.1e} of {size:.1e}"


def assert_same_step(got, want, rtol=1e-5, floor=1e-3):
    """Compare two results of `step`."""
    torch.testing.assert_close(got[0], want[0], rtol=rtol, atol=0)
    assert_same_gradients(got[1], want[1], rtol, floor)


# The decay of the gated delta rule. Its gradient is what is left of sums that cancel. In stock's qwen3_next it changes
# by 0.6e-5 to 2.7e-5 where all weights move by half of their last bit; other weights' gradients by 0.7e-5 at most.
CANCELLING = ("linear_attn.A_log", "linear_attn.dt_bias")


def largest_difference(got, want):
    """The largest relative difference of the loss or of any gradient in two results of `step`.

    Relative to the largest element of that gradient, or to 1e-3 of the largest of all: k biases have noise around zero.
    A fifth of the difference counts for `CANCELLING`: there, processors differ by more than 1e-5.
    """
    assert got[1].keys() == want[1].keys()
    floor = 1e-3 * max(g.abs().max() for g in want[1].values())
    worst = ((got[0] - want[0]).abs() / want[0].abs()).item()
    for name, gradient in want[1].items():
        difference = (got[1][name] - gradient).abs().max() / gradient.abs().max().clamp(min=floor)
        worst = max(worst, difference.item() / (5 if name.endswith(CANCELLING) else 1))
    return worst


class LargestTensor(TorchDispatchMode):
    """Counts the elements of the largest floating-point tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                self.numel = max(self.numel, x.numel())
        return result


class LogitRows(TorchDispatchMode):
    """The most rows of a vocabulary, or of any other dimension of its size, that one tensor of floats had."""

    def __init__(self, vocab=VOCAB):
        super().__init__()
        self.vocab, self.rows = vocab, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            logits = isinstance(x, torch.Tensor) and x.is_floating_point() and x.ndim > 1 and x.shape[-1] == self.vocab
            if logits and x.untyped_storage().data_ptr() not in known:  # a view, such as a transposed head, is not new
                self.rows = max(self.rows, x.numel() // self.vocab)
        return result
