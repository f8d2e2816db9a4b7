"""Reads rows with `datasets`: from a file, from a folder of files of one kind, or from the Hub."""

import csv
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from liger_trainer.command.processes import print_status
from liger_trainer.errors import RecipeError, short

if TYPE_CHECKING:
    from datasets import Dataset

FILE_BUILDERS = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
}

# Texts that pandas reads as null; used for columns that do not hold text
_NULLS = (
    "",
    "#N/A",
    "#N/A N/A",
    "#NA",
    "-1.#IND",
    "-1.#QNAN",
    "-NaN",
    "-nan",
    "1.#IND",
    "1.#QNAN",
    "<NA>",
    "N/A",
    "NA",
    "NULL",
    "NaN",
    "None",
    "n/a",
    "nan",
    "null",
)


def builder_of(path: str | os.PathLike, default: str | None = None) -> str | None:
    """Return the builder of `datasets` for a file, by its suffix in any case."""
    return FILE_BUILDERS.get(Path(path).suffix.lower(), default)


def read_rows(source: str, config: str | None, split: str, texts: frozenset[str] = frozenset()) -> "Dataset":
    """Return the rows of a file, a folder or a Hub dataset.

    Args:
        source (`str`): A path, or a name on the Hub.
        config (`str`, *optional*): The configuration of a Hub dataset.
        split (`str`): The split.
        texts (`frozenset[str]`): Columns of a CSV file that are texts, even if they look like numbers or nulls.
    """
    from datasets import Dataset, load_dataset
    from datasets.exceptions import DatasetGenerationError

    if not os.path.isfile(source):
        rows = load_dataset(source, config, split=split, **_folder_options(Path(source), texts))
        _check_kinds(Path(source), rows.info.builder_name)
        return rows
    size, builder = os.path.getsize(source), builder_of(source)
    if builder is None:
        raise RecipeError(f"expected a file name that ends in one of {', '.join(FILE_BUILDERS)}.")
    if size == 0:  # each reader fails on an empty file in its own way
        return Dataset.from_dict({})
    if builder == "csv":
        return load_dataset(builder, data_files=source, split=split, **_csv_options(source, texts))
    key = _find_row_key(source, texts) if builder == "json" else None
    if key is not None:
        print_status(f"{Path(source).name} is one JSON object; its key {key!r} has the rows.")
        return _rows_under(source, key, split)
    try:
        rows = load_dataset(builder, data_files=source, split=split)
    except DatasetGenerationError:
        if builder != "json" or size <= 10 << 20:
            raise
        # The reader infers keys from the first 10 MB, and later rows may have others.
        rows = load_dataset(builder, data_files=source, split=split, chunksize=size)
    if builder == "json":  # its reader does not check that texts are UTF-8
        rows.data.validate(full=True)
        rows = _with_dates_as_texts(rows, source, split)
    elif builder == "text":
        rows = rows.filter(lambda row: row["text"].strip(), desc="Leaving out empty lines")
    return rows


def _text_or_null(text: str) -> str | None:
    """Return the text of a cell as it is; pandas would turn it into a number, null or date. An empty cell is null."""
    return text or None


def _folder_options(folder: Path, texts: frozenset[str]) -> dict[str, Any]:
    """Return the CSV reader's options for a folder of CSV files; none for another folder or a Hub name."""
    files = [path for path in sorted(folder.rglob("*")) if builder_of(path) == "csv"] if folder.is_dir() else []
    kinds = {builder_of(path) for path in folder.rglob("*")} - {None, "text"} if files else set()
    if kinds != {"csv"}:
        return {}
    return _csv_options(files[0], texts)


def _csv_options(path: str | os.PathLike, texts: frozenset[str]) -> dict[str, Any]:
    """Return options that make the CSV reader keep the columns `texts` exactly as they are in the file.

    The separator is the first of comma, semicolon, tab and bar that the first line has.
    """
    with open(path, "rb") as file:
        first = file.readline().decode("utf-8-sig", errors="replace")
    separators = "\t" if Path(path).suffix.lower() == ".tsv" else ",;\t|"
    separator = next((each for each in separators if each in first), separators[0])
    names = next(csv.reader([first.rstrip("\r\n")], delimiter=separator), [])
    doubled = [name for name in names if name and names.count(name) > 1]
    if doubled:  # pandas would rename the second one
        raise RecipeError(f"the header of {Path(path).name} has the column {doubled[0]!r} twice. Rename one of them.")
    return {
        "sep": separator,
        "converters": dict.fromkeys(texts.intersection(names), _text_or_null),
        "keep_default_na": False,
        "na_values": {name: list(_NULLS) for name in names if name not in texts},
    }


def _find_row_key(path: str, columns: frozenset[str]) -> str | None:
    """Return the key under which a JSON object has its rows, as in `{"data": [...]}`; None for any other file.

    The object may also be a single row. So neither a list of turns nor a column that a trainer reads counts as rows.
    """
    with open(path, "rb") as file:
        if Path(path).suffix.lower() != ".json" or not file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
            return None
        file.seek(0)
        try:
            whole = json.loads(file.read().decode("utf-8-sig"))
        except ValueError:  # one row per line, or a broken file
            return None
    row_keys = [key for key, value in whole.items() if key not in columns and _are_rows(value)]
    return row_keys[0] if len(row_keys) == 1 and not columns.intersection(whole) else None


def _are_rows(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(row, dict) and not {"role", "from"}.intersection(row) for row in value)
    )


def _rows_under(path: str, key: str, split: str) -> "Dataset":
    """Return the rows under `key` of a JSON object, read as JSON lines because the JSON reader guesses types."""
    with open(path, encoding="utf-8-sig") as file:
        rows = json.load(file)[key]
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "rows.jsonl"
        lines.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return read_rows(str(lines), None, split).map(keep_in_memory=True)


def _with_dates_as_texts(rows: "Dataset", source: str, split: str) -> "Dataset":
    """Return the rows with the original texts where the JSON reader has turned them into dates."""
    from datasets import Features, Json, Value, load_dataset

    def replaced(kind: Any, by: Any) -> Any:
        if getattr(kind, "dtype", "").startswith(("timestamp", "date", "time")) and isinstance(kind, Value):
            return by
        if isinstance(kind, dict):
            return {key: replaced(one, by) for key, one in kind.items()}
        inner = getattr(kind, "feature", None)
        return kind if inner is None else type(kind)(replaced(inner, by))

    exact = Features({name: replaced(kind, Json()) for name, kind in rows.features.items()})
    if exact == rows.features:
        return rows
    names = [name for name in exact if exact[name] != rows.features[name]]
    texts = Features({name: replaced(kind, Value("string")) for name, kind in rows.features.items()})
    # The reader leaves columns of type Json as they are in the file.
    rows = load_dataset("json", data_files=source, split=split, features=exact)
    return rows.map(lambda row: {name: row[name] for name in names}, features=texts, desc="Reading dates")


def _check_kinds(folder: Path, builder: str) -> None:
    """RecipeError if a folder also has files of a kind that `datasets` has not read."""
    if builder not in FILE_BUILDERS.values():  # a folder of pictures, with their metadata.jsonl
        return
    about = ("dataset_infos.json", "dataset_dict.json", "state.json")
    unread = [path for path in sorted(folder.rglob("*")) if builder_of(path, builder) != builder]
    rows = [path for path in unread if path.suffix not in (".txt", ".json")]
    if rows:
        raise RecipeError(
            f"{rows[0]} was not read: only one kind of file is read from a folder. List the files by name."
        )
    left = [path for path in unread if path.name not in about]
    if left:  # licences, or descriptions of the rows
        print_status(f"{left[0]} was not read, nor any other such file: only one kind of file is read from a folder.")


def broken_json(path: str | os.PathLike | None) -> str | None:
    """Return where a JSON file is broken, by its line; None for any other file. The reader counts bytes, or from 0."""
    if path is None or not os.path.isfile(path) or builder_of(path) != "json":
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
                return f"line {number} is not JSON: {what}: {short(part.decode(errors='replace'))}"
    return None
