"""Find code in a model that draws random numbers for each token: equal tokens of several rows then differ inside."""

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedConfig

_FIELD_WORDS = ("drop", "jitter", "noise")  # in the name of a field of a config


def what_is_random(model: Any, modules: list[nn.Module]) -> str | None:
    """Name what draws random numbers in a call of `model` now, or return None.

    Args:
        model ([`~transformers.PreTrainedModel`]): The model.
        modules (`list[nn.Module]`): Those of its modules that see tokens before the head.
    """
    for module in modules:
        if module.training and isinstance(module, _DropoutNd) and module.p > 0:
            return f"a {type(module).__name__} with p={module.p:g} is on"
    if not any(module.training for module in modules):
        return None
    # Functions of dropout, and of the noise of routers, that no module shows.
    for config in _with_parts(model.config):
        for name, value in vars(config).items():
            if isinstance(value, float) and value > 0 and any(word in name for word in _FIELD_WORDS):
                return f"{name} of its config is {value:g}"
    return None


def _with_parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Yield a config and those inside it: of the text, and of what looks at images or hears, which may draw too."""
    yield config
    for part in vars(config).values():
        if isinstance(part, PreTrainedConfig):
            yield from _with_parts(part)
