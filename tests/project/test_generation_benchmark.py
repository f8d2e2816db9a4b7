"""benchmarks/generation.py times the same tokens in all arms, and counts those that differ."""

import argparse

import pytest
from benchmark_scripts import benchmarks_on_path  # noqa: F401


@pytest.mark.parametrize("lora", [None, 4])
def test_arms_write_the_same_tokens(lora):
    import generation

    from liger_trainer.head import calls

    rule = calls._continues_by_a_cache
    options = {"layers": None, "lora": lora, "batch": 2, "prompt": 5, "tokens": 3, "rounds": 2}
    rows = list(generation.rows_of("tiny", argparse.Namespace(arms=generation.ARMS, **options)))
    generation.compare(rows)
    assert [row["arm"] for row in rows] == ["stock", "ours", "ours, kernels"]
    assert [row["others"] for row in rows] == [0, 0, 0]
    for row in rows:
        assert len(row["call_ms"]) == 2 and 0 < row["fastest_ms"] <= row["ms"]
        assert len(row["first_tokens"]) == 2
    assert calls._continues_by_a_cache is rule
    rows[1]["first_tokens"][0] += 1
    generation.compare(rows)
    assert rows[1]["others"] == 1
