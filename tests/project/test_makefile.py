"""`make quickstart` and `make test` install the right things, as an interpreter that records its arguments shows."""

import os
import re
import shutil
import subprocess
import tomllib

import pytest
from checkout import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TRIED = PYPROJECT["tool"]["liger-trainer"]["tried"]
INTERPRETER = """#!/bin/sh
case "$*" in
    "-c import torch") exit 1 ;;
    "-m venv "*)
        for folder; do :; done  # the last argument
        mkdir -p "$folder/bin"
        cp "$0" "$folder/bin/python"
        cp "$0" "$folder/bin/liger-trainer" ;;
    "-m pip install"*+cpu*) echo "$*" >> asked; test "$HAS_CPU_BUILD" = yes ;;
    *) echo "$*" >> asked ;;
esac
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def made(folder, target, *variables, cpu_build="yes"):
    """(output of `make target`, what it asked of Python and pip) without a GPU and without PyTorch."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy2(ROOT / name, folder / name)  # keep its age, so that make does nothing twice
    python = folder / "python-of-test"
    python.write_text(INTERPRETER)
    python.chmod(0o755)
    unset = ("MAKEFLAGS", "MAKELEVEL", "TORCH", "VENV", "PYTHON", "OLDEST", "NEWEST")
    env = {name: value for name, value in os.environ.items() if name not in unset}
    env["HAS_CPU_BUILD"] = cpu_build
    words = ["make", target, f"PYTHON={python}", "GPU=", *variables]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    asked = (folder / "asked").read_text().splitlines()
    return done.stdout, [line for line in asked if not line.startswith("-c")]


def installed(asked):
    return " ".join(line for line in asked if line.startswith("-m pip install"))


def test_the_quickstart_installs_what_it_runs_and_no_more(tmp_path):
    printed, asked = made(tmp_path, "quickstart")
    version = TRIED["developed"]["torch"]
    assert f"torch=={version}+cpu" in installed(asked) and f"torch=={version} " not in installed(asked) + " "
    assert asked[-1] == "train quickstart"
    assert "deepspeed" not in installed(asked) and "[dev]" not in installed(asked)
    assert re.search(r"Downloading into \.venv.* \d+ MB; .* \d+ MB; .*torch==[\d.]+\+cpu, \d+ MB", printed, re.DOTALL)

    _, asked = made(tmp_path, "test-trainer")  # in the same environment
    after = asked[asked.index("train quickstart") + 1 :]
    assert "torch==" not in installed(after) and "[dev]" in installed(after) and "deepspeed" in installed(after)


def test_an_index_without_builds_for_cpus(tmp_path):
    printed, asked = made(tmp_path, "quickstart", cpu_build="no")
    version = TRIED["developed"]["torch"]
    assert re.search(rf"torch=={re.escape(version)}( |$)", installed(asked))
    assert re.search(r"the build for GPUs, [\d.]+ GB", printed) and asked[-1] == "train quickstart"


@pytest.mark.parametrize("torch", ["torch", "torch==2.14.0", "torch==2.14.0+xpu"])
def test_another_pytorch(torch, tmp_path):
    printed, asked = made(tmp_path, "quickstart", f"TORCH={torch}", cpu_build="no")
    assert re.search(rf"{re.escape(torch)}( |$)", installed(asked))
    assert ("+cpu" in installed(asked)) == ("has no torch==2.14.0+cpu" in printed) == (torch == "torch==2.14.0")


@pytest.mark.parametrize("which", ["oldest", "newest"])
def test_the_oldest_and_the_newest(which, tmp_path):
    _, asked = made(tmp_path, f"test-{which}")
    versions = " ".join(f"{name}=={version}" for name, version in TRIED[which].items())
    assert versions in asked[0] and len(TRIED[which]) == 4


def test_the_versions_that_were_tried():
    """README.md names the versions of pyproject.toml, and the oldest are the oldest that an install accepts."""
    readme = (ROOT / "README.md").read_text()
    for name, versions in TRIED.items():
        assert list(versions) == ["torch", "triton", "transformers", "trl"]
        assert f"{name} {' / '.join(versions.values())}" in readme
    dependencies = " ".join(PYPROJECT["project"]["dependencies"])
    for name, version in TRIED["oldest"].items():
        assert re.search(rf"\b{name}>={re.escape(version.removesuffix('.0'))}\b", dependencies), name
