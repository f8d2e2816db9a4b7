"""benchmarks/curves.py trains every arm on the rows of its seed, and reports only real differences."""

import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from benchmark_scripts import BENCHMARKS, benchmarks_on_path  # noqa: F401


def test_rows_of_a_seed():
    """Other seeds see the same rows in another order, and never the held-out rows."""
    import curves

    rows = [[k, k] for k in range(10)]
    train, held = curves.split(rows, 3, 14, seed=0)
    again, held_again = curves.split(rows, 3, 7, seed=1)
    first = [row["input_ids"][0] for row in train]
    assert held == held_again and len(held) == 3 and train != again
    assert sorted(first[:7]) == sorted(first[7:]) and first[:7] != first[7:], "two epochs"
    assert {row["input_ids"][0] for row in again} == set(first)
    assert not {row["input_ids"][0] for row in held} & set(first)


def test_ids_of_another_vocabulary_are_ranks_by_frequency(tmp_path):
    import curves

    ids = np.array([900, 7, 900, 900, 7, 128000, 55], dtype=np.uint32)
    np.savez(tmp_path / "rows.npz", ids=ids, offsets=np.array([0, 3, 7]))
    path = str(tmp_path / "rows.npz")
    assert curves.rows_in(path, None, vocab=100, length=4) == [[0, 1, 0], [0, 1, 3, 2]]
    assert curves.rows_in(path, None, vocab=3, length=4) == [[0, 1, 0], [0, 1, 2, 2]]


def row_of(arm, *curve):
    seed = int(arm[-1])
    return {"arm": arm, "seed": seed, "curve": curve, "first": 3.0, "middle": 2.0, "last": curve[-1], "held_out": 1.5}


def test_what_is_compared():
    """Compares arms of one seed, and the seeds in bf16. A failed arm is compared with nothing."""
    import curves

    rows = [row_of("bf16:0", 3.0, 2.0), row_of("bf16:1", 3.5, 2.1), row_of("fp8:0", 3.1, 1.75), row_of("lora:0", 4.0)]
    found = {row["what"]: row for row in curves.compared([*rows, {"arm": "lora+fp8:0", "note": "ValueError"}])}
    assert list(found) == ["all weights: fp8 - bf16, seed 0", "all weights: seed 1 - seed 0, bf16"]
    fp8, seeds = found.values()
    assert fp8["apart"] == 0.25 and fp8["last"] == -0.25 and fp8["first"] == 0
    assert seeds["apart"] == 0.5 and seeds["last"] == pytest.approx(0.1)


def test_ours_is_compared_with_stock_and_the_seeds_of_stock():
    import curves

    rows = [row_of("16bit:0", 3.0, 2.0), row_of("16bit+stock:0", 3.5, 2.0), row_of("16bit+stock:1", 3.5, 2.25)]
    found = {row["what"]: row["apart"] for row in curves.compared(rows)}
    kind = "all weights in bf16"
    assert found == {f"{kind}: ours - TRL's, seed 0": 0.5, f"{kind}: seed 1 - seed 0, TRL's": 0.25}


def run(tmp_path, model, *arms):
    """(the record of 20 steps on a tiny model, its file)"""
    source = np.random.default_rng(0)
    np.savez(tmp_path / "rows.npz", ids=source.integers(0, 128256, 24 * 12), offsets=np.arange(25) * 12)
    path = tmp_path / "record.json"
    words = ["--model", model, "--data", str(tmp_path / "rows.npz"), "--steps", "20", "--batch", "2", "--every", "20"]
    words += ["--held_out", "4", "--arms", *arms, "--json", str(path)]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, f"{BENCHMARKS}/curves.py", *words], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text()), path


@pytest.mark.slow
def test_a_run(tmp_path):
    """The record has a row for each arm, a failed one too, and makes a table."""
    import _tables

    record, path = run(tmp_path, "tiny", "bf16:0", "fp8:0")
    bf16, fp8, *compared = record["rows"]
    assert record["weights"] == "random" and len(bf16["curve"]) == 2 and bf16["curve"][1] < bf16["curve"][0]
    assert list(bf16["held_out_by_step"]) == ["0", "20"] and bf16["held_out"] == bf16["held_out_by_step"]["20"]
    assert bf16["held_out_bf16"] == pytest.approx(bf16["held_out"], rel=1e-3)
    if importlib.util.find_spec("torchao") is None:
        assert "needs torchao" in fp8["note"] and not compared
    else:
        assert "float8 13/13" in fp8["patched"] and 0 < compared[0]["apart"] < 0.05
        assert 0 < abs(fp8["held_out_bf16"] - fp8["held_out"]) < 0.02
    spec = {"rows": {"what": "loss"}, "cells": {"last 50": "{last:.4f}"}, "records": [str(path)]}
    lines = _tables.markdown(spec).splitlines()
    assert lines[2] == f"| all weights, bf16, seed 0 | {bf16['last']:.4f} |" and len(lines) == 4 + len(compared)


@pytest.mark.slow
def test_adapters_of_ours_and_of_trl(tmp_path):
    ours, stock, compared = run(tmp_path, "tiny", "lora:0", "lora+stock:0")[0]["rows"]
    assert "lora 14/14" in ours["patched"] and stock["patched"] is None
    assert compared["what"] == "adapters: bf16 - TRL's, seed 0" and compared["apart"] < 1e-2
    assert ours["curve"][1] < ours["curve"][0]


@pytest.mark.slow
def test_a_run_of_a_mixture_of_experts(tmp_path):
    """Trains ours and TRL's trainer with the router's loss."""
    ours, stock, compared = run(tmp_path, "tiny-moe", "16bit:0", "16bit+stock:0")[0]["rows"]
    assert "experts 2/2" in ours["patched"] and stock["patched"] is None
    assert len(ours["router_curve"]) == 2 and ours["router_curve"] == pytest.approx(stock["router_curve"], rel=1e-2)
    assert compared["what"] == "all weights in bf16: ours - TRL's, seed 0" and compared["apart"] < 1e-2
    assert ours["curve"][1] < ours["curve"][0] and ours["held_out"] == pytest.approx(stock["held_out"], abs=1e-2)
