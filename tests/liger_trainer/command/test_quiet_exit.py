"""How the process ends after a run that was cut short: our line is the last on stderr, and exit handlers have run."""

import os
import subprocess
import sys

import pytest
from recipe_fixtures import run_elsewhere, write_recipe

# Of Triton's library, an object that nothing can free keeps a type alive until the interpreter is finalised, as a half
# finished step may; the library then writes a line for each function and type that it calls leaked.
SCRIPT = """
import atexit, ctypes, sys, threading
import liger_trainer.command.main as command, liger_trainer.command.run as runs
from liger_trainer.command import preemption
from liger_trainer.errors import RunError

class Writer:
    def __del__(self):
        print("a finalizer ran")

def cut_short(recipe, **options):
    import triton
    context = triton._C.libtriton.ir.context()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(context))
    atexit.register(print, "a handler of a library ran")
    threading.Timer(0.5, print, ["a thread came to its end"]).start()
    recipe.writer = Writer()
    recipe.cycle = recipe
    raise {error}

runs.run = cut_short
sys.argv = ["liger-trainer", "train", sys.argv[1]]
sys.exit(command.main({argv}))
"""


@pytest.mark.parametrize(
    "error, code, said",
    [
        pytest.param("KeyboardInterrupt", 130, "interrupted. Training had not begun.", marks=pytest.mark.slow),
        pytest.param("preemption.Terminated", 143, "terminated. Training had not begun.", marks=pytest.mark.slow),
        ("RunError('The disk is full.')", 1, "error: The disk is full."),
    ],
)
def test_our_line_is_the_last(error, code, said, tmp_path):
    pytest.importorskip("triton", reason="its library writes the lines")
    script = SCRIPT.format(error=error, argv="")
    done = run_elsewhere(sys.executable, "-c", script, write_recipe(tmp_path), cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert done.stderr.splitlines()[-1] == f"liger-trainer: {said}", done.stderr
    for done_at_the_end in ("a handler of a library ran", "a thread came to its end", "a finalizer ran"):
        assert done_at_the_end in done.stdout


def test_a_program_that_calls_main_ends_as_it_wants(tmp_path):
    script = SCRIPT.format(error="KeyboardInterrupt", argv="sys.argv[1:]").replace("sys.exit(", "print(")
    script = script.replace("    context", "    # context").replace("    ctypes", "    # ctypes")
    done = run_elsewhere(sys.executable, "-c", script, write_recipe(tmp_path), cwd=tmp_path)
    assert done.returncode == 0 and "130" in done.stdout, done.stderr


def test_a_reader_that_has_had_enough():
    """`liger-trainer recipes | head -1`: no traceback, and the code of a process that a closed pipe has ended."""
    command = [sys.executable, "-m", "liger_trainer", "recipes"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(60) == 141


def test_a_run_whose_output_nobody_reads(tmp_path):
    script = SCRIPT.format(error="BrokenPipeError", argv="")
    done = run_elsewhere(sys.executable, "-c", script, write_recipe(tmp_path), cwd=tmp_path)
    assert done.returncode == 141
    assert done.stderr.splitlines()[-1].endswith("so the run has ended. Training had not begun."), done.stderr
