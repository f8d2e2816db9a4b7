"""benchmarks/small_steps.py trains every arm on the same rows, and has seen the timed rows before."""

import argparse

import numpy as np
from benchmark_scripts import benchmarks_on_path  # noqa: F401


def options_of(folder, **given):
    ids = np.random.default_rng(0).integers(2, 1031, 16 * 6).astype(np.uint32)
    np.savez(folder / "rows.npz", ids=ids, offsets=np.arange(0, 97, 6))
    options = {"data": str(folder / "rows.npz"), "length": 5, "batches": 2, "rounds": 1, "profile": True, "tiny": True}
    return argparse.Namespace(**{"case": "8b-lora", "rows": ["alpaca"]} | options | given)


def test_arms_train_on_the_same_rows_which_they_have_seen_before(tmp_path):
    import _rows
    import small_steps

    options = options_of(tmp_path)
    run, timed = small_steps.run_of("8b-lora", "alpaca", options)
    rows = _rows.sft_rows(run, 1031, _tokenizer())[0]
    assert timed == 2 and run.steps == 2 + 2 + 2, "a round before, the clock, the profiler"
    assert rows[:16] == rows[16:32] == rows[32:] and rows[:8] != rows[8:16]

    found = []
    for arm in ("stock", "stock_flat", "ours"):
        options.arm = arm
        row = small_steps.train(options, "alpaca", 0.0)
        assert row["tokens_per_s"] > 0 and len(row["step_ms"]) == 2
        found.append({"case": "8b-lora", "rows": "alpaca", "arm": arm} | row)
    assert all(row["step_tokens"] == [40, 40] for row in found)
    small_steps.flag(found)
    assert not any("note" in row for row in found)
    found[2]["losses"] = [2 * x for x in found[2]["losses"]]
    small_steps.flag(found)
    assert found[2]["note"].startswith("WRONG LOSS")


def _tokenizer():
    import _steps

    return _steps.tokenizer_of()


def test_a_failure_is_a_row_that_says_why(tmp_path, capsys):
    import small_steps

    options = options_of(tmp_path, arm="ours_captured", rows=["128"])
    small_steps.one_arm(options)
    printed = capsys.readouterr().out
    assert '"note"' in printed and "cuda_graphs" in printed and '"case": "8b-lora"' in printed
