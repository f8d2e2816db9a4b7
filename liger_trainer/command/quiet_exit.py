"""How the process of the command ends after a run that was cut short: with our line as the last one on stderr."""

import atexit
import gc
import logging
import os
import sys


class QuietExit:
    """An exit handler that ends the process without finalising the interpreter, once a run has been cut short.

    What a half finished step leaves behind may keep objects of native libraries alive until the interpreter is
    finalised, and then these libraries complain. nanobind, with which Triton's library is built, writes dozens of lines
    about leaked functions, below the line that says how to go on with the run.

    Python waits for all threads first, and then calls the exit handlers, the newest first. Handlers of libraries that
    are imported after `register` was called, such as wandb's, have therefore run before this one.
    """

    def __init__(self) -> None:
        self.code: int | None = None  # the exit code, set where a run has been cut short

    def register(self) -> None:
        atexit.register(self._end)

    def _end(self) -> None:
        if self.code is None:
            return
        gc.collect()  # calls the finalizers of what the run has left behind, as the interpreter would
        logging.shutdown()  # Python's own exit handler, which was registered before this one and has not run yet
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):  # a pipe that nobody reads any more, or a stream that is closed
                pass
        os._exit(self.code)
