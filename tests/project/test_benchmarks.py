"""Benchmarks measure what they say: their cases at tiny sizes, their rows, their search for the longest context."""

import json
import math
import os
import subprocess
import sys

import matplotlib
import pytest
import torch
import yaml
from benchmark_scripts import BENCHMARKS, benchmarks_on_path  # noqa: F401

from liger_trainer.paths import shipped


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_ours_and_eager_agree_with_float64(dtype):
    import operations

    tiny = [case for name in operations.DEFAULT for case in operations.TINY[name]]
    for make, *size in (*tiny, *[case for case in operations.TINY["lora_base"] if case[-1] == "16 bits"]):
        torch.manual_seed(0)
        case = make(*size, dtype=dtype)
        exact = case.reference(case)
        providers = [name for name in case.providers if name in ("ours", "ours lean", "eager")]
        found = [operations.measure(case, name, case.providers[name], exact, brief=True) for name in providers]
        for row, run in found:  # all have been measured; timing may write over the inputs
            assert run is not None, row
            operations.visit(row, case, run, floor_s=1.0)
            assert row["ms"] > 0, row


def test_dpo_loss_prefers_the_chosen():
    from _cases_head import BETA, dpo_loss

    score = torch.tensor([3.0, 1.0, 2.0, -1.0, -2.0, 1.0, 0.0, 0.5])  # 4 sequences of 2 tokens; the first 2 are chosen
    want = -torch.nn.functional.logsigmoid(BETA * (torch.tensor([4.0, 1.0]) - torch.tensor([-1.0, 0.5]))).mean()
    torch.testing.assert_close(dpo_loss(score + 1, torch.ones(8), 4), want)


def test_a_wrong_result_is_not_timed_and_a_missing_peer_is_a_row():
    import operations

    case = operations.rms_norm(8, 32, dtype=torch.bfloat16)
    exact = case.reference(case)
    row, run = operations.measure(case, "peer", lambda x, w: 1.1 * case.providers["eager"](x, w), exact)
    assert row["note"] == "wrong, not timed" and "ms" not in row and run is None

    def missing(x, w):
        import no_such_package  # noqa: F401

    assert "no_such_package" in operations.measure(case, "peer", missing, exact)[0]["note"]
    with pytest.raises(ModuleNotFoundError):  # ours must not fail silently
        operations.measure(case, "ours", missing, exact)


def test_what_is_kept_is_counted_without_the_inputs():
    import operations
    from _cases import Case

    x, w = torch.randn(64, 32, requires_grad=True), torch.randn(32, requires_grad=True)
    case = Case("a gate", "64x32", (x, w), {}, None, torch.float32)
    assert operations.kept_bytes(lambda x, w: x * w, case) == 0
    assert operations.kept_bytes(lambda x, w: (x * w).exp() * w, case) == 64 * 32 * 4


def test_a_peer_that_tunes_for_long_is_given_up():
    import time

    import operations

    case = operations.rms_norm(8, 32, dtype=torch.bfloat16)
    exact = case.reference(case)

    def slow(x, w):
        time.sleep(0.2)
        return case.providers["eager"](x, w)

    row, run = operations.measure(case, "peer", slow, exact, brief=True, patience=0.05)
    assert row["note"] == "TimeoutError: nothing computed after 0.05 s" and run is None
    row, run = operations.measure(case, "ours", slow, exact, brief=True, patience=0.05)
    assert "note" not in row and run is not None


@pytest.mark.slow
def test_operations_writes_a_record_that_a_figure_is_drawn_of(tmp_path, capsys):
    import operations

    record = tmp_path / "operations_tiny.json"
    few = ["--tiny", "--only", "swiglu", "linear_logprobs", "--providers", "ours", "eager"]
    operations.main([*few, "--dtype", "bf16", "fp32", "--json", str(record)])
    rows = json.loads(record.read_text())["rows"]
    assert len(rows) == 12 and all(row["of_floor"] > 0 and len(row["visits_ms"]) == 2 for row in rows)
    assert "DPO head" in capsys.readouterr().out
    operations.main([*few, "--minutes", "0"])
    assert "not begun after 0 minutes" in capsys.readouterr().out
    matplotlib.use("agg")
    import figures

    written = json.loads(record.read_text())
    assert written["argv"] == ["benchmarks/operations.py", *few, "--dtype", "bf16", "fp32", "--json", str(record)]
    figures.operations([written]).savefig(tmp_path / "operations_tiny.png")
    assert (tmp_path / "operations_tiny.png").stat().st_size > 10_000


def test_ratio_to_the_fastest_peer():
    import operations

    times = {"ours": 2.0, "ours lean": 1.0, "liger": 8.0, "compile": 4.0}
    rows = [
        {"operation": "o", "size": "s", "dtype": "d", "provider": name, "ms": ms, "of_floor": 1 / ms}
        for name, ms in times.items()
    ]
    rows.append({"operation": "o", "size": "s", "dtype": "d", "provider": "eager", "note": "too large"})
    (line,) = operations.against_fastest_peer(rows)
    assert (line["fastest"], line["ours / peer"], line["ours lean / peer"]) == ("compile", 0.5, 0.25)
    assert line["note"] == "eager: too large"


@pytest.mark.parametrize(
    ("most", "limit", "want"),
    [
        (101_376, 2**20, 101_376),
        (103, 2**20, 0),  # not a single unit
        (1024, 2**20, 1024),
        (3 * 1024, 2**20, 3 * 1024),
        (2**30, 65_536, 65_536),
    ],
)
@pytest.mark.parametrize("power", [1.0, 0.8, 1.2], ids="tokens^{}".format)
def test_longest_finds_the_border(most, limit, want, power):
    """Memory is 10 GiB plus a term that grows faster or slower than the length, out of 24 at `most` tokens."""
    import scaling

    tried = []

    def try_length(length):
        assert length % 1024 == 0 and 0 < length <= limit and length not in tried
        tried.append(length)
        peak = 10 + 14 * (length / most) ** power
        return peak if peak <= 24 else None

    length, gib, fails = scaling.longest(try_length, 4096, 24, 1024, limit)
    assert length == want and fails == (None if want == limit else want + 1024)
    assert (gib is None) == (want == 0) and len(tried) <= 14


def test_pairs_have_exactly_the_length(tmp_path):
    import numpy as np
    import preferences
    from tiny_models import tiny_tokenizer

    source = tmp_path / "rows.json"
    turn = {"from": "human", "value": "w1 w2 w3"}
    rows = [
        {"conversations": [turn], "chosen": {"value": "w4 w5"}, "rejected": {"value": "w6"}},
        {"conversations": [turn, turn], "chosen": {"value": "w7"}, "rejected": {"value": "w8 w9 w10"}},
    ]
    source.write_text(json.dumps(rows))
    preferences.tokenize(source, tiny_tokenizer(), tmp_path / "rows.npz")
    flat = np.load(tmp_path / "rows.npz")
    assert all(flat[f"{part}_offsets"][-1] == len(flat[f"{part}_ids"]) > 0 for part in preferences.PARTS)
    for path, longest in ((str(tmp_path / "rows.npz"), 12), (str(source), 12), (None, 18)):
        found = preferences.pairs(path, 1031, 24, 5)
        assert len(found) == 5
        for pair in found:
            assert 0 < len(pair["prompt_ids"]) <= longest
            for part in ("chosen_ids", "rejected_ids"):
                assert len(pair["prompt_ids"]) + len(pair[part]) == 24
            assert pair["chosen_ids"] != pair["rejected_ids"]


def test_losses_that_are_not_the_stock_trainers_are_flagged():
    import _steps

    rows = [
        {"arm": "LigerTrainer", "losses": [10.01, 9.9]},
        {"arm": "Trainer", "losses": [10.0, 9.8]},
        {"arm": "Trainer + Liger", "losses": [10.0, 4.9]},
        {"arm": "SFTTrainer", "losses": [float("nan"), 9.8]},
        {"arm": "Trainer + compile", "note": "out of memory"},
    ]
    _steps.flag_losses(rows)
    assert [row.get("note", "")[:10] for row in rows] == ["", "", "WRONG LOSS", "WRONG LOSS", "out of mem"]


@pytest.mark.parametrize(
    ("kind", "arms"), [("sft", ("LigerSFTTrainer", "Trainer")), ("dpo", ("LigerDPOTrainer", "DPOTrainer"))]
)
def test_arms_train_on_the_same_rows(kind, arms):
    import _steps

    run = _steps.Run("tiny", batch=2, length=32, trainer=kind, steps=2, skip=1, lora=4 if kind == "dpo" else None)
    rows = [_steps.train(arm, run) for arm in arms]
    _steps.flag_losses(rows)
    assert all("note" not in row and row["tokens_per_s"] > 0 for row in rows)
    assert rows[0]["flop_per_token"] == rows[1]["flop_per_token"]
    want = math.log(2) if kind == "dpo" else math.log(1031)
    assert rows[0]["losses"][0] == pytest.approx(want, rel=0.05)


def test_memory_by_kind_of_tensor():
    import _steps

    row = _steps.train("LigerSFTTrainer", _steps.Run("tiny", batch=2, length=32, steps=1, skip=0, lora=4, layers=1))
    gib = row["gib_by_kind"]
    hidden = 64
    inner = 128
    vocab = 1031
    linear = [(64, 64), (64, 32), (64, 32), (64, 64), (inner, hidden), (inner, hidden), (hidden, inner)]
    adapters = 4 * sum(n + k for n, k in linear)
    frozen = 2 * vocab * hidden + sum(n * k for n, k in linear) + 3 * hidden
    assert gib["trained"] * 2**30 == 4 * adapters == gib["gradients"] * 2**30
    assert gib["frozen"] * 2**30 == pytest.approx(2 * frozen, rel=0.01), "and the rotary frequencies"
    assert gib["packed"] == gib["states"] == 0, "the first step ends its forward pass before there are states"
    assert gib["kept"] is None and gib["workspace"] is None, "a CPU has no allocator to ask"


def test_scales_are_packed_weights_and_storages_are_counted_once():
    from types import SimpleNamespace

    import _memory_kinds

    model = torch.nn.ModuleList([torch.nn.Linear(8, 8, bias=False).requires_grad_(False) for _ in range(3)])
    model[1].weight = model[0].weight
    model[2].weight = torch.nn.Parameter(torch.zeros(32, 1, dtype=torch.bfloat16), requires_grad=False)
    nested = SimpleNamespace(absmax=torch.zeros(3), code=torch.zeros(16))
    model[2].weight.quant_state = SimpleNamespace(absmax=torch.zeros(7, dtype=torch.uint8), state2=nested)
    assert _memory_kinds.weights_of(model) == {"packed": 64 + 7 + 12 + 64, "frozen": 256, "trained": 0}


def test_what_products_and_attention_need():
    """One row of 100 tokens, two layers of 10 and 20 ms: 2 ms of products, 60 of attention, 31 for recompute."""
    from argparse import Namespace

    import training
    from _measure import attention_ms

    row = {"ms": 100.0, "layers": 2, "flop_per_token_of_products": 20e6, "flop_per_token_of_layers_forward": 10e6}
    options = Namespace(batch=1, length=100, checkpointing=True, auto=False)
    found = training.shares(row, options, rate=1e12, attention=[15.0, 30.0])
    assert found == {"share": pytest.approx(0.62), "share_recomputed": pytest.approx(0.93)}
    options.auto = True
    assert training.shares(row, options, 1e12, [15.0, 30.0])["share_recomputed"] is None
    forward, both = attention_ms(1, 64, 4, 2, 16, most=32)
    assert 0 < forward and 0 < both
    options = Namespace(model="gpt-oss-20b", rows="full", trainer="sft", processes=1)
    assert training.attention_of(options) is None, "some of its layers see a window alone"


@pytest.mark.slow
def test_training_through_accelerate_launch(tmp_path):
    """Two processes; the first reports an arm's row. Its losses differ from one process's."""
    config = yaml.safe_load((shipped("configs") / "ddp.yaml").read_text())
    (tmp_path / "ddp.yaml").write_text(yaml.safe_dump(config | {"use_cpu": True, "mixed_precision": "no"}))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    losses = []
    for launch in ((), ("--config_file", str(tmp_path / "ddp.yaml"), "--processes", "2")):
        record = tmp_path / f"{len(launch)}.json"
        sizes = ["--model", "tiny", "--batch", "2", "--length", "32", "--steps", "5", "--json", str(record)]
        subprocess.run(
            [sys.executable, f"{BENCHMARKS}/training.py", *sizes, "--arms", "LigerTrainer", *launch],
            env=env,
            check=True,
            timeout=240,
        )
        (row,) = json.loads(record.read_text())["rows"]
        assert row["tokens_per_s"] > 0
        losses.append(row["losses"][0])
    assert losses[0] == pytest.approx(losses[1], rel=0.01) and losses[0] != losses[1], "twice the rows"


@pytest.mark.parametrize("sinks", [False, True])
def test_attention_s_reference_tells_a_wrong_window(sinks, benchmarks_on_path):  # noqa: F811
    import operations

    case = operations.attention(2, 33, 4, 2, 16, 8, sinks, dtype=torch.float32)
    exact = case.reference(case)
    other = operations.attention(2, 33, 4, 2, 16, 9, sinks, dtype=torch.float32)
    row, run = operations.measure(case, "ours", case.providers["ours"], exact, brief=True)
    assert run is not None and row["error"] < 1e-5
    assert operations.measure(case, "peer", other.providers["ours"], exact, brief=True)[0]["note"] == "wrong, not timed"
