"""Base classes that tell one room what it may rely on in a class of another room, without an import.

`memory` is below `varlen`, and must know how many tokens a layer attends to. `patching` and `varlen` do not import
`base_weights` and `fp8`, and must know which class the experts had before their weights were packed.
"""

from typing import Any

from torch import nn


class LimitsAttention:
    """Stands in place of a mask, and knows how many tokens a token sees at most."""

    def most_seen(self) -> int:
        """Return how many tokens of its row a token attends to at most."""
        raise NotImplementedError


class PackedExperts:
    """A block of routed experts with quantized weights, which the code of `unpacked_class` reads in 16 bits.

    Attributes:
        unpacked_class: The class of transformers that the block had, with `forward` and parameters of its own.
    """

    unpacked_class: type[nn.Module]

    def packed(self, name: str) -> Any:
        """Return the weight `name`, `gate_up_proj` (E, 2 I, H) or `down_proj` (E, H, I), as kernels take it.

        It has `unpack()`, which gives the matrices in 16 bits.
        """
        raise NotImplementedError


class KeepsValues:
    """The pack half of a pair of saved-tensor hooks that gives back the same values."""
