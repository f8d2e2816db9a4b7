"""Writes the model card (`README.md`), which TRL's trainers write before each checkpoint.

If a trainer has its own text (`WritesCards.card_text`), that replaces TRL's text by the template `model_card.md`. The
metadata stay TRL's.

An error in the card must not cost a checkpoint. TRL's code asks trackers for their URLs, and a tracker with an
incomplete package raises there, in the middle of a save.
"""

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from liger_trainer._logging import logger

if TYPE_CHECKING:  # the mixins of this package always go before a class of TRL
    from trl import SFTTrainer as StockTrainer
else:
    StockTrainer = object

_TEMPLATE = Path(__file__).with_name("model_card.md")
_PACKAGES = {
    "TRL": "trl",
    "Transformers": "transformers",
    "PyTorch": "torch",
    "Datasets": "datasets",
    "Tokenizers": "tokenizers",
}
_ACCURACY = re.compile(r"^(?:mtp|medusa_head(?P<head>\d+)|eagle_step(?P<step>\d+))_accuracy$")


@contextmanager
def card_without_risk(folder: str | None) -> Iterator[None]:
    """Context manager: logs an error while a card is written as a warning with its reason, and goes on."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())
        logger.warning(
            f"The model card in {folder} cannot be written ({type(error).__name__}: {reason}). The model is saved "
            "without it. If a tracker is the cause, install what it needs, or take it out of report_to."
        )


@dataclass
class CardText:
    """The parts of a card that depend on the trainer.

    Attributes:
        base_model (`str`): The name of the fine-tuned model, for a model that is not on the Hub.
        quick_start (`bool`): Whether to show how to chat with the saved model by `pipeline`.
        trained (`str`): Markdown about the training: its data, its machine, its recipe.
    """

    base_model: str
    quick_start: bool = True
    trained: str = ""


class WritesCards(StockTrainer):
    """Writes TRL's card, or one with the trainer's own text. An error in the card does not end a save."""

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        with card_without_risk(self.args.output_dir):
            super().create_model_card(*args, **kwargs)
            text = self.card_text() if self.is_world_process_zero() else None
            if text is not None:
                _rewrite(Path(self.args.output_dir, "README.md"), self, text)

    def card_text(self) -> CardText | None:
        """Return the text of the card, or None to keep TRL's. Only the main process calls it."""
        return None


def accuracy_lines(log_history: list[dict[str, float]]) -> str:
    """Return the line of a model card about the guesses of heads, in Markdown, from the last log; empty without heads.

    Accuracies of an evaluation go before accuracies of training.
    """
    for prefix, source in (("eval_", "evaluation"), ("", "training")):
        for log in reversed(log_history):
            found = {}
            for name, value in log.items():
                match = _ACCURACY.match(name.removeprefix(prefix)) if name.startswith(prefix) else None
                if match is not None:
                    found[int(match["head"] or match["step"] or 1)] = value
            if found:
                shares = ", ".join(f"{found[place]:.3f}" for place in sorted(found))
                return f"- Right guesses of the heads, by position ahead ({source}): {shares}\n"
    return ""


class DescribedArguments(Protocol):
    """The trainer arguments that a card names."""

    output_dir: str


class DescribedTrainer(Protocol):
    """The trainer attributes that a card names. `_name` and `_paper` are TRL's."""

    args: DescribedArguments
    freezes_model: bool
    hub_model_id: str | None
    _name: str
    _paper: dict[str, str]


def _rewrite(path: Path, trainer: DescribedTrainer, text: CardText) -> None:
    """Rewrite TRL's card at `path`: keep its metadata, and replace its text by `text`."""
    from huggingface_hub import ModelCard

    data, folder = ModelCard.load(path).data, trainer.args.output_dir
    on_hub = data.get("base_model")
    card = ModelCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        model_name=data.get("model_name") or Path(folder).name,
        base_model=f"`{text.base_model}`" if on_hub is None else f"[{on_hub}](https://huggingface.co/{on_hub})",
        is_frozen=trainer.freezes_model,
        quick_start=text.quick_start,
        saved_as=trainer.hub_model_id or folder,
        method=trainer._name,
        paper=trainer._paper,
        trackers=_tracker_pages(),
        trained=text.trained,
        versions={name: version(package) for name, package in _PACKAGES.items()},
    )
    card.save(path)


def _tracker_pages() -> dict[str, str]:
    """Return the URLs of the run at its trackers, as TRL finds them."""
    from transformers import is_wandb_available
    from trl.trainer.utils import get_comet_experiment_url, get_trackio_space_url

    pages = {"Trackio": get_trackio_space_url(), "Comet": get_comet_experiment_url()}
    if is_wandb_available():
        run = importlib.import_module("wandb").run
        pages["Weights & Biases"] = None if run is None else run.url
    return {name: page for name, page in pages.items() if page is not None}
