"""Reads rows: a file, a folder of files of one kind, or a data set of the Hub, by `datasets`."""

import json
import os
from pathlib import Path

from liger_trainer.command.processes import say
from liger_trainer.errors import RecipeError, short

FILE_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}


def read_rows(source: str, config: str | None, split: str):
    """The rows of a file, a folder or a data set of the Hub."""
    from datasets import Dataset, load_dataset
    from datasets.exceptions import DatasetGenerationError

    if not os.path.isfile(source):
        rows = load_dataset(source, config, split=split)
        _check_kinds(Path(source), rows.info.builder_name)
        return rows
    size, builder = os.path.getsize(source), FILE_BUILDERS.get(Path(source).suffix)
    if builder is None:
        raise RecipeError(f"expected a file whose name ends in one of {', '.join(FILE_BUILDERS)}.")
    if size == 0:  # each reader fails on an empty file in its own way
        return Dataset.from_dict({})
    try:
        rows = load_dataset(builder, data_files=source, split=split)
    except DatasetGenerationError:
        if builder != "json" or size <= 10 << 20:
            raise
        # Later rows may have other keys than the first 10 MB.
        rows = load_dataset(builder, data_files=source, split=split, chunksize=size)
    if builder == "json":  # its reader takes any bytes for text
        rows.data.validate(full=True)
    elif builder == "text":
        rows = rows.filter(lambda row: row["text"].strip(), desc="Leaving out empty lines")
    return rows


def _check_kinds(folder: Path, builder: str) -> None:
    """RecipeError if a folder has files of other kinds than the one that `datasets` has read from it."""
    if builder not in FILE_BUILDERS.values():  # of pictures, of which metadata.jsonl tells more
        return
    about = ("dataset_infos.json", "dataset_dict.json", "state.json")
    unread = [path for path in sorted(folder.rglob("*")) if FILE_BUILDERS.get(path.suffix, builder) != builder]
    if rows := [path for path in unread if path.suffix not in (".txt", ".json")]:
        raise RecipeError(f"{rows[0]} is of another kind than the files that were read. List the files by name.")
    if left := [path for path in unread if path.name not in about]:  # licences, or what describes the rows
        say(f"{left[0]} is of another kind than the files that were read, and is left out, as are all such files.")


def broken_json(path: str | os.PathLike | None) -> str | None:
    """Say where a JSON file is broken, because its reader counts bytes, or rows from 0. None for any other file."""
    if path is None or not os.path.isfile(path) or Path(path).suffix not in (".json", ".jsonl"):
        return None
    with open(path, "rb") as file:
        first = file.readline().strip()
        whole = first[:1] == b"[" or first == b"{"  # a value over several lines
        file.seek(0)
        for number, part in enumerate([file.read()] if whole else file, 1):
            try:
                if part.strip():
                    json.loads(part.decode("utf-8-sig").rstrip())
            except ValueError as error:
                if whole:
                    return f"{error}."
                what = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
                return f"line {number} is no JSON: {what}: {short(part.decode(errors='replace'))}"
    return None
