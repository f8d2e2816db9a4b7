"""Makes the small model, tokenizer and rows that a recipe is verified on."""

import zlib
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from liger_trainer.errors import RecipeError
from liger_trainer.varlen.proof.small_model import drawn, small_config

POSITIONS = 512
_WIDTH, _HEAD_DIM = 64, 16  # as in `small_config`
_FURTHER_SIZES = {
    "num_kv_heads": 4,
    "ffn_hidden_size": 48,
    "dim_ff": 48,
    "lru_width": _WIDTH,
    "mamba_d_head": _HEAD_DIM,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
}
_LEAST_EPSILON = 1e-3  # with variances near 1, a wrong epsilon of 1e-6 would disappear in the rounding
_SPECIAL = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
_NAMES = ("role", "from", "name", "type", "id")  # keys of messages and tools with values that must not change
_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ (m['content'] or '') | string + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ (m['content'] or '') | string + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def small_tokenizer(*special: str | None) -> PreTrainedTokenizerFast:
    """Return a byte tokenizer with a chat template that marks answers, and with the tokens `special`."""
    names = list(dict.fromkeys([*_SPECIAL, *filter(None, special)]))
    known = {name: i for i, name in enumerate([*names, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=known, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=POSITIONS,
        chat_template=_TEMPLATE,
    )


def write_model(config: Any, vocab: int, seed: int, folder: str) -> None:
    """Save a small model of `config` with `vocab` tokens and random weights in `folder`.

    It has the class of `config`, its switches, scales and caps, and a layer of each kind.

    Raises:
        RecipeError: `config` has no text decoder, or its class does not accept small sizes.
    """
    text = config.get_text_config()
    if text.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not getattr(text, "auto_map", None):
        raise RecipeError(
            f"model_name_or_path has the model type {config.model_type!r}, which has no text decoder that can be built "
            "by itself. liger-trainer verify needs one, so it cannot check this model."
        )
    try:
        sizes = dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), vocab)
        sizes |= dict.fromkeys(("max_position_embeddings", "n_positions"), POSITIONS)
        small = small_config(text, **(sizes | _further_sizes(text)))
        small.architectures = None
        if isinstance(getattr(text, "attention_layers", None), list):  # gpt_neo's, one for each layer
            small.attention_types, small.attention_layers = [[["global", "local"], 1]], ["global", "local"]
        for name, value in small.to_dict().items():
            if isinstance(value, float) and name.endswith(("eps", "epsilon")):
                setattr(small, name, max(value, _LEAST_EPSILON))
        model = drawn(lambda: AutoModelForCausalLM.from_config(small, dtype=torch.float32), seed)
        model.save_pretrained(folder)
        AutoConfig.from_pretrained(folder)
    except Exception as error:  # the model's own code may put any condition on its sizes
        raise RecipeError(
            f"liger-trainer verify cannot make a small copy of the model type {text.model_type!r} "
            f"(model_name_or_path): {type(error).__name__}: {error}"
        ) from error


def _further_sizes(config: Any) -> dict[str, int]:
    """Return sizes that not all decoders have, or that follow from others."""
    known = config.to_dict()
    sizes = dict(_FURTHER_SIZES)
    if known.get("num_experts_per_tok") == 1:
        sizes["num_experts_per_tok"] = 1
    if "expand" in known and "num_heads" in known:  # in Mamba, heads x head width must equal the inner width
        sizes["num_heads"] = known["expand"] * _WIDTH // _HEAD_DIM
    if "mamba_expand" in known:
        sizes["mamba_n_heads"] = known["mamba_expand"] * _WIDTH // _HEAD_DIM
    return sizes


def small_rows(rows: list[dict[str, Any]], tokens: range) -> list[dict[str, Any]]:
    """Return `rows` with short texts of uneven length, at most two messages each, and token ids within `tokens`."""
    return [_short(row, 24 + 8 * (i % 5), tokens) for i, row in enumerate(rows)]


def long_rows(rows: list[dict[str, Any]], tokens: range) -> list[dict[str, Any]]:
    """Return `small_rows`, but with texts of about 160 characters (or as many ids) in every third row."""
    result = small_rows(rows, tokens)
    for i in range(0, len(rows), 3):
        result[i] = _short(_repeated(rows[i], 160), 160, tokens)
    return result


def _repeated(value: Any, length: int) -> Any:
    """Return `value` with texts and token ids repeated to about `length`. Names and roles stay as they are."""
    if isinstance(value, dict):
        return {name: part if name in _NAMES else _repeated(part, length) for name, part in value.items()}
    if isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int)):
        return value * -(-length // max(len(value), 1))
    if isinstance(value, list):
        return [_repeated(part, length) for part in value]
    return value


def _short(value: Any, length: int, tokens: range, name: str = "") -> Any:
    if isinstance(value, str):  # keep the end too, since two answers may begin alike
        return value if len(value) <= length else value[: length // 2] + value[-(length // 2) :]
    if isinstance(value, dict):
        return {name: _short(part, length, tokens, name) for name, part in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], int):
        is_mask = name.rstrip("s").endswith("mask")
        return value[:length] if is_mask else [x if x < 0 else tokens[x % len(tokens)] for x in value[:length]]
    if isinstance(value, list):
        return [_short(part, length, tokens) for part in (value if len(value) <= 2 else [value[0], value[-1]])]
    return value


def pseudo_random_reward(completions: list[Any], **columns: Any) -> list[float]:
    """Return a hash of each completion as its reward, so that almost all completions get different rewards."""
    return [zlib.crc32(str(text).encode()) % 1009 / 1009 for text in completions]
