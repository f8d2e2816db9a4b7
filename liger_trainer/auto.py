"""`AutoLigerKernelForCausalLM`, and a function per model type, such as `apply_liger_kernel_to_llama(model=...)`."""

import difflib
import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from liger_trainer.patching import LigerReport, apply_liger, check_config

_PREFIX = "apply_liger_kernel_to_"
# Arguments of liger-kernel's from_pretrained that no config of transformers has: they can mean nothing else.
_SWITCHES_OF_LIGER = ("rope", "swiglu", "geglu", "cross_entropy", "fused_linear_cross_entropy")


class AutoLigerKernelForCausalLM:
    """[`~transformers.AutoModelForCausalLM`] that patches its models. Takes the same arguments, and `liger_config`."""

    def __init__(self) -> None:
        raise OSError(f"{type(self).__name__} is not instantiated; call its from_pretrained or from_config.")

    @classmethod
    def from_pretrained(cls, *args: Any, liger_config: dict | None = None, **kwargs: Any) -> PreTrainedModel:
        """`AutoModelForCausalLM.from_pretrained(...)`, then `apply_liger(model, liger_config)`."""
        check_config(liger_config)  # before the model is loaded, which may take minutes
        _refuse_switches(kwargs)
        model = AutoModelForCausalLM.from_pretrained(*args, **kwargs)
        apply_liger(model, liger_config)
        return model

    @classmethod
    def from_config(cls, *args: Any, liger_config: dict | None = None, **kwargs: Any) -> PreTrainedModel:
        """`AutoModelForCausalLM.from_config(...)`, then `apply_liger(model, liger_config)`."""
        check_config(liger_config)
        _refuse_switches(kwargs)
        model = AutoModelForCausalLM.from_config(*args, **kwargs)
        apply_liger(model, liger_config)
        return model


def _refuse_switches(kwargs: dict[str, Any]) -> None:
    given = {name: kwargs[name] for name in (*_SWITCHES_OF_LIGER, "rms_norm", "layer_norm") if name in kwargs}
    if any(name in given for name in _SWITCHES_OF_LIGER):
        config = {name: on for name, on in given.items() if name != "cross_entropy"}
        raise ValueError(
            f"{', '.join(given)}: single operations are switched in one argument here. Write liger_config={config!r}."
        )


def _model_types() -> dict[str, str]:
    """Maps each model type, spelt as in the name of its function, to the model type itself."""
    return {name.replace("-", "_").replace(".", "_"): name for name in CONFIG_MAPPING_NAMES}


@functools.cache
def _function_for(model_type: str, name: str) -> Callable[..., LigerReport]:
    def apply_liger_kernel(
        model: nn.Module | None = None, *, strict: bool = False, cross_entropy: bool = False, **config: bool
    ) -> LigerReport:
        if cross_entropy:
            raise ValueError(
                "cross_entropy=True: a cross-entropy of logits is not swapped here. Leave it out, and the loss is "
                "fused with the LM head; a loss of your own can call liger_trainer.LigerCrossEntropyLoss."
            )
        check_config(config)
        if model is None:
            given = "".join(f", {key}={value!r}" for key, value in config.items())
            raise ValueError(
                f"{name} patches one model that has been built, and not the classes of transformers, which other code "
                "uses too. Remove this line, and after the one that builds the model write "
                f"{name}(model=model{given})."
            )
        own = getattr(model, "config", None)
        types = {getattr(own, "model_type", None)}
        if own is not None and hasattr(own, "get_text_config"):
            types.add(own.get_text_config().model_type)
        if model_type not in types:
            found = ", ".join(sorted(map(str, types)))
            raise ValueError(
                f"{name} got a model of type {found}; use apply_liger(model), which takes a model of any type."
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
    types, wanted = _model_types(), name.removeprefix(_PREFIX)
    if wanted not in types:
        near = difflib.get_close_matches(wanted, types, n=1)
        hint = f"; did you mean {_PREFIX}{near[0]}?" if near else "."
        raise AttributeError(
            f"transformers has no model type {wanted!r}{hint} apply_liger(model) takes a model of any type."
        )
    return _function_for(types[wanted], name)


def __dir__() -> list[str]:
    return sorted([*globals(), *(_PREFIX + name for name in _model_types())])
