"""Checkpoints whose weights have other names than the model's.

transformers saves some models in the form of their files on the Hub, such as each expert by itself where the model has
one tensor for all. `from_pretrained` reads both forms. `Trainer` loads a checkpoint by name, and warns of what it does
not find: a resumed run would have the experts that it began with, and the best model the experts of the last step.
"""

import functools
import json
import os
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from liger_trainer.base_weights.shards import loaded_names
from liger_trainer.instance.binding import own_class

if TYPE_CHECKING:  # the mixins of this package always go before a class of transformers or TRL
    from transformers import Trainer as StockTrainer
else:
    StockTrainer = object


class LoadsRenamedWeights(StockTrainer):
    """Loads a checkpoint by `from_pretrained` where its weights have other names than the model's."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self._load_renamed(resume_from_checkpoint, self.model if model is None else model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if not self._load_renamed(str(self.state.best_model_checkpoint), self.model):
            super()._load_best_model()

    def _load_renamed(self, checkpoint: str, model: nn.Module) -> bool:
        """Load `checkpoint` into `model` if that takes more than its names. Returns whether it has been loaded."""
        if self.is_fsdp_enabled or self.is_deepspeed_enabled or not isinstance(model, PreTrainedModel):
            return False
        if _names_in(checkpoint) <= model.state_dict().keys():
            return False
        model_class: Any = own_class(model)
        # `model.dtype` is that of the first weight, and a router in fp32, say, would be rounded to it
        dtypes = (p.dtype for p in model.parameters() if p.is_floating_point())
        saved = model_class.from_pretrained(checkpoint, dtype=functools.reduce(torch.promote_types, dtypes))
        model.load_state_dict(saved.state_dict())
        return True


def _names_in(checkpoint: str) -> set[str]:
    """The names of the weights in a checkpoint of safetensors, but for what was only taken over from the base."""
    index, file = (os.path.join(checkpoint, name) for name in (SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME))
    if os.path.isfile(index):
        with open(index, encoding="utf-8") as text:
            return loaded_names(json.load(text))
    if not os.path.isfile(file):
        return set()
    with safe_open(file, "pt") as tensors:
        return set(tensors.keys())
