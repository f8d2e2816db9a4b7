"""Where files lie: the recipes and accelerate configs that ship, and files that a recipe names by a relative path."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def shipped(folder: str) -> Path:
    """The folder `"recipes"` or `"configs"` of this installation.

    A checkout has it at its root, an installed wheel inside the package.
    """
    inside = PACKAGE / folder
    return inside if inside.is_dir() else PACKAGE.parent / folder


def find_beside(name: str, folder: Path) -> Path | None:
    """The file or folder `name`, looked for in the working directory and then in `folder`. None if neither has it."""
    return next((path for path in (Path(name).expanduser(), folder / name) if path.exists()), None)
