"""Checks the model: slow code, weights that are not loaded, adapters that servers do not accept."""

import inspect
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import PreTrainedModel

from liger_trainer.patching.core.binding import own_class
from liger_trainer.preflight.context import PreflightContext
from liger_trainer.varlen.proof import convolutions

_DISTRIBUTIONS = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d", "mamba_ssm": "mamba-ssm"}
TOKENIZER_CONFIG = "tokenizer_config.json"
_TOKENIZERS_OF_TRANSFORMERS_5 = ("TokenizersBackend", "SentencePieceBackend", "PythonBackend", "MistralCommonBackend")
_NOT_IN_SGLANG = ("in_proj_a", "in_proj_b")


def slow_attention(run: PreflightContext) -> str | None:
    """Warn if attention writes all scores to GPU memory."""
    implementation = getattr(run.text_config, "_attn_implementation", None)
    report = run.trainer.liger_report
    if not run.on_gpu or implementation != "eager" or (report is not None and report["varlen_attention"].swapped):
        return None
    return (
        "attn_implementation is 'eager', which writes all scores to memory. Load the model with "
        "attn_implementation='sdpa', or 'flash_attention_2' with the package flash-attn."
    )


def slow_layers(run: PreflightContext) -> str | None:
    """Warn if layers such as linear attention run in plain PyTorch on a GPU because a package is missing."""
    missing = missing_packages(run.model)
    if not run.on_gpu or not missing:
        return None
    return (
        f"layers of {type(run.model).__name__} run in plain PyTorch, which is several times slower, because "
        f"{' and '.join(missing)} cannot be imported. Run `pip install {' '.join(missing)}`."
    )


def missing_packages(model: PreTrainedModel) -> list[str]:
    """Return the distributions that code of `model` would call if they were installed, sorted.

    transformers chooses between a package and its own PyTorch code when a modeling file is imported. A convolution that
    `liger_triton` computes needs no package.
    """
    missing: set[str] = set()
    for module_class in {own_class(module) for module in model.modules()}:
        scope: dict[str, Any] = vars(sys.modules[module_class.__module__])
        ours = {name for name, _ in convolutions.replacement(scope)}
        forward = inspect.unwrap(module_class.forward)
        names = forward.__code__.co_names if isinstance(forward, types.FunctionType) else ()
        for name in set(names) - ours:
            package = _package_of_fallback(scope.get(name))
            if package is not None and not name.endswith("_update"):  # that one is only for generation
                missing.add(_DISTRIBUTIONS.get(package, package))
    return sorted(missing)


def _package_of_fallback(function: Any) -> str | None:
    """Return the package that a fallback of transformers stands in for, or None if `function` is not a fallback."""
    for _ in range(3):
        if not isinstance(function, types.FunctionType):
            return None
        held = inspect.getclosurevars(function).nonlocals
        if "is_new_implementation" in held:
            return None if held["is_new_implementation"] else held.get("package")
        function = held.get("func")
    return None


def unloaded_weights(run: PreflightContext) -> str | None:
    """Warn if the checkpoint has prediction layers (MTP) that transformers does not load."""
    base = run.trainer.base_checkpoint
    if base is None or not base.predicts or not hasattr(run.model, "state_dict"):
        return None
    if getattr(run.trainer.args, "trains_mtp", False):  # all of them are trained, some under other names in the model
        return None
    trained = {name for name, _ in run.model.named_parameters()}
    names = sorted(name for name in base.predicts if name not in trained)
    if not names:
        return None
    is_kept = getattr(run.trainer.args, "keep_unloaded_weights", True)
    fate = "are saved as they were" if is_kept else "are left out of what is saved"
    return (
        f"{len(names)} tensors of the checkpoint are prediction layers (MTP), such as {names[0]}, which transformers "
        f"does not load. They are not trained and {fate}; a server that drafts with them may see fewer drafts accepted."
    )


def served_adapter(run: PreflightContext) -> str | None:
    """Warn if servers would reject the adapter, or ignore a part of it."""
    reasons: list[str] = []
    for config in getattr(run.trainer.model, "peft_config", {}).values():
        if str(getattr(config.peft_type, "value", config.peft_type)) == "LORA":
            reasons.extend(_reasons_against(config, run.trainer.model))
    if not reasons:
        return None
    return (
        f"the adapter trains {'; '.join(dict.fromkeys(reasons))}. Merge it into its base before serving "
        "(`liger-trainer merge`), or leave these parts out."
    )


def _reasons_against(config: Any, model: PreTrainedModel) -> list[str]:
    adapted = _adapted_names(model)
    reasons = []
    if config.modules_to_save:
        reasons.append(f"whole modules ({', '.join(sorted(config.modules_to_save))}), which vLLM refuses")
    if getattr(config, "trainable_token_indices", None):
        reasons.append("rows of the embeddings (trainable_token_indices), which vLLM does not load")
    if config.use_dora:
        reasons.append("with DoRA, which vLLM refuses")
    if config.bias != "none":
        reasons.append(f"biases (bias={config.bias!r}), which vLLM does not load")
    if getattr(config, "target_parameters", None):
        reasons.append("experts (target_parameters), which servers take for some models only")
    dropped = sorted(adapted.intersection(_NOT_IN_SGLANG))
    if dropped:
        reasons.append(f"{' and '.join(dropped)}, which releases of SGLang leave out with a warning")
    if "embed_tokens" in adapted:
        reasons.append("embed_tokens, which vLLM and SGLang take for some models only")
    return reasons


def tokenizer_class(run: PreflightContext) -> str | None:
    """Warn if the tokenizer is saved under a class that transformers 4 does not know, and the base names another."""
    saved = type(run.tokenizer).__name__
    if saved not in _TOKENIZERS_OF_TRANSFORMERS_5:
        return None
    named = _named_tokenizer(getattr(run.tokenizer, "name_or_path", ""))
    if named is None or named in _TOKENIZERS_OF_TRANSFORMERS_5:
        return None
    return (
        f"the tokenizer is saved as tokenizer_class {saved!r}, where the base has {named!r}. Servers with transformers "
        f'4, such as older vLLM and SGLang, refuse that. For them, write "tokenizer_class": "{named}" into '
        "tokenizer_config.json of the saved model, or copy the base's tokenizer files."
    )


def _named_tokenizer(name: str) -> str | None:
    """Return the tokenizer class that the files of `name` give, a folder or a name in the Hub's cache; None without."""
    path: Any = Path(name, TOKENIZER_CONFIG) if os.path.isdir(name) else None
    if path is None:
        try:
            path = try_to_load_from_cache(name, TOKENIZER_CONFIG)
        except HFValidationError:  # the path of a folder that is gone, or an empty name
            return None
    if not isinstance(path, (str, Path)) or not os.path.isfile(path):
        return None
    named = json.loads(Path(path).read_text(encoding="utf-8")).get("tokenizer_class")
    return named if isinstance(named, str) else None


def _adapted_names(model: PreTrainedModel) -> set[str]:
    """Return the last part of the name of each module with a LoRA."""
    names = set()
    for path, module in model.named_modules():
        if len(getattr(module, "lora_A", ())) or len(getattr(module, "lora_embedding_A", ())):
            names.add(path.rpartition(".")[2])
    return names
