"""liger-kernel's names: `AutoLigerKernelForCausalLM`, and `apply_liger_kernel_to_llama(model=...)` for each type."""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from liger_trainer.patching import LigerReport, apply_liger, check_config

_PREFIX = "apply_liger_kernel_to_"


class AutoLigerKernelForCausalLM:
    """Patches the models of [`~transformers.AutoModelForCausalLM`]. Takes its arguments and `liger_config`.

        model = AutoLigerKernelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B", liger_config={"rope": False})

    The result is transformers' own class, patched by [`apply_liger`]. A ValueError names an unknown key of
    `liger_config` before anything is loaded.
    """

    @classmethod
    def from_pretrained(cls, *args: Any, liger_config: dict | None = None, **kwargs: Any) -> PreTrainedModel:
        """Call `AutoModelForCausalLM.from_pretrained(...)`, then `apply_liger(model, liger_config)`."""
        check_config(liger_config)  # raise before loading the model, which may take minutes
        model = AutoModelForCausalLM.from_pretrained(*args, **kwargs)
        apply_liger(model, liger_config)
        return model

    @classmethod
    def from_config(cls, *args: Any, liger_config: dict | None = None, **kwargs: Any) -> PreTrainedModel:
        """Call `AutoModelForCausalLM.from_config(...)`, then `apply_liger(model, liger_config)`."""
        check_config(liger_config)
        model = AutoModelForCausalLM.from_config(*args, **kwargs)
        apply_liger(model, liger_config)
        return model


def _model_types() -> dict[str, str]:
    """Map the spelling in a function's name to the model type: `xlm_roberta` to `xlm-roberta`, for example."""
    return {name.replace("-", "_").replace(".", "_"): name for name in CONFIG_MAPPING_NAMES}


@functools.cache
def _function_for(model_type: str, name: str) -> Callable[..., LigerReport]:
    def apply_liger_kernel(
        model: nn.Module | None = None, *, strict: bool = False, cross_entropy: bool = False, **config: bool
    ) -> LigerReport:
        if cross_entropy:
            raise ValueError(
                "cross_entropy is True, but the cross-entropy of logits is not swapped here. Leave it out: the loss is "
                "fused with the LM head."
            )
        if model is None:
            raise ValueError(
                f"{name} patches a built model instead of the classes of transformers. After the line that builds the "
                f"model, write {name}(model=model)."
            )
        return apply_liger(model, config, strict)

    apply_liger_kernel.__name__ = apply_liger_kernel.__qualname__ = name
    apply_liger_kernel.__doc__ = (
        f"`apply_liger` for a model of type {model_type}, after it is built: {name}(model=model, rope=False, ...)."
    )
    return apply_liger_kernel


def __getattr__(name: str) -> Callable[..., LigerReport]:
    if not name.startswith(_PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    types = _model_types()
    spelling = name.removeprefix(_PREFIX)
    if spelling not in types:
        raise AttributeError(f"transformers has no model type {spelling!r}; apply_liger(model) takes any model.")
    return _function_for(types[spelling], name)


def __dir__() -> list[str]:
    return sorted([*globals(), *(_PREFIX + name for name in _model_types())])
