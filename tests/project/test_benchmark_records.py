"""Every published figure comes from a record, in tables, charts and sentences."""

import importlib
import itertools
import json
import re
import shutil
import subprocess

import pytest
from benchmark_scripts import benchmarks_on_path  # noqa: F401
from checkout import ROOT

BENCHMARKS = ROOT / "benchmarks"
# The quantity in a record that a figure with this unit may come from.
FIELDS = {
    "tokens/s": ("tokens_per_s", "tokens_per_second", "tokens_per_second_without"),
    "GiB": ("gib", "static", "above", "memory"),
    "ms": ("ms", "forward_ms", "visits_ms"),
}
THOUSANDS = re.compile(r"(?<![\w.,-])\d{1,3}(?:,\d{3})+(?![\w,])")
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
UNIT = "|".join(FIELDS)
BETWEEN = r"(?:\s*,|\s+and|\s+or|\s+to|\s+against|\s*/)\s+"
BEFORE_UNIT = re.compile(rf"(?<![\w.,-])({NUMBER}(?:{BETWEEN}{NUMBER})*)\s+({UNIT})\b")
AFTER_UNIT = re.compile(rf"({UNIT})\s+(?:against|and|or|to)\s+({NUMBER}(?:{BETWEEN}{NUMBER})*)(?![\d.,]*\s+[A-Za-z])")


@pytest.fixture
def render():
    return importlib.import_module("render")


def leaves(value, name=""):
    """(name of the nearest key, number) for everything in a record."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from leaves(part, key)
    elif isinstance(value, list):
        for part in value:
            yield from leaves(part, name)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield name, value


def is_rounding_of(text, values):
    """True if `text` is one of the values, rounded to as many decimals."""
    plain = text.replace(",", "")
    if "e" in plain:
        return any(f"{value:.{len(plain.split('e')[0].partition('.')[2])}e}" == plain for value in values)
    return any(f"{value:.{len(plain.partition('.')[2])}f}" == plain for value in values)


def prose_of(text):
    """The text without rendered tables and code."""
    text = re.sub(r"<!-- begin table: .*?<!-- end table: [\w.-]+ -->", "", text, flags=re.DOTALL)
    return re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)


def figures_in(text):
    """(number, unit) of every figure in the sentences, in lists too: "3.0 and 4.5 GiB", "10 tokens/s against 11"."""
    for found in BEFORE_UNIT.finditer(text):
        yield from ((number, found[2]) for number in re.findall(NUMBER, found[1]))
    for found in AFTER_UNIT.finditer(text):
        yield from ((number, found[1]) for number in re.findall(NUMBER, found[2]))


def strays(text, records):
    """The figures in sentences that no record holds. A number with a comma always counts as one. Sizes and other chosen
    numbers are written without (8192)."""
    text = prose_of(text)
    values = []
    for record in records:
        values += leaves(record)
    anything = [value for _, value in values]
    found = [number for number in THOUSANDS.findall(text) if not is_rounding_of(number, anything)]
    held = {}
    for unit, names in FIELDS.items():
        held[unit] = [value for name, value in values if name in names]
    return found + [f"{number} {unit}" for number, unit in figures_in(text) if not is_rounding_of(number, held[unit])]


def test_pages_and_figures_are_what_the_records_say(render, capsys):
    try:
        render.main(["--check"])
    except SystemExit as error:
        pytest.fail(f"{capsys.readouterr().out}{error}")


def speeds(record):
    """The speeds of a record's rows, by what its benchmark counts: tokens, rows or steps a second."""
    fields = list(leaves(record))
    counted = [v for field, v in fields if field in ("tokens_per_s", "rows_s")]
    return counted or [1 / v for field, v in fields if field == "ms"]


def test_every_number_of_a_table_is_in_its_records(render):
    """Computes the cells independently of the code that writes the tables."""
    plan, seen = render.published(), set()
    for page in render.pages():
        for block in render.BLOCK.finditer(page.read_text()):
            spec = plan["tables"][block["id"]]
            paths = dict.fromkeys(path for path, _ in render.entries(spec))
            records = [render.read(path) for path in paths]
            formats = [*spec["cells"].values(), *(form for _, form, *_ in spec.get("extra", {}).values())]
            names = set(re.findall(r"\{(\w+)", " ".join(formats)))
            names |= {name.removeprefix("gib_") for name in names}  # for a kind of tensor
            if "memory" in names:
                names |= {"gib", "gib_used"}
            values = [v for record in records for name, v in leaves(record) if name in names or name == "tried"]
            values += [100 * v for record in records for name, v in leaves(record) if name == "less"]
            if spec["records"] == plan["tables"]["medusa-real"]["records"]:
                values += [v for record in records for _, v in leaves([record["before"], record["after"]])]
            ratios = {}
            for title, (name, *_) in spec.get("ratios", {}).items():
                ratios[title] = []
                for record in records:
                    if name == "speed":
                        found = speeds(record)
                    else:
                        found = [v for field, v in leaves(record) if field == name]
                    ratios[title] += [a / b for a, b in itertools.product(found, found)]
            titles, _, *lines = [
                [cell.strip() for cell in line.strip("|").split("|")]
                for line in block[0].splitlines()
                if line.startswith("|")
            ]
            left = len(spec["rows"]) + spec.get("measures", False)
            for line in lines:
                for title, cell in list(zip(titles, line, strict=True))[left:]:
                    for number in re.findall(r"-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?", cell):
                        held = ratios.get(title, values)
                        assert is_rounding_of(number, held), f"{page.name}, {block['id']}: {number} in {line}"
                        seen.add((block["id"], number))
    assert len(seen) > 400, "the tables hold hundreds of figures"


def test_every_figure_in_a_sentence_is_in_a_listed_record(render):
    records = [render.read(path) for path in render.listed(render.published())]
    looked_at = 0
    for page in render.pages():
        text = page.read_text()
        if render.BLOCK.search(text) or page.name.startswith("performance"):
            assert strays(text, records) == [], page.name
            looked_at += 1
    assert looked_at >= 3


def test_a_stray_figure_is_found():
    records = [{"rows": [{"tokens_per_s": 45343.4, "gib": 14.63, "ms": 1.44}], "options": {"memory": 24}}]
    sentences = {
        "It made 45,343 tokens/s in 14.6 GiB, of 24 GiB, and 1.4 ms.": [],
        "It made 44,456 tokens/s.": ["44,456", "44,456 tokens/s"],
        "45,343 tokens/s against 44,524.": ["44,524", "44,524 tokens/s"],
        "691 and\n570 tokens/s": ["691 tokens/s", "570 tokens/s"],
        "(earlier run: 9,691 and 9,570), 45,343, 8192": ["9,691", "9,570"],
        "| **LigerDPOTrainer** | 44,456 | 14.6 |": ["44,456"],
        "from 14.6 to 15.1 GiB, and 2 ms more": ["15.1 GiB", "2 ms"],
        "`--memory 3 GiB` and `9 ms`": [],
        "<!-- begin table: x -->\n| 5 ms |\n<!-- end table: x -->": [],
        "45,343 tokens/s and 14.63 GiB": [],
    }
    for text, want in sentences.items():
        assert sorted(strays(text, records)) == sorted(want), text


def test_records_are_complete_and_listed(render):
    plan = render.published()
    found = {str(path.relative_to(render.RESULTS)): path for path in render.RESULTS.rglob("*.json")}
    assert set(render.listed(plan)) == set(found), "list a record in benchmarks/published.yaml or delete it"
    for name, path in found.items():
        bench, _, file = name.split("/")
        record = json.loads(path.read_text())
        assert (BENCHMARKS / f"{bench}.py").exists()
        stamp = record["date"].removesuffix(" UTC").replace(" ", "T").replace(":", "")
        assert re.fullmatch(rf"{stamp}-{record['commit']}(-\d+)?\.json", file), name
        assert {"gpu", "driver", "host", "versions", "python", "dirty"} <= set(record), name
        assert {"torch", "triton", "transformers", "trl", "liger-kernel"} <= set(record["versions"]), name
        assert record["argv"] or "not record" in record["argv_note"], name
        assert record["argv"] is None or record["argv"][0] == f"benchmarks/{bench}.py", name
        assert not re.search(r'"(/|\.)\w[^" ]*/', path.read_text()), (
            f"{name} names a folder of the machine that it ran on"
        )
    for page, paths in plan["quoted"].items():
        assert (ROOT / page).exists() and paths


def test_first_losses_of_a_run_agree(render):
    for path in sorted((render.RESULTS / "training").rglob("*.json")):
        rows = [row for row in json.loads(path.read_text())["rows"] if row.get("losses")]
        losses = [row["losses"][0] for row in rows]
        # Under FSDP2, with context parallelism too, accelerate rounds the stock loss to 1/16
        rounding = 1 / 32 if "fsdp2" in path.parent.name or "cp2" in path.parent.name else 0
        of_fp8 = 1e-3 * any("fp8" in row["arm"] for row in rows)  # it has different numbers
        assert max(losses) - min(losses) <= (1e-3 + of_fp8) * min(losses) + rounding, path


def test_check_says_what_would_change(render, tmp_path, monkeypatch, capsys):
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "page.md"
    page.write_text("Before.\n\n<!-- begin table: readme -->\nold\n<!-- end table: readme -->\n\nAfter.\n")
    (tmp_path / "README.md").write_text("No table.\n")
    plan = render.published()
    plan["figures"] = {"docs/three_trainers.png": plan["figures"]["docs/three_trainers.png"]}
    monkeypatch.setattr(render, "ROOT", tmp_path)
    monkeypatch.setattr(render, "published", lambda: plan)
    with pytest.raises(SystemExit, match="make figures"):
        render.main(["--check"])
    assert "old" in page.read_text() and not (tmp_path / "docs/three_trainers.png").exists()
    assert {"docs/page.md", "docs/three_trainers.png"} <= set(capsys.readouterr().out.split())
    render.main([])
    assert page.read_text().startswith("Before.\n\n<!-- begin table: readme -->\n| ") and "After." in page.read_text()
    assert (tmp_path / "docs/three_trainers.png").stat().st_size > 10_000
    render.main(["--check"])
    page.write_text(page.read_text().replace("68,976", "69,976"))
    plan["figures"]["docs/three_trainers.png"]["options"] = {"axis": "context"}
    with pytest.raises(SystemExit, match="make figures"):
        render.main(["--check"])


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<!-- begin table: readme -->\n", "1 marks of tables and 0 tables"),
        ("<!-- begin table: nothing -->\n<!-- end table: nothing -->\n", "a table nothing, which"),
    ],
)
def test_marks_that_fit_no_table_are_refused(render, text, error):
    with pytest.raises(ValueError, match=error):
        render.with_tables(text, render.published()["tables"], "page.md")


def test_a_table_does_not_choose_between_two_runs(render):
    import _tables

    spec = render.published()["tables"]["rows-in-a-step"]
    with pytest.raises(ValueError, match="2 rows fall into one cell.*name a join"):
        _tables.markdown({name: value for name, value in spec.items() if name != "join"})
    with pytest.raises(ValueError, match="no row of"):
        _tables.markdown(spec | {"where": {"axis": "nothing"}})


def test_a_run_names_its_own_record(tmp_path, monkeypatch):
    import _measure

    monkeypatch.setattr(_measure, "RESULTS", tmp_path)
    monkeypatch.setattr(_measure, "DEVICE", "cpu")
    about = _measure.environment()
    assert about["versions"]["torch"] and about["host"]["cores"] and about["gpu"] is about["driver"] is None
    record = _measure.Record("training", "case")
    record.write({"rows": []})
    assert record.path is None and list(tmp_path.iterdir()) == [], "a run on a CPU"

    about |= {"gpu": "a GPU", "date": "2026-12-01 09:30 UTC", "commit": "abcdef0"}
    monkeypatch.setattr(_measure, "environment", lambda: about)
    monkeypatch.setattr(_measure, "DEVICE", "cuda")
    assert _measure.Record("training", "case", trial=True).path is None
    for count, name in enumerate(("2026-12-01T0930-abcdef0.json", "2026-12-01T0930-abcdef0-2.json"), start=1):
        record = _measure.Record("training", "case", argv=["--steps", "5", "--data", "/rows/alpaca.npz"])
        record.write({"rows": []})
        record.write({"rows": [count]})
        held = json.loads((tmp_path / "training" / "case" / name).read_text())
        argv = ["benchmarks/training.py", "--steps", "5", "--data", "alpaca.npz"]
        assert held == {"argv": argv, **about, "rows": [count]}
    record = _measure.Record("training", "case", tmp_path / "told.json")
    record.write({})
    assert (tmp_path / "told.json").exists()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_dirty_is_told_from_clean(tmp_path, monkeypatch):
    import _measure

    git = ("git", "-c", "user.name=n", "-c", "user.email=e")
    (tmp_path / "file").write_text("1")
    for command in (("init", "-q"), ("add", "file"), ("commit", "-qm", "m")):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(_measure, "__file__", str(tmp_path / "_measure.py"))
    assert _measure.environment()["dirty"] is False
    (tmp_path / "untracked").write_text("2")
    assert _measure.environment()["dirty"] is False
    (tmp_path / "file").write_text("2")
    assert _measure.environment()["dirty"] is True


def test_the_page_for_users_names_every_script_and_no_other():
    page = (ROOT / "benchmarks" / "README.md").read_text()
    scripts = {path.name for path in (ROOT / "benchmarks").glob("[!_]*.py")} - {
        "figures.py",
        "render.py",
    }  # run `make figures`
    shared = {"_cases.py", "_models.py", "_steps.py", "_trainers.py"}
    assert set(re.findall(r"\b([a-z_]+\.py)\b", page)) - shared == scripts
    for script in scripts:
        source = (ROOT / "benchmarks" / script).read_text()
        for options in re.findall(rf"`{script} ([^`]*)`", page):
            for option in re.findall(r"--[a-z_]+", options):
                assert f'"{option}"' in source or "config_file" in option or "processes" in option, (script, option)
