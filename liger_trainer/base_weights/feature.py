"""The option `keep_unloaded_weights`: saved models keep the weights of the base that transformers does not load."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import nn
from transformers import PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled

from liger_trainer._logging import logger
from liger_trainer.base_weights.unloaded import Base, KeptWeights, find_checkpoint, keep_unloaded_weights
from liger_trainer.feature import Feature, FeatureTrainer


@dataclass
class BaseWeightsFields:
    """The field of `keep_unloaded_weights`."""

    keep_unloaded_weights: bool = field(
        default=True,
        metadata={
            "help": "Saved models have the weights of the base that transformers does not load, such as prediction "
            "layers (MTP), untrained and bit for bit. False: they are left out, and config.json counts no prediction "
            "layers."
        },
    )


class BaseWeightsArguments(Protocol):
    """The trainer arguments that this feature reads."""

    keep_unloaded_weights: bool
    output_dir: str | None
    should_save: bool


class SavingTrainer(FeatureTrainer, Protocol):
    """The trainer attributes that this feature reads. It writes the last two."""

    args: BaseWeightsArguments
    model: nn.Module
    base_checkpoint: Base | None
    kept_weights: KeptWeights | None


class BaseWeights(Feature[BaseWeightsArguments, SavingTrainer]):
    """Finds the base when a trainer is built, and copies its unloaded weights when the trainer saves.

    Every checkpoint of a whole model gets them. The last one is not known in advance, the best one may be served, and
    one more layer is smaller than its optimizer state would be.
    """

    def check(self, args: BaseWeightsArguments) -> None:
        if not isinstance(args.keep_unloaded_weights, bool):
            raise ValueError(f"keep_unloaded_weights is {args.keep_unloaded_weights!r}; expected true or false.")

    def check_trainer(self, trainer: SavingTrainer) -> None:
        """Find the base. Raise if saving would overwrite the prediction layers that have to be kept."""
        if not trainer.args.should_save:
            return
        base = _base_of(trainer.model, getattr(trainer.args, "model_init_kwargs", None) or {})
        trainer.base_checkpoint = base
        folder = trainer.args.output_dir
        if base is None or folder is None or not _keeps(trainer.args) or not base.predicts:
            return
        if Path(folder).resolve() == base.folder.resolve():
            raise ValueError(
                f"output_dir is {folder!r}, the folder of the base, so its prediction layers would be overwritten. Set "
                "another output_dir, or keep_unloaded_weights: false."
            )

    def after_save(self, trainer: SavingTrainer, folder: Path) -> None:
        if not isinstance(trainer.model, PreTrainedModel):  # an adapter needs none: its base has them
            return
        previous = trainer.kept_weights
        kept_weights = keep_unloaded_weights(trainer.model, trainer.base_checkpoint, folder, _keeps(trainer.args))
        trainer.kept_weights = kept_weights
        if str(kept_weights) and kept_weights != previous:
            is_unwanted = kept_weights.reason is not None and _keeps(trainer.args)
            log = logger.warning if is_unwanted else logger.info
            log(f"{folder}: {kept_weights}")


def _keeps(args: BaseWeightsArguments) -> bool:
    return getattr(args, "keep_unloaded_weights", True)  # stock arguments have no such field


def _base_of(model: nn.Module, init: dict[str, Any]) -> Base | None:
    """Return the checkpoint that `model` was loaded from, or None for an adapter and for a model built from a config.

    The config names a folder in both cases, so this looks at what loading leaves on the model. `init` is the trainer's
    `model_init_kwargs`, for revision and subfolder. Without them a Hub model is taken for its main branch.
    """
    if not isinstance(model, PreTrainedModel):
        return None
    was_loaded = "_weight_conversions" in vars(model) or "hf_quantizer" in vars(model)
    if not was_loaded and not is_deepspeed_zero3_enabled():
        return None
    return find_checkpoint(model.name_or_path, init.get("revision"), init.get("subfolder") or "")
