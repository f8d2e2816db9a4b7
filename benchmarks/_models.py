"""Shapes of published models by name: model type in transformers, and config. And trained models."""

QWEN3_5_4B = dict(
    hidden_size=2560,
    intermediate_size=9216,
    num_hidden_layers=32,
    full_attention_interval=4,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=256,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    vocab_size=248320,
    max_position_embeddings=262144,
    tie_word_embeddings=True,
)
# For a recipe that names modules by `language_model`, which a decoder alone has not.
ON_A_DECODER = ["--lora_target_modules", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MODELS = {
    "Llama-3-8B": (
        "llama",
        dict(
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=128256,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
        ),
    ),
    "Llama-3.2-3B": (
        "llama",
        dict(
            hidden_size=3072,
            intermediate_size=8192,
            num_hidden_layers=28,
            num_attention_heads=24,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=128256,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
        ),
    ),
    "Llama-3.2-1B": (
        "llama",
        dict(
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=64,
            vocab_size=128256,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
        ),
    ),
    "Qwen3-0.6B": (
        "qwen3",
        dict(
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=151936,
            max_position_embeddings=40960,
            tie_word_embeddings=True,
        ),
    ),
    "Qwen3-30B-A3B-12-layers": (
        "qwen3_moe",
        dict(
            hidden_size=2048,
            moe_intermediate_size=768,
            num_hidden_layers=12,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
            vocab_size=151936,
            max_position_embeddings=40960,
        ),
    ),
    "Qwen3-30B-A3B": (
        "qwen3_moe",
        dict(
            hidden_size=2048,
            moe_intermediate_size=768,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
            vocab_size=151936,
            max_position_embeddings=40960,
        ),
    ),
    "experts-512-wide": (
        "qwen3_moe",
        dict(
            hidden_size=512,
            moe_intermediate_size=256,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=64,
            num_experts=32,
            num_experts_per_tok=8,
            norm_topk_prob=True,
            vocab_size=32768,
            max_position_embeddings=4096,
        ),
    ),
    "gpt-oss-20b-8-layers": (
        "gpt_oss",
        dict(
            hidden_size=2880,
            intermediate_size=2880,
            num_hidden_layers=8,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=64,
            num_local_experts=32,
            num_experts_per_tok=4,
            vocab_size=201088,
            sliding_window=128,
        ),
    ),
    "gpt-oss-20b": (
        "gpt_oss",
        dict(
            hidden_size=2880,
            intermediate_size=2880,
            num_hidden_layers=24,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=64,
            num_local_experts=32,
            num_experts_per_tok=4,
            vocab_size=201088,
            sliding_window=128,
        ),
    ),
    "Gemma-3-1B": (
        "gemma3_text",
        dict(
            hidden_size=1152,
            intermediate_size=6912,
            num_hidden_layers=26,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=256,
            vocab_size=262144,
            max_position_embeddings=32768,
            sliding_window=512,
        ),
    ),
    "Gemma-3-4B": (
        "gemma3_text",
        dict(
            hidden_size=2560,
            intermediate_size=10240,
            num_hidden_layers=34,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=256,
            vocab_size=262208,
            max_position_embeddings=131072,
            sliding_window=1024,
        ),
    ),
    "Gemma-4-E4B": (
        "gemma4_text",
        dict(
            hidden_size=2560,
            intermediate_size=10240,
            num_hidden_layers=42,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=256,
            global_head_dim=512,
            num_kv_shared_layers=18,
            hidden_size_per_layer_input=256,
            vocab_size_per_layer_input=262144,
            vocab_size=262144,
            max_position_embeddings=131072,
            sliding_window=512,
            final_logit_softcapping=30.0,
        ),
    ),
    "Qwen3.5-4B-16-layers": ("qwen3_5_text", QWEN3_5_4B | dict(num_hidden_layers=16)),
    "Qwen3.5-4B": ("qwen3_5_text", QWEN3_5_4B),
    "Qwen3.5-9B": (
        "qwen3_5_text",
        QWEN3_5_4B | dict(hidden_size=4096, intermediate_size=12288, tie_word_embeddings=False),
    ),
    # Every layer is attention, which needs no flash-linear-attention. Its MTP head is a layer of 32.
    "Qwen3.5-9B-attention": (
        "qwen3_5_text",
        QWEN3_5_4B
        | dict(hidden_size=4096, intermediate_size=12288, tie_word_embeddings=False, full_attention_interval=1),
    ),
    "Qwen3.5-35B-A3B": (
        "qwen3_5_moe_text",
        dict(
            hidden_size=2048,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
            num_hidden_layers=40,
            full_attention_interval=4,
            num_attention_heads=16,
            num_key_value_heads=2,
            head_dim=256,
            num_experts=256,
            num_experts_per_tok=8,
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            vocab_size=248320,
            max_position_embeddings=262144,
        ),
    ),
    "Granite-4.0-H-Tiny": (
        "granitemoehybrid",
        dict(
            hidden_size=1536,
            intermediate_size=512,
            shared_intermediate_size=1024,
            num_hidden_layers=40,
            layer_types=["full_attention" if layer % 10 == 5 else "linear_attention" for layer in range(40)],
            num_attention_heads=12,
            num_key_value_heads=4,
            num_local_experts=64,
            num_experts_per_tok=6,
            mamba_n_heads=48,
            mamba_d_head=64,
            mamba_d_state=128,
            mamba_expand=2,
            vocab_size=100352,
            max_position_embeddings=131072,
            embedding_multiplier=12,
            logits_scaling=6,
            residual_multiplier=0.22,
            attention_multiplier=0.0078125,
            tie_word_embeddings=True,
        ),
    ),
    "SmolLM2-135M": (
        "llama",
        dict(
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            vocab_size=49152,
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
        ),
    ),
    "tiny-moe": (
        "qwen3_moe",
        dict(
            hidden_size=64,
            moe_intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            vocab_size=1031,
            max_position_embeddings=512,
        ),
    ),
    "tiny": (
        "llama",
        dict(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=1031,
            max_position_embeddings=512,
        ),
    ),
    "tiny-attention": (
        "qwen3_5_text",
        dict(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            full_attention_interval=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            vocab_size=1031,
            max_position_embeddings=512,
        ),
    ),
    "tiny-states": (
        "qwen3_5_text",
        dict(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            full_attention_interval=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            vocab_size=1031,
            max_position_embeddings=512,
            tie_word_embeddings=True,
        ),
    ),
}


def trained(name, dtype):
    """The model of a folder, or smollm2-135m-instruct, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from liger_trainer.command.recipe.model_source import find_model

    source = find_model(name)
    more = {"quantization_config": GgufConfig(dequantize=True)} if source.is_gguf else {}
    model = source.load(AutoModelForCausalLM, dtype=dtype, **more)
    model.config.quantization_config = None  # nothing of it is left, and PEFT looks for it
    del model.config.quantization_config
    return model, source.load(AutoTokenizer)


def spread_attention(model):
    """Let the random weights of a Gemma 4 attend to many tokens, as trained ones do.

    Its layers normalize queries and keys and do not scale their scores, so `q_norm` has to. With random weights it is
    one: scores of hundreds of dimensions have a standard deviation of 16 and more, softmax picks one token, and
    rounding picks which. A relative change of 1e-3 in the embeddings changes the output by 80 %.
    """
    for module in model.modules():
        if getattr(module, "q_norm", None) is not None and getattr(module, "scaling", None) == 1.0:
            module.q_norm.weight.data.mul_(module.head_dim**-0.5)
