"""Everything that README, CONTRIBUTING and docs/ tell a reader to open, import and run exists."""

import ast
import importlib
import importlib.util
import json
import re
from pathlib import Path

import pytest
import yaml
from checkout import ROOT
from recipe_fixtures import command, write_model

import liger_trainer
import liger_triton
from liger_trainer.command.recipe.read import recipe_names
from liger_trainer.command.recipe.shipped_files import find_shipped

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
# Pages other than documentation that have links.
FRONT = [
    *(ROOT / name for name in ("CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md")),
    ROOT / "kernels" / "README.md",
    ROOT / ".github" / "pull_request_template.md",
]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page, language):
    return [found[2] for found in BLOCK.finditer(page.read_text()) if found[1] == language]


def prose(page):
    return BLOCK.sub("", page.read_text())


def anchors(page):
    """The anchors of the headings, as GitHub and as the site spell them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", title).strip().lower() for title in titles]
    return {re.sub(r"\s+", "-", title) for title in plain}


def by_name(paths):
    return [pytest.param(path, id=path.name) for path in paths]


@pytest.mark.parametrize("page", by_name([*PAGES, *FRONT]))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), f"{page.name} links {target}"
        assert not anchor or anchor in anchors(path), f"{page.name} links {target}; headings: {anchors(path)}"


@pytest.mark.parametrize("page", by_name(PAGES))
def test_examples_in_python_import_what_exists(page):
    for text in blocks(page, "python"):
        for node in ast.walk(ast.parse(text, filename=page.name)):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("liger_"):
                module = importlib.import_module(node.module)
                for name in node.names:
                    assert hasattr(module, name.name), f"{page.name}: {ast.unparse(node)}"


@pytest.mark.parametrize("page", by_name([ROOT / "README.md", DOCS / "get_started.md"]))
def test_lines_added_in_a_diff_import_what_exists(page):
    found = blocks(page, "diff")
    assert found
    for text in found:
        before, after = (
            [line[1:].strip() for line in text.splitlines() if line.startswith(sign)] for sign in ("-", "+")
        )
        assert len(before) == len(after) == 2, "a diff of four lines"
        for line in before + after:
            ast.parse(line)
        exec(before[0] + "\n" + after[0], {})  # the two imports


def commands_in(page):
    for text in blocks(page, "bash"):
        for line in text.replace("\\\n", " ").splitlines():
            line = re.sub(r"\$\(liger-trainer path (\S+)\)", lambda named: str(find_shipped(named[1])[1]), line)
            yield line.partition(" #")[0].split()


@pytest.mark.parametrize("page", by_name(PAGES))
def test_commands_name_what_exists(page, capsys):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    known = re.findall(r"^    ([a-z][\w-]+)", command(capsys, "--help")[1], re.MULTILINE)
    assert "train" in known
    for words in commands_in(page):
        if not words:
            continue
        if words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= set(targets), words
        if "--config_file" in words:
            assert (ROOT / words[words.index("--config_file") + 1]).exists(), words
        if any(word.endswith("bin/pytest") for word in words):
            for word in words:
                assert not word.startswith("tests/") or list(ROOT.glob(word.partition("::")[0])), words
        start = "liger-trainer" if "liger-trainer" in words else "liger_trainer"
        if start in words:
            _, name, *rest = words[words.index(start) :]
            assert name in known or name == "--help", words
            if name == "train" and not rest[0].endswith(".yaml") and rest[0] != "RECIPE":
                assert rest[0] in recipe_names(), words
            if name in ("init", "path"):
                find_shipped(rest[0])


def test_every_page_is_in_the_site():
    pages = []

    def walk(nav):
        for entry in nav if isinstance(nav, list) else nav.values():
            pages.append(entry) if isinstance(entry, str) else walk(entry)

    walk(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(pages) == sorted(path.name for path in DOCS.glob("*.md"))


def test_the_reference_has_every_public_name():
    listed = set()
    for name in re.findall(r"^::: ([\w.]+)$", (DOCS / "reference.md").read_text(), re.MULTILINE):
        module, _, member = name.rpartition(".")
        listed.add(id(getattr(importlib.import_module(module), member)))
    for package in (liger_trainer, liger_triton):
        assert not [name for name in package.__all__ if id(getattr(package, name)) not in listed]


def exists(name):
    """True if a dotted name can be imported, or stands in the source of a module that needs a tool to be imported."""
    module, _, member = name.rpartition(".")
    if importlib.util.find_spec(module) is None:
        return False
    try:
        return hasattr(importlib.import_module(module), member) or importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the part before `member` is a module without modules
        return False
    except ImportError:
        return re.search(rf"^(?:class|def) {member}\b", Path(importlib.util.find_spec(module).origin).read_text(), re.M)


@pytest.mark.parametrize("page", by_name(PAGES))
def test_names_can_be_imported(page):
    """Dotted names anywhere on a page exist; names of ours without a module come from the package or the reference."""
    # a planned kernel, in "Adding something"
    text = page.read_text()
    examples = {"liger_triton.relu2"}
    dotted = set(re.findall(r"\bliger_(?:trainer|triton)(?:\.\w+)+", text)) - examples
    assert not [name for name in dotted if not exists(name)]
    reference = re.findall(r"^::: [\w.]+\.(\w+)$", (DOCS / "reference.md").read_text(), re.MULTILINE)
    bare = set(re.findall(r"`((?:Auto)?Liger[A-Z]\w+|Medusa[A-Z]\w+)\b", prose(page))) - set(reference)
    assert not [name for name in bare if not hasattr(liger_trainer, name)]


def test_own_rows_train_as_get_started_says(tmp_path, monkeypatch, capsys):
    """Runs the page's rows, recipe and Python with a tiny model in place of its model."""
    (recipe,), (rows,) = (blocks(DOCS / "get_started.md", language) for language in ("yaml", "json"))
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "tiny")
    keys = yaml.safe_load(recipe)
    assert len(keys) == 9, "a recipe of nine lines"
    Path(keys["dataset_name"]).write_text(rows)
    assert all(json.loads(line)["output"] for line in rows.splitlines())
    Path("my_recipe.yaml").write_text(recipe)
    code, out, err = command(
        capsys,
        "train",
        "my_recipe.yaml",
        "--model_name_or_path",
        "tiny",
        "--bf16",
        "false",
        "--max_steps",
        "1",
    )
    assert code == 0, err
    assert f"model    {keys['output_dir']}" in out
    assert "not logged" not in out and "not counted" not in out, "the page says that the loss and the speed are printed"
    (load,) = (text for text in blocks(DOCS / "get_started.md", "python") if "from_pretrained" in text)
    told = {}
    exec(load, told)
    assert type(told["model"]).__name__ == "LlamaForCausalLM"
    assert capsys.readouterr().out.strip() or told["text"] == ""


@pytest.mark.parametrize("package", [liger_trainer, liger_triton], ids=lambda package: package.__name__)
def test_type_checkers_may_read_the_hints(package):
    assert (Path(package.__file__).parent / "py.typed").exists()


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_files_that_contributors_are_sent_to_exist(page):
    text = (ROOT / page).read_text().partition("## Adding something")[0]  # after that, examples name files to write
    folders = ("liger_trainer", "kernels", "tests", "benchmarks")
    files = [f"/{path.relative_to(ROOT)}" for folder in folders for path in (ROOT / folder).rglob("*.py")]
    named = set(re.findall(r"`([\w/]+\.py)`", text))
    missing = [name for name in named if not any(file.endswith(f"/{name}") for file in files)]
    assert len(named) > 5 and not missing


@pytest.mark.parametrize("page", by_name([*PAGES, *FRONT]))
def test_sentences_name_who_acts(page):
    """These words hide from the reader who acts."""
    words = r"\b(?:nobody|somebody|whoever|reckon\w*|numbers are others|that of which)\b"
    found = re.findall(words, prose(page), re.IGNORECASE)
    assert not found, "say which code, which user or which number"


# Errors of other packages that troubleshooting quotes: the module whose source has them.
FOREIGN = {
    "requires a shared vocabulary": "trl.trainer.distillation_trainer",
    "Your setup doesn't support bf16/gpu": "transformers.training_args",
    "The chat template is not training-compatible": "trl.chat_template_utils",
    "torchao with FSDP2 and cpu_ram_efficient_loading is not supported": "accelerate.accelerator",
}
OF_PYTHON = {"'NoneType' object is not subscriptable", "not enough values to unpack"}


def messages():
    """Every string of the packages' source; for f-strings, the text between their values."""
    for folder in (ROOT / "liger_trainer", ROOT / "kernels"):
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    yield "\0".join(part.value for part in node.values if isinstance(part, ast.Constant))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def test_troubleshooting_quotes_errors_that_exist():
    titles = re.findall(r'^\*\*(".*?")\.?\*\*', (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    quotes = [quote for title in titles for quote in re.findall(r'"([^"]+)"', title)]
    known, missing = list(messages()), []
    for quote in quotes:
        if quote in OF_PYTHON:
            continue
        if quote in FOREIGN:
            source = Path(importlib.import_module(FOREIGN[quote]).__file__).read_text()
            assert quote in source, f"{FOREIGN[quote]} no longer says {quote!r}"
            continue
        parts = [part.strip() for part in quote.split("...") if part.strip()]
        said = [message for message in known if all(part in message for part in parts)]
        if not said:
            missing.append(quote)
    assert len(quotes) >= 10 and not missing
