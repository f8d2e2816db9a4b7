"""benchmarks/generation.py times the same tokens in all arms, and counts those that differ."""

import argparse
import json

import pytest
from benchmark_scripts import benchmarks_on_path  # noqa: F401


@pytest.mark.parametrize("lora", [None, 4])
def test_arms_write_the_same_tokens(lora, capsys):
    import generation

    options = {"models": ["tiny"], "layers": None, "lora": lora, "batch": 2, "prompt": 5, "tokens": 3, "rounds": 1}
    for arm in ("stock", "ours"):
        generation.one_arm(argparse.Namespace(arm=arm, **options))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("RESULT ")]
    rows = [json.loads(line.removeprefix("RESULT ")) for line in lines]
    generation.compare(rows)
    assert [row["others"] for row in rows] == [0, 0] and all(row["ms"] > 0 for row in rows)
    assert len(rows[0]["first_tokens"]) == 2
    rows[1]["first_tokens"][0] += 1
    generation.compare(rows)
    assert rows[1]["others"] == 1
