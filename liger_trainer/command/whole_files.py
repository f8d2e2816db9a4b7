"""Whether the files of a checkpoint or of a model are whole. They may be cut off if a run has ended early."""

import json
import os
import zipfile
from pathlib import Path

from liger_trainer.command.saved_arguments import processes_of


def matches(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    """The paths in `folder` that match at least one of the glob patterns, sorted."""
    return sorted({path for pattern in patterns for path in folder.glob(pattern)})


def checkpoints_in(folder: Path) -> list[Path]:
    """The folders `checkpoint-N` in `folder`, in the order of their steps."""
    steps = {path: path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*") if path.is_dir()}
    return sorted((path for path, step in steps.items() if step.isdecimal()), key=lambda path: int(steps[path]))


def fault_of_checkpoint(checkpoint: Path, needs_optimizer: bool) -> str | None:
    """What is missing or cut off in `checkpoint`; None if it is whole. Reads sizes and headers, not the weights."""
    if not (checkpoint / "trainer_state.json").is_file():
        return "no trainer_state.json in it"
    if (checkpoint / "checkpoint-is-incomplete.txt").exists():  # of the stock trainer's enable_jit_checkpoint
        return "checkpoint-is-incomplete.txt in it"
    if not matches(checkpoint, ("*.safetensors", "pytorch_model*", "adapter_model*", "medusa_heads", "global_step*")):
        if not matches(checkpoint, ("*/adapter_model*",)):
            return "no weights in it"
    if needs_optimizer and not matches(checkpoint, ("optimizer*", "global_step*")):
        return "no optimizer.pt in it"
    if fault := _fault_of_ranks(checkpoint, needs_optimizer):
        return fault
    for index in checkpoint.glob("*.index.json"):
        if not (fault := fault_of_file(index)):
            missing = set(json.loads(index.read_text())["weight_map"].values()) - set(os.listdir(checkpoint))
            fault = f"no {min(missing)} in it" if missing else None
        if fault:
            return fault
    for folder in matches(checkpoint, ("pytorch_model_fsdp*", "optimizer_*")):
        if folder.is_dir() and not (folder / ".metadata").is_file():  # this file is written last
            return f"{folder.name} is cut off"
    return next((fault for path in sorted(checkpoint.rglob("*")) if (fault := fault_of_file(path))), None)


def _fault_of_ranks(checkpoint: Path, needs_optimizer: bool) -> str | None:
    """Each process saves the state of its random numbers, and the main one may be done before the others are."""
    if not needs_optimizer or fault_of_file(checkpoint / "training_args.bin"):
        return None
    processes = processes_of(checkpoint)
    for rank in range(processes or 0) if (processes or 0) > 1 else ():
        if not (checkpoint / f"rng_state_{rank}.pth").is_file():
            return f"no rng_state_{rank}.pth of its {processes} processes in it"
    return None


def fault_of_file(path: Path) -> str | None:
    """A message that a file of weights, states or JSON is cut off; None if it is whole, or a file of another kind."""
    whole = True
    if path.suffix == ".safetensors":
        whole = _is_whole_safetensors(path)
    elif path.suffix in (".pt", ".pth", ".bin") and path.is_file():
        whole = zipfile.is_zipfile(path)
    elif path.suffix == ".json":
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            whole = False
    return None if whole else f"{path.name} is cut off"


def _is_whole_safetensors(path: Path) -> bool:
    """Whether the file is as long as its header says.

    It has 8 bytes with the length of the header, the header in JSON, and the tensors.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= size - 8:
            return False
        try:
            header = json.loads(file.read(length))
        except ValueError:
            return False
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return size == 8 + length + max(ends, default=0)
