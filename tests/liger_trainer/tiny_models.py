"""Tiny random models of real architectures, a tokenizer and rows, for tests that need no download."""

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB = 131  # a prime: no block size divides it
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
_OWN = {
    "gemma2": {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 20.0, "sliding_window": 16, "query_pre_attn_scalar": 8},
    "granite": {"logits_scaling": 3.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0, "attention_multiplier": 0.3},
    "cohere2": {"logit_scale": 0.3, "sliding_window": 16},
    "phi": {"partial_rotary_factor": 0.5},
}


def tiny_model(model_type, dtype=torch.float32, seed=0, **config):
    """A random causal LM of `model_type`. Weights are larger than the default init, so that gradients are not all noise."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **(_DECODER | _OWN.get(model_type, {}) | config))
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
            elif "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def tiny_tokenizer():
    """Whole words `w3` ... `w130`, padding 0, bos 1, eos 2."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def ragged_rows(n=16, seed=1, prompt=True):
    """Rows of 4 to 21 tokens; with `prompt`, the labels of a random first part are -100."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(n):
        length = int(torch.randint(4, 22, (), generator=generator))
        ids = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
        hidden = int(torch.randint(0, length // 2, (), generator=generator)) if prompt else 0
        rows.append({"input_ids": ids, "labels": [-100] * hidden + ids[hidden:]})
    return rows


def text_rows(n=16, seed=2):
    """Prompt and completion as text for `tiny_tokenizer`."""
    return [
        {
            "prompt": " ".join(f"w{i}" for i in row["input_ids"][:3]),
            "completion": " " + " ".join(f"w{i}" for i in row["input_ids"][3:]),
        }
        for row in ragged_rows(n, seed)
    ]


def collate(rows):
    """Right-pads `ragged_rows` to the longest."""
    width = max(len(row["input_ids"]) for row in rows)

    def padded(name, value):
        return torch.tensor([row[name] + [value] * (width - len(row[name])) for row in rows])

    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (width - len(row["input_ids"])) for row in rows])
    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100), "attention_mask": mask}
