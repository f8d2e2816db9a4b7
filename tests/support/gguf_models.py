"""A tiny model in a GGUF file."""

from typing import Any

import torch

GGUF_VOCAB = 261


def write_gguf(gguf: Any, path: Any) -> None:
    """A one-layer Llama with a byte-level BPE vocabulary and two merges."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    path.parent.mkdir()
    hidden, heads, inner = 32, 4, 64
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(GGUF_VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *bytes_to_unicode().values(), "w1", "w2"])
    writer.add_token_types([3, 3, 3] + [1] * 258)
    writer.add_token_merges(["w 1", "w 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    shapes = {"token_embd": (GGUF_VOCAB, hidden), "output": (GGUF_VOCAB, hidden), "output_norm": (hidden,)}
    shapes |= {f"blk.0.attn_{name}": (hidden, hidden) for name in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (inner, hidden), "blk.0.ffn_up": (inner, hidden), "blk.0.ffn_down": (hidden, inner)}
    shapes |= {"blk.0.attn_norm": (hidden,), "blk.0.ffn_norm": (hidden,)}
    torch.manual_seed(0)
    for name, shape in shapes.items():
        writer.add_tensor(
            f"{name}.weight", (torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * 0.1).numpy()
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
