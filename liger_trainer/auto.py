"""`AutoLigerKernelForCausalLM`, and `apply_liger_kernel_to_llama(model=...)` and so on for every model type."""

import difflib
import functools

from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from liger_trainer.patching import LigerReport, apply_liger, check_config

_PREFIX = "apply_liger_kernel_to_"


class AutoLigerKernelForCausalLM:
    """[`~transformers.AutoModelForCausalLM`] whose models come out patched: the same arguments, and `liger_config`."""

    def __init__(self):
        raise OSError(f"{type(self).__name__} is not instantiated; call its from_pretrained or from_config.")

    @classmethod
    def from_pretrained(cls, *args, liger_config: dict | None = None, **kwargs):
        """`AutoModelForCausalLM.from_pretrained(...)`, then `apply_liger(model, liger_config)`."""
        check_config(liger_config)  # before minutes of loading
        model = AutoModelForCausalLM.from_pretrained(*args, **kwargs)
        apply_liger(model, liger_config)
        return model

    @classmethod
    def from_config(cls, *args, liger_config: dict | None = None, **kwargs):
        """`AutoModelForCausalLM.from_config(...)`, then `apply_liger(model, liger_config)`."""
        check_config(liger_config)
        model = AutoModelForCausalLM.from_config(*args, **kwargs)
        apply_liger(model, liger_config)
        return model


def _model_types() -> dict[str, str]:
    """How a model type is written in the name of a function -> the model type."""
    return {name.replace("-", "_").replace(".", "_"): name for name in CONFIG_MAPPING_NAMES}


@functools.cache
def _function_for(model_type: str, name: str):
    def apply_liger_kernel(model=None, *, strict: bool = False, **config: bool) -> LigerReport:
        check_config(config)
        if model is None:
            raise ValueError(f"{name} patches one model: pass it, {name}(model=model). No class is patched here.")
        own = getattr(model, "config", None)
        types = {getattr(own, "model_type", None)}
        if hasattr(own, "get_text_config"):
            types.add(own.get_text_config().model_type)
        if model_type not in types:
            found = ", ".join(sorted(map(str, types)))
            raise ValueError(f"{name} got a model of type {found}; use apply_liger(model), which takes any.")
        return apply_liger(model, config, strict)

    apply_liger_kernel.__name__ = apply_liger_kernel.__qualname__ = name
    apply_liger_kernel.__doc__ = (
        f"`apply_liger` for a model of type {model_type}: {name}(model=model, rope=False, ...)."
    )
    return apply_liger_kernel


def __getattr__(name: str):
    if not name.startswith(_PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    types, wanted = _model_types(), name.removeprefix(_PREFIX)
    if wanted not in types:
        near = difflib.get_close_matches(wanted, types, n=1)
        hint = f"; did you mean {_PREFIX}{near[0]}?" if near else "."
        raise AttributeError(f"transformers has no model type {wanted!r}{hint} apply_liger(model) takes any model.")
    return _function_for(types[wanted], name)


def __dir__():
    return sorted([*globals(), *(_PREFIX + name for name in _model_types())])
