"""Start processes on CPUs: forked, by a launcher where the launcher is tested, or on two simulated machines."""

import functools
import importlib.util
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from multiprocessing import connection, forkserver
from pathlib import Path
from unittest import mock

import pytest
import yaml
from checkout import ROOT

from liger_trainer.paths import shipped

HERE = Path(__file__).parent
PROCESSES = HERE.parent / "processes"  # the scripts that train in their own processes
DEEPSPEED = Path(sys.prefix, "deepspeed")  # where the Makefile installs it
_TIMEOUT_S = 400
_ALONE = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def in_processes(script, *arguments, processes=2, config=None):
    """Run `script` of `PROCESSES` in two processes, or in one, with the variables that torchrun sets.

    With `config`, an accelerate config, also set the variables of `accelerate launch`. If a process fails, raise an
    AssertionError with everything they have printed.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    group = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(processes):
            variables = _ALONE | {name: str(x) for name, x in (group | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            given = (
                str(PROCESSES / script),
                [*map(str, arguments)],
                os.environ | variables,
                f"{folder}/{rank}",
                config,
            )
            ranks.append(_importing().Process(target=_run_forked, args=given))
            ranks[-1].start()
        try:
            waiting = [rank.sentinel for rank in ranks]
            while waiting:
                if not connection.wait(waiting, _TIMEOUT_S) or any(rank.exitcode for rank in ranks):
                    break
                waiting = [rank.sentinel for rank in ranks if rank.exitcode is None]
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        out = "".join(path.read_text() for path in sorted(Path(folder).glob("*.out")))
        err = "".join(path.read_text() for path in sorted(Path(folder).glob("*.err")))
    codes = [rank.exitcode for rank in ranks]
    assert not any(codes), f"exit codes {codes}\n{out}{err}"
    return subprocess.CompletedProcess(script, 0, out, err)


@functools.cache
def _importing():
    """A process that has imported everything and forks the others; imports take each longer than its steps."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "datasets",
            "torch.distributed.fsdp",
            "transformers.models.llama.modeling_llama",
            "trl.experimental.orpo",
            "liger_trainer.trainers.grpo_trainer",
            "liger_trainer.medusa.trainer",
        ]
    )
    with mock.patch.dict(os.environ, _ALONE | {"PYTHONPATH": os.pathsep.join(sys.path)}):
        forkserver.ensure_running()
    return context


def _run_forked(script, arguments, environ, output, config):
    for number, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{output}.{kind}", os.O_CREAT | os.O_WRONLY), number)
    os.environ.clear()
    os.environ.update(environ)
    if config is not None:
        from liger_trainer.command.recipe.accelerate_file import apply_config

        apply_config(Path(config), str(config))
    one_gloo_worker()
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def in_processes_fsdp2(folder, script, *arguments):
    """`in_processes` with FSDP2, as `configs/fsdp2.yaml` says. `script` has to call `shard_on_cpus` first."""
    return in_processes(script, *arguments, config=_fsdp2_on_cpus(folder))


def torchrun_deepspeed(script, *arguments):
    """Run `script` in two processes with DeepSpeed on CPUs. Skip the test if DeepSpeed is not installed."""
    with mock.patch.object(sys, "path", [*sys.path, str(DEEPSPEED)]):
        if importlib.util.find_spec("deepspeed") is None:
            pytest.skip("DeepSpeed is not installed")
        options = ("--nproc_per_node", "2", "--standalone")
        return _run("torch.distributed.run", *options, PROCESSES / script, *arguments, DS_ACCELERATOR="cpu")


def accelerate_fsdp2(folder, *command):
    """Run `command` in two processes on CPUs by `accelerate launch` with `configs/fsdp2.yaml`.

    The command has to call `shard_on_cpus` before anything else. Otherwise the two processes would run DDP.
    """
    options = ("--config_file", _fsdp2_on_cpus(folder), "--main_process_port", "0")
    return _run("accelerate.commands.launch", *options, *command)


def _fsdp2_on_cpus(folder):
    """The shipped config, without its 16-bit arithmetic."""
    config = yaml.safe_load((shipped("configs") / "fsdp2.yaml").read_text())
    config |= {"use_cpu": True, "num_processes": 2, "mixed_precision": "no"}
    path = Path(folder, "fsdp2.yaml")
    path.write_text(yaml.safe_dump(config))
    return path


def _run(module, *arguments, **variables):
    env = os.environ | variables | _ALONE | {"PYTHONPATH": os.pathsep.join([str(HERE), str(PROCESSES), *sys.path])}
    command = [sys.executable, "-m", module, *map(str, arguments)]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_TIMEOUT_S)
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def init_deepspeed():
    """Have DeepSpeed start with gloo alone: its shared-memory sums take a minute to compile in each environment."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")


def shard_on_cpus():
    """Make accelerate take CPUs for accelerators. It runs DDP on two CPU processes whatever its config says."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    one_gloo_worker()
    plain = PartialState.__init__

    @functools.wraps(plain)
    def init(self, *args, **kwargs):
        plain(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = init


def one_gloo_worker():
    """Give each process group of gloo one worker thread instead of two, for the rest of this process.

    In PyTorch 2.11 to 2.15, a worker of a gloo group writes the name of the collective that it has finished to a
    string of the group, without the group's lock. Names of up to 15 characters are stored in place. A longer one is
    "ALLGATHER_COALESCED", of the all-gathers in which DTensor and FSDP2 gather a state dict: if two workers write it
    at once, both free the old text. The process dies later, in any thread, often while a checkpoint is saved.
    """
    from torch.distributed.distributed_c10d import ProcessGroupGloo, default_pg_timeout

    plain = ProcessGroupGloo.__init__
    if hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def init(self, store, rank, size, timeout=default_pg_timeout, **further):
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_default_device()]
        options._timeout = timeout
        options._threads = 1
        for name, value in further.items():  # PyTorch 2.15 passes `enable_reconfigure`
            setattr(options, name, value)
        plain(self, store, rank, size, options)

    ProcessGroupGloo.__init__ = init


NAMES = ("liger-a", "liger-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
_CARD = "liger0"  # in each namespace


def _ip(*words, check=True):
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


def _remove():
    for name in NAMES:
        _ip("netns", "delete", name, check=False)  # removes its interface too, and so the cable


@contextmanager
def two_machines():
    """Make the namespaces and remove them afterwards. Skip the test, saying why, if the rights are missing."""
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
    """Start Python with `command` on machine 0 or 1, in its own process group."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    env = (
        os.environ
        | {
            "PYTHONPATH": paths,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "GLOO_SOCKET_IFNAME": _CARD,
        }
        | env
    )
    words = ["ip", "netns", "exec", NAMES[machine], sys.executable, *map(str, command)]
    return subprocess.Popen(
        words, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def on_both(*command, cwd, per_machine, env=lambda machine: {}):
    """Run `command` on both machines, with the arguments that `per_machine` adds. Return what machine 0 printed."""
    processes = [start(i, *per_machine(i, command), cwd=cwd, **env(i)) for i in range(2)]
    ended = [process.communicate(timeout=240) for process in processes]
    for process, (out, err) in zip(processes, ended, strict=True):
        assert process.returncode == 0, out + err
    return ended[0]
