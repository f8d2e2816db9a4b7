"""The report of `apply_liger`: for each operation the modules that it found, swapped and left alone, and why."""

import json
import os
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

OPERATIONS = (
    "rms_norm",
    "layer_norm",
    "rope",
    "swiglu",
    "geglu",
    "experts",
    "lora",
    "float8",
    "fused_linear_cross_entropy",
    "varlen_attention",
)


@dataclass
class OperationReport:
    """The modules of one operation.

    Attributes:
        enabled (`bool`): Whether the config asked for the operation.
        swapped (`dict[str, str]`): Module name -> the variant that it was proven to compute.
        skipped (`dict[str, str]`): Module name -> why it keeps its own code.
        unsuited (`dict[str, str]`): Module name -> why the operation does not apply. Such a module was not recognised,
            and counts neither as found nor as skipped.
    """

    enabled: bool = True
    swapped: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    unsuited: dict[str, str] = field(default_factory=dict)

    @property
    def found(self) -> int:
        """Return the number of modules that were recognised, swapped or not."""
        return len(self.swapped) + len(self.skipped)


class ReportEntry:
    """A module's entry in a report, which is updated when the module falls back or runs ours again.

    The report is about this module and not about its copies, so `deepcopy` and pickle replace it by None.
    """

    def __init__(self, operation: OperationReport, name: str):
        self.operation, self.name = operation, name
        self.variant: str | None = None  # of a swapped module that runs its own code for now

    def mark_skipped(self, reason: str) -> None:
        """Note that the module, though it was swapped, runs its own code from now on, and why."""
        variant = self.operation.swapped.pop(self.name, None)
        if variant is not None:
            self.operation.skipped[self.name], self.variant = reason, variant

    def mark_swapped(self) -> None:
        """Note that the module runs what it was swapped for once more, after `mark_skipped`."""
        if self.variant is not None:
            self.operation.skipped.pop(self.name, None)
            self.operation.swapped[self.name], self.variant = self.variant, None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


class LigerReport:
    """The report of one model.

    Args:
        model_name (`str`): The name of the model's class.

    Attributes:
        operations (`dict[str, OperationReport]`): One entry for each key of the config, in the order of `OPERATIONS`.
        checkpointing (`dict` or `None`): What `activation_checkpointing: auto` has chosen while the model was trained.
        cuda_graphs (`dict` or `None`): Which sizes of steps were captured, and why others were not.
        advice (`list[str]`): What to install, and what it costs to go without.
        shared_prompts (`dict` or `None`): What rows that begin alike have shared, and why others have not.
        sort_by_prompt (`dict` or `None`): What sorting rows by prompt saves in the training steps, or would save.
        old_policy (`dict` or `None`): Passes of the old policy that were left out, and why others ran.
    """

    def __init__(self, model_name: str):
        self.model_name = model_name
        self.operations = {name: OperationReport() for name in OPERATIONS}
        self.checkpointing: dict[str, Any] | None = None
        self.cuda_graphs: dict[str, Any] | None = None
        self.advice: list[str] = []
        self.shared_prompts: dict[str, Any] | None = None
        self.sort_by_prompt: dict[str, Any] | None = None
        self.old_policy: dict[str, Any] | None = None

    def __getitem__(self, operation: str) -> OperationReport:
        return self.operations[operation]

    @property
    def skipped(self) -> dict[str, str]:
        """Module name -> why it keeps its own code, over all operations."""
        found: dict[str, str] = {}
        for operation in self.operations.values():
            found |= operation.skipped
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain dicts and lists.

        A name such as `model.layers.*.mlp` stands for `count` modules.
        """
        chosen = {} if self.checkpointing is None else {"activation_checkpointing": self.checkpointing}
        if self.cuda_graphs is not None:
            chosen["cuda_graphs"] = self.cuda_graphs
        if self.shared_prompts is not None:
            chosen["shared_prompts"] = self.shared_prompts
        if self.sort_by_prompt is not None:
            chosen["sort_by_prompt"] = self.sort_by_prompt
        if self.old_policy is not None:
            chosen["old_policy"] = self.old_policy
        if self.advice:
            chosen["advice"] = self.advice  # type: ignore[assignment]
        return {
            "model": self.model_name,
            "operations": {
                name: {
                    "enabled": operation.enabled,
                    "found": operation.found,
                    "swapped": _rows(operation.swapped, "variant"),
                    "skipped": _rows(operation.skipped, "reason"),
                    "unsuited": _rows(operation.unsuited, "reason"),
                }
                for name, operation in self.operations.items()
            },
            **chosen,
        }

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write `to_dict()` to the file `path`."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.to_dict(), file, indent=2)
            file.write("\n")

    def one_line(self) -> str:
        """Return one line for a log: modules swapped and found for each operation, and why others were not."""
        counts = [
            f"{name} {len(operation.swapped)}/{operation.found}" if operation.enabled else f"{name} off"
            for name, operation in self.operations.items()
            if operation.found or not operation.enabled
        ]
        line = f"{self.model_name}: {', '.join(counts) if counts else 'nothing recognised, nothing swapped'}"
        found = set(self.skipped.values())
        for operation in self.operations.values():
            found.update(operation.unsuited.values())
        reasons = sorted(found)
        line = f"{line} (kept: {'; '.join(reasons)})" if reasons else line
        return ". ".join([line, *self.advice])

    def __str__(self) -> str:
        lines = [self.model_name, f"{'operation':<28}{'found':>6}{'swapped':>9}{'skipped':>9}"]
        for name, operation in self.operations.items():
            if not operation.enabled:
                lines.append(f"{name:<28}   off")
                continue
            swapped, skipped = operation.swapped, operation.skipped
            lines.append(f"{name:<28}{operation.found:>6}{len(swapped):>9}{len(skipped):>9}")
            for sign, modules in (("+", swapped), ("-", skipped), (".", operation.unsuited)):
                for names, count, text in compress(modules):
                    lines.append(f"  {sign} {names}{f' x{count}' if count > 1 else ''}: {text}")
        lines += self.advice
        return "\n".join(lines)


def _rows(modules: dict[str, str], text_is: str) -> list[dict[str, Any]]:
    return [{"modules": names, "count": count, text_is: text} for names, count, text in compress(modules)]


def compress(modules: dict[str, str]) -> list[tuple[str, int, str]]:
    """Group modules with equal texts and with names that differ only in their numbers: (name, how many, text).

    The name has `*` in place of its numbers, or keeps them where it stands for one module alone.
    """
    groups: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for name, text in modules.items():
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        groups[pattern, text].append(name)
    return [(pattern if len(names) > 1 else names[0], len(names), text) for (pattern, text), names in groups.items()]
