"""HuggingFace's `kernels`: `from_pretrained(..., use_kernels=True)` finds our norms, without asking the Hub."""

import importlib
from typing import Any

import torch
from torch import nn

from liger_trainer.patching import norms
from liger_trainer.patching.kind import Proven

LAYERS = ("RMSNorm",)


class LigerRMSNorm(nn.Module):
    """What `kernels` binds to a norm: no state of its own, and a forward that asks what that norm was proven to be."""

    has_backward = True
    can_torch_compile = False

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return _forward_of(self)(self, hidden_states)


class _Ours:
    """The repository that `kernels` is told of. It wants an object with `load`, wherever that loads from."""

    def load(self) -> type[nn.Module]:
        return LigerRMSNorm

    def __repr__(self) -> str:
        return "liger_trainer.integrations.hf_kernels.LigerRMSNorm"


def register(devices: tuple[str, ...] = ("cuda", "rocm", "xpu")) -> None:
    """Let `use_kernels=True` take the norms of this package for all models that are loaded from now on.

    transformers names 141 classes "RMSNorm", of which 13 round in another place than Llama's. So the first call of each
    norm shows what its class computes, as `apply_liger` does, and a norm that computes something else keeps its own
    code. `use_kernels` knows no fused LM head, no gated MLP of Llama's kind and no rotary function; for them use
    `apply_liger`, instead of this.

    Args:
        devices (`tuple[str, ...]`): The types of devices, as `kernels` names them.

    Raises:
        ImportError: The package `kernels` is not installed, or in a version that transformers does not take.
    """
    from transformers.utils import import_utils

    if not import_utils.is_kernels_available():
        least, below = import_utils.KERNELS_MIN_VERSION, import_utils.KERNELS_MAX_VERSION
        raise ImportError(
            "liger_trainer.integrations.hf_kernels needs the package kernels, in a version that transformers takes. "
            f"Run `pip install 'kernels>={least},<{below}'`."
        )
    from transformers.integrations.hub_kernels import get_kernel_mapping_transformers

    mode = importlib.import_module("kernels").Mode  # an import statement would have mypy look into our folder kernels/
    # transformers registers this table again for each model, so what is to stay has to stand in it.
    table = get_kernel_mapping_transformers()
    ours = _Ours()
    for name in LAYERS:
        modes = {mode.TRAINING: ours, mode.INFERENCE: ours}
        table[name] = table.get(name, {}) | dict.fromkeys(devices, modes)


_PROVEN: dict[Any, tuple[Proven | None, str | None]] = {}


def _forward_of(norm: nn.Module) -> Any:
    """Our forward for `norm`, or that of its class where ours would compute something else."""
    shapes = tuple(tuple(p.shape) for p in norm.parameters())
    numbers = tuple(sorted((k, v) for k, v in vars(norm).items() if isinstance(v, (int, float, str))))
    key = (type(norm), shapes, tuple(entry for entry in numbers if entry[0] != "training"))
    if key not in _PROVEN:
        _PROVEN[key] = norms.prove(norm) if norms.nominated(norm) else (None, "it is not a norm")
    proven = _PROVEN[key][0]
    return type(norm).forward if proven is None else norms.build(proven)
