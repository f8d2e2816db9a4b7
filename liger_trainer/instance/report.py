"""What `apply_liger` did: per operation, the modules found, swapped and left alone, and why."""

import json
from collections import defaultdict
from dataclasses import dataclass, field

OPERATIONS = ("rms_norm", "layer_norm", "rope", "swiglu", "geglu", "fused_linear_cross_entropy")


@dataclass
class OperationReport:
    """One operation. `swapped`: module name -> variant proven. `skipped`: module name -> reason."""

    enabled: bool = True
    swapped: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def found(self) -> int:
        return len(self.swapped) + len(self.skipped)


class Place:
    """A module's place in a report, for what happens to it after patching.

    A copy of the module, by `deepcopy` or pickle, is not the module that the report is about: it has none.
    """

    def __init__(self, part: OperationReport, name: str):
        self.part, self.name = part, name

    def kept(self, reason: str) -> None:
        """The module runs its own code in spite of being swapped, as a call has found."""
        if self.part.swapped.pop(self.name, None) is not None:
            self.part.skipped[self.name] = reason

    def __reduce__(self):
        return type(None), ()


class LigerReport:
    """What was patched in one model.

    Args:
        model_name (`str`): Class of the model.

    Attributes:
        operations (`dict[str, OperationReport]`): One entry for each key of the config, in the order of `OPERATIONS`.
    """

    def __init__(self, model_name: str):
        self.model_name = model_name
        self.operations = {name: OperationReport() for name in OPERATIONS}

    def __getitem__(self, operation: str) -> OperationReport:
        return self.operations[operation]

    @property
    def skipped(self) -> dict[str, str]:
        """Module name -> reason, of all operations."""
        return {name: why for part in self.operations.values() for name, why in part.skipped.items()}

    def to_dict(self) -> dict:
        """Plain dicts and lists, names compressed: `model.layers.*.mlp` stands for `count` modules."""
        return {
            "model": self.model_name,
            "operations": {
                name: {
                    "enabled": part.enabled,
                    "found": part.found,
                    "swapped": [
                        {"modules": modules, "count": count, "variant": text}
                        for modules, count, text in compress(part.swapped)
                    ],
                    "skipped": [
                        {"modules": modules, "count": count, "reason": text}
                        for modules, count, text in compress(part.skipped)
                    ],
                }
                for name, part in self.operations.items()
            },
        }

    def to_json(self, path) -> None:
        """Write `to_dict()` to the file `path`."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.to_dict(), file, indent=2)
            file.write("\n")

    def one_line(self) -> str:
        """For a log: swapped and found per operation, and how many modules kept their own code."""
        parts = [
            f"{name} {len(part.swapped)}/{part.found}" if part.enabled else f"{name} off"
            for name, part in self.operations.items()
            if part.found or not part.enabled
        ]
        line = f"{self.model_name}: {', '.join(parts) if parts else 'nothing recognised, nothing swapped'}"
        reasons = sorted({why for why in self.skipped.values()})
        return f"{line} (kept: {'; '.join(reasons)})" if reasons else line

    def __str__(self) -> str:
        lines = [self.model_name, f"{'operation':<28}{'found':>6}{'swapped':>9}{'skipped':>9}"]
        for name, part in self.operations.items():
            if not part.enabled:
                lines.append(f"{name:<28}   off")
                continue
            lines.append(f"{name:<28}{part.found:>6}{len(part.swapped):>9}{len(part.skipped):>9}")
            for sign, modules in (("+", part.swapped), ("-", part.skipped)):
                for names, count, text in compress(modules):
                    lines.append(f"  {sign} {names}{f' x{count}' if count > 1 else ''}: {text}")
        return "\n".join(lines)


def compress(modules: dict[str, str]) -> list[tuple[str, int, str]]:
    """(name with `*` for its numbers, how many, text), one for each name and text, in order of appearance.

    A name that stands alone keeps its numbers.
    """
    groups = defaultdict(list)
    for name, text in modules.items():
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        groups[pattern, text].append(name)
    return [(pattern if len(names) > 1 else names[0], len(names), text) for (pattern, text), names in groups.items()]
