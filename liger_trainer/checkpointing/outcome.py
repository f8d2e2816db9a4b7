"""What was chosen, in words: for the log, the report and the summary, and for a micro-batch that does not fit."""

from dataclasses import dataclass
from typing import Any

from liger_trainer.checkpointing.memory import GIB
from liger_trainer.checkpointing.plan import NOTHING, Count, Plan, Size


@dataclass
class Outcome:
    """What was chosen in one training.

    Attributes:
        budget (`float` or `None`): The budget that was set, in GiB.
        layers (`int`): Layers that a micro-batch calls. 0 as long as nothing was chosen.
        least, most (`int`): How many of them kept their activations, in the micro-batches for which it was chosen.
        size (`Size` or `None`): Of the largest of those micro-batches.
        kept (`int`): How many layers kept their activations then.
        attention (`int`): How many others kept the results of attention then.
        most_attention (`int`): The most that did so in a micro-batch.
        on_host (`int`): How many others had their activations on the host then.
        most_on_host (`int`): The most that did so in a micro-batch.
        inputs_on_host (`bool`): Whether what checkpointed layers were given waited there too.
        host_bytes (`int`): What was taken of the host's memory.
        peak (`int`): Bytes that were allocated then at most, as predicted.
        run_again (`int`): Micro-batches that ran out of memory and were run again.
        highest (`int`): The most bytes that were allocated before torch's own counter was last reset.
    """

    budget: float | None
    layers: int = 0
    least: int = 0
    most: int = 0
    size: Size | None = None
    kept: int = 0
    attention: int = 0
    most_attention: int = 0
    on_host: int = 0
    most_on_host: int = 0
    inputs_on_host: bool = False
    host_bytes: int = 0
    peak: int = 0
    run_again: int = 0
    highest: int = 0

    def add(self, size: Size, layers: int, plan: Plan) -> bool:
        """Note one choice. Returns whether it is of a larger micro-batch than all before."""
        kept = len(plan.kept)
        self.most_attention = max(self.most_attention, plan.attention_only)
        self.most_on_host = max(self.most_on_host, len(plan.on_host))
        self.least = min(self.least, kept) if self.layers else kept
        self.most, self.layers = max(self.most, kept), layers
        before = self.size
        if before is not None and size.tokens < before.tokens:
            return False
        self.size, self.kept, self.attention, self.peak = size, kept, plan.attention_only, plan.peak
        self.on_host = len(plan.on_host)
        return before is None or size.tokens > before.tokens

    def to_dict(self) -> dict[str, Any]:
        """For the report."""
        found: dict[str, Any] = {"memory_budget_gib": self.budget, "layers": self.layers, "run_again": self.run_again}
        if self.host_bytes:
            found |= {"host_gib": round(self.host_bytes / GIB, 2), "inputs_on_host": self.inputs_on_host}
        if self.size is not None:
            found |= {"kept_least": self.least, "kept_most": self.most, "attention_most": self.most_attention}
            found["host_most"] = self.most_on_host
            found["largest"] = {
                "rows": self.size.rows, "length": self.size.length, "kept": self.kept, "attention": self.attention,
                "host": self.on_host, "gib": round(self.peak / GIB, 2),
            }  # fmt: skip
        return found

    def __str__(self) -> str:
        again = f"; {_times(self.run_again)} run again with more checkpointing" if self.run_again else ""
        if self.inputs_on_host:
            again = f"; the inputs of checkpointed layers waited in the host's memory{again}"
        if self.size is None:
            return f"every layer was checkpointed{again}"
        parts = [f"{self.kept} of {self.layers} layers kept their activations"]
        parts += [f"{self.on_host} had them in the host's memory"] * (self.on_host > 0)
        parts += [f"{self.attention} kept the results of attention"] * (self.attention > 0)
        line = f"{_and(parts)} for {_shape(self.size)}"
        others = f", {self.least} to {self.most} for others" if self.least < self.most else ""
        return line + others + again


def chosen(size: Size, layers: int, plan: Plan, limit: int) -> str:
    """The line of the log."""
    parts = [f"the activations of {len(plan.kept)} of {layers} layers"]
    parts += [f"those of {len(plan.on_host)} in the host's memory"] * bool(plan.on_host)
    parts += [f"the results of attention of {plan.attention_only}"] * (plan.attention_only > 0)
    return (
        f"activation_checkpointing: auto keeps {_and(parts)} for {_shape(size)}: {plan.peak / GIB:.1f} GiB of "
        f"{limit / GIB:.1f}."
    )


def over_budget(size: Size, peak: int, budget: float, fits: int | None) -> str:
    """The warning of a budget that full checkpointing does not meet."""
    return (
        f"memory_budget is {budget} GiB, but {_shape(size)} need {peak / GIB:.1f} GiB with every layer checkpointed, "
        f"so it is exceeded. {_what_fits(size, fits)}"
    )


def run_again(size: Size | None, kept: Count, inputs_on_host: bool) -> str:
    """The line of a micro-batch that has run out of memory and is run again."""
    of = "A micro-batch" if size is None else f"A micro-batch of {_shape(size)}"
    how = "every layer checkpointed" if kept == NOTHING else f"{_kept(kept)} kept"
    how += ", their inputs in the host's memory" if inputs_on_host and kept == NOTHING else ""
    return f"{of} ran out of memory. It is run again, with the same random numbers and {how}."


def too_large(size: Size | None, fits: int | None, error: str) -> str:
    """The error of a micro-batch that does not fit with every layer checkpointed."""
    what = "A micro-batch does" if size is None else f"A micro-batch of {_shape(size)} does"
    return (
        f"{what} not fit the memory of the device, though every layer is checkpointed (activation_checkpointing: "
        f"auto). {_what_fits(size, fits)} ({error})"
    )


def cannot_redo(why: str, size: Size | None, kept: Count, error: str) -> str:
    """The error of a micro-batch that ran out of memory where it cannot be run again."""
    what = "A micro-batch" if size is None else f"A micro-batch of {_shape(size)}"
    mend = _what_fits(size, None)
    if kept != NOTHING:
        what_was = _kept(kept)
        mend = (
            f"{what_was[0].upper()}{what_was[1:]} were kept. Set memory_budget to fewer GiB, or "
            "activation_checkpointing to true."
        )
    return f"{what} ran out of memory, and {why}. {mend} ({error})"


def _what_fits(size: Size | None, tokens: int | None) -> str:
    if size is None:
        return "Set a smaller per_device_train_batch_size or max_length."
    if tokens is None or tokens >= size.tokens:  # nothing is known, or it was wrong
        tokens = size.tokens // 2
        about = f"Try half of that, {tokens} tokens"
    elif tokens < 1:
        return "No row fits: shard the model over more GPUs, or train an adapter (use_peft)."
    else:
        about = f"About {tokens} tokens fit"
    rows, length = tokens // size.length, tokens // size.rows
    by_rows = f"per_device_train_batch_size: {rows}, or " if 0 < rows < size.rows else ""
    return f"{about}: {by_rows}rows of at most {max(length, 1)} tokens."


def _kept(count: Count) -> str:
    whole = f"the activations of {_layers(count.whole)}"
    attention = f"the results of attention of {_layers(count.attention)}"
    host = f"the activations of {_layers(count.on_host)} on the host"
    return _and([whole] * (count.whole > 0) + [attention] * (count.attention > 0) + [host] * (count.on_host > 0))


def _and(parts: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def _layers(number: int) -> str:
    return f"{number} layer{'s' * (number > 1)}"


def _shape(size: Size) -> str:
    return f"{size.rows} x {size.length} tokens"


def _times(count: int) -> str:
    return "1 micro-batch was" if count == 1 else f"{count} micro-batches were"
