"""Where the shipped recipes and accelerate configs lie: at the root of a checkout, inside the package in a wheel."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def shipped(folder: str) -> Path:
    """The folder `"recipes"` or `"configs"` that belongs to this installation.

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
