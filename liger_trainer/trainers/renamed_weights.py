"""Loads checkpoints with other weight names than the model's.

transformers saves some models in the format of their Hub files, for example with one tensor per expert where the model
has a single tensor. `from_pretrained` reads both formats. `Trainer` loads by name and only warns about missing names: a
resumed run would keep its initial experts, and the best model would get the experts of the last step.
"""

import functools
import json
import os
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from liger_trainer.base_weights.shards import loaded_names
from liger_trainer.patching.core import probe
from liger_trainer.patching.core.binding import own_class

if TYPE_CHECKING:  # the mixins of this package always go before a class of transformers or TRL
    from transformers import Trainer as StockTrainer
else:
    StockTrainer = object


class LoadsRenamedWeights(StockTrainer):
    """Loads a checkpoint through `from_pretrained` if its weights have other names than the model's.

    The weights go into the modules that the model has now, even if its class and config would build others.
    """

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self._load_renamed(resume_from_checkpoint, self.model if model is None else model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if not self._load_renamed(str(self.state.best_model_checkpoint), self.model):
            super()._load_best_model()

    def _load_renamed(self, checkpoint: str, model: nn.Module) -> bool:
        """Load `checkpoint` into `model` if their names differ. Return True if it was loaded."""
        if self.is_fsdp_enabled or self.is_deepspeed_enabled or not isinstance(model, PreTrainedModel):
            return False
        if _names_in(checkpoint) <= model.state_dict().keys():
            return False
        # Not `model.dtype`: that is the first weight's dtype, and an fp32 router would be rounded to it
        dtypes = (p.dtype for p in model.parameters() if p.is_floating_point())
        saved, loading_info = _class_without_constructor(model).from_pretrained(
            checkpoint, dtype=functools.reduce(torch.promote_types, dtypes), output_loading_info=True
        )
        missing = sorted(loading_info["missing_keys"])
        if missing:
            raise RuntimeError(
                f"{checkpoint} lacks {len(missing)} weights of the model, such as {missing[0]}, so it cannot be "
                f"loaded. Load it into the model that wrote it, or start a new run without it."
            )
        model.load_state_dict(saved.state_dict())
        return True


def _class_without_constructor(model: PreTrainedModel) -> Any:
    """Return a subclass of `model`'s class. Its constructor copies the modules of `model`, without weights.

    `from_pretrained` builds a model from its class and config. That would miss modules that were added to `model` or
    removed from it, and arguments of its constructor.
    """
    model_class: Any = own_class(model)

    def new(cls: type, *args: Any, **kwargs: Any) -> PreTrainedModel:
        return _without_weights(model, {})  # not an instance of `cls`, so Python does not call `__init__`

    names = {"__new__": new, "__module__": model_class.__module__, "__qualname__": model_class.__qualname__}
    return type(model_class.__name__, (model_class,), names)


def _without_weights(module: Any, done: dict[int, Any]) -> Any:
    """Return a copy of `module` with its attributes and children, without hooks, and with parameters on `meta`.

    `done` maps ids of modules and parameters to their copies, since several modules may share them.
    """
    if id(module) in done:
        return done[id(module)]
    twin = done[id(module)] = object.__new__(own_class(module))
    state = {name: value for name, value in module.__dict__.items() if not name.startswith("_liger_")}
    for slot in (*probe.SLOTS, "_hf_hook"):
        state.pop(slot, None)
    for name, value in state.items():
        if name.endswith("_hooks") or name.startswith(("_forward_hooks_", "_forward_pre_hooks_")):
            state[name] = OrderedDict() if isinstance(value, dict) else value
    twin.__dict__.update(state)
    for parameter in module._parameters.values():
        if parameter is not None and id(parameter) not in done:
            empty = torch.empty_like(parameter, device="meta")
            done[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    twin.__dict__["_parameters"] = {n: None if p is None else done[id(p)] for n, p in module._parameters.items()}
    twin.__dict__["_buffers"] = {n: None if b is None else b.detach().clone() for n, b in module._buffers.items()}
    twin.__dict__["_non_persistent_buffers_set"] = {*module._non_persistent_buffers_set}
    children = module._modules.items()
    twin.__dict__["_modules"] = {n: None if c is None else _without_weights(c, done) for n, c in children}
    return twin


def _names_in(checkpoint: str) -> set[str]:
    """Return the names of the weights in a safetensors checkpoint, except those that were copied from the base."""
    index, file = (os.path.join(checkpoint, name) for name in (SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME))
    if os.path.isfile(index):
        with open(index, encoding="utf-8") as text:
            return loaded_names(json.load(text))
    if not os.path.isfile(file):
        return set()
    with safe_open(file, "pt") as tensors:
        return set(tensors.keys())
