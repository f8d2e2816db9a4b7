"""The tensors of an LM head as the operations on it take them: checked, and flattened to rows."""

from typing import NamedTuple

import torch

from ._dispatch import takes_twin
from ._head_checks import FLOAT_DTYPES, check_chunking, check_device, check_target, compute_dtype


class Head(NamedTuple):
    """One head flattened to rows: x (T, H), weight (V, H), bias (V,), u (T, r), lora_b (V, r)."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    u: torch.Tensor | None
    lora_b: torch.Tensor | None

    def needs(self) -> int:
        """Which gradients autograd wants: the sum of `DX` to `DB`."""
        grads_on = torch.is_grad_enabled()
        return sum(1 << k for k, t in enumerate(self) if grads_on and t is not None and t.requires_grad)


DX, DW, DBIAS, DU, DB = (1 << k for k in range(5))  # a bit for the gradient of each tensor of `Head`


def prepare(hidden, weight, target, bias, lora, lora_input, accumulate, chunk_rows):
    """Check the tensors of a call and flatten them: (`Head`, target (T,), compute dtype)."""
    if hidden.ndim < 1 or weight.ndim != 2 or hidden.shape[-1] != weight.shape[1] or target.shape != hidden.shape[:-1]:
        raise ValueError(
            f"hidden is {tuple(hidden.shape)}, weight {tuple(weight.shape)}, target {tuple(target.shape)}; expected "
            "hidden (..., H), weight (V, H), target (...). For the next-token loss: hidden[:, :-1] and labels[:, 1:]."
        )
    vocab = weight.shape[0]
    if bias is not None and bias.shape != (vocab,):
        raise ValueError(f"bias is {tuple(bias.shape)}; expected ({vocab},) for weight {tuple(weight.shape)}, or None.")
    dtype = compute_dtype(hidden, ("weight", weight), ("bias", bias))
    check_target("hidden", hidden, target)
    check_chunking(accumulate, chunk_rows)
    u, lora_b = _lora_branch(hidden, weight, lora, lora_input)
    flat = [t if t is None else t.reshape(-1, t.shape[-1]) for t in (hidden, u)]
    x, u = (t if t is None or t.stride(-1) == 1 else t.contiguous() for t in flat)
    return Head(x, weight, bias, u, lora_b), target.reshape(-1).long().contiguous(), dtype


def _lora_branch(hidden, weight, lora, lora_input):
    """u = scaling * lora_input A^T (..., r), which plain autograd differentiates because it is small, and B."""
    if lora is None:
        if lora_input is not None:
            raise ValueError("lora_input was given without lora; pass lora=(A, B, scaling) too, or drop it.")
        return None, None
    if len(lora) != 3:
        raise ValueError(f"lora has {len(lora)} entries; expected (A, B, scaling), A (r, H) and B (V, r).")
    lora_a, lora_b, scaling = lora
    (vocab, width), rank = weight.shape, lora_a.shape[0]
    if lora_a.shape != (rank, width) or lora_b.shape != (vocab, rank):
        raise ValueError(
            f"lora has A {tuple(lora_a.shape)} and B {tuple(lora_b.shape)}; expected A (r, {width}) and B ({vocab}, r) "
            f"for weight {tuple(weight.shape)}."
        )
    source = hidden if lora_input is None else lora_input
    if source.shape != hidden.shape:
        raise ValueError(f"lora_input is {tuple(source.shape)}, hidden {tuple(hidden.shape)}; expected the same shape.")
    for name, t in (("lora A", lora_a), ("lora B", lora_b), ("lora_input", source)):
        if t.dtype not in FLOAT_DTYPES or (takes_twin(t) and not takes_twin(hidden)):
            also = " or float64" if takes_twin(hidden) else ""
            raise ValueError(f"{name} is {t.dtype}, hidden {hidden.dtype}; expected bfloat16, float16, float32{also}.")
        check_device(name, t, "hidden", hidden)
    return torch.nn.functional.linear(source.to(lora_a.dtype), lora_a) * scaling, lora_b
