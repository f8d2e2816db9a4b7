"""Save a checkpoint and exit on SIGTERM, the signal that schedulers send before they take a machine back."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import SaveStrategy

from liger_trainer.memory.ranks import Ranks


class Terminated(KeyboardInterrupt):
    """Raised when SIGTERM ends a run. Like Ctrl-C, it is not an `Exception`, so other code does not catch it."""


class SaveOnSigterm(TrainerCallback):
    """Saves a checkpoint and stops training after any process of the run got SIGTERM.

    The signal may not reach every process, but all of them have to save together. So they exchange it over gloo in
    each step.

    Training stops at the end of the step, or of the epoch if the step is its last. After the last step of the run it
    does not stop, because only the model is left to save.
    """

    def __init__(self) -> None:
        self.training = False
        self._asked = self._stops = self._saves = False
        self._ranks: Ranks | None = None

    def request_stop(self) -> bool:
        """Note a SIGTERM. Return whether the run will end by itself: after this step, or once the model is saved."""
        self._asked = self._asked or self.training
        return self._asked

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # If machines do not reach each other here, GLOO_SOCKET_IFNAME has to name their network card.
        self._ranks = Ranks(timedelta(seconds=args.ddp_timeout))
        self.training = True

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._stops = self.any_signalled() and state.global_step < state.max_steps
        if not float(state.epoch).is_integer():
            self.on_epoch_end(args, state, control)

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._stops:
            self._saves = control.should_save = True
            args.save_strategy = SaveStrategy.STEPS  # BEST would wait for another evaluation

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._saves:
            raise Terminated

    def any_signalled(self) -> bool:
        """Return whether any process got the signal. All processes have to call this."""
        if self._ranks is None:
            return self._asked
        return self._ranks.least(not self._asked) == (False,)


@contextlib.contextmanager
def handle_sigterm(run: SaveOnSigterm) -> Iterator[None]:
    """Context manager: on SIGTERM, `run` saves and stops. If it is not training, `Terminated` is raised.

    Worker processes of data loaders end as usual.
    """
    process = os.getpid()

    def stop(number: int, frame: Any) -> None:
        if os.getpid() != process:
            signal.signal(
                number, signal.SIG_DFL
            )  # a worker that inherited this handler, and that its pool wants to end
            os.kill(os.getpid(), number)
        elif not run.request_stop():
            raise Terminated

    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield
        return
    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)
