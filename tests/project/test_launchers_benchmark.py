"""benchmarks/launchers.py starts what it says, compares losses, and times a real run and one that is killed."""

import json

import pytest
from benchmark_scripts import benchmarks_on_path  # noqa: F401
from recipe_fixtures import write_rows

GIVEN = ["llama3_8b/sft_alpaca", "--model", "tiny", "--data", "rows.json"]


def test_a_step_has_the_same_rows_under_every_launcher(tmp_path):
    import launchers

    options = launchers.parsed([*GIVEN, "--rows", "4", "--runs", "torchrun:2", "accelerate:1", "--", "--seed", "3"])
    assert options.runs == [("torchrun", 2), ("accelerate", 1)]
    for run, share in (("torchrun", 2), "2"), (("accelerate", 2), "2"), (("accelerate", 1), "4"):
        words = launchers.words_of(run, options, tmp_path)
        assert words[words.index("--per_device_train_batch_size") + 1] == share
        assert words[-2:] == ["--seed", "3"]
        config = words[words.index("--config_file") + 1] if run[0] == "accelerate" else "fsdp2.yaml"
        assert config.endswith("single_gpu.yaml" if run[1] == 1 else "fsdp2.yaml")
        assert ("--accelerate_config" in words) == (run[0] == "torchrun")
    killed = launchers.words_of(("killed", 2), options, tmp_path)
    assert killed[killed.index("--max-restarts") + 1] == "1" and killed[killed.index("--save_steps") + 1] == "2"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rows", "3"], "--rows is 3, which the 2 processes of torchrun cannot share"),
        (["--runs", "slurm:2"], "'slurm:2'; expected LAUNCHER:PROCESSES"),
        (["--skip", "8"], "--skip is 8; expected 1 to 7"),
        (["--runs", "killed:1"], "killed:1 has no process that is left"),
    ],
)
def test_what_it_refuses(words, said, capsys):
    import launchers

    with pytest.raises(SystemExit):
        launchers.parsed([*GIVEN, *words])
    assert said in capsys.readouterr().err


def test_other_losses_are_flagged():
    import launchers

    rows = [{"losses": [2.0, 1.0]}, {"losses": [2.0, 1.005]}, {"losses": [2.0, 1.02]}, {"losses": [2.0]}, {"note": "?"}]
    launchers.flag(rows)
    assert [row.get("note") for row in rows[:3]] == [None, None, "WRONG LOSS"] and rows[4] == {"note": "?"}
    assert rows[1]["apart"] == pytest.approx(0.005) and rows[3]["note"].startswith("WRONG: 1 losses")
    rows = [{"losses": [1.0]}, {"losses": [float("nan")]}]
    launchers.flag(rows)
    assert rows[1]["note"] == "WRONG LOSS"


@pytest.mark.slow
def test_a_killed_run_has_the_losses_of_the_others(tmp_path):
    import launchers

    record, data = tmp_path / "record.json", tmp_path / "rows.jsonl"
    write_rows(data, 60)
    runs = ["accelerate:1", "torchrun:2", "killed:2"]
    launchers.main(
        [
            "quickstart",
            "--model",
            "tiny",
            "--data",
            str(data),
            "--config",
            "ddp",
            "--steps",
            "6",
            "--skip",
            "2",
            "--runs",
            *runs,
            "--folder",
            str(tmp_path / "kept"),
            "--json",
            str(record),
        ]
    )
    rows = json.loads(record.read_text())["rows"]
    assert [row["run"] for row in rows] == runs and not [row["note"] for row in rows if "note" in row]
    assert [row["resumed"] for row in rows] == [None, None, 4]
    assert all(len(row["losses"]) == 6 and row["tokens_per_s"] > 0 and row["apart"] < 1e-4 for row in rows)
    assert (tmp_path / "kept" / "model" / "tokenizer.json").exists()
