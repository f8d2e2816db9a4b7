"""The manifest of a checkpoint: the file that is written last, and names every other file with its size and checksums.

A checkpoint of `liger-trainer train` without a manifest was cut off. The manifest also has the facts of the run
(`resuming.py`), so that nothing else in a checkpoint has to be read before it is known whose it is.
"""

import json
import os
import shutil
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

NAME = "liger_manifest.json"
BEGUN = "liger_manifest.begun.json"  # stands in a checkpoint from before its first file until its manifest
_BLOCK = 1 << 24  # bytes of a checksum: a 100 GB checkpoint has 6,000 of them
_THREADS = 8  # zlib frees the interpreter's lock: 3 GB/s a core were measured


def checkpoints_in(folder: Path) -> list[Path]:
    """The folders `checkpoint-N` in `folder`, in the order of their steps."""
    steps = {path: path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*") if path.is_dir()}
    return sorted((path for path, step in steps.items() if step.isdecimal()), key=lambda path: int(steps[path]))


def files_in(checkpoint: Path) -> list[str]:
    """The names of all files in a checkpoint and its subfolders, without the manifest itself."""
    found = (path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file())
    return sorted(set(found) - {NAME, BEGUN})


def begin(checkpoint: Path, facts: dict[str, Any]) -> None:
    """Mark `checkpoint` as begun. What an earlier attempt has left there is deleted."""
    if (checkpoint / BEGUN).exists() or (checkpoint / NAME).exists():
        remove(checkpoint)
    checkpoint.mkdir(parents=True, exist_ok=True)
    _put(checkpoint / BEGUN, facts)


def write(checkpoint: Path, names: Iterable[str], facts: dict[str, Any]) -> None:
    """Write the manifest of `checkpoint` once its files `names` are on the disk: after a crash, they are if it is."""
    names = sorted(names)
    for name in names:
        with open(checkpoint / name, "rb") as file:
            os.fsync(file.fileno())
    sizes = {name: (checkpoint / name).stat().st_size for name in names}
    _put(checkpoint / BEGUN, facts | {"files": _checksums(checkpoint, sizes)})
    os.replace(checkpoint / BEGUN, checkpoint / NAME)


def remove(folder: Path) -> None:
    """Delete a checkpoint, or a link to one. Its mark goes last, so what a crash leaves is still known as begun."""
    if folder.is_symlink():
        folder.unlink()
        return
    if (folder / NAME).exists():
        os.replace(folder / NAME, folder / BEGUN)
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != BEGUN:
            path.unlink()
    shutil.rmtree(folder)


def read(checkpoint: Path) -> dict[str, Any] | None:
    """The manifest of `checkpoint`; None if there is none that can be read."""
    try:
        found = json.loads((checkpoint / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and {"files", "recipe", "processes", "run"} <= found.keys() else None


def fault_of(checkpoint: Path, manifest: dict[str, Any]) -> str | None:
    """What is missing in `checkpoint` or differs from its manifest; None if it is whole. Reads every byte of it.

    A missing random state is no fault: training goes on with different random numbers, as in the stock trainer.
    """
    files = {
        name: sums for name, sums in manifest["files"].items() if name not in lost_random_states(checkpoint, manifest)
    }
    try:
        sizes = {name: (checkpoint / name).stat().st_size for name in files}
        for name, size in sizes.items():
            if size != files[name][0]:
                return f"{name} has {size} bytes of {files[name][0]}"
        found = _checksums(checkpoint, sizes)
    except OSError as error:
        return f"{Path(error.filename or checkpoint).name} cannot be read: {error.strerror}"
    return next((f"{name} has changed since it was saved" for name in files if found[name] != files[name]), None)


def lost_random_states(checkpoint: Path, manifest: dict[str, Any]) -> list[str]:
    """The files of random states that a manifest names and that are gone."""
    names = (name for name in manifest["files"] if name.startswith("rng_state"))
    return [name for name in names if not (checkpoint / name).exists()]


def _put(path: Path, values: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(values, file)
        file.flush()
        os.fsync(file.fileno())


def _checksums(checkpoint: Path, sizes: dict[str, int]) -> dict[str, list[int]]:
    """For each file, its size and the CRC-32 of each block."""
    blocks = [(name, start) for name, size in sizes.items() for start in range(0, size, _BLOCK)]

    def sum_of(block: tuple[str, int]) -> int:
        name, start = block
        with open(checkpoint / name, "rb") as file:
            file.seek(start)
            return zlib.crc32(file.read(_BLOCK))

    sums: dict[str, list[int]] = {name: [size] for name, size in sizes.items()}
    with ThreadPoolExecutor(_THREADS) as pool:
        for (name, _), found in zip(blocks, pool.map(sum_of, blocks), strict=True):
            sums[name].append(found)
    return sums
