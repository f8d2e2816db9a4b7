"""The processes of a launch: which one this is, what only the main one prints, and values that all share."""

import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from liger_trainer.errors import RecipeError, without_tokens


def is_main_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def launched_processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def print_status(line: str, stream: TextIO | None = None) -> None:
    """Print a line on stderr (or `stream`), from the main process only."""
    if is_main_process():
        print(f"liger-trainer: {without_tokens(line)}", file=stream or sys.stderr, flush=True)


def print_loading() -> None:
    """Say that libraries are being loaded, which takes seconds. Print nothing if they are loaded already."""
    if "transformers" not in sys.modules:
        print_status("loading torch, transformers and TRL")


_SILENT_FOR = 3.0  # seconds, after which a user wonders


class Heartbeat:
    """Says on stderr, every few seconds from `start` to `stop`, that a long job is still going on.

    It is a context manager too, and can be started again after `stop`. Only the main process prints. It prints to the
    stderr of `start`, also if that is redirected later, and nothing once `stop` has returned. While a job inside
    another one has a heartbeat of its own, the outer one is silent.

    Args:
        describe (`Callable[[str], str]`): Returns the line; it gets the seconds since the start as text, such as "6 s".
    """

    _running: "list[Heartbeat]" = []  # of the whole process; the last one is the innermost job

    def __init__(self, describe: Callable[[str], str]) -> None:
        self._describe = describe
        self._done = threading.Event()
        self._printing = threading.Lock()  # `stop` waits for a line that has begun
        self._start = self._last_line = 0.0

    def start(self) -> None:
        self.stop()  # a training that begins once more, with smaller batches, has not ended its first step
        if is_main_process():
            self._done = threading.Event()
            self._start = self._last_line = time.monotonic()
            Heartbeat._running.append(self)
            threading.Thread(target=self._beat, args=(sys.stderr, self._done), daemon=True).start()

    def stop(self) -> None:
        with self._printing:
            self._done.set()
        if self in Heartbeat._running:
            Heartbeat._running.remove(self)

    def restart(self) -> None:
        """Count the silence from now on, because the command has printed something else."""
        self._last_line = time.monotonic()

    def __enter__(self) -> "Heartbeat":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _beat(self, stream: TextIO, done: threading.Event) -> None:
        pause = _SILENT_FOR
        while not done.wait(max(0.0, self._last_line + pause - time.monotonic())):
            now = time.monotonic()
            if now < self._last_line + pause:  # `restart` was called while this thread waited
                continue
            with self._printing:
                if done.is_set():
                    return
                if Heartbeat._running[-1:] == [self]:
                    print_status(self._describe(f"{now - self._start:.0f} s"), stream)
            self._last_line = now
            # A tenth of the time so far: a job of an hour would fill its log with a line every 3 seconds
            pause = max(_SILENT_FOR, (now - self._start) / 10)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Context manager for the imports of large libraries: says how long they take, and collects no garbage.

    Imports make a million objects and hardly any garbage. Looking for it takes a quarter of their time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with Heartbeat(lambda time: f"still loading, {time}. The first start on a machine takes longest."):
            yield
    finally:
        if was_enabled:
            gc.enable()


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
