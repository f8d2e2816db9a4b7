"""What servers read of an EAGLE-3 drafter, as the sources of their loaders say, and how they name it.

vLLM 0.33 (vllm/model_executor/models/llama_eagle3.py, v1/worker/gpu_model_runner.py) and SGLang 0.5.23
(python/sglang/srt/models/llama_eagle3.py, model_executor/model_runner.py).
"""

H, INNER, QUERIES, KEYS, V, DRAFT = "H", "I", "Q", "G", "V", "Vd"
TABLE = {  # name in the file: shape, dtype, vLLM's parameter (with its shard), SGLang's parameter (with its shard)
    "fc.weight": (H, "3H", None, "model.fc.weight", "model.fc.weight"),
    "midlayer.input_layernorm.weight": (H, None, None, "model.layers.0.input_layernorm.weight",
                                        "model.midlayer.input_layernorm.weight"),
    "midlayer.hidden_norm.weight": (H, None, None, "model.layers.0.hidden_norm.weight",
                                    "model.midlayer.hidden_norm.weight"),
    "midlayer.post_attention_layernorm.weight": (H, None, None, "model.layers.0.post_attention_layernorm.weight",
                                                 "model.midlayer.post_attention_layernorm.weight"),
    "midlayer.self_attn.q_proj.weight": (QUERIES, "2H", None, "model.layers.0.self_attn.qkv_proj.weight[q]",
                                         "model.midlayer.self_attn.qkv_proj.weight[q]"),
    "midlayer.self_attn.k_proj.weight": (KEYS, "2H", None, "model.layers.0.self_attn.qkv_proj.weight[k]",
                                         "model.midlayer.self_attn.qkv_proj.weight[k]"),
    "midlayer.self_attn.v_proj.weight": (KEYS, "2H", None, "model.layers.0.self_attn.qkv_proj.weight[v]",
                                         "model.midlayer.self_attn.qkv_proj.weight[v]"),
    "midlayer.self_attn.o_proj.weight": (H, QUERIES, None, "model.layers.0.self_attn.o_proj.weight",
                                         "model.midlayer.self_attn.o_proj.weight"),
    "midlayer.mlp.gate_proj.weight": (INNER, H, None, "model.layers.0.mlp.gate_up_proj.weight[0]",
                                      "model.midlayer.mlp.gate_up_proj.weight[0]"),
    "midlayer.mlp.up_proj.weight": (INNER, H, None, "model.layers.0.mlp.gate_up_proj.weight[1]",
                                    "model.midlayer.mlp.gate_up_proj.weight[1]"),
    "midlayer.mlp.down_proj.weight": (H, INNER, None, "model.layers.0.mlp.down_proj.weight",
                                      "model.midlayer.mlp.down_proj.weight"),
    "norm.weight": (H, None, None, "model.norm.weight", "model.norm.weight"),
    "lm_head.weight": (DRAFT, H, None, "lm_head.weight", "lm_head.weight"),
    "d2t": (DRAFT, None, "int64", "draft_id_to_target_id", "hot_token_id"),
    "t2d": (V, None, "bool", None, None),  # both leave it out
}  # fmt: skip
SHARDS = (("q_proj", "qkv_proj", "q"), ("k_proj", "qkv_proj", "k"), ("v_proj", "qkv_proj", "v"),
          ("gate_proj", "gate_up_proj", "0"), ("up_proj", "gate_up_proj", "1"))  # fmt: skip
ARCHITECTURE = "LlamaForCausalLMEagle3"  # SGLang's class; vLLM's registry knows it too


def _stacked(name):
    for own, stacked, shard in SHARDS:
        if f".{own}." in name:
            return f"{name.replace(own, stacked)}[{shard}]"
    return name


def vllm_parameter(name):
    """The parameter that vLLM loads a tensor of the file into, or None if it skips it."""
    if "t2d" in name:
        return None
    if "d2t" in name:
        return name.replace("d2t", "draft_id_to_target_id")
    name = name if "lm_head" in name else f"model.{name}"
    return _stacked(name.replace("midlayer.", "layers.0."))


def sglang_parameter(name):
    """The parameter that SGLang loads a tensor of the file into, or None if it skips it."""
    if "d2t" in name:
        return "hot_token_id"  # d2t plus the draft id
    if "t2d" in name:
        return None
    return _stacked(name if name == "lm_head.weight" else f"model.{name}")


def vllm_layers(config):
    """Number i: the hidden state that goes into layer i."""
    return config.get("eagle_aux_hidden_state_layer_ids") or config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]


def sglang_layers(config):
    """The same numbers: SGLang adds 1 to the config's, and taps what goes into that layer."""
    return [i + 1 for i in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
