"""Says why speculative heads, which read whole rows and whole weights, cannot train under a launch."""

from typing import Any

from accelerate import DistributedType
from torch import nn

from liger_trainer.patching.core.modules import is_spread

_PLAIN = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)


def spread_reason(model: nn.Module) -> str | None:
    """Return what to do if the layers of `model` lie on several devices, for the end of an error; else None."""
    if not is_spread(model):
        return None
    return (
        "device_map has spread the model over several devices. Set device_map to null in model_init_kwargs, or launch "
        "one process for each GPU."
    )


def sharding_reason(accelerator: Any, model: nn.Module) -> str | None:
    """Return what the launch splits and what to do, for the end of an error. None if it splits nothing."""
    spread = spread_reason(model)
    if spread is not None:
        return spread
    if accelerator.distributed_type not in _PLAIN:
        launch = accelerator.distributed_type.value
        return f"the launch is {launch}, which shards weights. Train in one process, or with DDP."
    parallel = getattr(accelerator, "parallelism_config", None)
    if parallel is not None and (parallel.cp_enabled or parallel.sp_enabled or parallel.tp_enabled):
        return (
            "parallelism_config splits sequences or weights over ranks, and heads read whole rows. Set cp_size, "
            "sp_size and tp_size to 1."
        )
    return None
