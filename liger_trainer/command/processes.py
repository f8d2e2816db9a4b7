"""The processes of a launch: which one this is, messages from the main process only, and what all agree on."""

import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from liger_trainer.errors import RecipeError, without_tokens


def is_main_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def launched_processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def say(line: str) -> None:
    """Print a line of this command on stderr, on the main process."""
    if is_main_process():
        print(f"liger-trainer: {without_tokens(line)}", file=sys.stderr)


def say_loading() -> None:
    """Say that libraries are being loaded, which takes seconds and shows nothing; silent if they are there already."""
    if "transformers" not in sys.modules:
        say("loading torch, transformers and TRL")


_SILENT_FOR = 3.0  # seconds, after which a user wonders


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Context manager for the imports of large libraries: says how long they take, and collects no garbage.

    Imports make a million objects and hardly any garbage. Looking for it takes a quarter of their time.
    """
    was_enabled, done = gc.isenabled(), threading.Event()
    gc.disable()
    threading.Thread(target=_say_each_time, args=(done,), daemon=True).start()
    try:
        yield
    finally:
        done.set()
        if was_enabled:
            gc.enable()


def _say_each_time(done: threading.Event) -> None:
    """Say every few seconds that libraries are still being loaded, until `done` is set."""
    start = time.monotonic()
    while not done.wait(_SILENT_FOR):
        seconds = time.monotonic() - start
        say(f"still loading, {seconds:.0f} s. The first start on a machine takes longest.")


def say_error(line: str) -> None:
    """Print an error of this process."""
    print(f"liger-trainer: error: {without_tokens(line)}", file=sys.stderr)


def on_all(training: Any, value: Any) -> list[Any]:
    """The `value` of each process, on all of them. They wait for each other here."""
    if training.world_size == 1:
        return [value]
    from accelerate.utils import gather_object

    return gather_object([value])


def on_main_for_all(training: Any, compute: Callable[[], Any]) -> Any:
    """Call `compute` on the main process, and return its result or raise its RecipeError on all of them."""
    found = error = None
    if training.process_index == 0:
        try:
            found = compute()
        except RecipeError as raised:
            error = raised
    found, error = on_all(training, (found, error))[0]
    if error is not None:
        raise error
    return found
