"""Both arms of benchmarks/medusa.py compute the same loss and gradient; benchmarks/medusa_real.py runs."""

import argparse
import json

import matplotlib
import pytest
from benchmark_scripts import benchmarks_on_path  # noqa: F401
from recipe_fixtures import write_model, write_rows
from tiny_models import tiny_model


def test_arms_agree_and_a_wrong_one_is_flagged(tmp_path):
    import medusa

    options = argparse.Namespace(
        model="tiny", batch=2, data=None, no_checkpointing=False, steps=5, rows="full", profile=False
    )
    rows = []
    for case in (
        {"stage": 1, "heads": 2, "tied": True, "length": 24},
        {"stage": 2, "heads": 2, "tied": False, "length": 24},
    ):
        for arm in (medusa.OURS, medusa.UNFUSED):
            rows.append({"arm": arm, "batch": 2} | case | medusa.measure(arm, case, options))
    for ours, unfused in (rows[:2], rows[2:]):
        assert ours["losses"] == pytest.approx(unfused["losses"], rel=1e-4), "logged to 4 digits"
        assert ours["grad_norms"] == pytest.approx(unfused["grad_norms"], rel=1e-2), "bf16 weights"
        assert ours["static"] == unfused["static"] and len(ours["losses"]) == 2, "of the first step and the fifth"
    assert rows[0]["losses"][0] != rows[2]["losses"][0]
    medusa.flag(rows)
    assert not any("wrong" in row for row in rows) and rows[1]["faster"] > 0
    rows[1]["losses"] = [1.01 * loss for loss in rows[1]["losses"]]
    medusa.flag(rows)
    assert "losses" in rows[1]["wrong"] and "wrong" not in rows[3]
    medusa.show([*rows, rows[0] | {"length": 48, "note": "out of memory"}])

    matplotlib.use("agg")
    import figures

    record = {"gpu": "cpu", "date": "2026-01-01", "rows": [row | {"above": 1.0} for row in rows]}
    figures.medusa([record | {"options": vars(options)}]).savefig(tmp_path / "medusa.png")
    assert (tmp_path / "medusa.png").stat().st_size > 10_000


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_real(kind, tmp_path, capsys):
    import medusa_real

    write_model(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", 20)
    # A random model seldom ends an answer, so it ends with one token in five.
    model = tiny_model("llama", num_hidden_layers=7)  # enough for the layers that a drafter reads
    model.generation_config.eos_token_id = list(range(0, 131, 5))
    model.save_pretrained(tmp_path / "model")
    medusa_real.main(
        [
            "--kind",
            kind,
            "--model",
            str(tmp_path / "model"),
            "--data",
            str(tmp_path / "rows.jsonl"),
            "--max-new-tokens",
            "16",
            "--epochs",
            "8",
            "--batch",
            "4",
            "--learning-rate",
            "0.02",
            "--json",
            str(tmp_path / "record.json"),
        ]
    )
    record = json.loads((tmp_path / "record.json").read_text())
    out = capsys.readouterr().out
    assert "18 prompts to train on" in out and "2 held out" in out
    assert record["before"]["rows"] == record["after"]["rows"] == 2
    first, *_, last = record["losses"].values()
    assert last < first
    assert len(record["after"]["accuracy"]) == 3 and record["after"]["tokens_per_pass"] >= 1
