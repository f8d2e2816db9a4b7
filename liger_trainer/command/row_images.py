"""Pictures that rows name by a path."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from liger_trainer.errors import RecipeError


def find_images(rows: Any, folders: Sequence[Path]) -> Any:
    """The rows with the paths in their columns `images` and `image` as they are found in the first of `folders`.

    Pictures themselves, URLs and base64, which transformers reads too, stay as they are. RecipeError for a row whose
    file is in none of them.
    """
    kinds = {name: rows.features[name] for name in ("images", "image") if name in rows.features}
    named = [name for name, kind in kinds.items() if getattr(getattr(kind, "feature", kind), "dtype", "") == "string"]
    if not named:
        return rows

    def found(name: str | None, index: int) -> str | None:
        if name is None or name.startswith(("http://", "https://", "data:")) or "." not in name:  # base64 has no dot
            return name
        path = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if path is None:
            looked = ", ".join(dict.fromkeys(str(folder.absolute()) for folder in folders))
            raise RecipeError(f"Row {index} of the dataset has the picture {name!r}, a file that is not in {looked}.")
        return str(path)

    def convert(row: dict[str, Any], index: int) -> dict[str, Any]:
        return {
            key: [found(name, index) for name in row[key]] if isinstance(row[key], list) else found(row[key], index)
            for key in named
        }

    return rows.map(convert, with_indices=True, desc="Looking for pictures")
