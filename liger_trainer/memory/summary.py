"""Says what `activation_checkpointing: auto` chose: in the log, the report, the summary and errors."""

from dataclasses import dataclass
from typing import Any

from liger_trainer.memory.device_memory import GIB
from liger_trainer.memory.plan import Size


@dataclass
class CheckpointingSummary:
    """The choices of one training, and those for its largest micro-batch, the one with the most tokens."""

    budget: float | None  # memory_budget, in GiB
    size: Size | None = None  # the input of a layer in the largest micro-batch; None: nothing was chosen
    peak: int = 0  # of the largest micro-batch, in bytes
    layers: int = 0  # that it called
    kept: int = 0  # of these, with all activations
    attention: int = 0  # of these, with the results of attention alone
    on_host: int = 0  # of these, with their activations in the host's memory
    least: int = 0  # layers of any micro-batch that kept all activations, and the most of each kind
    most: int = 0
    most_attention: int = 0
    most_on_host: int = 0
    host_bytes: int = 0  # pinned memory that was taken
    highest: int = 0  # the peak until torch's own counter was last reset

    def add(self, size: Size, peak: int, layers: int, kept: int, attention: int, on_host: int) -> bool:
        """Count a micro-batch. Return whether it is the largest so far and was not planned like the last such one."""
        self.least = kept if self.size is None else min(self.least, kept)
        self.most = max(self.most, kept)
        self.most_attention = max(self.most_attention, attention)
        self.most_on_host = max(self.most_on_host, on_host)
        if self.size is not None and size.tokens < self.size.tokens:
            return False
        before = (self.size, self.kept, self.attention, self.on_host)
        self.size = size
        self.kept = kept
        self.attention = attention
        self.on_host = on_host
        self.layers = layers
        self.peak = peak
        return before != (size, kept, attention, on_host)

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of the report."""
        found: dict[str, Any] = {"memory_budget_gib": self.budget, "layers": self.layers}
        if self.host_bytes:
            found["host_gib"] = round(self.host_bytes / GIB, 2)
        if self.size is not None:
            found |= {"kept_least": self.least, "kept_most": self.most, "attention_most": self.most_attention}
            found["host_most"] = self.most_on_host
            found["largest"] = {
                "rows": self.size.rows,
                "length": self.size.length,
                "kept": self.kept,
                "attention": self.attention,
                "host": self.on_host,
                "gib": round(self.peak / GIB, 2),
            }
        return found

    def __str__(self) -> str:
        if self.size is None:
            return "every layer was checkpointed"
        parts = [f"{self.kept} of {self.layers} layers kept their activations"]
        if self.on_host:
            parts.append(f"{self.on_host} had them in the host's memory")
        if self.attention:
            parts.append(f"{self.attention} kept the results of attention")
        listed = parts[-1]
        if len(parts) > 1:
            listed = f"{', '.join(parts[:-1])} and {listed}"
        others = f", {self.least} to {self.most} for others" if self.least < self.most else ""
        return f"{listed} for {_shape(self.size)}{others}"

    def log_line(self, limit: int) -> str:
        return f"activation_checkpointing: auto: {self}: {self.peak / GIB:.1f} GiB of {limit / GIB:.1f}."


def over_budget(size: Size, peak: int, budget: float) -> str:
    """Return the warning for a budget that is exceeded though every layer is checkpointed."""
    return (
        f"memory_budget is {budget} GiB, but {_shape(size)} need {peak / GIB:.1f} GiB with every layer checkpointed, "
        f"so it is exceeded. {_smaller(size)}"
    )


def out_of_memory(size: Size | None, kept: int, took: int, error: str) -> str:
    """Return the error of a micro-batch that ran out of memory after `took` bytes, with `kept` layers kept."""
    what = "A micro-batch" if size is None else f"A micro-batch of {_shape(size)}"
    if kept:
        return (
            f"{what} ran out of memory. {kept} layer{'s were' if kept > 1 else ' was'} not checkpointed "
            f"(activation_checkpointing: auto). Set memory_budget: {0.9 * took / GIB:.1f} or less, or "
            f"activation_checkpointing: true, and go on from the last checkpoint. ({error})"
        )
    return (
        f"{what} does not fit the memory of the device, though every layer is checkpointed (activation_checkpointing: "
        f"auto). {_smaller(size)} ({error})"
    )


def _smaller(size: Size | None) -> str:
    if size is None or size.tokens < 2:
        return "Set a smaller per_device_train_batch_size or max_length."
    by_rows = f"per_device_train_batch_size: {size.rows // 2}, or " if size.rows > 1 else ""
    length = max(1, size.tokens // 2 // size.rows)
    return f"Try half of that: {by_rows}rows of at most {length} tokens. liger-trainer fit says what fits."


def _shape(size: Size) -> str:
    return f"{size.rows} x {size.length} tokens"
