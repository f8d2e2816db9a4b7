"""Reads and writes the folder of a drafter: `config.json` and `model.safetensors`, named as vLLM and SGLang expect.

H hidden size of target and drafter, I intermediate size, Q query heads, G key heads, D head size, V and Vd the
vocabularies of target and drafter:

    fc.weight                                            (H, 3 H)
    midlayer.input_layernorm.weight                      (H,)    of the embedding of the token
    midlayer.hidden_norm.weight                          (H,)    of the hidden state
    midlayer.self_attn.q_proj.weight                     (Q D, 2 H)
    midlayer.self_attn.k_proj.weight, v_proj.weight      (G D, 2 H)
    midlayer.self_attn.o_proj.weight                     (H, Q D)
    midlayer.post_attention_layernorm.weight             (H,)
    midlayer.mlp.gate_proj.weight, up_proj.weight        (I, H)
    midlayer.mlp.down_proj.weight                        (H, I)
    norm.weight                                          (H,)
    lm_head.weight                                       (Vd, H)
    d2t                                                  (Vd,) int64: the target's id of a draft id, minus the draft id
    t2d                                                  (V,) bool: whether the drafter has the token

The file has no embeddings, so both servers use the target's. Older SGLang only reads the layer as `midlayer`. vLLM and
speculators call it `layers.0`, and that name is read too. With the whole vocabulary (Vd = V), the file has neither d2t
nor t2d, because vLLM then has no parameter for d2t and rejects it.
"""

import json
import os
from dataclasses import asdict, dataclass
from typing import Any

import torch
from safetensors.torch import load_file, save_file

DRAFTER_FOLDER = "eagle_drafter"  # in the output directory and in every checkpoint of the trainer
WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
LAYER = "midlayer."
_OTHER_LAYER = "layers.0."
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_SHAPE = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
_VOCABULARY = ("d2t", "t2d")


@dataclass(frozen=True)
class DrafterConfig:
    """The shape of a drafter, as in the `config.json` next to its weights.

    `layers` are the three hidden states of the target, numbered as in `output_hidden_states` of transformers: number i
    is the input of layer i, and number 0 the embeddings. None: the servers' default for this target. `target_dtype` is
    the dtype that the target had in training, such as "bfloat16".
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    layers: tuple[int, int, int] | None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048
    base_model_name_or_path: str | None = None
    target_dtype: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the keys and values of the file."""
        values = asdict(self)
        layers = values.pop("layers")
        values |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rope_scaling": None,
            "tie_word_embeddings": False,  # with true, SGLang would use the target's embeddings as the head
        }
        if layers is not None:
            values[_LAYERS] = list(layers)  # vLLM numbers them as we do
            # SGLang numbers layers by their outputs, and adds 1.
            values["eagle_config"] = {"use_aux_hidden_state": True, _LAYERS: [i - 1 for i in layers]}
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any], path: str) -> "DrafterConfig":
        """Return the config in the file `path`. ValueError for another architecture, or if a key is missing."""
        values = values.get("transformer_layer_config", {}) | values  # speculators nests the layer's shape there
        missing = [name for name in _SHAPE if name not in values]
        if missing:
            raise ValueError(f"{path} has no {missing[0]}, which the config of an EAGLE-3 drafter needs. Add it.")
        expected = {
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "norm_before_residual": False,
            "norm_before_fc": False,
            "norm_output": False,
            "fc_norm": False,
            "tie_word_embeddings": False,
            "target_hidden_size": values["hidden_size"],
        }
        for name, only in expected.items():
            if values.get(name, only) not in (only, None):
                raise ValueError(f"{path} says {name}: {values[name]!r}; only drafters with {only!r} are supported.")
        scaling = values.get("rope_scaling") or values.get("rope_parameters") or {}
        if scaling.get("rope_type", scaling.get("type", "default")) != "default":
            raise ValueError(f"{path} says rope_scaling: {scaling}; only drafters without scaling are supported.")
        heads = values["num_attention_heads"]
        optional = ("rms_norm_eps", "max_position_embeddings", "base_model_name_or_path", "target_dtype")
        return cls(
            **{name: values[name] for name in _SHAPE},
            head_dim=values.get("head_dim") or values["hidden_size"] // heads,
            draft_vocab_size=values.get("draft_vocab_size") or values["vocab_size"],
            layers=_layers_in(values, path),
            rope_theta=values.get("rope_theta") or scaling.get("rope_theta", 10000.0),
            **{name: values[name] for name in optional if values.get(name) is not None},
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the names of a drafter's tensors, and their shapes."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        layer = {
            "input_layernorm": (hidden,),
            "hidden_norm": (hidden,),
            "self_attn.q_proj": (queries, 2 * hidden),
            "self_attn.k_proj": (keys, 2 * hidden),
            "self_attn.v_proj": (keys, 2 * hidden),
            "self_attn.o_proj": (hidden, queries),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 3 * hidden)}
        shapes |= {f"{LAYER}{name}.weight": shape for name, shape in layer.items()}
        shapes["norm.weight"] = (hidden,)
        shapes["lm_head.weight"] = (self.draft_vocab_size, hidden)
        return shapes | {"d2t": (self.draft_vocab_size,), "t2d": (self.vocab_size,)}

    @property
    def has_all_tokens(self) -> bool:
        """Return whether the draft vocabulary is the target's, so that draft ids are token ids."""
        return self.draft_vocab_size == self.vocab_size


def drafter_folder(folder: str | os.PathLike) -> str:
    """Return `folder` if it holds a drafter, or else the drafter's folder in it. ValueError without a drafter."""
    for candidate in (os.fspath(folder), os.path.join(folder, DRAFTER_FOLDER)):
        if _is_drafter(candidate):
            return candidate
    raise ValueError(
        f"{os.fspath(folder)!r} has no EAGLE-3 drafter: neither a folder {DRAFTER_FOLDER}, nor a {WEIGHTS_FILE} and a "
        f"{CONFIG_FILE} with draft_vocab_size. Give the output_dir of an EAGLE training, or a drafter's folder."
    )


def has_drafter(folder: str | os.PathLike) -> bool:
    """Return whether `drafter_folder` finds a drafter."""
    return _is_drafter(os.fspath(folder)) or _is_drafter(os.path.join(folder, DRAFTER_FOLDER))


def _is_drafter(folder: str) -> bool:
    path = os.path.join(folder, CONFIG_FILE)
    if not os.path.isfile(path) or not os.path.isfile(os.path.join(folder, WEIGHTS_FILE)):
        return False
    with open(path, encoding="utf-8") as file:
        return "draft_vocab_size" in json.load(file)


def write_drafter(folder: str, config: DrafterConfig, tensors: dict[str, torch.Tensor]) -> None:
    """Write the two files, and create the folder if needed. ValueError if a tensor is missing or has a wrong shape."""
    check_tensors(config, tensors, "the drafter to be saved")
    os.makedirs(folder, exist_ok=True)
    left_out = _VOCABULARY if config.has_all_tokens else ()
    tensors = {name: tensor for name, tensor in tensors.items() if name not in left_out}
    save_file(tensors, os.path.join(folder, WEIGHTS_FILE), metadata={"format": "pt"})
    values = config.to_dict() | {"torch_dtype": str(tensors["fc.weight"].dtype).removeprefix("torch.")}
    with open(os.path.join(folder, CONFIG_FILE), "w", encoding="utf-8") as file:
        json.dump(values, file, indent=2)


def read_drafter(folder: str | os.PathLike) -> tuple[DrafterConfig, dict[str, torch.Tensor]]:
    """Return the shape of a drafter, and its tensors by the names of `EagleDrafter.state_dict()`.

    Embeddings in the file are ignored, since they are the target's. Without d2t and t2d, the drafter has all tokens.

    Raises:
        ValueError: The drafter is missing, it has another architecture, or the config contradicts the tensors.
    """
    folder = drafter_folder(folder)
    path = os.path.join(folder, CONFIG_FILE)
    with open(path, encoding="utf-8") as file:
        config = DrafterConfig.from_dict(json.load(file), path)
    tensors = {}
    for name, tensor in load_file(os.path.join(folder, WEIGHTS_FILE)).items():
        if name != "embed_tokens.weight":
            tensors[name.replace(_OTHER_LAYER, LAYER, 1)] = tensor
    if config.has_all_tokens and not any(name in tensors for name in _VOCABULARY):
        tensors["d2t"] = torch.zeros(config.vocab_size, dtype=torch.int64)
        tensors["t2d"] = torch.ones(config.vocab_size, dtype=torch.bool)
    check_tensors(config, tensors, os.path.join(folder, WEIGHTS_FILE))
    return config, tensors


def check_tensors(config: DrafterConfig, tensors: dict[str, torch.Tensor], where: str) -> None:
    """ValueError unless `tensors` are a drafter of this shape, and d2t and t2d name the same tokens."""
    shapes = config.shapes()
    differing = sorted(shapes.keys() ^ tensors.keys())
    if differing:
        state = "is missing" if differing[0] in shapes else "does not belong to a drafter"
        raise ValueError(f"{where}: {differing[0]} {state}.")
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise ValueError(f"{where}: {name} is {tuple(tensors[name].shape)}, and the config says {shape}.")
    d2t, t2d = tensors["d2t"].cpu(), tensors["t2d"].cpu()
    ids = torch.arange(len(d2t)) + d2t
    if d2t.dtype != torch.int64 or t2d.dtype != torch.bool or not torch.equal(ids, t2d.nonzero()[:, 0]):
        raise ValueError(
            f"{where}: d2t ({d2t.dtype}) and t2d ({t2d.dtype}) do not name the same tokens; expected int64 and bool, "
            "with draft id i standing for the i-th token of t2d."
        )


def _layers_in(values: dict[str, Any], path: str) -> tuple[int, int, int] | None:
    nested = (values.get("eagle_config") or {}).get(_LAYERS)
    layers = values.get(_LAYERS) or (nested and [i + 1 for i in nested])
    if layers is None:
        return None
    if len(layers) != 3:
        raise ValueError(f"{path} says {_LAYERS}: {layers}; only drafters that read three hidden states are supported.")
    return tuple(layers)
