"""Says why speculative heads, which read whole rows and whole weights, cannot train under a launch."""

from typing import Any

from accelerate import DistributedType

_PLAIN = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)


def sharding_reason(accelerator: Any) -> str | None:
    """Return what the launch splits over ranks and what to do, for the end of an error. None if it splits nothing."""
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
