"""Logs the metrics of each head, for all trainers of speculative heads."""

from typing import Any

from liger_trainer.head.sums import HeadSums
from liger_trainer.trainers.sft_trainer import LigerSFTTrainer


class LigerHeadsTrainer(LigerSFTTrainer):
    """[`LigerSFTTrainer`] with a loss and an accuracy for each head.

    A subclass adds the sums of each batch to `_sums`, and names the metrics in `_metric_names`.
    """

    loss_hook = None
    gives_token_predictions = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sums = HeadSums()

    def _metric_names(self, heads: int) -> list[tuple[str, str]]:
        """The names of the loss and the accuracy of each of the heads that `_sums` counts."""
        raise NotImplementedError(f"{type(self).__name__} has no names for the metrics of its heads.")

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        mode = "train" if self.model.training else "eval"
        if mode in self._sums:
            self._metrics[mode] |= {name: [value] for name, value in self._mean_metrics(mode).items()}
        super().log(logs, start_time)

    def _mean_metrics(self, mode: str) -> dict[str, float]:
        """Means over all rows since the last log, on all ranks. All ranks have to call this."""
        (losses, hits, rows), tokens = self._sums.take(mode, self.accelerator)
        if mode == "train":
            self._total_train_tokens += int(self.accelerator.reduce(tokens, "sum")) // self.get_tp_size()
        metrics: dict[str, float] = {"num_tokens": self._total_train_tokens}
        for names, loss, hit, count in zip(self._metric_names(len(rows)), losses, hits, rows, strict=True):
            metrics[names[0]] = loss / max(count, 1)
            metrics[names[1]] = hit / max(count, 1)
        return metrics
