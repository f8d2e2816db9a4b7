"""Finds the shipped recipes and accelerate configs, for `liger-trainer recipes`, `init` and `path` too."""

import shlex
import shutil
from pathlib import Path

from liger_trainer.command.recipe.parser import load_yaml, nearest
from liger_trainer.errors import RecipeError
from liger_trainer.paths import shipped

_NAME = "a recipe or config that `liger-trainer recipes` lists, such as llama3_8b/sft_alpaca or fsdp2"


def add_shipped_commands(commands) -> None:
    """Add the three commands to the subparsers of `liger-trainer`."""
    recipes = commands.add_parser("recipes", help="list the recipes and accelerate configs that ship with the package")
    recipes.set_defaults(run=_recipes)
    init = commands.add_parser(
        "init", help="copy a shipped recipe with its rows, or a config, to change it; nothing is overwritten"
    )
    init.add_argument("name", metavar="NAME", help=_NAME)
    init.add_argument(
        "folder", metavar="DIR", nargs="?", default=".", help="where the copy goes; if unset, the working directory"
    )
    init.set_defaults(run=_init)
    path = commands.add_parser("path", help="print the path of a shipped recipe or config")
    path.add_argument("name", metavar="NAME", help=_NAME)
    path.set_defaults(run=_path)


def recipe_names() -> dict[str, Path]:
    """Return the files of the shipped recipes by name, such as `llama3_8b/sft_alpaca`."""
    root = shipped("recipes")
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(root.rglob("*.yaml"))}


def config_names() -> dict[str, Path]:
    """Return the files of the shipped accelerate configs by name, such as `configs/fsdp2`."""
    return {f"configs/{path.stem}": path for path in sorted(shipped("configs").glob("*.yaml"))}


def find_shipped(name: str, key: str = "NAME", files: dict[str, Path] | None = None) -> tuple[str, Path]:
    """Return the full name and the file of a shipped recipe or config. `configs/` and `.yaml` may be left out.

    It is looked up in `files`, by default in all of them. If it is missing, the RecipeError is about `key`.
    """
    files = recipe_names() | config_names() if files is None else files
    bare = name.removesuffix(".yaml")
    for whole in (bare, f"configs/{bare}"):
        if whole in files:
            return whole, files[whole]
    near = nearest(bare, [*files, *(known.removeprefix("configs/") for known in files)])
    # A name with an ending means a file of the user's, so a list of shipped names would not help.
    folder = Path(name).expanduser().parent
    if name.endswith((".yaml", ".yml")) and not near:
        own = sorted(str(path) for ending in ("*.yaml", "*.yml") for path in folder.glob(ending))
        raise RecipeError(f"{key} is {name!r}, and {folder.resolve()} has no such file.{nearest(name, own)}")
    raise RecipeError(
        f"{key} is {name!r}, which is neither a file nor the name of a shipped one.{near} Shipped: {', '.join(files)}."
    )


def describe(path: Path) -> str:
    """Return the description of a shipped file: its first line, a comment."""
    return path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ").strip()


def _recipes(args) -> int:
    recipes, configs = recipe_names(), config_names()
    width = max(map(len, recipes | configs))
    for files in (recipes, configs):
        lines = [f"{name:{width}}  {describe(path)}" for name, path in files.items()]
        print(*lines, *([""] if files is recipes else []), sep="\n")
    return 0


def _path(args) -> int:
    print(find_shipped(args.name)[1])
    return 0


def _init(args) -> int:
    name, path = find_shipped(args.name)
    folder = Path(args.folder).expanduser()
    if folder.suffix in (".yaml", ".yml"):
        raise RecipeError(f"DIR is {args.folder!r}; expected a folder. The copy keeps its name, {path.name}.")
    target, run = folder / path.name, "accelerate launch --config_file {} -m liger_trainer train RECIPE"
    copies = {path: target}
    if name in recipe_names():
        values = load_yaml(path)
        for key in ("dataset_name", "eval_dataset_name"):
            rows = values.get(key)
            if isinstance(rows, str) and (path.parent / rows).is_file():
                copies[path.parent / rows] = folder / rows
        header = next(line for line in path.read_text(encoding="utf-8").splitlines() if f"train {name}" in line)
        run = header.lstrip("# ").partition("  #")[0].rstrip().replace(f"train {name}", "train {}")
    for source, copy in copies.items():
        # The same rows may be there already, from another recipe that uses them.
        if copy.exists() and (source == path or copy.read_bytes() != source.read_bytes()):
            raise RecipeError(f"{copy} exists already and is not overwritten. Name another folder as DIR.")
    try:
        for source, copy in copies.items():
            copy.parent.mkdir(parents=True, exist_ok=True)
            print(shutil.copyfile(source, copy))
    except OSError as error:
        raise RecipeError(f"{copy} cannot be written: {error.strerror}. Name another folder as DIR.") from error
    print(f"\nTo run it: {run.format(shlex.quote(str(target)))}")
    return 0
