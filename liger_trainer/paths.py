"""Where files lie: shipped recipes and accelerate configs, and what a recipe names by a relative path."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def shipped(folder: str) -> Path:
    """The folder `"recipes"` or `"configs"` of this installation: at the root of a checkout, in the package in a wheel.

    Raises:
        FileNotFoundError: Neither the package nor its parent has the folder: the installation is broken.
    """
    for place in (PACKAGE / folder, PACKAGE.parent / folder):
        if place.is_dir():
            return place
    raise FileNotFoundError(
        f"The folder {folder}/ is missing from {PACKAGE} and {PACKAGE.parent}: the installation of liger-trainer is "
        "incomplete. Install it again with `pip install --force-reinstall --no-deps liger-trainer`."
    )


def find_beside(name: str, folder: Path) -> Path | None:
    """The file or folder that `name` means, from the working directory or else from `folder`; None: neither has it."""
    return next((path for path in (Path(name).expanduser(), folder / name) if path.exists()), None)
