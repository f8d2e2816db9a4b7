"""The scripts and the notebook of examples/ train as written: with a tiny model, without GPU or network."""

import json
import math
import re
import runpy
import sys

import pytest
from checkout import ROOT
from recipe_fixtures import write_model
from tiny_models import tiny_tokenizer
from transformers import Trainer

EXAMPLES = ROOT / "examples"
NOTEBOOK = EXAMPLES / "finetune_on_one_gpu.ipynb"
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
INSTRUCTIONS = [{"instruction": f"w{3 + i} w4 w5", "input": "w9", "output": f"w{6 + i} w8"} for i in range(16)]
PAIRS = [
    {
        "prompt": [{"role": "user", "content": f"w{3 + i} w4"}],
        "chosen": [{"role": "assistant", "content": f"w{6 + i} w8"}],
        "rejected": [{"role": "assistant", "content": f"w{60 + i} w9 w9"}],
    }
    for i in range(16)
]
ANSWERS = [{"prompt": f"w{3 + i} w4 w5", "completion": f" w{6 + i} w8 w10 w11 w12"} for i in range(20)]
ROWS = {  # in the file that each script reads
    "sft": INSTRUCTIONS,
    "dpo": PAIRS,
    "own_loop": INSTRUCTIONS,
    "custom_loss": INSTRUCTIONS,
    "medusa": ANSWERS,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("model"))
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def losses(monkeypatch):
    """The losses that a trainer logs while the test runs."""
    logged = []
    log = Trainer.log

    def record(self, logs, *rest):
        logged.extend(value for name, value in logs.items() if name == "loss")
        return log(self, logs, *rest)

    monkeypatch.setattr(Trainer, "log", record)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return logged


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_each_script_has_rows_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(ROWS)
    assert [path.name for path in EXAMPLES.glob("*.ipynb")] == [NOTEBOOK.name]


@pytest.mark.parametrize("name", ROWS)
def test_script(name, model, losses, tmp_path, monkeypatch, capsys):
    rows = write_lines(tmp_path / "rows.jsonl", ROWS[name])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, "--model", str(model), "--rows", str(rows)])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    saved = tmp_path / "outputs" / name
    assert list(saved.rglob("*.safetensors")), sorted(saved.rglob("*"))
    if name == "own_loop":
        printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("rows ")]
        losses.extend(float(line.split()[-1]) for line in printed)
    assert losses and all(math.isfinite(loss) and loss != 0 for loss in losses)


@pytest.mark.parametrize("name", ROWS)
def test_script_needs_no_permission(name):
    text = (EXAMPLES / f"{name}.py").read_text()
    default = text.split('"--model", default="')[1].split('"')[0]
    assert default.split("/")[0] in ("Qwen", "HuggingFaceTB"), "a model that anybody may download"
    shipped = text.split('parents[1] / "')[1].split('"')[0]
    first = json.loads((ROOT / shipped).read_text().splitlines()[0])
    assert ROWS[name][0].keys() <= first.keys(), "the rows of this test have the form of those that the script names"


@pytest.mark.parametrize("old_gpu", [False, True], ids=["fused", "stock"])
def test_notebook(old_gpu, model, losses, tmp_path, monkeypatch, capsys):
    """Runs each cell in turn in one namespace, like a notebook. Leaves out the `%pip` lines.

    Makes the choice for an old GPU, but without fp16, which a CPU refuses.
    """
    monkeypatch.setenv("MODEL", str(model))
    monkeypatch.setenv("ROWS", str(write_lines(tmp_path / "rows.jsonl", INSTRUCTIONS)))
    monkeypatch.chdir(tmp_path)
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    namespace = {}
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        assert cell["outputs"] == [] and cell["execution_count"] is None, "a notebook is committed without outputs"
        lines = [line for line in cell["source"] if not line.startswith("%")]
        source = "".join(lines)
        if old_gpu and "old_gpu = " in source:
            source = re.sub(r"^old_gpu = .*$", "old_gpu = True", source, flags=re.MULTILINE)
            source = source.replace("fp16=old_gpu", "fp16=False")
        exec(source, namespace)
    assert namespace["args"].use_liger != old_gpu
    assert ("rms_norm" in capsys.readouterr().out) != old_gpu, "the report"
    assert losses and all(math.isfinite(loss) and loss != 0 for loss in losses)
    assert list((tmp_path / "outputs/notebook").glob("adapter_model.safetensors"))
    assert [turn["role"] for turn in namespace["history"]] == ["user", "assistant"] * 2, "a chat of two questions"
    shipped = "../recipes/data/alpaca_quickstart.jsonl"
    assert shipped in NOTEBOOK.read_text() and (EXAMPLES / shipped).exists()
