"""Places pictures in rows: `<image>` in a message becomes an image part of its content, as chat templates need it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from liger_trainer.data.formats import has_images
from liger_trainer.errors import RecipeError, short

if TYPE_CHECKING:
    from datasets import Dataset

# LLaVA and LLaMA-Factory write these markers where a picture, or another medium, belongs in a text.
MARKER = "<image>"
_UNREAD = {"<video>": ("video", "videos"), "<audio>": ("audio", "audios")}
_TEXTS = ("messages", "prompt", "completion", "chosen", "rejected", "text")


def place_images(rows: "Dataset") -> "Dataset":
    """Split the texts of messages at `<image>` into parts, in rows that have pictures.

    Raises:
        RecipeError: A row has more or fewer places than pictures, or a place where trainers do not read pictures.
    """
    _refuse_other_media(rows)
    columns = [name for name in _TEXTS if name in rows.column_names and _is_messages(rows[0][name])]
    if not has_images(rows) or not columns:
        return rows
    counts = _picture_counts(rows)
    # Trainers look for pictures in the prompt. Preferences without one have it at the beginning of both conversations.
    with_places = [name for name in columns if name in ("messages", "prompt")] or [
        name for name in columns if name in ("chosen", "rejected")
    ]
    marked = False
    for index, row in enumerate(_iterate(rows, columns)):
        for name in columns:
            marked |= _check_places(index, name, row[name], counts[index] if name in with_places else 0)
    if not marked:
        return rows
    return _split(rows, columns, with_places, counts)


def check_image_tokens(rows: "Dataset", processor: Any) -> None:
    """RecipeError if a row writes a picture's place in a way that this model reads as text.

    In messages the chat template writes the model's image token; plain texts have to contain it.
    """
    names = ("image_token", "boi_token")
    tokens = {str(getattr(processor, name)) for name in names if getattr(processor, name, None) is not None}
    if not tokens or not has_images(rows):
        return
    columns = [name for name in _TEXTS if name in rows.column_names]
    counts = _picture_counts(rows)
    for index, row in enumerate(_iterate(rows, columns)):
        texts = [row[name] for name in ("text", "prompt") if isinstance(row.get(name), str)]
        places = texts[0].count(MARKER) if texts else 0
        if texts and MARKER in tokens and places != counts[index]:
            raise RecipeError(
                f"Row {index} of the dataset has {MARKER} {places} times in {short(texts[0])}, and pictures: "
                f"{counts[index]}. Write it once for each picture."
            )
        for name in columns:
            if isinstance(row[name], str) and MARKER in row[name] and MARKER not in tokens:
                raise RecipeError(
                    f"Row {index} of the dataset has {MARKER} in {name} {short(row[name])}, which this model reads as "
                    f"text. Write the row as messages of role and content, or write {' or '.join(sorted(tokens))}."
                )
            for text in _texts(row[name]) if _is_messages(row[name]) else ():
                template_tokens = sorted(token for token in tokens if token in text)
                if template_tokens:
                    raise RecipeError(
                        f"Row {index} of the dataset has {template_tokens[0]} in {name} {short(text)}, which the chat "
                        f"template adds itself. Write {MARKER} instead."
                    )


def _refuse_other_media(rows: "Dataset") -> None:
    """RecipeError for rows with videos or sounds and their marker in the text. No trainer here reads them."""
    for marker, names in _UNREAD.items():
        column = next((name for name in names if name in rows.column_names), None)
        if column is None:
            continue
        for index, row in enumerate(_iterate(rows, [name for name in _TEXTS if name in rows.column_names])):
            if any(marker in str(value) for value in row.values()):
                raise RecipeError(
                    f"Row {index} of the dataset has {marker} in its text and a column {column}. No trainer reads that "
                    f"column, so {marker} would be learned as text. Remove such rows."
                )


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _iterate(rows: "Dataset", columns: list[str]) -> Iterator[dict[str, Any]]:
    """Iterate over the rows with `columns` only, because reading a picture takes time."""
    selected = rows.select_columns(columns)
    return iter(selected) if columns else iter(())


def _picture_counts(rows: "Dataset") -> list[int]:
    """Return the number of pictures in each row, without reading one."""
    name = "image" if "image" in rows.column_names else "images"  # TRL prefers `image` if rows have both
    column = rows.select_columns([name]).with_format("arrow")[:].column(0)
    counts = pc.is_valid(column) if name == "image" else pc.fill_null(pc.list_value_length(column), 0)
    return [int(count) for count in counts.to_pylist()]


def _texts(turns: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the texts in the content of messages."""
    for turn in turns:
        content = turn.get("content")
        if isinstance(content, str):
            yield content
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                yield part["text"]


def _unfilled(content: Any) -> int:
    """Count the parts of a content that are placeholders for a picture from the column of pictures."""
    parts = content if isinstance(content, list) else []
    return sum(isinstance(part, dict) and part.get("type") == "image" and part.get("image") is None for part in parts)


def _check_places(index: int, column: str, turns: list[dict[str, Any]], pictures: int) -> bool:
    """Return whether a text of `turns` has the marker. RecipeError unless there are as many places as `pictures`."""
    markers = sum(text.count(MARKER) for text in _texts(turns))
    of_tools = _texts([turn for turn in turns if turn["role"] == "tool"])
    if any(MARKER in text for text in of_tools):
        raise RecipeError(
            f"Row {index} of the dataset has {MARKER} in a message of the role tool in {column}, where trainers do not "
            "read pictures. Move it to a message of the user."
        )
    places = markers + sum(_unfilled(turn.get("content")) for turn in turns)
    first = next((turn for turn in turns if turn["role"] == "user"), None)
    if places == 0 and first is not None and isinstance(first.get("content"), str):
        return False  # TRL puts the pictures before the first turn of the user
    if places != pictures:
        raise RecipeError(
            f"Row {index} of the dataset has places for pictures in {column}: {places} ({MARKER}, or a part of the "
            f"type image), and pictures that go there: {pictures}. Write one place for each picture of the row, in "
            "messages or in the prompt."
        )
    return markers > 0


def _split(rows: "Dataset", columns: list[str], with_places: list[str], counts: list[int]) -> "Dataset":
    """Return the rows with a list of parts as the content of every message."""
    from datasets import Features, Json, List

    def convert(row: dict[str, Any], index: int) -> dict[str, Any]:
        pictures = {name: counts[index] if name in with_places else 0 for name in columns}
        return {name: _in_parts(row[name], pictures[name]) for name in columns}

    # Json, because image parts and text parts have different keys, and Arrow would fill the missing ones with nulls
    features = Features(rows.features | {name: List(Json()) for name in columns})
    return rows.map(convert, with_indices=True, features=features, desc=f"Placing pictures at {MARKER}")


def _in_parts(turns: list[dict[str, Any]], pictures: int) -> list[dict[str, Any]]:
    """Return messages with lists of parts as contents, and an image part at each `MARKER`."""
    messages = []
    for turn in turns:
        content = turn.get("content")
        message = {name: value for name, value in turn.items() if value is not None}
        if content is not None:
            message["content"] = [part for text in _parts(content) for part in _at_markers(text)]
        messages.append(message)
    if pictures and not any(_unfilled(turn.get("content")) for turn in messages):
        first = next(turn for turn in messages if turn["role"] == "user")
        first["content"] = [{"type": "image"}] * pictures + first["content"]
    return messages


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [_without_nulls(part) for part in parts]


def _without_nulls(part: dict[str, Any]) -> dict[str, Any]:
    """Return a part of a content without the fields that Arrow adds because other parts have them."""
    return {name: value for name, value in part.items() if value is not None}


def _at_markers(part: dict[str, Any]) -> list[dict[str, Any]]:
    """Split a part of a content at the markers in its text."""
    if MARKER not in (part.get("text") or ""):
        return [part]
    parts: list[dict[str, Any]] = []
    for number, text in enumerate(part["text"].split(MARKER)):
        if number:
            parts.append({"type": "image"})
        if text:
            parts.append({**part, "text": text})
    return parts
