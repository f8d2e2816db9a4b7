"""Finds the weights of a base that transformers does not load, and adds them to the saved model.

Many models come with prediction layers (MTP: `mtp.*`, or `model.layers.N` beyond the depth). transformers ignores them,
but the config.json that it saves still counts them, so a server looks for them.

The names in the files decide: the base's names are compared with the saved model's. transformers saves under the base's
names, so renaming while a class loads does not matter.

Model types of transformers 5.24 that ignore such layers (`_keys_to_ignore_on_load_unexpected`):

- under a name with `mtp`: deepseek_v4, dots3_note, ernie4_5_moe, exaone4_5, exaone_moe, granite_docling, hy_v4,
  hy_v4_vl, inkling, longcat_flash, mellum, mimo_v2_flash, minimax_m3_vl, mistral_large4, nemotron3_5_transcribe,
  nemotron_h, olmo_hybrid, qwen3_5, qwen3_5_moe, qwen3_next, qwen4_exp
- as layers beyond the depth: bailing_hybrid, deepseek_v3, deepseek_v32, dots3_note, glm4_moe, glm4_moe_lite, glm4v_moe,
  glm5_next, glm_moe_dsa, glm_ocr, hy_v3, step3p7

The code does not use these lists. A new type works if its names have one of the two forms.
"""

import functools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import PreTrainedModel

from liger_trainer.base_weights.shards import StoredTensor, add_shards, drop_old_index, files_of, tensors_of
from liger_trainer.patching.core.binding import own_class

_PREDICTS = re.compile(r"(?:^|\.)(?:mtp|nextn)[^.]*\.")
_LAYER = re.compile(r"^(?P<prefix>(?:.*\.)?layers\.)(?P<number>\d+)\.")
# Old checkpoints store these, but every class computes them. A server would take them for unknown weights.
_COMPUTED = re.compile(r"inv_freq$|attn\.bias$|attention\.bias$|masked_bias$|causal_mask$|relative_position_index$")
# Keys of config.json that count prediction layers, in all model types of transformers
_COUNTS = re.compile(r"^(num_nextn_predict_layers|mtp_num(_hidden)?_layers|num_mtp_(layers|modules)|num_mtp)$")
SIXTEEN_BITS_OR_MORE = ("BF16", "F16", "F32", "F64")


@dataclass(frozen=True)
class KeptWeights:
    """Counts the weights that were copied from the base to a saved model, or says why none were.

    Attributes:
        parameters (`int`): Number of elements in the copied tensors.
        tensors (`int`): Number of copied tensors.
        reason (`str` or `None`): Why the base's prediction layers were left out. config.json then counts none. None if
            nothing was left out.
    """

    parameters: int = 0
    tensors: int = 0
    reason: str | None = None

    def __str__(self) -> str:
        lines = []
        if self.tensors:
            lines.append(
                f"{self.tensors} tensors of the base that transformers does not load are kept as they were "
                f"({self.parameters:,} parameters, not trained)"
            )
        if self.reason is not None:
            lines.append(f"prediction layers (MTP) of the base are left out, and config.json says so: {self.reason}")
        return "; ".join(lines)


@dataclass(frozen=True)
class Base:
    """The checkpoint that a model was loaded from: its config.json, and its tensors by name.

    `unread` is the reason if the tensors could not be read, else None.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, StoredTensor]
    unread: str | None = None

    @functools.cached_property
    def predicts(self) -> dict[str, StoredTensor]:
        """The tensors of prediction layers, recognised by name."""
        beyond = _beyond_depth(self.config)
        layers = _layers_in(self.tensors)
        return {name: tensor for name, tensor in self.tensors.items() if _is_prediction(name, layers, beyond)}

    @property
    def prediction_counts(self) -> dict[str, int]:
        """The fields of config.json, or of its text config, that count prediction layers."""
        fields = self.config | _text(self.config)
        return {key: value for key, value in fields.items() if _COUNTS.match(key) and isinstance(value, int)}


def find_checkpoint(name: str, revision: str | None = None, subfolder: str = "") -> Base:
    """Return the checkpoint in the folder `name`, or with this name in the Hub's cache.

    Only safetensors are read: all models with prediction layers use them, and tensors of a `.bin` cannot be copied as
    bytes. For a `.bin`, a GGUF file or a missing folder, `unread` of the result is the reason.
    """
    folder = Path(name, subfolder) if Path(name).is_dir() else _cached_folder(name, revision, subfolder)
    if folder is None or not (folder / "config.json").is_file():
        return Base(Path(name), {}, {}, f"{name!r} is neither a folder with a config.json nor in the Hub's cache")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    files = files_of(folder)
    missing = [str(file) for file in files if not file.is_file()]
    if not files:
        bin_files = sorted(path.name for path in folder.glob("*.bin"))[:3]
        reason = f"only safetensors are read, and the weights in {folder} are: {', '.join(bin_files) or 'none'}"
        return Base(folder, config, {}, reason)
    if missing:
        return Base(folder, config, {}, f"{missing[0]} is missing")
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        tensors.update(tensors_of(file))
    return Base(folder, config, tensors)


def _cached_folder(name: str, revision: str | None, subfolder: str) -> Path | None:
    """Return the folder of a model in the Hub's cache, or None if it is not there or `name` is not a Hub name."""
    prefix = f"{subfolder}/" if subfolder else ""
    try:
        config_path = try_to_load_from_cache(name, f"{prefix}config.json", revision=revision)
    except HFValidationError:  # the path of a folder that is gone, or an empty name
        return None
    return Path(config_path).parent if isinstance(config_path, str) else None


def keep_unloaded_weights(model: PreTrainedModel, base: Base | None, folder: Path, keep: bool = True) -> KeptWeights:
    """Copy the weights of `base` that the class of `model` does not load to the model saved in `folder`, bit for bit.

    Call it on the main process, right after `save_pretrained`. The names stay the base's, because servers look for
    them. If `keep` is false or prediction layers do not fit the saved model, they are left out and config.json counts
    none.
    """
    if not files_of(folder):  # only an adapter was saved, or a `.bin`
        return KeptWeights()
    drop_old_index(folder)
    if base is None:
        return KeptWeights()
    saved: set[str] = set()  # names of the saved tensors
    for file in files_of(folder):
        saved.update(tensors_of(file))
    config_path = folder / "config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))

    # Which prediction layers to copy, or the reason why none are.
    in_base = base.predicts
    predicts = _predictions(base, saved)
    reason = None
    if base.unread is not None:
        reason = _why_unread(base.unread, config, saved, keep)
    elif in_base and not any(name in saved for name in in_base):  # else the class has loaded and trained them
        reason = _why_left_out(base, config, predicts, keep)
    copied = {} if reason is not None else predicts
    if keep:  # and the other tensors that the class ignores
        copied = copied | _declared(model, base, saved | in_base.keys(), config)
    changed_file = _changed_file(copied)
    if copied and folder.resolve() == base.folder.resolve():
        changed_file = f"{folder}, where the trained model is saved now"
    if changed_file is not None:  # leave them out instead of raising: the trained model is already saved
        copied = {}
        reason = f"they are no longer in {changed_file}"
    if copied:
        add_shards(folder, copied)
    if reason is not None:
        _zero_counts(config)
        config_path.write_text(f"{json.dumps(config, indent=2, sort_keys=True)}\n", encoding="utf-8")
    return KeptWeights(sum(tensor.num_elements for tensor in copied.values()), len(copied), reason)


def _predictions(base: Base, saved: set[str]) -> dict[str, StoredTensor]:
    """Return the prediction layers of `base` that continue the layers of the saved model or have an `mtp` name."""
    beyond = _beyond_depth(base.config)
    layers = _layers_in(saved)
    predictions = {}
    for name, tensor in base.predicts.items():
        if name not in saved and _is_prediction(name, layers, beyond):
            predictions[name] = tensor
    return predictions


def _beyond_depth(config: dict[str, Any]) -> range:
    """Return the numbers of the prediction layers that config.json counts after the last layer.

    A number alone does not decide: some checkpoints number their layers differently from the model.
    """
    depth = _text(config).get("num_hidden_layers") or 0
    return range(depth, depth + (_count(config) or _count(_text(config))))


def _count(config: dict[str, Any]) -> int:
    counts = [value for key, value in config.items() if _COUNTS.match(key) and isinstance(value, int)]
    return max(counts, default=0)


def _layers_in(names: Iterable[str]) -> set[tuple[str, int]]:
    """Return (prefix, number) of each layer in `names`: `model.layers.3.a` gives `("model.layers.", 3)`."""
    matches = (_LAYER.match(name) for name in names)
    return {(layer["prefix"], int(layer["number"])) for layer in matches if layer is not None}


def _is_prediction(name: str, layers: set[tuple[str, int]], beyond: range) -> bool:
    """Return whether `name` is a weight of a prediction layer of a model with `layers`.

    A layer beyond the depth counts if the model's last layer has the same prefix. Towers have layers too, sometimes
    more than the language model.
    """
    if _PREDICTS.search(name):
        return True
    layer = _LAYER.match(name)
    if layer is None or int(layer["number"]) not in beyond:
        return False
    prefix = layer["prefix"]
    return (prefix, beyond.start - 1) in layers and _is_of_text(prefix)


def _is_of_text(prefix: str) -> bool:
    return re.search(r"vision|visual|audio|image|tower|encoder", prefix) is None


def _changed_file(tensors: dict[str, StoredTensor]) -> str | None:
    """Return the first file that no longer has one of `tensors` at its offsets, or None.

    A training takes days. If the base is downloaded or saved again meanwhile, other bytes are at these offsets.
    """
    for file in sorted({tensor.file for tensor in tensors.values()}):
        expected = {name: tensor for name, tensor in tensors.items() if tensor.file == file}
        try:
            current = tensors_of(file)
        except (OSError, ValueError):
            return str(file)
        end = max(tensor.end for tensor in expected.values())
        if file.stat().st_size < end or any(current.get(name) != tensor for name, tensor in expected.items()):
            return str(file)
    return None


def _why_unread(unread: str, config: dict[str, Any], saved: set[str], keep: bool) -> str | None:
    """Return why the saved model lacks the prediction layers that `config` counts, or None if it lacks none.

    The weights of the base are unknown here, so only `config` and the saved names are compared.
    """
    counted = _count(config) or _count(_text(config))
    layers = _layers_in(saved)
    beyond = _beyond_depth(config)
    if not counted or any(_is_prediction(name, layers, beyond) for name in saved):
        return None
    return unread if keep else "keep_unloaded_weights is false"


def _why_left_out(base: Base, config: dict[str, Any], predicts: dict[str, StoredTensor], keep: bool) -> str | None:
    """Return why the prediction layers of `base` do not fit the saved model, or None if they do."""
    if not keep:
        return "keep_unloaded_weights is false"
    old, new = _text(base.config), _text(config)
    for key in ("num_hidden_layers", "hidden_size"):
        if old.get(key) != new.get(key):
            return f"{key} was {old.get(key)} in the base and is {new.get(key)}"
    vocabulary = old.get("vocab_size")
    sized = [name for name, tensor in predicts.items() if tensor.shape and tensor.shape[0] == vocabulary]
    if vocabulary != new.get("vocab_size") and sized:
        return f"{sized[0]} has the base's {vocabulary} tokens, and the model has {new.get('vocab_size')}"
    if not predicts:
        return "the saved model has its layers under other names than the base"
    packed = [name for name, tensor in predicts.items() if tensor.dtype not in SIXTEEN_BITS_OR_MORE]
    if packed and "quantization_config" not in config:
        return f"{packed[0]} is quantized ({predicts[packed[0]].dtype}), and the saved model is not"
    return None


def _declared(model: PreTrainedModel, base: Base, known: set[str], config: dict[str, Any]) -> dict[str, StoredTensor]:
    """Return the tensors that the class of `model` declares to ignore, without the names in `known`.

    Only the class that the base's config.json names counts. Another class, such as the text-only one, leaves the rest
    out on purpose.
    """
    model_class = own_class(model).__name__
    if model_class not in (base.config.get("architectures") or ()):
        return {}
    patterns = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    depth = _text(config).get("num_hidden_layers") or 0
    is_cut = depth != _text(base.config).get("num_hidden_layers")  # loaded with fewer layers than the base has
    declared = {}
    for name, tensor in base.tensors.items():
        if name in known or _COMPUTED.search(name):
            continue
        layer = _LAYER.match(name)
        if is_cut and layer is not None and int(layer["number"]) >= depth:
            continue
        if any(pattern.search(name) for pattern in patterns):
            declared[name] = tensor
    return declared


def _text(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a config.json that describes the language model."""
    text: dict[str, Any] = config.get("text_config") or config
    return text


def _zero_counts(config: dict[str, Any]) -> None:
    """Set every count of prediction layers in `config` to 0, also in nested configs."""
    for key, value in config.items():
        if isinstance(value, dict):
            _zero_counts(value)
        elif _COUNTS.match(key) and value:
            config[key] = 0
