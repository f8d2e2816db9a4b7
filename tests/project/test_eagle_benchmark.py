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


def test_losses_on_given_hidden_states_agree():
    import eagle_loss

    options = eagle_loss.parsed(["--tiny", "--counted", "0.6", "--check"])
    assert options.arms == [eagle_loss.OURS, eagle_loss.PLAIN, eagle_loss.SLICES]
    rows = [eagle_loss.measure(arm, options) for arm in options.arms]
    eagle_loss.flag(rows)
    for row in rows[1:]:
        assert "wrong" not in row and row["apart"] < 1e-4 and row["hits"] == rows[0]["hits"]
    counted = [96 - 39 - k for k in (1, 2, 3)]  # the first 39 rows do not count, and the last have no teacher
    assert rows[0]["tflop"] == pytest.approx((3 * sum(counted) + 56) * 2 * 32 * 200 / 1e12)
    rows[1]["loss"] *= 1.02
    eagle_loss.flag(rows)
    assert rows[1]["wrong"].startswith("loss")


def test_speculators_needs_its_folder(capsys):
    import eagle_loss

    with pytest.raises(SystemExit):
        eagle_loss.parsed(["--arms", "speculators"])
    assert "--speculators" in capsys.readouterr().err
