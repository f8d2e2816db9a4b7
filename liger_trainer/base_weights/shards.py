"""Reads and extends safetensors checkpoints without loading a tensor.

A safetensors file has 8 bytes with the length of the header, then the header, then the tensors. The header is JSON: the
name, dtype, shape and offsets of each tensor. Tensors are copied as bytes, one block at a time. So they stay bit for
bit, even in dtypes that torch does not have, and a large prediction layer needs no more memory than a small one.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

SHARD_BYTES = 5 * 10**9
KEPT_FILES = "unloaded_weights"  # key in the metadata of an index: the files that the model's class does not load
_BLOCK = 16 * 2**20
_ALIGNMENT = 8  # of the header, as the library safetensors writes it


@dataclass(frozen=True)
class StoredTensor:
    """The location of a tensor: bytes `begin` to `end` of `file`. `dtype` is safetensors' name, such as `BF16`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


def tensors_of(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file by name. ValueError if the file is cut off or not safetensors."""
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > os.path.getsize(file):
            raise ValueError(f"{file} is not a safetensors file, or it is cut off. Download or save it again.")
        header = json.loads(stream.read(length))
    start = 8 + length
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        tensors[name] = StoredTensor(file, entry["dtype"], tuple(entry["shape"]), start + begin, start + end)
    return tensors


def read_index(folder: Path) -> dict[str, Any] | None:
    """Return the index of a checkpoint in several files, or None."""
    path = folder / SAFE_WEIGHTS_INDEX_NAME
    if not path.is_file():
        return None
    index: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return index


def files_of(folder: Path) -> list[Path]:
    """Return the safetensors files that `from_pretrained` would read in `folder`."""
    single = folder / SAFE_WEIGHTS_NAME
    if single.is_file():
        return [single]
    index = read_index(folder)
    if index is None:
        return []
    return [folder / name for name in sorted(set(index["weight_map"].values()))]


def add_shards(folder: Path, tensors: dict[str, StoredTensor], shard_bytes: int = SHARD_BYTES) -> list[str]:
    """Add `tensors` to the model in `folder` as separate files, and return the names of these files.

    A `model.safetensors` is renamed to the first shard: next to it, `from_pretrained` would ignore an index. All shards
    are renumbered for tools that trust the numbers. The index is written before the new files get their names, so an
    interrupted copy does not look complete.
    """
    own_files = files_of(folder)
    index = read_index(folder)
    weight_map: dict[str, str] = {}
    for file in own_files:
        weight_map.update(dict.fromkeys(tensors_of(file), file.name))
    metadata: dict[str, Any] = {} if index is None else dict(index.get("metadata") or {})
    groups = _grouped(tensors, shard_bytes)
    total = len(own_files) + len(groups)

    written: list[Path] = []
    try:
        for number, group in enumerate(groups, len(own_files) + 1):
            written.append(folder / f"{_shard_name(number, total)}.part")
            _write(written[-1], group)
    except (OSError, ValueError):
        for part in written:
            part.unlink(missing_ok=True)
        raise

    renamed = {file.name: _shard_name(number, total) for number, file in enumerate(own_files, 1)}
    for file in own_files:
        file.rename(folder / renamed[file.name])
    weight_map = {name: renamed[file] for name, file in weight_map.items()}
    kept_files = [part.name.removesuffix(".part") for part in written]
    for file_name, group in zip(kept_files, groups, strict=True):
        weight_map.update(dict.fromkeys(group, file_name))

    own_bytes = sum(_tensor_bytes(folder / name) for name in renamed.values())
    metadata["total_size"] = own_bytes + sum(tensor.num_bytes for tensor in tensors.values())
    metadata[KEPT_FILES] = kept_files
    text = json.dumps({"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}, indent=2)
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(f"{text}\n", encoding="utf-8")
    for part in written:
        part.rename(part.with_suffix(""))
    return kept_files


def drop_old_index(folder: Path) -> None:
    """Delete the index and shards of an earlier `add_shards` if the model is now in one file. They are outdated."""
    index = read_index(folder)
    if index is None or not (folder / SAFE_WEIGHTS_NAME).is_file():
        return
    if (index.get("metadata") or {}).get(KEPT_FILES):
        for name in set(index["weight_map"].values()):
            (folder / name).unlink(missing_ok=True)
        (folder / SAFE_WEIGHTS_INDEX_NAME).unlink()


def loaded_names(index: dict[str, Any]) -> set[str]:
    """Return the names in an index, without the ones that `add_shards` has added."""
    kept_files = set((index.get("metadata") or {}).get(KEPT_FILES, ()))
    return {name for name, file in index["weight_map"].items() if file not in kept_files}


def _shard_name(number: int, total: int) -> str:
    return f"model-{number:05d}-of-{total:05d}.safetensors"


def _tensor_bytes(file: Path) -> int:
    return sum(tensor.num_bytes for tensor in tensors_of(file).values())


def _grouped(tensors: dict[str, StoredTensor], shard_bytes: int) -> list[dict[str, StoredTensor]]:
    """Return `tensors` in groups of at most `shard_bytes`. A larger tensor gets its own group."""
    groups: list[dict[str, StoredTensor]] = []
    room = 0
    for name in sorted(tensors):
        size = tensors[name].num_bytes
        if not groups or size > room:
            groups.append({})
            room = shard_bytes
        groups[-1][name] = tensors[name]
        room -= size
    return groups


def _write(target: Path, tensors: dict[str, StoredTensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without it
    offset = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.num_bytes],
        }
        offset += tensor.num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with open(target, "wb") as out:
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        _copy(tensors.values(), out)


def _copy(tensors: Iterable[StoredTensor], out: BinaryIO) -> None:
    for tensor in tensors:
        with open(tensor.file, "rb") as source:
            source.seek(tensor.begin)
            left = tensor.num_bytes
            while left:
                block = source.read(min(left, _BLOCK))
                if not block:
                    raise ValueError(f"{tensor.file} is cut off. Download it again.")
                out.write(block)
                left -= len(block)
