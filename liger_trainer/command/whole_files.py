"""Whether the files of a checkpoint or of a model are whole, or were cut off when a run ended early."""

import json
import os
import zipfile
from pathlib import Path


def matches(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern)})


def fault_of_checkpoint(checkpoint: Path, needs_optimizer: bool) -> str | None:
    """What is missing or cut off in `checkpoint`, or None. Reads sizes and headers, not the weights."""
    if not (checkpoint / "trainer_state.json").is_file():
        return "no trainer_state.json in it"
    if not matches(checkpoint, ("*.safetensors", "pytorch_model*", "adapter_model*", "medusa_heads", "global_step*")):
        if not matches(checkpoint, ("*/adapter_model*",)):
            return "no weights in it"
    if needs_optimizer and not matches(checkpoint, ("optimizer*", "global_step*")):
        return "no optimizer.pt in it"
    for index in checkpoint.glob("*.index.json"):
        if not (fault := fault_of_file(index)):
            missing = set(json.loads(index.read_text())["weight_map"].values()) - set(os.listdir(checkpoint))
            fault = f"no {min(missing)} in it" if missing else None
        if fault:
            return fault
    for folder in matches(checkpoint, ("pytorch_model_fsdp*", "optimizer_*")):
        if folder.is_dir() and not (folder / ".metadata").is_file():  # written last
            return f"{folder.name} is cut off"
    return next((fault for path in sorted(checkpoint.rglob("*")) if (fault := fault_of_file(path))), None)


def fault_of_file(path: Path) -> str | None:
    """That a file of weights, of states or of JSON is cut off, or None."""
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
    """Whether the file is as long as its header says: 8 bytes of length, the header in JSON, the tensors."""
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
