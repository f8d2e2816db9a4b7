"""Two processes on CPUs: under torchrun, or under `accelerate launch` with the shipped FSDP2 config."""

import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import yaml

from liger_trainer.paths import shipped

HERE = Path(__file__).parent
DEEPSPEED = Path(sys.prefix, "deepspeed")  # where the Makefile puts it


def torchrun(script, *arguments, processes=2, **variables):
    """Run `script` of this folder in two processes, or in one."""
    options = ("--nproc_per_node", str(processes), "--standalone")
    return _run("torch.distributed.run", *options, HERE / script, *arguments, **variables)


def torchrun_deepspeed(script, *arguments):
    """Run `script` in two processes with DeepSpeed on CPUs. Where it is not installed, the test is skipped."""
    with mock.patch.object(sys, "path", [*sys.path, str(DEEPSPEED)]):
        if importlib.util.find_spec("deepspeed") is None:
            pytest.skip("DeepSpeed is not installed")
        return torchrun(script, *arguments, DS_ACCELERATOR="cpu")


def accelerate_fsdp2(folder, *command):
    """Run `command` in two processes as `configs/fsdp2.yaml` says, without its 16-bit arithmetic, on CPUs.

    The command has to call `shard_on_cpus` before anything else: without it the two processes would run DDP.
    """
    config = yaml.safe_load((shipped("configs") / "fsdp2.yaml").read_text())
    config |= {"use_cpu": True, "num_processes": 2, "mixed_precision": "no"}
    path = Path(folder, "fsdp2.yaml")
    path.write_text(yaml.safe_dump(config))
    return _run("accelerate.commands.launch", "--config_file", path, "--main_process_port", "0", *command)


def _run(module, *arguments, **variables):
    env = os.environ | variables | {
        "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    command = [sys.executable, "-m", module, *map(str, arguments)]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def shard_on_cpus():
    """Let accelerate take CPUs for accelerators: of two CPU processes it makes DDP, whatever its config says."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    plain = PartialState.__init__

    @functools.wraps(plain)
    def init(self, *args, **kwargs):
        plain(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = init
