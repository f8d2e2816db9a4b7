"""Applies `accelerate_config` of a recipe, under any launcher, as `accelerate launch --config_file` would.

`accelerate launch` passes its file to the processes in environment variables, which accelerate and the trainers read.
torchrun, Ray, Flyte and Kubeflow know no such file, so the same variables are set here.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from liger_trainer.command.processes import launched_processes
from liger_trainer.command.recipe.shipped_files import config_names, find_shipped
from liger_trainer.errors import RecipeError
from liger_trainer.paths import find_beside

_PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "TRL_EXPERIMENTAL_")
_DECIDING = ("ACCELERATE_USE_", "ACCELERATE_DEEPSPEED_", "FSDP_", "PARALLELISM_CONFIG_")
_TYPES = ("NO", "MULTI_GPU", "MULTI_CPU", "MULTI_NPU", "MULTI_XPU", "MULTI_MLU", "MULTI_HPU", "FSDP", "DEEPSPEED")


@contextlib.contextmanager
def preserve_environment() -> Iterator[None]:
    """Context manager: restore `os.environ` afterwards, since one process may run several recipes."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def find_config(recipe: Path, name: str) -> Path:
    """Return the file that `accelerate_config` names: a path, or a shipped config such as `fsdp2`."""
    path = find_beside(name, recipe.parent)
    if path is not None and path.is_file():
        return path
    return find_shipped(name, "accelerate_config", config_names())[1]


def apply_config(recipe: Path, name: str) -> str:
    """Set the variables that `accelerate launch` would set for the file `name`. Return its `distributed_type`.

    The launcher decides the number of processes and machines. RecipeError if the launcher has set other variables than
    the file would.
    """
    path = find_config(recipe, name)
    launcher_variables = {variable: value for variable, value in os.environ.items() if variable.startswith(_PREFIXES)}
    with preserve_environment():
        for variable in launcher_variables:
            del os.environ[variable]
        try:
            kind, file_variables = _variables(path)
        except (ValueError, TypeError, KeyError, AttributeError, ImportError, OSError) as error:
            raise RecipeError(f"accelerate_config is {name!r}, which accelerate cannot use: {error}") from error
    for variable, from_launcher in launcher_variables.items():
        from_file = file_variables.get(variable, "false" if variable.startswith("ACCELERATE_USE_") else None)
        if variable.startswith(_DECIDING) and from_file is not None and from_launcher.lower() != from_file.lower():
            if variable == "ACCELERATE_USE_CPU":  # not a conflict: the file may ask for CPUs on a machine with GPUs
                continue
            raise RecipeError(
                f"accelerate_config is {name!r}, which sets {variable} to {from_file}, but the launcher has set it to "
                f"{from_launcher}. Launch with torchrun, or give accelerate launch the same file, or remove "
                "accelerate_config."
            )
    os.environ.update(file_variables)
    return kind


def _variables(path: Path) -> tuple[str, dict[str, str]]:
    """Return the `distributed_type` of a file, and the variables that `accelerate launch` would set for it."""
    from accelerate.commands import launch
    from accelerate.utils import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    processes = str(max(launched_processes(), 1))
    launch_options = [
        "--config_file",
        str(path),
        "--num_processes",
        processes,
        "--num_machines",
        "1",
        "--machine_rank",
        "0",
    ]
    parsed = launch.launch_command_parser().parse_args(
        [*launch_options, "--main_process_port", "0", "--module", "unused"]
    )
    parsed, config, precision_is_filed = launch._validate_launch_command(parsed)
    kind = str(getattr(config.distributed_type, "value", config.distributed_type))
    if kind not in _TYPES:
        raise ValueError(f"distributed_type is {kind!r}; expected one of {', '.join(_TYPES)}.")
    if kind == "DEEPSPEED":
        fields = [*config.deepspeed_config, *(["mixed_precision"] if precision_is_filed else [])]
        parsed.deepspeed_fields_from_accelerate_config = ",".join(fields)
        environment = prepare_deepspeed_cmd_env(parsed)[1]
    else:
        environment = prepare_multi_gpu_env(parsed)
    wanted = {name: value for name, value in environment.items() if name.startswith(_PREFIXES)}
    if config.use_cpu:
        wanted["ACCELERATE_USE_CPU"] = "true"
    return kind, wanted
