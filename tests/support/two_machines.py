"""Two machines on one host: two network namespaces with an address each and a cable between them."""

import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
from checkout import ROOT

NAMES = ("liger-a", "liger-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
_CARD = "liger0"  # in each of them


def _ip(*words, check=True):
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


def _remove():
    for name in NAMES:
        _ip("netns", "delete", name, check=False)  # which takes its card, and so the cable, with it


@contextmanager
def two_machines():
    """Make the namespaces, and remove them afterwards. Skips the test, saying why, where the rights are missing."""
    try:
        _remove()
        for name in NAMES:
            _ip("netns", "add", name)
        _ip("link", "add", _CARD, "netns", NAMES[0], "type", "veth", "peer", "name", _CARD, "netns", NAMES[1])
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", _CARD)
            for card in (_CARD, "lo"):
                _ip("-n", name, "link", "set", card, "up")
    except (OSError, subprocess.CalledProcessError) as error:
        _remove()
        pytest.skip(f"two machines need root and iproute2: {getattr(error, 'stderr', None) or error}")
    try:
        yield
    finally:
        _remove()


def start(machine, *command, cwd, **env):
    """Start Python with `command` on machine 0 or 1, in a process group of its own."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {
        "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": _CARD,
    } | env  # fmt: skip
    words = ["ip", "netns", "exec", NAMES[machine], sys.executable, *map(str, command)]
    return subprocess.Popen(
        words, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def on_both(*command, cwd, per_machine, env=lambda machine: {}):
    """Run `command` on both machines, each with the words that `per_machine` adds; what machine 0 has printed."""
    processes = [start(i, *per_machine(i, command), cwd=cwd, **env(i)) for i in range(2)]
    ended = [process.communicate(timeout=240) for process in processes]
    for process, (out, err) in zip(processes, ended, strict=True):
        assert process.returncode == 0, out + err
    return ended[0]
