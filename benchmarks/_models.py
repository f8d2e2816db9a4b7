"""Shapes of published models by name: the model type of transformers, and its config. And models that are trained."""

MODELS = {
    "Llama-3-8B": ("llama", dict(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=131072, rms_norm_eps=1e-5)),
    "Llama-3.2-3B": ("llama", dict(
        hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24, num_key_value_heads=8,
        head_dim=128, vocab_size=128256, max_position_embeddings=131072, rms_norm_eps=1e-5, tie_word_embeddings=True)),
    "Llama-3.2-1B": ("llama", dict(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
        head_dim=64, vocab_size=128256, max_position_embeddings=131072, rms_norm_eps=1e-5, tie_word_embeddings=True)),
    "Qwen3-0.6B": ("qwen3", dict(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, vocab_size=151936, max_position_embeddings=40960, tie_word_embeddings=True)),
    "Qwen3-30B-A3B-12-layers": ("qwen3_moe", dict(
        hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=12, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
        vocab_size=151936, max_position_embeddings=40960)),
    "Qwen3-30B-A3B": ("qwen3_moe", dict(
        hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
        vocab_size=151936, max_position_embeddings=40960)),
    "experts-512-wide": ("qwen3_moe", dict(
        hidden_size=512, moe_intermediate_size=256, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=2,
        head_dim=64, num_experts=32, num_experts_per_tok=8, norm_topk_prob=True, vocab_size=32768,
        max_position_embeddings=4096)),
    "gpt-oss-20b-8-layers": ("gpt_oss", dict(
        hidden_size=2880, intermediate_size=2880, num_hidden_layers=8, num_attention_heads=64, num_key_value_heads=8,
        head_dim=64, num_local_experts=32, num_experts_per_tok=4, vocab_size=201088, sliding_window=128)),
    "gpt-oss-20b": ("gpt_oss", dict(
        hidden_size=2880, intermediate_size=2880, num_hidden_layers=24, num_attention_heads=64, num_key_value_heads=8,
        head_dim=64, num_local_experts=32, num_experts_per_tok=4, vocab_size=201088, sliding_window=128)),
    "Gemma-3-1B": ("gemma3_text", dict(
        hidden_size=1152, intermediate_size=6912, num_hidden_layers=26, num_attention_heads=4, num_key_value_heads=1,
        head_dim=256, vocab_size=262144, max_position_embeddings=32768, sliding_window=512)),
    "Gemma-3-4B": ("gemma3_text", dict(
        hidden_size=2560, intermediate_size=10240, num_hidden_layers=34, num_attention_heads=8, num_key_value_heads=4,
        head_dim=256, vocab_size=262208, max_position_embeddings=131072, sliding_window=1024)),
    "SmolLM2-135M": ("llama", dict(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True)),
    "tiny-moe": ("qwen3_moe", dict(
        hidden_size=64, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True, vocab_size=1031,
        max_position_embeddings=512)),
    "tiny": ("llama", dict(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=1031, max_position_embeddings=512)),
}  # fmt: skip


def trained(name, dtype):
    """The model of a folder, or smollm2-135m-instruct, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from liger_trainer.command.recipe.model_source import find_model

    source = find_model(name)
    more = {"quantization_config": GgufConfig(dequantize=True)} if source.is_gguf else {}
    model = source.load(AutoModelForCausalLM, dtype=dtype, **more)
    model.config.quantization_config = None  # nothing of it is left, and PEFT looks
    del model.config.quantization_config
    return model, source.load(AutoTokenizer)
