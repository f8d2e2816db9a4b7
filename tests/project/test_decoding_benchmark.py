"""benchmarks/decoding.py trains each kind of head, decodes with it, and counts passes and time."""

import json

import pytest
from benchmark_scripts import benchmarks_on_path  # noqa: F401
from tiny_models import tiny_model, tiny_tokenizer


@pytest.fixture
def small(tmp_path):
    """Options of a run on a random model of seven layers, enough for those that a drafter reads."""
    folder = tmp_path / "model"
    tiny_model("llama", num_hidden_layers=7).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    rows = []
    for i in range(20):
        rows.append({"prompt": f"w{3 + i} w4 w5", "completion": f"w{6 + i} w{40 + i} w8"})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["--tiny", "--model", str(folder), "--data", str(tmp_path / "rows.jsonl")]


def test_every_kind_of_head_is_trained_and_decodes_the_same_text(small, tmp_path, capsys):
    import decoding

    record = tmp_path / "record.json"
    more = ["--heads_folder", str(tmp_path / "heads"), "--json", str(record)]
    decoding.main([*small, *more])
    assert "17 rows to train on, 2 prompts held out" in capsys.readouterr().out
    found = json.loads(record.read_text())
    assert found["training"].keys() == {"eagle", "mtp", "medusa"}
    without, *rows = found["rows"]
    assert (without["head"], without["tokens_a_pass"], without["times"]) == ("no head", 1, 1)
    wanted = [(head, guesses) for head in ("EAGLE-3", "MTP", "Medusa") for guesses in (1, 3)]
    assert [(row["head"], row["guesses"]) for row in rows] == wanted
    for row in rows:
        assert row["changed"] == 0 and row["tokens"] == without["tokens"] == 2 * 11
        assert row["passes"] <= without["passes"] and 1 <= row["tokens_a_pass"] <= row["guesses"] + 1
        assert 0 < row["head_ms"] < row["ms"]
        assert row["tokens_per_s"] == pytest.approx(1000 * row["tokens_a_pass"] / row["ms"])

    # A second run takes the trained heads.
    decoding.main([*small, *more, "--kinds", "mtp", "--guesses", "2"])
    again = json.loads(record.read_text())
    assert again["training"]["mtp"] == found["training"]["mtp"]
    assert [row["guesses"] for row in again["rows"]] == [0, 2]


def test_no_row_is_trained_on_and_held_out(small):
    import decoding

    options = decoding.parsed(small)
    to_train, held_out = decoding.split(options.data)
    assert len(to_train) == 17 and len(held_out) == 3
    assert not [row for row in held_out if row in to_train]
