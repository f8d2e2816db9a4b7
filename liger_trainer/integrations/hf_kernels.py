"""HuggingFace's `kernels`: `from_pretrained(..., use_kernels=True)` finds our norms, without asking the Hub."""

import importlib
import weakref

import torch
from torch import nn

from liger_trainer.instance import probe
from liger_trainer.instance.binding import Binding, Weakly
from liger_trainer.patching import norms
from liger_trainer.patching.apply import prove_module

LAYERS = ("RMSNorm",)


class ProvenRMSNorm(nn.Module):
    """The layer that `kernels` binds to a norm. It has no state; its forward is what the norm was proven to be."""

    has_backward = True
    can_torch_compile = False

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return _binding_of(self)(hidden_states)


class _Ours:
    """Stands for a repository: `kernels` asks it for `load`."""

    def load(self) -> type[nn.Module]:
        return ProvenRMSNorm

    def __repr__(self) -> str:
        return "liger_trainer.integrations.hf_kernels.ProvenRMSNorm"


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
    # transformers registers this table again for each model, so our layers go into the table itself.
    table = get_kernel_mapping_transformers()
    ours = _Ours()
    for name in LAYERS:
        modes = {mode.TRAINING: ours, mode.INFERENCE: ours}
        table[name] = table.get(name, {}) | dict.fromkeys(devices, modes)


_bound: weakref.WeakKeyDictionary[nn.Module, Binding] = weakref.WeakKeyDictionary()


def _binding_of(norm: nn.Module) -> Binding:
    """Our forward for `norm`, or its own where ours would compute something else."""
    if norm not in _bound:
        with probe.isolated():
            nothing = None, None, "it is no norm of this package's"
            proven, guards, _ = prove_module(norms.KIND, norm) if norms.nominated(norm) else nothing
        binding = Binding(type(norm).forward if proven is None else norms.build(proven), guards=guards)
        binding.module, binding.aside = Weakly(norm), proven is None
        _bound[norm] = binding
    return _bound[norm]
