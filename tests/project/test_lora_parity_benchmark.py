"""benchmarks/lora_parity.py runs, and what it calls apart is apart."""

import json

from benchmark_scripts import benchmarks_on_path  # noqa: F401
from recipe_fixtures import write_model, write_rows


def test_losses_lie_on_each_other(tmp_path, capsys):
    import lora_parity

    write_model(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", 20)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    lora_parity.main([
        "--model", str(tmp_path / "model"), "--data", str(tmp_path / "rows.json"), "--steps", "3", "--batch", "2",
        "--rank", "4", "--learning-rate", "0.01", "--json", str(tmp_path / "record.json"),
    ])  # fmt: skip
    record = json.loads((tmp_path / "record.json").read_text())
    stock, ours = record["compared"]
    assert stock["largest"] == 0 and ours["largest"] < 1e-4
    losses = record["losses"]["ours"]
    assert len(losses) == 3 and losses[0] != losses[-1]
    assert "14 LoRA layers are swapped, 0 are not" in capsys.readouterr().out


def test_what_is_apart():
    import lora_parity

    stock = {"arm": "TRL", "losses": [2.0, 1.0, 3.0], "seconds": 1.0}
    found = lora_parity.compared(stock | {"arm": "ours", "losses": [2.0, 1.5, 2.0]}, stock)
    assert (found["largest"], found["mean"], found["first"], found["last"]) == (1.0, 0.5, 2.0, 2.0)
