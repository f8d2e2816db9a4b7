"""Tell callers where the kernels run, so that they can leave calls alone that would only get plain PyTorch."""

import torch

from ._dispatch import use_triton


def runs_kernels(x: torch.Tensor) -> bool:
    """Return whether operations run their Triton kernels on the device of `x`, instead of their plain PyTorch versions.

    Never for float64. On a CPU only under `TRITON_INTERPRET=1`.
    """
    return use_triton(x)
