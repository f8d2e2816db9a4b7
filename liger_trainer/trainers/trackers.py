"""Logs the errors of trackers (`report_to`) during training as warnings, and trains on.

A tracker may lose its server hours after the start. It only runs on the main process, so its error would end that
process in the middle of a step and leave the others waiting. Before training, it stays an error: the user should learn
at once that a tracker is set up wrongly.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from transformers import TrainerCallback
from transformers.integrations import integration_utils
from transformers.trainer_callback import CallbackHandler

from liger_trainer._logging import logger
from liger_trainer.feature import Feature, FeatureTrainer

_BEFORE_TRAINING = ("on_init_end", "on_train_begin")


class TrackedTrainer(FeatureTrainer, Protocol):
    """The trainer attribute that this feature reads. It only writes to the trackers."""

    callback_handler: CallbackHandler


class Trackers(Feature[object, TrackedTrainer]):
    """Turns errors of transformers' trackers into warnings during training, one for each event."""

    @contextmanager
    def around_training(self, trainer: TrackedTrainer) -> Iterator[None]:
        trackers = [callback for callback in trainer.callback_handler.callbacks if _is_tracker(callback)]
        guarded = []
        for tracker in trackers:
            for event in _events_of(tracker):
                setattr(tracker, event, _errors_as_warnings(getattr(tracker, event), type(tracker).__name__, event))
                guarded.append((tracker, event))
        try:
            yield
        finally:
            for tracker, event in guarded:
                vars(tracker).pop(event, None)


def _is_tracker(callback: TrainerCallback) -> bool:
    """Return True for trackers of transformers. A user's callback may raise an error to end the training."""
    return type(callback).__module__ == integration_utils.__name__


def _events_of(tracker: TrainerCallback) -> list[str]:
    """Return the events after the start of training that `tracker` handles."""
    kind = type(tracker)
    events = [name for name in dir(TrainerCallback) if name.startswith("on_") and name not in _BEFORE_TRAINING]
    return [name for name in events if getattr(kind, name) is not getattr(TrainerCallback, name)]


def _errors_as_warnings(method: Callable[..., Any], name: str, event: str) -> Callable[..., Any]:
    """Return `method` with its first error as a warning. Later errors are hidden: each step may repeat them."""
    warned = False

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal warned
        try:
            return method(*args, **kwargs)
        except Exception as error:
            if not warned:
                reason = " ".join(str(error).split())
                logger.warning(
                    f"{name}.{event} raised {type(error).__name__}: {reason}. The training goes on, and further errors "
                    "of this call are not shown. The tracker may miss values; take it out of report_to if it stays so."
                )
            warned = True
            return None

    return call
