"""Both arms of benchmarks/eagle.py compute the same loss and gradient, and a wrong arm is flagged."""

import copy

import pytest
from benchmark_scripts import benchmarks_on_path  # noqa: F401


def test_arms_agree_and_a_wrong_one_is_flagged(capsys):
    import eagle

    options = eagle.parsed(["--tiny"])
    rows = [eagle.measure(arm, options) for arm in eagle.ARMS]
    ours, plain = rows
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-3), "bf16 weights"
    assert ours["grad_norms"] == pytest.approx(plain["grad_norms"], rel=1e-2)
    assert ours["static"] == plain["static"] and len(ours["losses"]) == 3, "of steps 1, 3 and 6"
    assert ours["samples_per_s"] > 0 and ours["trained"] == plain["trained"]
    eagle.flag(rows)
    assert not any("wrong" in row for row in rows) and rows[1]["faster"] > 0
    wrong = copy.deepcopy(rows)
    wrong[1]["losses"] = [1.02 * loss for loss in wrong[1]["losses"]]
    eagle.flag(wrong)
    assert "losses" in wrong[1]["wrong"]
    eagle.show([*wrong, {"arm": eagle.PLAIN, "note": "out of memory"}])
    assert "WRONG: losses" in capsys.readouterr().out


def test_options_are_checked(capsys):
    import eagle

    for words in (["--steps", "3"], ["--rows", "padded"]):
        with pytest.raises(SystemExit):
            eagle.parsed(words)
        assert words[0] in capsys.readouterr().err
