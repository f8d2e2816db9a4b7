"""The tensors that servers read from an EAGLE-3 drafter and the names they give them, taken from their loaders.

Read in the wheels of vLLM 0.33.0 (model_executor/models/llama_eagle3.py, v1/worker/gpu_model_runner.py) and SGLang
0.5.23 (srt/models/llama_eagle3.py, srt/models/llama.py, .../model_runner_components/spec_aux_hidden_state.py).
"""

H = "H"
INNER = "I"
QUERIES = "Q"
KEYS = "G"
V = "V"
DRAFT = "Vd"
TABLE = {  # name in the file: shape, dtype if not the weights' dtype, parameter of both servers with its shard
    "fc.weight": (H, "3H", None, "model.fc.weight"),
    "midlayer.input_layernorm.weight": (H, None, None, "model.layers.0.input_layernorm.weight"),
    "midlayer.hidden_norm.weight": (H, None, None, "model.layers.0.hidden_norm.weight"),
    "midlayer.post_attention_layernorm.weight": (H, None, None, "model.layers.0.post_attention_layernorm.weight"),
    "midlayer.self_attn.q_proj.weight": (QUERIES, "2H", None, "model.layers.0.self_attn.qkv_proj.weight[q]"),
    "midlayer.self_attn.k_proj.weight": (KEYS, "2H", None, "model.layers.0.self_attn.qkv_proj.weight[k]"),
    "midlayer.self_attn.v_proj.weight": (KEYS, "2H", None, "model.layers.0.self_attn.qkv_proj.weight[v]"),
    "midlayer.self_attn.o_proj.weight": (H, QUERIES, None, "model.layers.0.self_attn.o_proj.weight"),
    "midlayer.mlp.gate_proj.weight": (INNER, H, None, "model.layers.0.mlp.gate_up_proj.weight[0]"),
    "midlayer.mlp.up_proj.weight": (INNER, H, None, "model.layers.0.mlp.gate_up_proj.weight[1]"),
    "midlayer.mlp.down_proj.weight": (H, INNER, None, "model.layers.0.mlp.down_proj.weight"),
    "norm.weight": (H, None, None, "model.norm.weight"),
    "lm_head.weight": (DRAFT, H, None, "lm_head.weight"),
    "d2t": (DRAFT, None, "int64", "draft ids"),  # vLLM: draft_id_to_target_id; SGLang: hot_token_id
    "t2d": (V, None, "bool", None),  # both skip it
}
SHARDS = (
    ("q_proj", "qkv_proj", "q"),
    ("k_proj", "qkv_proj", "k"),
    ("v_proj", "qkv_proj", "v"),
    ("gate_proj", "gate_up_proj", "0"),
    ("up_proj", "gate_up_proj", "1"),
)
ARCHITECTURE = "LlamaForCausalLMEagle3"  # SGLang's class, also in vLLM's registry


def _stacked(name):
    for own, stacked, shard in SHARDS:
        if f".{own}." in name:
            return f"{name.replace(own, stacked)}[{shard}]"
    return name


def vllm_parameter(name, has_all_tokens=False):
    """The parameter into which vLLM loads a tensor of the file, or None if it skips it. KeyError if it refuses it."""
    if "t2d" in name:
        return None
    if "d2t" in name:
        if has_all_tokens:
            raise KeyError("draft_id_to_target_id is None, and the loader finds no such parameter")
        return "draft ids"
    name = name if "lm_head" in name else f"model.{name}"
    return _stacked(name.replace("midlayer.", "layers.0."))


def sglang_parameter(name):
    """The parameter into which SGLang loads a tensor of the file, or None if it skips it."""
    name = name.replace("midlayer", "layers.0")
    if "d2t" in name:
        return "draft ids"
    if "t2d" in name:
        return None
    return _stacked(name if name == "lm_head.weight" else f"model.{name}")


def vllm_layers(config):
    """Layer numbers as vLLM reads them: number i is the hidden state that enters layer i."""
    return config.get("eagle_aux_hidden_state_layer_ids") or config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]


def sglang_layers(config):
    """The same numbers for SGLang, which adds 1 to the config's and reads the input of that layer."""
    return [i + 1 for i in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
