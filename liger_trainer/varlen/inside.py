"""Who is inside a backbone, beside the code that has been proven to work without padding: hooks, and other modules."""

from collections.abc import Callable, Iterator

from torch import nn

from liger_trainer.instance.binding import Binding, own_class
from liger_trainer.instance.hooks import has_hooks, hook_on

# Inputs that require gradients. Other hooks of PEFT say which adapter is for which row, or from which token on.
_HARMLESS_HOOKS = (
    "transformers.modeling_utils",
    "transformers.utils.",
    "peft.utils.",
    "peft.peft_model",
    "peft.helpers",
)
# Modules that the proof need not have run, since each token goes through them by itself.
_PER_TOKEN_FORWARDS = frozenset(
    kind.forward for kind in (nn.Module, nn.Linear, nn.Embedding, nn.Dropout, nn.Identity, nn.LayerNorm, nn.RMSNorm)
)
_PER_TOKEN_ROOMS = ("peft.tuners.", "peft.utils.", "bitsandbytes.", "transformers.integrations.", "liger_trainer.")
_NOT_PER_TOKEN = ("peft.tuners.adaption_prompt", "peft.tuners.xlora")


def why_whole(
    backbone: nn.Module, ours: Binding, forwards: frozenset | None, known: dict[type, Callable]
) -> str | None:
    """What somebody has put into the backbone that has to see a batch as it is: a hook, or code of theirs.

    A hook on the backbone itself would see zeros for padding. Every call asks this, and a model with adapters has
    thousands of modules, so that the walk looks no closer than it must.

    Args:
        ours (`Binding`): What we have bound to the backbone.
        forwards (`frozenset`, *optional*): The code that has been proven. Unset: any.
        known (`dict`): The classes of modules that have been found harmless, with their forwards. It is filled here.
    """
    if (why := hook_on(backbone, ours, _HARMLESS_HOOKS)) is not None:
        return f"{why} on the {type(backbone).__name__} would see rows without padding"
    for module in _inside(backbone):
        attributes = module.__dict__
        if (has_hooks(module) or "forward" in attributes) and (
            why := hook_on(module, Binding.of(module), _HARMLESS_HOOKS)
        ):
            return f"{why} on a {type(module).__name__} would see rows without padding"
        if attributes.get("_compiled_call_impl") is not None:
            return f"a {type(module).__name__} is compiled by itself, which each new length would do anew"
        kind = type(module)
        if known.get(kind) is not kind.forward:
            if (why := _why_unknown(module, forwards)) is not None:
                return why
            known[kind] = kind.forward
    return None


def unknown_module(backbone: nn.Module, forwards: frozenset | None) -> str | None:
    """A module inside `backbone` that may not take each token by itself, or None.

    `forwards` is the code that has been proven; None stands for any.
    """
    return next((why for module in _inside(backbone) if (why := _why_unknown(module, forwards)) is not None), None)


def _inside(backbone: nn.Module) -> Iterator[nn.Module]:
    """The modules inside `backbone`, those that it has in two places twice; `modules()` takes five times as long."""
    waiting = [backbone]
    while waiting:
        children = [child for child in waiting.pop()._modules.values() if child is not None]
        yield from children
        waiting += [child for child in children if child._modules]


def _why_unknown(module: nn.Module, forwards: frozenset | None) -> str | None:
    forward = getattr(own_class(module), "forward", None)
    if forwards is None or forward in forwards or _is_per_token(module):
        return None
    return f"it has a {type(module).__name__}, which may need the rows as they are"


def _is_per_token(module: nn.Module) -> bool:
    """Whether each token goes through `module` by itself, or `module` only holds others.

    A class that derives from a layer of PyTorch counts only with that layer's forward.
    """
    kind = own_class(module)
    room = kind.__module__
    return getattr(kind, "forward", None) in _PER_TOKEN_FORWARDS or (
        room.startswith(_PER_TOKEN_ROOMS) and not room.startswith(_NOT_PER_TOKEN)
    )
