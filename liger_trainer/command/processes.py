"""The processes of a launch: which one this is, what only the main one prints, and values that all share."""

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


def print_status(line: str) -> None:
    """Print a line on stderr, from the main process only."""
    if is_main_process():
        print(f"liger-trainer: {without_tokens(line)}", file=sys.stderr)


def print_loading() -> None:
    """Say that libraries are being loaded, which takes seconds. Print nothing if they are loaded already."""
    if "transformers" not in sys.modules:
        print_status("loading torch, transformers and TRL")


_SILENT_FOR = 3.0  # seconds, after which a user wonders


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Context manager for the imports of large libraries: says how long they take, and collects no garbage.

    Imports make a million objects and hardly any garbage. Looking for it takes a quarter of their time.
    """
    was_enabled, done = gc.isenabled(), threading.Event()
    gc.disable()
    threading.Thread(target=_print_each_time, args=(done,), daemon=True).start()
    try:
        yield
    finally:
        done.set()
        if was_enabled:
            gc.enable()


def _print_each_time(done: threading.Event) -> None:
    """Say every few seconds that libraries are still being loaded, until `done` is set."""
    start = time.monotonic()
    while not done.wait(_SILENT_FOR):
        seconds = time.monotonic() - start
        print_status(f"still loading, {seconds:.0f} s. The first start on a machine takes longest.")


def print_error(line: str) -> None:
    """Print an error on stderr, from any process."""
    print(f"liger-trainer: error: {without_tokens(line)}", file=sys.stderr)


def gather_from_all(training: Any, value: Any) -> list[Any]:
    """Return the `value` of every process. All processes have to call this, and wait for each other here."""
    if training.world_size == 1:
        return [value]
    from accelerate.utils import gather_object

    return gather_object([value])


def run_on_main(training: Any, compute: Callable[[], Any]) -> Any:
    """Call `compute` on the main process only. All processes return its result, or raise its RecipeError."""
    result = error = None
    if training.process_index == 0:
        try:
            result = compute()
        except RecipeError as raised:
            error = raised
    result, error = gather_from_all(training, (result, error))[0]
    if error is not None:
        raise error
    return result
