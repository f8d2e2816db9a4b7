"""A tracker that fails while a trainer trains costs a warning, not a checkpoint."""

import pytest
from tiny_models import tiny_model
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from liger_trainer import LigerTrainer, LigerTrainingArguments

ROWS = [{"input_ids": list(range(3, 19)), "labels": list(range(3, 19))}] * 4


class Fails(TrainerCallback):
    """Raises at the event `at`, like a tracker without its server."""

    def __init__(self, at):
        self.at = at

    def fail(self, event):
        if event == self.at:
            raise ConnectionError(f"no server\nat {event}")

    def on_train_begin(self, args, state, control, **kwargs):
        self.fail("on_train_begin")

    def on_log(self, args, state, control, **kwargs):
        self.fail("on_log")

    def on_save(self, args, state, control, **kwargs):
        self.fail("on_save")

    def on_train_end(self, args, state, control, **kwargs):
        self.fail("on_train_end")


class Tracker(Fails):
    __module__ = integration_utils.__name__  # like one of transformers


def train(callback, folder):
    args = LigerTrainingArguments(
        str(folder),
        max_steps=2,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        save_steps=2,
        logging_steps=1,
    )
    LigerTrainer(tiny_model("llama"), args, train_dataset=ROWS, callbacks=[callback]).train()


@pytest.mark.parametrize("at", ["on_log", "on_save", "on_train_end"])
def test_a_tracker_that_fails_is_told_once(at, tmp_path, caplog):
    tracker = Tracker(at)
    train(tracker, tmp_path)
    assert (tmp_path / "checkpoint-2" / "trainer_state.json").is_file()
    assert caplog.text.count(f"Tracker.{at} raised ConnectionError: no server at {at}.") == 1
    assert vars(tracker) == {"at": at}  # unchanged


def test_before_training_it_is_an_error(tmp_path):
    with pytest.raises(ConnectionError):
        train(Tracker("on_train_begin"), tmp_path)


def test_a_user_s_callback_may_end_a_training(tmp_path):
    with pytest.raises(ConnectionError):
        train(Fails("on_log"), tmp_path)
