"""The option `keep_unloaded_weights`: saved models have what the base has and transformers does not load."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled

from liger_trainer._logging import logger
from liger_trainer.base_weights.unloaded import Base, find_checkpoint, keep_unloaded_weights
from liger_trainer.feature import Feature


@dataclass
class BaseWeightsFields:
    """The field of `keep_unloaded_weights`."""

    keep_unloaded_weights: bool = field(
        default=True,
        metadata={
            "help": "Saved models have the weights of the base that transformers does not load, such as prediction "
            "layers (MTP), untrained and bit for bit. False: they are left out, and config.json says that there are no "
            "prediction layers."
        },
    )


class BaseWeights(Feature):
    """`keep_unloaded_weights`. The base is looked up when a trainer is built, and read when it saves.

    Every checkpoint with a whole model gets them, not only the last: which one is the last is not known in advance, the
    best one is loaded and served too, and one layer more costs less than the optimizer's state of that layer would.
    """

    def check(self, args: Any) -> None:
        if not isinstance(args.keep_unloaded_weights, bool):
            raise ValueError(f"keep_unloaded_weights is {args.keep_unloaded_weights!r}; expected true or false.")

    def check_trainer(self, trainer: Any) -> None:
        """Find the base. ValueError if the model would be saved over the prediction layers that it has to keep."""
        if not trainer.args.should_save:
            return
        base = _base_of(trainer.model, getattr(trainer.args, "model_init_kwargs", None) or {})
        trainer.base_checkpoint = base
        folder = trainer.args.output_dir
        if base is None or folder is None or not _keeps(trainer.args) or not base.predicts:
            return
        if Path(folder).resolve() == base.folder.resolve():
            raise ValueError(
                f"output_dir is {folder!r}, the folder of the base, whose prediction layers would be overwritten. Set "
                "another output_dir, or keep_unloaded_weights: false."
            )

    def after_save(self, trainer: Any, folder: Path) -> None:
        if not isinstance(trainer.model, PreTrainedModel):  # an adapter is loaded onto its base, which has them
            return
        known = trainer.kept_weights
        kept = keep_unloaded_weights(trainer.model, trainer.base_checkpoint, folder, _keeps(trainer.args))
        trainer.kept_weights = kept
        if str(kept) and kept != known:
            say = logger.warning if kept.reason is not None and _keeps(trainer.args) else logger.info
            say(f"{folder}: {kept}")


def _keeps(args: Any) -> bool:
    return getattr(args, "keep_unloaded_weights", True)  # stock arguments have no such field


def _base_of(model: Any, init: dict[str, Any]) -> Base | None:
    """The checkpoint that `model` was loaded from; None for an adapter, and for a model that was made from a config.

    Only a model knows whether its weights came from files: its config names a folder in both cases. A revision is known
    from `init`, a trainer's `model_init_kwargs`; a model of the Hub that was loaded without them is that of its main
    branch.
    """
    if not isinstance(model, PreTrainedModel):
        return None
    was_loaded = "_weight_conversions" in vars(model) or "hf_quantizer" in vars(model)
    if not was_loaded and not is_deepspeed_zero3_enabled():
        return None
    return find_checkpoint(model.name_or_path, init.get("revision"), init.get("subfolder") or "")
