"""Corrects the environment variables of torchrun, `accelerate launch` or another launcher before a run begins."""

import os
import signal
import sys

from liger_trainer.command.processes import launched_processes, print_status
from liger_trainer.errors import RecipeError


def exit_with_launcher() -> None:
    """Request SIGTERM for this process when its parent `accelerate launch` exits, which does not forward signals.

    Only for a launch of a single process: with several, `accelerate launch` starts torchrun, which does forward them.
    """
    alone = os.environ.get("ACCELERATE_USE_CPU") in ("True", "False") and "LOCAL_RANK" not in os.environ
    if alone and sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def apply_precision(bf16: bool | None, fp16: bool | None) -> None:
    """Let the recipe decide the precision, and report a different one in accelerate's config. Call before parsing.

    If `bf16` and `fp16` are both false, trainers and plugins would use the precision of `accelerate launch`.
    """
    configured = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    wanted = "fp16" if fp16 else "no" if bf16 is False else "bf16"  # bf16 is the default of TRL's configs
    if configured in ("no", wanted) or (configured == "fp8" and bf16 is None and not fp16):  # see `fp8/feature.py`
        return
    if wanted == "no":
        os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    keys = f"bf16: {bf16}, fp16: {fp16}".replace("None", "unset").lower()
    print_status(
        f"the recipe ({keys}) decides the precision, which is {wanted}. The mixed_precision: {configured} of "
        "accelerate's config has no effect."
    )


def load_on_every_process(fp8: bool | None, bf16: bool | None, fp16: bool | None) -> None:
    """With fp8 under FSDP2, make every process read the model. Call this after `apply_precision`, before parsing.

    accelerate 1.15 hangs if one process reads it for all: weights wrapped for fp8 cannot be broadcast.
    """
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower() == "fp8" and bf16 is None and not fp16
    variables = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")
    if (fp8 or launched) and all(os.environ.get(name, "").lower() in ("true", "1") for name in variables):
        os.environ[variables[1]] = "false"
        print_status(
            "with fp8 every process reads the whole model. fsdp_cpu_ram_efficient_loading: true has no effect."
        )


def check_restarts() -> None:
    """RecipeError if torchrun would give restarted processes the addresses of dead ones."""
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shared and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and launched_processes() > 1:
        raise RecipeError(
            "torchrun keeps one store for all restarts, so a restarted run would wait for processes that have died. "
            "Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of torchrun, or --max-restarts 0."
        )
