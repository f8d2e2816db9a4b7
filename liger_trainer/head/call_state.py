"""What the stand-ins of one call of an LM head share, and how a write into a tensor is noticed."""

import contextlib

import torch

WAY_OUT = 'Call the model with skip_logits=False, or set liger_config={"fused_linear_cross_entropy": false}.'


class HeadCallState:
    """State shared by all stand-ins of one call of a head.

    Attributes:
        hidden (`torch.Tensor`): The head's input.
        grad (`bool`): Whether gradients were on.
        autocast (`tuple`): The arguments of `torch.autocast` in effect, after the type of the device.
        is_materialized (`bool`): Whether the logits that the head returned have become real.
    """

    def __init__(self, hidden: torch.Tensor):
        self.hidden = hidden
        self.grad = torch.is_grad_enabled()
        self.autocast = _autocast_of(hidden.device.type)
        self.is_materialized = False
        self._version = version_of(hidden)

    def under_autocast(self) -> contextlib.AbstractContextManager:
        """Return a context with the autocast of the call.

        Raises:
            RuntimeError: The head's input has been changed in place since, so the logits would be different ones.
        """
        if was_written(self.hidden, self._version):
            raise RuntimeError(
                f"The input of the LM head was changed in place between the call of the head and the loss. {WAY_OUT}"
            )
        device_type = self.hidden.device.type
        if self.autocast == _autocast_of(device_type):
            return contextlib.nullcontext()
        return torch.autocast(device_type, *self.autocast)


def _autocast_of(device_type: str) -> tuple[torch.dtype, bool, bool]:
    """Read the arguments of `torch.autocast` after the type of the device: dtype, whether it is on, its cache."""
    dtype = torch.get_autocast_dtype(device_type)
    return dtype, torch.is_autocast_enabled(device_type), torch.is_autocast_cache_enabled()


def version_of(tensor: torch.Tensor) -> int | None:
    """Count the writes into a tensor, or return None where PyTorch does not count them."""
    if torch.compiler.is_compiling() or tensor.is_inference():
        return None
    return tensor._version


def was_written(tensor: torch.Tensor, version: int | None) -> bool:
    """Return whether a tensor is known to have been written into since `version_of` returned `version`."""
    now = version_of(tensor)
    return version is not None and now is not None and now != version
