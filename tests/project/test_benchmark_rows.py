"""Benchmarks on real rows count tokens without padding, and train all arms on the same rows."""

import json
import os
import sys

import numpy as np
import pytest
from benchmark_scripts import BENCHMARKS, benchmarks_on_path  # noqa: F401


def file_of_rows(folder, *lengths):
    ids = np.random.default_rng(0).integers(2, 1031, sum(lengths)).astype(np.uint32)
    np.savez(folder / "rows.npz", ids=ids, offsets=np.cumsum([0, *lengths]))
    return str(folder / "rows.npz")


def file_of_pairs(folder, *characters):
    """Texts of so many characters, four to a token: prompt (the blank line after it counts), answers."""
    rows = []
    for prompt, chosen, rejected in characters:
        turn = {"from": "human", "value": "x" * (prompt - 2)}
        rows.append({"conversations": [turn], "chosen": {"value": "y" * chosen}, "rejected": {"value": "z" * rejected}})
    (folder / "pairs.json").write_text(json.dumps(rows))
    return str(folder / "pairs.json")


SFT = ("SFTTrainer", "LigerSFTTrainer", "LigerSFTTrainer - varlen", "Trainer", "LigerTrainer", "LigerTrainer - varlen")


def trained(arms, **run):
    import _steps

    rows = [_steps.train(arm, _steps.Run("tiny", **run)) for arm in arms]
    _steps.flag_losses(rows)
    _steps.flag_tokens(rows)
    for row in rows:
        assert "note" not in row, row
        ours = row["arm"].startswith("Liger") and not row["arm"].endswith("varlen")
        assert ("varlen_attention 1/1" in row.get("patched", "")) == ours
        assert row["losses"] == pytest.approx(rows[0]["losses"], rel=1e-3)
        assert len(row["losses"]) == 2 and row["tokens_per_s"] > 0
    return rows


def assert_counts(rows, step_tokens, positions):
    """`positions`: positions of all steps on the clock, with padding."""
    for row in rows:
        assert row["step_tokens"] == step_tokens, row["arm"]
        assert row["padding"] == pytest.approx(1 - sum(step_tokens) / positions), row["arm"]


def assert_flop(rows, run, mean_length):
    """`mean_length`: the sum of the squared lengths of all rows on the clock, divided by their sum."""
    import _steps

    run = _steps.Run("tiny", **run)
    want = _steps.flop_per_token(_steps.build(run), run, mean_length)
    assert [row["flop_per_token"] for row in rows] == pytest.approx([want] * len(rows))


@pytest.mark.slow
def test_padded_rows(tmp_path):
    """Two batches in turn: rows of 5 and 9 tokens, then of 3 and 40 (cut to 32). The clock sees each once."""
    data = file_of_rows(tmp_path, 5, 9, 3, 40, 7, 6)
    run = {"batch": 2, "length": 32, "steps": 5, "skip": 3, "rows": "padded", "data": data}
    rows = trained(SFT, **run)
    assert_counts(rows, (3 + 32, 5 + 9), 2 * 32 + 2 * 9)
    assert_flop(rows, run, (3**2 + 32**2 + 5**2 + 9**2) / 49)


@pytest.mark.slow
def test_packed_rows(tmp_path):
    """Five rows become three of at most 16 tokens: 12 + 3, 10 + 5 and 9. One batch has them all."""
    data = file_of_rows(tmp_path, 10, 5, 12, 3, 9)
    run = {"batch": 3, "length": 16, "steps": 5, "skip": 4, "rows": "packed", "data": data}
    rows = trained(SFT, **run)
    assert_counts(rows, (39,), 39)
    assert_flop(rows, run, (10**2 + 5**2 + 12**2 + 3**2 + 9**2) / 39)


def test_padded_pairs(tmp_path):
    """A pair of 5 + 3 and 5 + 10 tokens, cut to 12, and one of 1 + 2 and 1 + 1. A prompt of 16 leaves no answer."""
    data = file_of_pairs(tmp_path, (20, 12, 40), (64, 8, 8), (4, 8, 4))
    run = {"batch": 2, "length": 12, "steps": 5, "skip": 4, "rows": "padded", "data": data, "trainer": "dpo", "lora": 4}
    rows = trained(("DPOTrainer", "LigerDPOTrainer", "LigerDPOTrainer - varlen"), **run)
    assert_counts(rows, (8 + 12 + 3 + 2,), 4 * 12)


def test_packed_batches_of_both_collators(tmp_path):
    """TRL's collator and transformers' make the same batch of packed rows."""
    import _rows
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    rows = _rows.packed_rows(_rows.real_rows(file_of_rows(tmp_path, 10, 5, 12, 3, 9), 1031, 16), 16)
    want = DataCollatorForLanguageModeling(0, padding_free=True)(rows)
    got = _rows.flatten(rows)
    for name in ("input_ids", "labels", "position_ids"):
        assert got[name].tolist() == want[name].tolist(), name
    assert [int(x) for x in _rows.tokens_of(got)] == [39, 359, 39]


def test_other_rows_are_flagged():
    import _steps

    rows = [
        {"arm": "LigerTrainer", "step_tokens": [5, 9]},
        {"arm": "SFTTrainer", "note": "out of memory"},
        {"arm": "Trainer", "step_tokens": [5, 8]},
        {"arm": "LigerSFTTrainer", "step_tokens": [5, 9]},
    ]
    _steps.flag_tokens(rows)
    assert [row.get("note") for row in rows[:2]] == [None, "out of memory"] and "note" not in rows[3]
    assert rows[2]["note"] == "OTHER ROWS: a step of 8 tokens, of the first trainer 9"


@pytest.mark.slow
def test_a_record_of_real_rows(tmp_path, monkeypatch, capsys):
    import training

    record = tmp_path / "record.json"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    sizes = ["--model", "tiny", "--batch", "2", "--length", "32", "--steps", "6", "--json", str(record)]
    rows = ["--rows", "padded", "--data", file_of_rows(tmp_path, 5, 9, 3, 40, 7, 6)]
    arms = ["SFTTrainer", "LigerSFTTrainer"]
    monkeypatch.setattr(sys, "argv", [f"{BENCHMARKS}/training.py", *sizes, *rows, "--arms", *arms])
    training.main()
    held = json.loads(record.read_text())
    assert "without padding" in held["tokens"] and held["options"]["rows"] == "padded"
    for row in held["rows"]:
        assert row["step_tokens"] == [14, 35, 13] and row["mfu"] > 0 and "note" not in row
    assert "padded rows" in capsys.readouterr().out


def test_default_arms_and_the_folder_of_a_record():
    from argparse import Namespace

    import training

    plain = {
        "model": "Llama-3-8B",
        "batch": 8,
        "length": 2048,
        "checkpointing": True,
        "no_waits": False,
        "no_autocast": False,
        "lora_experts": False,
        "nf4": False,
        "mxfp4": False,
        "offload": False,
        "auto": False,
        "memory_budget": None,
        "gpu_memory": None,
        "optimizer_in_backward": False,
        "layers": None,
        "prompt": 64,
    }
    options = Namespace(trainer="sft", rows="full", lora=None, config_file=None, **plain)
    assert training.case_of(options) == "sft-llama-3-8b-8x2048-checkpointing"
    assert not any(word in arm for arm in training.default_arms(options) for word in ("varlen", "compile", "in_back"))
    options.layers = 2
    assert training.case_of(options) == "sft-llama-3-8b-2-layers-8x2048-checkpointing"
    options.layers, options.optimizer_in_backward = None, True
    assert training.case_of(options) == "sft-llama-3-8b-8x2048-checkpointing-optimizer_in_backward"
    assert "LigerTrainer - in_backward" in training.default_arms(options)
    options.optimizer_in_backward = False
    options.rows = "packed"
    assert training.case_of(options) == "sft-llama-3-8b-8x2048-packed-checkpointing"
    arms = training.default_arms(options)
    assert {*SFT, "LigerSFTTrainer - graphs", "Trainer + Liger", "SFTTrainer + Liger"} == set(arms)
    options.lora = 16
    assert set(training.default_arms(options)) == set(training.LORA_ARMS)
    options.trainer, options.rows = "dpo", "padded"
    assert "LigerDPOTrainer - varlen" in training.default_arms(options)
    options.rows, options.lora = "full", None
    assert "LigerDPOTrainer - shared" not in training.default_arms(options), "prompts of 64 tokens are not shared"
    options.prompt = 512
    assert training.case_of(options) == "dpo-llama-3-8b-8x2048-prompt512-checkpointing"
    assert "LigerDPOTrainer - shared" in training.default_arms(options)


def test_no_arm_clips_gradients_with_the_optimizer_in_backward(monkeypatch):
    import _steps

    from liger_triton import _dispatch

    monkeypatch.setattr(_dispatch, "INTERPRET", False)
    run = _steps.Run("tiny", batch=2, length=32, steps=2, skip=1, optimizer_in_backward=True)
    args = [_steps.make_trainer(arm, run, []).args for arm in ("LigerTrainer", "LigerTrainer - in_backward", "Trainer")]
    assert [each.max_grad_norm for each in args] == [0, 0, 0]
    assert [getattr(each, "optimizer_in_backward", False) for each in args] == [True, False, False]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--rows", "padded"], "--data"),
        (["--rows", "packed", "--trainer", "dpo", "--data", "pairs.json"], "does not pack"),
        (["--rows", "padded", "--data", "rows.npz", "--steps", "1"], "take at least 2"),
        (["--steps", "4"], "take at least 5"),
        (["--skip", "-1"], "expected 0 or more"),
        (["--trainer", "dpo", "--arms", "LigerTrainer - varlen"], "expected, for --trainer dpo"),
    ],
)
def test_what_the_command_line_refuses(monkeypatch, capsys, arguments, error):
    import training

    monkeypatch.setattr(sys, "argv", ["training.py", *arguments])
    with pytest.raises(SystemExit):
        training.main()
    assert error in capsys.readouterr().err


def test_a_file_without_rows_is_refused(tmp_path):
    import _rows

    np.savez(tmp_path / "flat.npz", ids=np.arange(9))
    with pytest.raises(ValueError, match="offsets"):
        _rows.real_rows(str(tmp_path / "flat.npz"), 1031, 16)
    (tmp_path / "rows.jsonl").write_text('{"input_ids": [1, 2, 3]}\n{"input_ids": [1040, 5]}\n')
    assert [row["input_ids"] for row in _rows.real_rows(str(tmp_path / "rows.jsonl"), 1031, 2)] == [[1, 2], [9, 5]]
