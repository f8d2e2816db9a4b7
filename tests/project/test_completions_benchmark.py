"""benchmarks/completions.py trains all arms on the same completions, and its stand-in for a tree computes attention."""

import argparse
import json

import pytest
import torch
from benchmark_scripts import benchmarks_on_path  # noqa: F401


def options_of(**given):
    options = {"model": "tiny", "layers": None, "prompt": 160, "completions": 4, "micro_batches": 2, "longest": 70}
    options |= {"lora": None, "batches": 1, "rounds": 4, "always": False, "profile": False}
    return argparse.Namespace(**options | given)


def row_of(arm, capsys, **given):
    import completions

    completions.one_arm(options_of(arm=arm, **given))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


def test_a_step_has_completions_of_as_many_prompts_as_micro_batches():
    import completions

    group = completions.group_of(options_of(), vocab=1031, step=3)
    prompts = group["prompt_ids"]
    assert prompts.shape == (8, 160) and group["completion_ids"].shape == (8, 70)
    assert (prompts[:4] == prompts[0]).all() and (prompts[4:] == prompts[4]).all()
    assert (prompts[0] != prompts[4]).any()
    assert group["num_items_in_batch"] == group["completion_mask"].sum()


def test_sorted_rows_save_more_than_shuffled_ones_and_have_the_same_loss(capsys):
    stock = row_of("GRPOTrainer", capsys)
    shuffled = row_of("LigerGRPOTrainer", capsys)
    in_order = row_of("LigerGRPOTrainer + sorted", capsys)
    assert "saved" not in stock
    assert 0 < shuffled["saved"] < in_order["saved"]
    for row in (shuffled, in_order):
        assert row["losses"] == pytest.approx(stock["losses"], abs=1e-5) and row["losses"]


def test_completions_that_attend_to_copies_of_keys_get_the_same_attention():
    import completions

    from liger_trainer.varlen.groups import Group, lay_out
    from liger_trainer.varlen.rows import RowMask
    from liger_trainer.varlen.shared_rows import SharedRows

    real = torch.ones(3, 9, dtype=torch.bool)
    real[1, 7:] = False
    rows = SharedRows(lay_out(real, [Group([0, 1], 0, 5)]), real.device)
    draw = torch.Generator().manual_seed(0)
    tensors = []
    for heads in (4, 2, 2):
        tensors.append(torch.randn(1, heads, rows.tokens, 8, generator=draw, requires_grad=True))
    upstream = torch.randn(rows.tokens, 4, 8, generator=draw)
    found = []
    for attend in (SharedRows.attend, completions.attend_to_copies):
        out = attend(rows, *tensors, RowMask(rows), 0.0, None, None, None)
        found.append([out, *torch.autograd.grad(out, tensors, upstream)])
    for got, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
