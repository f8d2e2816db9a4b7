"""What processes say: a long job is not silent, and nothing is said once it is over."""

import contextlib
import io
import threading
import time

import pytest

from liger_trainer.command import processes


def test_a_long_job_is_not_silent(capsys, monkeypatch):
    monkeypatch.setattr(processes, "_SILENT_FOR", 0.02)
    with processes.Heartbeat(lambda time: f"still at it, {time}.") as beat:
        time.sleep(0.2)
        said = capsys.readouterr().err.splitlines()
        assert len(said) > 2 and set(said) == {"liger-trainer: still at it, 0 s."}
        for _ in range(40):  # no line as long as other lines appear
            beat.restart()
            time.sleep(0.005)
        assert len(capsys.readouterr().err.splitlines()) <= 4  # a busy machine may delay a `restart`
    time.sleep(0.1)
    assert capsys.readouterr().err == "", "nothing is said once it is over"
    monkeypatch.setenv("RANK", "1")
    with processes.Heartbeat(lambda time: f"still at it, {time}."):
        time.sleep(0.1)
    assert capsys.readouterr().err == "", "other processes say nothing"


def test_no_line_is_printed_after_the_end(capsys, monkeypatch):
    """The job may end while a line is being made."""
    monkeypatch.setattr(processes, "_SILENT_FOR", 0.0)

    def describe_slowly(time_so_far):
        begun.set()
        time.sleep(0.05)
        return "still at it."

    for _ in range(3):
        begun = threading.Event()
        with processes.Heartbeat(describe_slowly):
            begun.wait()
        capsys.readouterr()
        time.sleep(0.1)
        assert capsys.readouterr().err == ""


def test_a_heartbeat_starts_again(capsys, monkeypatch):
    """A training starts again if its batches were too large. It must not have two heartbeats then."""
    monkeypatch.setattr(processes, "_SILENT_FOR", 0.02)
    beat = processes.Heartbeat(lambda time: "still at it.")
    threads = threading.active_count()
    for _ in range(3):
        beat.start()
        time.sleep(0.06)
        assert "still at it." in capsys.readouterr().err
    assert threading.active_count() <= threads + 1
    beat.stop()
    capsys.readouterr()
    time.sleep(0.1)
    assert capsys.readouterr().err == ""
    with beat:
        time.sleep(0.1)
    assert "still at it." in capsys.readouterr().err


def test_only_the_innermost_job_speaks(capsys, monkeypatch):
    """`chat` loads a model, and imports libraries for that."""
    monkeypatch.setattr(processes, "_SILENT_FOR", 0.02)
    with processes.Heartbeat(lambda time: "outer."):
        with pytest.raises(KeyboardInterrupt), processes.Heartbeat(lambda time: "inner."):
            time.sleep(0.1)
            raise KeyboardInterrupt
        said = capsys.readouterr().err
        assert "inner." in said and "outer." not in said
        time.sleep(0.1)
        assert "outer." in capsys.readouterr().err


def test_a_redirected_stderr_does_not_hide_it(capsys, monkeypatch):
    """`verify` hides what the libraries print."""
    monkeypatch.setattr(processes, "_SILENT_FOR", 0.02)
    with processes.Heartbeat(lambda time: "still at it."), contextlib.redirect_stderr(io.StringIO()) as hidden:
        time.sleep(0.1)
    assert "still at it." in capsys.readouterr().err and not hidden.getvalue()
