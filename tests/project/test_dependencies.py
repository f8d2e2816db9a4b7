"""Everything the packages import is declared in pyproject.toml, as a dependency or as an extra."""

import ast
import re
import sys
import tomllib

from checkout import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# names of distributions, where they differ
NAMES = {"PIL": "pillow", "yaml": "pyyaml", "huggingface_hub": "huggingface-hub"}
OURS = ("liger_trainer", "liger_triton")
# axolotl loads our plugin. So axolotl, and pydantic with it, is there when that file is imported.
HOSTS = {"axolotl", "pydantic"}


def names_of(requirements):
    return {re.match(r"[\w-]+", requirement)[0].lower() for requirement in requirements}


def imported():
    """Return the distributions that the packages import, each with one of the importing files."""
    found = {}
    for path in [*(ROOT / "liger_trainer").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module]
            for module in modules:
                top = module.split(".")[0]
                if top not in sys.stdlib_module_names and top not in OURS:
                    found[NAMES.get(top, top)] = str(path.relative_to(ROOT))
    return found


def test_imports_are_declared():
    extras = {name for requirements in PROJECT["optional-dependencies"].values() for name in names_of(requirements)}
    declared = names_of(PROJECT["dependencies"]) | extras | HOSTS
    assert "torch" in imported()
    undeclared = {name: path for name, path in imported().items() if name not in declared}
    assert undeclared == {}


def test_declared_dependencies_are_imported():
    assert names_of(PROJECT["dependencies"]) <= imported().keys()
