"""benchmarks/small_steps.py trains every arm on the same rows, and has seen the timed rows before."""

import argparse
import json

import numpy as np
import pytest
from benchmark_scripts import benchmarks_on_path  # noqa: F401


def options_of(folder, **given):
    ids = np.random.default_rng(0).integers(2, 1031, 16 * 6).astype(np.uint32)
    np.savez(folder / "rows.npz", ids=ids, offsets=np.arange(0, 97, 6))
    options = {"data": str(folder / "rows.npz"), "length": 5, "batches": 2, "rounds": 1, "profile": 4, "tiny": True}
    options["judged"] = None
    return argparse.Namespace(**{"case": "8b-lora", "trainer": "sft", "rows": ["alpaca"]} | options | given)


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
        found.append({"case": "8b-lora", "method": "sft", "rows": "alpaca", "arm": arm} | row)
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


def pairs_of_words(path, count):
    """Write `count` pairs of texts of uneven length, for which `preferences.py` makes random ids."""
    rows = []
    for number in range(count):
        turns = [{"from": "human", "value": "x" * (20 + 8 * (number % 5))}]
        answers = ["y" * (12 + 4 * (number % 7)), "z" * (16 + 4 * (number % 3))]
        rows.append({"conversations": turns, "chosen": {"value": answers[0]}, "rejected": {"value": answers[1]}})
    path.write_text(json.dumps(rows))


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("cpo", "rloo", "distillation")]


@pytest.mark.parametrize("trainer", ["kto", "orpo", "reward", "grpo", *SLOW])
def test_every_trainer_beside_ours_on_the_same_pairs(trainer, tmp_path):
    import small_steps

    pairs_of_words(tmp_path / "pairs.json", 24)
    given = {"data": str(tmp_path / "pairs.json"), "length": 24, "batches": 1, "profile": 0}
    options = options_of(tmp_path, case="1b-full", trainer=trainer, rows=["pairs"], **given)
    found = []
    for arm in ("stock", "ours"):
        options.arm = arm
        row = small_steps.train(options, "pairs", 0.0)
        found.append({"case": "1b-full", "method": trainer, "rows": "pairs", "arm": arm} | row)
    small_steps.flag(found)
    assert not any("note" in row for row in found)
    assert found[0]["step_tokens"] == found[1]["step_tokens"] and found[0]["step_tokens"][0] > 8 * 5
    compared = "grad_norm" if trainer in ("grpo", "rloo") else "losses"
    assert found[0][compared][0] > 0, "two trainers that learn nothing agree too"
    found[1][compared] = [1.2 * x for x in found[1][compared]]
    small_steps.flag(found)
    assert found[1]["note"].startswith("WRONG ")


@pytest.mark.parametrize(("trainer", "prompts"), [("kto", 8), ("cpo", 8), ("rloo", 4), ("distillation", 8)])
def test_steps_on_the_clock_take_the_rows_of_steps_before(trainer, prompts, tmp_path):
    import _trainers
    import small_steps

    pairs_of_words(tmp_path / "pairs.json", 24)
    options = options_of(tmp_path, data=str(tmp_path / "pairs.json"), length=24, profile=0)
    run, timed = small_steps.run_of("1b-full", "pairs", options, trainer)
    rows, made_of = _trainers.rows_of(run, 1031)
    clocked = timed * prompts
    assert len(rows) == len(made_of) == run.steps * prompts == 2 * clocked
    assert made_of[:clocked] == made_of[clocked:] and made_of[:prompts] != made_of[prompts:clocked]


def test_judged_answers_are_read_from_both_kinds_of_files(tmp_path):
    import preferences

    pairs_of_words(tmp_path / "pairs.json", 2)
    found = preferences.judged(str(tmp_path / "pairs.json"), 1031, 64)
    assert [row["label"] for row in found] == [True, False, True, False]
    turns = [{"role": "user", "content": "x" * 30}, {"role": "assistant", "content": "y" * 8}]
    long = [{"role": "user", "content": "x" * 400}, turns[1]]
    rows = [{"messages": turns, "label": False}, {"messages": long, "label": True}]
    (tmp_path / "judged.json").write_text(json.dumps(rows))
    (row,) = preferences.judged(str(tmp_path / "judged.json"), 1031, 64)
    assert (len(row["prompt_ids"]), len(row["completion_ids"]), row["label"]) == (8, 2, False)


def test_kto_s_other_answer_is_that_of_the_row_before_in_its_batch():
    import _steps
    import _trainers

    run = _steps.Run("tiny", batch=2, length=8, trainer="kto", steps=2, skip=1)
    rows = [{"prompt_ids": [k], "completion_ids": [10 + k], "label": True} for k in range(4)]
    found = _trainers.KINDS["kto"].rows(run, rows)
    assert [row["KL_completion_ids"] for row in found] == [[11], [10], [13], [12]]


def test_what_a_trainer_has_no_field_for_is_named():
    import small_steps

    with pytest.raises(ValueError, match="LigerCPOConfig has no field share_prompts"):
        small_steps.options_of(small_steps.ARMS["ours_unshared"], "cpo")


def test_trainers_of_an_arm_share_a_process_where_asked():
    import small_steps

    given = {"cases": ["1b-full"], "arms": ["ours", "ours_answers"], "trainers": ["kto", "cpo", "orpo"]}
    apart = [*small_steps.processes_of(argparse.Namespace(together=False, **given))]
    assert [(arm, trainers) for _, arm, trainers in apart] == [
        ("ours", ["kto"]),
        ("ours", ["cpo"]),
        ("ours", ["orpo"]),
        ("ours_answers", ["cpo"]),
        ("ours_answers", ["orpo"]),
    ], "an arm runs where the trainer has it"
    together = [*small_steps.processes_of(argparse.Namespace(together=True, **given))]
    assert together == [("1b-full", "ours", ["kto", "cpo", "orpo"]), ("1b-full", "ours_answers", ["cpo", "orpo"])]


def test_one_process_trains_several_trainers(tmp_path, capsys):
    import small_steps

    pairs_of_words(tmp_path / "pairs.json", 16)
    given = {"data": str(tmp_path / "pairs.json"), "length": 24, "batches": 1, "profile": 0, "rows": ["pairs"]}
    small_steps.one_arm(options_of(tmp_path, case="8b-16-layers-lora", trainer="cpo,kto", arm="ours", **given))
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("RESULT ")]
    rows = [json.loads(line.removeprefix("RESULT ")) for line in printed]
    assert [row["title"] for row in rows] == [
        "CPO, Llama-3-8B, 16 layers, LoRA",
        "KTO, Llama-3-8B, 16 layers, LoRA",
    ]
    assert all(row["tokens_per_s"] > 0 for row in rows)


@pytest.mark.parametrize(("case", "flagged"), [("1b-full", [False, True, True]), ("8b-lora", [False, False, True])])
def test_later_losses_are_compared_without_adapters_alone(case, flagged):
    import small_steps

    rows = [
        {"arm": "stock", "losses": [10.0, 9.0]},
        {"arm": "ours_auto", "losses": [10.0, 8.0]},
        {"arm": "trl_liger", "losses": [9.0, 9.0]},
    ]
    for row in rows:
        row |= {"case": case, "method": "sft", "rows": "alpaca"}
    small_steps.flag(rows)
    assert ["note" in row for row in rows] == flagged


def test_a_run_that_is_over_begins_nothing(tmp_path, monkeypatch, capsys):
    import small_steps

    pairs_of_words(tmp_path / "pairs.json", 2)
    record = tmp_path / "record.json"
    given = ["--trainers", "cpo", "kto", "--arms", "ours", "ours_answers", "--cases", "1b-full", "--minutes", "0"]
    given += ["--data", str(tmp_path / "pairs.json"), "--json", str(record)]
    monkeypatch.setattr("sys.argv", ["small_steps.py", *given])
    small_steps.main()
    rows = json.loads(record.read_text())["rows"]
    assert [(row["title"], row["arm"]) for row in rows] == [
        ("CPO, Llama-3.2-1B, all weights", "ours"),
        ("KTO, Llama-3.2-1B, all weights", "ours"),
        ("CPO, Llama-3.2-1B, all weights", "ours_answers"),
    ], "an arm runs where the trainer has it"
    assert all(row["note"] == "not begun after 0 minutes" for row in rows)
    monkeypatch.setattr("sys.argv", ["small_steps.py", *given, "--rows", "512"])
    with pytest.raises(SystemExit):
        small_steps.main()
    assert "and the others take pairs" in capsys.readouterr().err
