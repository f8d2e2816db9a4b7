"""The card of a model (`README.md`), which TRL writes before each checkpoint.

A card says what was trained. It is not worth a checkpoint: TRL's code for it asks trackers for addresses, and one whose
package is incomplete raises an error there, in the middle of a save.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from liger_trainer._logging import logger

if TYPE_CHECKING:  # the mixins of this package always go before a class of TRL
    from trl import SFTTrainer as StockTrainer
else:
    StockTrainer = object


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


def without_quick_start(card: str) -> str:
    """`card` without its example of `pipeline(model=...)`."""
    return re.sub("## Quick start\n.*?(?=## Training)", "", card, flags=re.DOTALL)


class WritesCards(StockTrainer):
    """TRL's card, whose errors do not end a save."""

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        with card_without_risk(self.args.output_dir):
            super().create_model_card(*args, **kwargs)
            if self.is_world_process_zero():
                self.complete_card(Path(self.args.output_dir, "README.md"))

    def complete_card(self, card: Path) -> None:
        """Change the card that TRL has written. Only the main process calls it."""
