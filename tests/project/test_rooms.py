"""The packages as rooms: layers of imports, nothing private across rooms, and files short enough to read in one go."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from checkout import ROOT

LAYERS = (  # a module imports from its own layer and from earlier ones
    ("liger_triton",),
    ("_logging", "errors", "feature", "paths"),
    ("data",),
    ("patching.core",),
    ("base_weights", "memory"),
    ("varlen",),
    ("head",),
    ("varlen.proof",),
    ("fp8",),
    ("lora",),
    ("patching",),
    ("losses", "mtp"),
    ("preflight",),
    ("trainers",),
    ("medusa",),
    ("eagle",),
    ("speculative_decoding",),
    ("fitting", "verify"),
    ("command.options", "command.processes"),
    ("command.recipe",),
    ("command.rows",),
    ("command.run",),
    ("command.tools",),
    ("command.main",),
    ("integrations",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FILES = sorted([*(ROOT / "liger_trainer").rglob("*.py"), *(ROOT / "kernels" / "liger_triton").rglob("*.py")])
LONGEST = 500  # lines, with one argument a line; a longer file needs a reason
REASONS = {
    "kernels/liger_triton/_routed.py": "the five products of experts share their tiles and their routing",
    "kernels/liger_triton/float8_cast.py": "all casts to fp8 share their scales and their rounding",
    "kernels/liger_triton/float8_linear.py": "both forms of an fp8 layer run through one function",
    "kernels/liger_triton/gates.py": "all gates of gated MLPs, with a LoRA and without",
    "kernels/liger_triton/linear_head.py": "the losses of an LM head are one walk over chunks of logits",
    "kernels/liger_triton/linear_heads_kl.py": "a kernel, its twin for CPUs and the walk over windows",
    "kernels/liger_triton/reference.py": "every operation once more, in plain PyTorch",
    "kernels/liger_triton/row_attention.py": "attention is a kernel forward and three backward, by one rule of tiles",
    "kernels/liger_triton/rms_norm.py": "the norm with a residual or a gate is one kernel",
    "liger_trainer/patching/experts.py": "one proof finds a block's gate, order and sum, with a LoRA and without",
}


def room(path: Path) -> str:
    """The room of a file: its first folder in `liger_trainer`, the first two if it has rooms, or `liger_triton`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "liger_triton" if parts[0] == "kernels" else _room(parts[1:])


def _room(parts: tuple[str, ...]) -> str:
    """The room of a module, from its name's parts below `liger_trainer`."""
    inner = ".".join(parts[:2])
    return inner if parts[0] == "command" or inner in LEVEL else parts[0]


def imports(path: Path):
    """(module, name or None) for every import of our modules in a file, inside functions too."""
    package = ("liger_triton",) if room(path) == "liger_triton" else None
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            module = node.module
            if node.level:
                module = ".".join((*package, node.module) if node.module else package)
            for alias in node.names:
                yield module, alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, None


def ours(module: str) -> bool:
    return module.partition(".")[0] in ("liger_trainer", "liger_triton")


def room_of(module: str, name: str | None) -> str | None:
    """The room that an import reaches into; None for the package itself, which finds its names on use."""
    first, _, rest = module.partition(".")
    if first == "liger_triton":
        return first
    parts = tuple(part for part in (*rest.split("."), name) if part)
    below = _room(parts) if parts else None
    return below if below in LEVEL else None


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_imported_from_above_or_from_another_room_s_private_names(path):
    here = room(path)
    if here in ("__init__", "__main__", "command.__init__"):
        return
    assert here in LEVEL, f"{here} is a new room: give it a layer"
    for module, name in imports(path):
        if not ours(module):
            continue
        there = room_of(module, name)
        if there is None or there == here:
            continue
        assert LEVEL[there] < LEVEL[here], f"{here} imports {name or module} from {there}, which is not below it"
        parts = (*module.split(".")[1:], *((name,) if name else ()))
        private = [part for part in parts if part.startswith("_") and part != "_logging"]
        assert not private, f"{here} imports {'.'.join(private)} of {there}, which is private there"


def test_no_two_files_import_each_other():
    """Not directly, through other files, within functions or for types alone."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("kernels."): path for path in FILES}
    graph = {}
    for file, path in names.items():
        found = {name for module, alias in imports(path) for name in (f"{module}.{alias}", module) if name in names}
        graph[file] = found - {file}
    assert graph["liger_trainer.patching.apply"] > {"liger_trainer.patching.norms"}
    TopologicalSorter(graph).prepare()  # raises a CycleError that names the files


BELOW_TRAINERS = [path for path in FILES if LEVEL.get(room(path), LEVEL["trainers"]) < LEVEL["trainers"]]


@pytest.mark.parametrize("path", BELOW_TRAINERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_below_the_trainers_says_what_it_reads_of_one(path):
    """By a protocol: with `Any`, it could read and write everything, and mypy would compare it with no trainer."""
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef):
            continue
        for argument in (*function.args.args, *function.args.kwonlyargs):
            hint = None if argument.annotation is None else ast.unparse(argument.annotation)
            assert argument.arg != "trainer" or hint not in (None, "Any", "object"), function.name


def test_files_can_be_read_at_a_sitting():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES}
    assert {name for name, lines in lengths.items() if lines > LONGEST} <= set(REASONS)


def test_no_test_imports_another():
    """Shared code is in tests/support or in a conftest.py, so that each test file can be moved or split."""
    found = {}
    for path in (ROOT / "tests").rglob("*.py"):
        parts = {part for module, name in imports(path) for part in (*(module or "").split("."), name or "")}
        names = sorted(part for part in parts if part.startswith("test_"))
        if names:
            found[str(path.relative_to(ROOT))] = names
    assert not found
