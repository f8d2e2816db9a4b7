"""`liger-trainer recipes`, `init` and `path`: list, copy and find the shipped recipes and configs of accelerate.

Nothing that takes long to import is imported here.
"""

import shlex
import shutil
from pathlib import Path

from liger_trainer.command.recipe import describe, nearest, recipe_names
from liger_trainer.command.recipe_values import load_yaml
from liger_trainer.errors import RecipeError
from liger_trainer.paths import shipped

_NAME = "a recipe or config that `liger-trainer recipes` lists, such as llama3_8b/sft_alpaca or fsdp2"


def add_shipped_commands(commands) -> None:
    """Add the three commands to the subparsers of `liger-trainer`."""
    recipes = commands.add_parser("recipes", help="list the recipes and accelerate configs that ship with the package")
    recipes.set_defaults(run=_recipes)

    init = commands.add_parser(
        "init",
        help="copy a shipped recipe or config, to change it",
        description="Copy a shipped recipe, with the rows that ship with it, or a shipped config of accelerate. "
        "Nothing is overwritten.",
        allow_abbrev=False,
    )
    init.add_argument("name", metavar="NAME", help=_NAME)
    init.add_argument(
        "folder", metavar="DIR", nargs="?", default=".", help="where the copy goes; if unset, the working directory"
    )
    init.set_defaults(run=_init)

    path = commands.add_parser(
        "path",
        help="print the path of a shipped recipe or config",
        description="Print the path of a shipped file, as in `accelerate launch --config_file $(liger-trainer path "
        "fsdp2) -m liger_trainer train RECIPE`.",
        allow_abbrev=False,
    )
    path.add_argument("name", metavar="NAME", help=_NAME)
    path.set_defaults(run=_path)


def config_names() -> dict[str, Path]:
    """The files of the shipped configs of accelerate by their names, such as `configs/fsdp2`."""
    return {f"configs/{path.stem}": path for path in sorted(shipped("configs").glob("*.yaml"))}


def find_shipped(name: str) -> tuple[str, Path]:
    """The full name and the file of a shipped recipe or config, of which `configs/` and `.yaml` may be left out.

    Raises:
        RecipeError: There is no shipped file of that name.
    """
    files = recipe_names() | config_names()
    key = name.removesuffix(".yaml")
    for whole in (key, f"configs/{key}"):
        if whole in files:
            return whole, files[whole]
    raise RecipeError(
        f"NAME is {name!r}, which is neither a shipped recipe nor a shipped config.{nearest(key, files)} "
        f"Shipped: {', '.join(files)}."
    )


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
    target = folder / path.name
    is_config = name.startswith("configs/")
    copies = {path: target} | ({} if is_config else _rows_beside(path, folder))
    for source, copy in copies.items():
        # The same rows may be there already, from another recipe that uses them.
        if copy.exists() and (source == path or copy.read_bytes() != source.read_bytes()):
            raise RecipeError(
                f"{copy} exists already and is not overwritten. Move it away, or name another folder: "
                f"liger-trainer init {name} DIR"
            )
    try:
        for source, copy in copies.items():
            copy.parent.mkdir(parents=True, exist_ok=True)
            print(shutil.copyfile(source, copy))
    except OSError as error:
        raise RecipeError(f"{copy} cannot be written: {error.strerror}. Name another folder as DIR.") from error
    word = shlex.quote(str(target))
    run = f"accelerate launch --config_file {word} -m liger_trainer train RECIPE"
    print(f"\nTo run it: {run if is_config else _command_for(word, name, path)}")
    return 0


def _rows_beside(recipe: Path, folder: Path) -> dict[Path, Path]:
    """The files of rows that ship with a recipe, and for each the path below `folder` where the copy looks for it."""
    values = load_yaml(recipe)
    named = [values.get(key) or [] for key in ("dataset_name", "eval_dataset_name")]
    names = [name for value in named for name in ([value] if isinstance(value, str) else value)]
    return {recipe.parent / name: folder / name for name in names if (recipe.parent / name).is_file()}


def _command_for(copy: str, name: str, path: Path) -> str:
    """The command in the header of the recipe `name`, with the copy in the place of the recipe."""
    lines = path.read_text(encoding="utf-8").splitlines()
    line = next(line for line in lines if f"train {name}" in line)
    return line.lstrip("# ").partition("  #")[0].rstrip().replace(f"train {name}", f"train {copy}")
