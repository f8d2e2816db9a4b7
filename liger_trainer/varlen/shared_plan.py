"""The plan of a call with rows that share a prompt."""

from typing import Any

import torch

from liger_trainer.varlen.groups import Group, lay_out, saved_by
from liger_trainer.varlen.host_copies import remember, sent
from liger_trainer.varlen.shared_rows import SharedRows
from liger_trainer.varlen.unpad_plan import UnpadPlan


class SharedPromptsPlan(UnpadPlan):
    """Runs one call of the backbone on its real tokens, and computes each shared token once.

    The output is the same batch as without sharing: the states of shared tokens are repeated in every row.

    Args:
        given (`dict`): The arguments of the call that the plan is made from.
        real (`torch.Tensor`): bool (B, S) on a CPU, False for padding.
        groups (`list[Group]`): The rows that share.
        unshared (`UnpadPlan` or None): The plan of the call without sharing.

    Attributes:
        saved (`int`): The tokens that are not computed.
    """

    def __init__(self, given: dict[str, Any], real: torch.Tensor, groups: list[Group], unshared: UnpadPlan | None):
        device = given["input_ids"].device
        layout = lay_out(real, groups)
        index = sent(layout.places, device)
        if index is not layout.places:
            remember(index, layout.places)
        super().__init__(given, SharedRows(layout, device), index, bool(real[:, -1].any()))
        self.unshared = unshared
        self.saved = saved_by(groups)
        self._real = sent(layout.real, device)
        self._source = sent(layout.source, device)
        self._copies = sent(layout.copies.clamp(min=0), device)
        missing = layout.copies < 0
        self._missing = sent(missing, device) if missing.any() else None

    def fits(self, call: dict[str, Any]) -> bool:
        """Return whether `call` has the arguments that the plan was made from, and no position ids of its own."""
        return call.get("position_ids") is None and call.get("input_ids") is not None and super().fits(call)

    def _spread(self, x: torch.Tensor, size: int) -> torch.Tensor:
        assert self.index is not None  # a layout has one
        tables = self._real, self._source, self.index, self._copies, self._missing
        return _Spread.apply(x, size, *(None if table is None else table.to(x.device) for table in tables))


class _Spread(torch.autograd.Function):
    """Copy the tokens of a layout x (T, ...) into a flattened batch (size, ...), with zeros for padding.

    The gradient of a shared token is summed over its rows in fp32, in a fixed order, and rounded once. The backward of
    a gather would sum in 16 bits and in any order.
    """

    @staticmethod
    def forward(ctx, x, size, real, source, index, copies, missing):
        ctx.save_for_backward(index, copies, missing)
        return x.new_zeros(size, *x.shape[1:]).index_copy_(0, real, x.index_select(0, source))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        index, copies, missing = ctx.saved_tensors
        of_tokens = gradient.index_select(0, index)
        of_rows = gradient[copies]  # (prefix tokens, rows, ...)
        if missing is not None:
            hidden = missing.reshape(*missing.shape, *(1,) * (gradient.ndim - 1))
            of_rows = of_rows.masked_fill(hidden, 0.0)
        wide = torch.float64 if gradient.dtype == torch.float64 else torch.float32
        of_tokens[: len(copies)] = of_rows.sum(1, dtype=wide).to(gradient.dtype)
        return of_tokens, *(None,) * 6
