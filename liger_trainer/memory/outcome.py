"""What was chosen, in words: for the log, the report and the summary, and for a micro-batch that does not fit."""

from dataclasses import dataclass
from typing import Any

from liger_trainer.memory.memory import GIB
from liger_trainer.memory.plan import Size


@dataclass
class Outcome:
    """What was chosen in one training. What is said of a micro-batch is said of the one with the most tokens."""

    budget: float | None  # GiB
    size: Size | None = None  # of what its layers are given; None: nothing was chosen
    peak: int = 0  # the most bytes that were allocated
    layers: int = 0  # how many it has called
    kept: int = 0  # how many of them kept their activations
    attention: int = 0  # how many others kept the results of attention
    on_host: int = 0  # how many others had their activations on the host
    least: int = 0  # the fewest layers that kept their activations in a micro-batch, and the most of each
    most: int = 0
    most_attention: int = 0
    most_on_host: int = 0
    host_bytes: int = 0  # what was taken of the host's memory
    highest: int = 0  # the most bytes that were allocated before torch's own counter was last reset

    def add(self, size: Size, peak: int, layers: int, kept: int, attention: int, on_host: int) -> bool:
        """Note one micro-batch. Returns whether it is the largest so far, and chosen in another way than the last."""
        self.least = kept if self.size is None else min(self.least, kept)
        self.most, self.most_attention = max(self.most, kept), max(self.most_attention, attention)
        self.most_on_host = max(self.most_on_host, on_host)
        if self.size is not None and size.tokens < self.size.tokens:
            return False
        before = self.size, self.kept, self.attention, self.on_host
        self.size, self.kept, self.attention, self.on_host = size, kept, attention, on_host
        self.layers, self.peak = layers, peak
        return before != (size, kept, attention, on_host)

    def to_dict(self) -> dict[str, Any]:
        """For the report."""
        found: dict[str, Any] = {"memory_budget_gib": self.budget, "layers": self.layers}
        if self.host_bytes:
            found["host_gib"] = round(self.host_bytes / GIB, 2)
        if self.size is not None:
            found |= {"kept_least": self.least, "kept_most": self.most, "attention_most": self.most_attention}
            found["host_most"] = self.most_on_host
            found["largest"] = {
                "rows": self.size.rows, "length": self.size.length, "kept": self.kept, "attention": self.attention,
                "host": self.on_host, "gib": round(self.peak / GIB, 2),
            }  # fmt: skip
        return found

    def __str__(self) -> str:
        if self.size is None:
            return "every layer was checkpointed"
        parts = [f"{self.kept} of {self.layers} layers kept their activations"]
        parts += [f"{self.on_host} had them in the host's memory"] * (self.on_host > 0)
        parts += [f"{self.attention} kept the results of attention"] * (self.attention > 0)
        others = f", {self.least} to {self.most} for others" if self.least < self.most else ""
        return f"{_and(parts)} for {_shape(self.size)}{others}"

    def line(self, limit: int) -> str:
        """The line of the log."""
        assert self.size is not None
        parts = [f"the activations of {self.kept} of {self.layers} layers"]
        parts += [f"those of {self.on_host} in the host's memory"] * (self.on_host > 0)
        parts += [f"the results of attention of {self.attention}"] * (self.attention > 0)
        return (
            f"activation_checkpointing: auto keeps {_and(parts)} for {_shape(self.size)}: {self.peak / GIB:.1f} GiB of "
            f"{limit / GIB:.1f}."
        )


def over_budget(size: Size, peak: int, budget: float) -> str:
    """The warning of a budget that full checkpointing does not meet."""
    return (
        f"memory_budget is {budget} GiB, but {_shape(size)} need {peak / GIB:.1f} GiB with every layer checkpointed, "
        f"so it is exceeded. {_smaller(size)}"
    )


def out_of_memory(size: Size | None, kept: int, took: int, error: str) -> str:
    """The error of a micro-batch that ran out of memory when it had taken `took` bytes, with `kept` layers kept."""
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


def _and(parts: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def _shape(size: Size) -> str:
    return f"{size.rows} x {size.length} tokens"
