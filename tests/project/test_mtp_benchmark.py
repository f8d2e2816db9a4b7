"""benchmarks/mtp.py compares like with like, and benchmarks/mtp_acceptance.py shows what train_mtp is for."""

import pytest
from benchmark_scripts import benchmarks_on_path  # noqa: F401


def test_the_head_changes_no_loss_and_its_cost_is_told(capsys):
    import mtp

    options = mtp.parsed(["--tiny"])
    rows = [mtp.measure(arm, options) for arm in (mtp.WITHOUT, mtp.WITH)]
    mtp.flag(rows)
    without, with_head = rows
    assert "wrong" not in with_head and with_head["losses"] == pytest.approx(without["losses"], rel=1e-4)
    assert len(with_head["mtp_losses"]) == 3 and not without["mtp_losses"]
    assert (
        with_head["static"] - without["static"] == pytest.approx(with_head["head_static"])
        and with_head["head_static"] > 0
    )
    assert with_head["head_tflop"] > 0 and "slower" in with_head
    with_head["losses"] = [1.01 * loss for loss in with_head["losses"]]
    mtp.flag(rows)
    assert "loss" in with_head["wrong"]


@pytest.mark.parametrize("arm", ["LigerMTPTrainer, labels", "LigerMTPTrainer, model's distribution"])
def test_a_head_alone_has_the_losses_of_plain_logits(arm):
    import mtp

    options = mtp.parsed(["--tiny"])
    rows = [mtp.measure(each, options) for each in (arm, mtp.PLAIN[arm])]
    mtp.flag(rows)
    ours, plain = rows
    assert "wrong" not in ours and ours["speedup"] > 0
    assert len(ours["mtp_losses"]) == 3 and ours["mtp_losses"] == pytest.approx(plain["mtp_losses"], rel=1e-2)
    assert 0 < ours["head_static"] < ours["static"]
    plain["mtp_losses"] = [1.1 * loss for loss in plain["mtp_losses"]]
    mtp.flag(rows)
    assert "loss" in ours["wrong"]


def test_a_fine_tuning_is_tried_to_the_end(tmp_path):
    import mtp_acceptance

    rows = list(mtp_acceptance.measure(mtp_acceptance.parsed(["--tiny"]), tmp_path))
    assert [row.get("train_mtp") for row in rows] == [None, False, True, None, None]
    assert [row.get("mtp_targets") for row in rows[3:]] == ["hard", "soft"]
    assert rows[1]["loss"] == rows[2]["loss"], "the head gives the model nothing"
    assert all(len(row["by_position"]) == 3 and 1 <= row["tokens_a_pass_of_3"] <= 4 for row in rows)


@pytest.mark.slow
def test_acceptance_falls_without_train_mtp_and_stays_with_it(tmp_path):
    import mtp_acceptance

    base, without, with_head, *alone = mtp_acceptance.measure(mtp_acceptance.parsed([]), tmp_path)
    assert base["tokens_a_pass"] > 1.9
    assert without["tokens_a_pass"] < 1.3
    assert with_head["tokens_a_pass"] > 1.9
    assert without["loss"] == with_head["loss"]
    for row in alone:
        assert row["tokens_a_pass"] > 1.9, row["head"]
