"""Reads TRL's training metrics from the GPU only when they are logged.

In every micro-batch TRL reads the number of labels, the entropy and the accuracy from the GPU, between forward and
backward. The host waits there for the forward pass, and then the GPU waits for the host to launch the backward pass.
The numbers are needed only for logging. So TRL computes on placeholders and appends these to its lists. When the lists
are first read, the placeholders are replaced by the values, computed on the GPU as TRL computes them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from liger_trainer.head.outputs import FusedLMOutput

_METRICS = ("entropy", "mean_token_accuracy")
_MOST_PENDING = 256  # micro-batches; bounds the number of small tensors if nothing is logged for a long time


class _Pending(NamedTuple):
    """The sums of one micro-batch on the device, and the place of each metric: a list and an index."""

    entropy: torch.Tensor
    correct: torch.Tensor
    labels: torch.Tensor
    places: list[tuple[list[float], int]]


class LateMetrics:
    """Holds the lists of TRL's metrics, by mode and name, and the sums that are still on the GPU.

    Attributes:
        lists (`dict`): TRL's `_metrics`.
    """

    def __init__(self, lists: dict[str, Any]):
        self.lists = lists
        self._pending: list[_Pending] = []
        self._recording = False

    def read(self) -> dict[str, Any]:
        """Return TRL's lists. Their values are filled in first, except while TRL appends to them."""
        if self._pending and not self._recording:
            self._fill_in()
        return self.lists

    @staticmethod
    def placeholders() -> dict[str, torch.Tensor]:
        """Return fields that make TRL's metrics NaN, so that a metric that is not replaced is noticed."""
        nan = torch.full((1,), float("nan"))
        return {"entropy": nan, "is_top1": nan, "label_mask": torch.ones(1, dtype=torch.bool)}

    @contextmanager
    def recording(self, outputs: list[FusedLMOutput]) -> Iterator[None]:
        """Context manager for a call of TRL's `compute_loss` on placeholders; `outputs` gets the real fields.

        RuntimeError if TRL did not append exactly one value to each metric.
        """
        train = self.lists["train"]
        before = {name: len(train.get(name, ())) for name in _METRICS}
        self._recording = True
        try:
            yield
        finally:
            self._recording = False
        grown = all(len(train.get(name, ())) == count + 1 for name, count in before.items())
        if len(outputs) != 1 or not grown:
            raise RuntimeError(
                f"SFTTrainer.compute_loss called its model {len(outputs)} times and appended to {', '.join(_METRICS)} "
                "other than once. This version of trl is not supported: install trl>=1.16,<2."
            )
        fields = outputs[0]
        self._pending.append(
            _Pending(
                entropy=fields.entropy.detach().sum(),  # type: ignore[union-attr]  # TRL's head always has it
                correct=fields.is_top1.sum(),  # type: ignore[union-attr]
                labels=fields.label_mask.sum(),  # type: ignore[union-attr]
                places=[(train[name], count) for name, count in before.items()],
            )
        )
        if len(self._pending) == _MOST_PENDING:
            self._fill_in()

    def _fill_in(self) -> None:
        """Replace the placeholders in TRL's lists. The host waits for the device once."""
        pending, self._pending = self._pending, []
        labels = torch.stack([x.labels for x in pending])
        entropy = torch.stack([x.entropy for x in pending]) / labels
        accuracy = torch.stack([x.correct for x in pending]) / labels
        per_metric = torch.stack((entropy, accuracy))
        per_metric = torch.where(labels > 0, per_metric, 0.0)  # TRL's value for a batch without labels
        for metric, values in enumerate(per_metric.tolist()):
            for micro_batch, value in zip(pending, values, strict=True):
                target, index = micro_batch.places[metric]
                if index < len(target):  # else the list was cleared
                    target[index] = value
