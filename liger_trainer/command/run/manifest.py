"""Writes and reads the manifest of a checkpoint: its last file, which lists every other file with size and checksums.

A checkpoint of `liger-trainer train` without a manifest is incomplete. The manifest also holds the fingerprint of the
run: the recipe keys that decide what is trained, and checksums of the rows and the models. So a run knows whether it
may resume from a checkpoint before it reads anything else in it.
"""

import dataclasses
import fnmatch
import json
import os
import shutil
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from liger_trainer.command.recipe.model_source import ModelSource, find_model
from liger_trainer.command.recipe.read import Recipe
from liger_trainer.errors import RecipeError, without_tokens

if TYPE_CHECKING:
    from datasets import Dataset

NAME = "liger_manifest.json"
BEGUN = "liger_manifest.begun.json"  # in a checkpoint from before its first file until its manifest is written
_BLOCK = 1 << 24  # bytes per checksum: a 100 GB checkpoint has 6,000 of them
_THREADS = 8  # zlib releases the GIL; measured 3 GB/s per core
# If one of these changes, the states in a checkpoint no longer fit the weights or the optimizer.
_REFUSED = (
    "trainer",
    "optim",
    "optim_args",
    "optim_target_modules",
    "use_peft",
    "lora_r",
    "lora_alpha",
    "lora_target_*",
    "lora_modules_to_save",
    "use_rslora",
    "use_dora",
    "load_in_*",
    "medusa_num_*",
    "medusa_tied",
    "eagle_draft_vocab_size",
    "eagle_layers",
    "eagle_intermediate_size",
)
_SAME_STATES = {"adamw_torch", "adamw_torch_fused"}
# The states of optimizer and scheduler contain these, so loading the states overwrites the recipe's values.
_IN_THE_STATES = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
# The parts of a fingerprint, and the recipe key that each is about
_FINGERPRINT_KEYS = {"base": "model_name_or_path", "teacher": "teacher_model_name_or_path", "rows": "dataset_name"}
_FILES_OF_A_MODEL = (".safetensors", ".bin", ".gguf", ".json", ".jinja", ".model", ".txt")
_MOST_BYTES = 1 << 32  # of larger data, only every second, third, ... batch of rows is read


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the folders `checkpoint-N` in `folder`, ordered by step."""
    steps = {path: path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*") if path.is_dir()}
    return sorted((path for path, step in steps.items() if step.isdecimal()), key=lambda path: int(steps[path]))


def files_in(checkpoint: Path) -> list[str]:
    """Return the names of all files in a checkpoint and its subfolders, except the manifest."""
    names = (path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file())
    return sorted(set(names) - {NAME, BEGUN})


def begin(checkpoint: Path, fingerprint: dict[str, Any]) -> None:
    """Mark `checkpoint` as begun, and delete the remains of an earlier attempt."""
    if (checkpoint / BEGUN).exists() or (checkpoint / NAME).exists():
        remove(checkpoint)
    checkpoint.mkdir(parents=True, exist_ok=True)
    _write_json(checkpoint / BEGUN, fingerprint)


def write(checkpoint: Path, names: Iterable[str], fingerprint: dict[str, Any]) -> None:
    """Flush the files `names` of `checkpoint` to disk, then write its manifest. So a manifest implies its files."""
    names = sorted(names)
    for name in names:
        with open(checkpoint / name, "rb") as file:
            os.fsync(file.fileno())
    sizes = {name: (checkpoint / name).stat().st_size for name in names}
    _write_json(checkpoint / BEGUN, fingerprint | {"files": _checksums(checkpoint, sizes)})
    os.replace(checkpoint / BEGUN, checkpoint / NAME)


def remove(folder: Path) -> None:
    """Delete a checkpoint, or a link to one. Its mark goes last, so after a crash the rest still counts as begun."""
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


def was_begun(checkpoint: Path) -> bool:
    """Return whether a run of the command began to save `checkpoint`, or only created the folder."""
    marks = (checkpoint / BEGUN).exists() or (checkpoint / NAME).exists()
    return marks or (checkpoint.is_dir() and not any(checkpoint.iterdir()))


def read(checkpoint: Path) -> dict[str, Any] | None:
    """Return the manifest of `checkpoint`, or None if it is missing or cannot be read."""
    try:
        manifest = json.loads((checkpoint / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if isinstance(manifest, dict) and {"files", "recipe", "processes", "run"} <= manifest.keys():
        return manifest
    return None


def find_damage(checkpoint: Path, manifest: dict[str, Any]) -> str | None:
    """Read every byte of `checkpoint`. Return what is missing or differs from its manifest, or None if it is whole."""
    try:
        checksums = _checksums(checkpoint, {name: (checkpoint / name).stat().st_size for name in manifest["files"]})
    except OSError as error:
        return f"{Path(error.filename or checkpoint).name} cannot be read: {error.strerror}"
    return next((f"{name} has changed" for name, sums in manifest["files"].items() if checksums[name] != sums), None)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(values, file)
        file.flush()
        os.fsync(file.fileno())


def _checksums(checkpoint: Path, sizes: dict[str, int]) -> dict[str, list[int]]:
    """Return, for each file, its size and the CRC-32 of each block."""
    blocks = [(name, start) for name, size in sizes.items() for start in range(0, size, _BLOCK)]

    def sum_of(block: tuple[str, int]) -> int:
        name, start = block
        with open(checkpoint / name, "rb") as file:
            file.seek(start)
            return zlib.crc32(file.read(_BLOCK))

    sums: dict[str, list[int]] = {name: [size] for name, size in sizes.items()}
    with ThreadPoolExecutor(_THREADS) as pool:
        for (name, _), checksum in zip(blocks, pool.map(sum_of, blocks), strict=True):
            sums[name].append(checksum)
    return sums


def fingerprint_run(recipe: Recipe, source: ModelSource, rows: "Dataset") -> dict[str, Any]:
    """Return what identifies a run in its checkpoints: its keys (without tokens), and checksums of models and rows."""
    keys: dict[str, Any] = {}
    for part in (recipe.args, recipe.training, recipe.model):
        keys |= {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    compared_keys = {key: _as_json(value) for key, value in keys.items() if _is_refused(key) or key in _IN_THE_STATES}
    fingerprint: dict[str, Any] = {"processes": recipe.training.world_size, "recipe": compared_keys}
    if not recipe.training.should_save:
        return fingerprint  # this process neither writes manifests nor decides whether to resume
    fingerprint["base"] = [recipe.model.model_name_or_path, _fingerprint_model(source)]
    if teacher := keys.get("teacher_model_name_or_path"):
        fingerprint["teacher"] = [
            teacher,
            _fingerprint_model(find_model(teacher, revision=keys["teacher_model_revision"])),
        ]
    fingerprint["rows"] = [_as_json(recipe.args.dataset_name), _fingerprint_rows(rows)]
    return fingerprint


def refuse_another_run(checkpoint: Path, saved: dict[str, Any], current: dict[str, Any]) -> None:
    """RecipeError if a run with the fingerprint `current` cannot resume `checkpoint` with the manifest `saved`."""
    differences = [
        f"{key} is {value!r} and was {old!r}"
        for key, value, old in _differences(saved, current)
        if _is_refused(key) and not (key == "optim" and {value, old} == _SAME_STATES)
    ]
    for kind, key in _FINGERPRINT_KEYS.items():
        if saved.get(kind, [None])[-1] != current.get(kind, [None])[-1]:
            new = " ".join(map(str, current.get(kind, ("unset",))))
            old = " ".join(map(str, saved.get(kind, ("unset",))))
            differences.append(f"{key} is {new} and was {old}")
    if differences:
        raise RecipeError(f"{checkpoint} was saved by another run: {'; '.join(differences)}. Set another output_dir.")


def describe_changes(checkpoint: Path, saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Return lines about what changes when a run with the fingerprint `current` resumes from `checkpoint`."""
    lines = []
    changed = [(key, new, old) for key, new, old in _differences(saved, current) if key in _IN_THE_STATES]
    if not has_optimizer(saved):
        lines.append(f"{checkpoint} was saved without its optimizer, so optimizer and learning rate start from step 0.")
    elif changed:
        unchanged = ", ".join(f"{key} stays {old}, not {new}" for key, new, old in changed)
        lines.append(f"{unchanged}, because the optimizer's state in {checkpoint} decides.")
    before, processes = saved["processes"], current["processes"]
    if before != processes:
        lines.append(
            f"{checkpoint} was saved with {before} processes, and this run has {processes}: a step has "
            f"{processes}/{before} of its rows, and in this epoch some rows are learned twice or not at all. Change "
            "gradient_accumulation_steps to keep the rows of a step."
        )
    return lines


def has_optimizer(manifest: dict[str, Any]) -> bool:
    return any(name.startswith(("optimizer", "global_step")) for name in manifest["files"])


def _differences(saved: dict[str, Any], current: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (key, new value, old value) for each key that differs. Keys that only one side has are not compared."""
    old, new = saved["recipe"], current["recipe"]
    return [(key, new[key], old[key]) for key in sorted(old.keys() & new.keys()) if new[key] != old[key]]


def _is_refused(key: str) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in _REFUSED)


def _as_json(value: Any) -> Any:
    """Return a value as it comes back from JSON, without Hub tokens."""
    text = json.dumps(value, default=lambda part: sorted(part) if isinstance(part, set) else str(part))
    return json.loads(without_tokens(text))


def _fingerprint_model(source: ModelSource) -> str:
    """Return the commit of a Hub model, or a checksum of a folder: the size of each file and 64 samples of it."""
    if not os.path.isdir(source.path):
        from transformers.utils.hub import cached_file, extract_commit_hash

        name, revision = source.options.get("gguf_file", "config.json"), source.options.get("revision")
        return f"(commit {extract_commit_hash(cached_file(source.path, name, revision=revision), None)})"
    total = 0
    for path in sorted(Path(source.path).iterdir()):
        if path.suffix in _FILES_OF_A_MODEL and path.is_file():
            size = path.stat().st_size
            total = zlib.crc32(f"{path.name} {size}".encode(), total)
            with path.open("rb") as file:
                for i in range(64):
                    file.seek(i * size // 64)
                    total = zlib.crc32(file.read(4096), total)
    return f"(crc32 {total:08x})"


def _fingerprint_rows(rows: "Dataset") -> str:
    import pyarrow as pa

    total, every = 0, 1 + rows.data.nbytes // _MOST_BYTES
    rows = rows.with_format("arrow")
    for start in range(0, len(rows), 10_000 * every):
        table = rows[start : start + 10_000].combine_chunks().replace_schema_metadata(None)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        total = zlib.crc32(sink.getvalue(), total)
    return f"({len(rows)} rows, crc32 {total:08x})"
