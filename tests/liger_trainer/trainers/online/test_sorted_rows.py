"""Rows sorted by prompt within a step: the same gradient as in TRL's order, and what it saves."""

import json
import math
import re

import engine_stand_in
import pytest
import torch
from checkout import ROOT
from tiny_models import assert_same_gradients, tiny_model, words
from trainer_parity import build, letters, trained, with_reference

from liger_trainer import LigerGRPOConfig, LigerGRPOTrainer, LigerRLOOConfig, LigerRLOOTrainer
from liger_trainer.trainers.online import sorted_rows
from liger_trainer.trainers.online.sorted_rows import SUMS_OVER_ROWS, Prompts, in_order
from liger_trainer.trainers.shared_prompts import shared_prompts_of
from liger_trainer.varlen import groups

CLASSES = {"grpo": (LigerGRPOTrainer, LigerGRPOConfig), "rloo": (LigerRLOOTrainer, LigerRLOOConfig)}


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Share prompts of any length, and generate by the stand-in."""
    monkeypatch.setattr(groups, "PAYS", groups.ALWAYS)
    engine_stand_in.install(monkeypatch)


def one(kind, folder, model="llama", trainer_class=None, dtype=torch.float32, **options):
    ours, args = CLASSES[kind]
    generator = torch.Generator().manual_seed(4)
    rows = [{"prompt": words(generator, 3, 6)} for _ in range(16)]
    options = {"num_generations": 4, "max_completion_length": 6, "split": (4, 4), "beta": 0.0} | options
    options = {"use_vllm": True, "learning_rate": 0.01, "max_steps": 2} | options
    base = tiny_model(model, dtype=dtype)
    base.set_attn_implementation("sdpa")
    base = with_reference(base, folder) if options["beta"] else base
    return build(trainer_class or ours, args, base, folder, rows, trainer_options={"reward_funcs": letters}, **options)


def gradients(kind, folder, **options):
    """The gradient of each step in TRL's order and sorted, and the trainer that has sorted."""
    shuffled, ours = (one(kind, folder, sort_by_prompt=is_on, **options) for is_on in (False, True))
    return trained(shuffled)[1], trained(ours)[1], ours


def assert_same_steps(kind, folder, rtol=1e-10, **options):
    """Runs in float64, where a sum hardly depends on its order."""
    want, got, trainer = gradients(kind, folder, dtype=torch.float64, **options)
    assert len(got) == len(want) == trainer.args.max_steps
    for step, stock_step in zip(got, want, strict=True):
        assert_same_gradients(step, stock_step, rtol)
    assert trainer.sorting.sorted > trainer.sorting.shuffled
    return trainer


@pytest.mark.parametrize("loss_type", SUMS_OVER_ROWS)
def test_the_gradient_of_a_step_is_the_same(loss_type, tmp_path):
    mode = "token_mask" if loss_type == "vespo" else "sequence_mask"
    assert_same_steps("grpo", tmp_path, loss_type=loss_type, vllm_importance_sampling_mode=mode)


@pytest.mark.parametrize(
    "kind, options",
    [
        pytest.param("rloo", {}, id="rloo"),
        pytest.param("rloo", {"beta": 0.1}, id="rloo-reference", marks=pytest.mark.slow),
        pytest.param("grpo", {"beta": 0.1, "importance_sampling_level": "sequence"}, id="reference-sequences"),
        pytest.param("grpo", {"mask_truncated_completions": True, "max_steps": 1}, id="truncated-masked"),
        pytest.param("grpo", {"off_policy_mask_threshold": 0.5, "max_steps": 1}, id="off-policy"),
        pytest.param("grpo", {"split": (4, 2), "steps_per_generation": 4}, id="two-steps-a-generation"),
        pytest.param("grpo", {"split": (4, 8), "steps_per_generation": 4, "max_steps": 1}, id="two-generations-a-step"),
        pytest.param("grpo", {"num_iterations": 2}, id="used-twice"),
        pytest.param("grpo", {"use_vllm": False, "temperature": 0.7}, id="without-vllm", marks=pytest.mark.slow),
    ],
)
def test_options(kind, options, tmp_path):
    assert_same_steps(kind, tmp_path, **options)


@pytest.mark.parametrize("is_on", [False, True])
def test_the_report_says_what_it_saves(is_on, tmp_path):
    """By what the training steps have saved: no other pass shares here."""
    trainer = one("grpo", tmp_path, sort_by_prompt=is_on, max_steps=3)
    trainer.train()
    saved, sorting = shared_prompts_of(trainer.model).saved, trainer.sorting
    assert saved == (sorting.sorted if is_on else sorting.shuffled)
    assert 0 < sorting.shuffled < sorting.sorted
    report = json.loads((tmp_path / "LigerGRPOTrainer" / "liger_report.json").read_text())
    want = {"on": is_on, "tokens_saved_shuffled": sorting.shuffled, "tokens_saved_sorted": sorting.sorted}
    assert report["sort_by_prompt"] == want


@pytest.mark.parametrize("options", [{"split": (4, 1)}, {"share_prompts": False}, {"use_liger": False}], ids=str)
def test_nothing_is_counted_where_it_makes_no_difference(options, tmp_path):
    trainer = one("rloo", tmp_path, max_steps=1, **options)
    trainer.train()
    assert trainer.sorting is None
    assert "sort_by_prompt" not in trainer.liger_report.to_dict() if trainer.liger_report else True


REFUSED = [
    ({"loss_type": "bnpo"}, "loss_type is 'bnpo', which is not a sum over rows. Set one of grpo, dr_grpo, dapo"),
    ({"top_entropy_quantile": 0.5}, "top_entropy_quantile is 0.5: .* Set top_entropy_quantile=1.0"),
    ({"entropy_coef": 3.0}, r"entropy_coef is 3: .* Set entropy_coef=0.0"),
    ({"use_adaptive_entropy": True, "entropy_coef": 0.2}, "use_adaptive_entropy is True: .* Set use_adaptive_entropy"),
    ({"model": "qwen3_moe", "router_aux_loss_coef": 3.0}, "router_aux_loss_coef is 3: .* Set router_aux_loss_coef=0.0"),
]
CHANGES = [options for options, _ in REFUSED if "use_adaptive_entropy" not in options]  # it begins at its second step


@pytest.mark.parametrize("options, message", REFUSED, ids=str)
def test_a_loss_that_is_no_sum_over_rows_is_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=f"sort_by_prompt is True, but {message}.*, or sort_by_prompt=False"):
        one("grpo", tmp_path, sort_by_prompt=True, **options)


@pytest.mark.parametrize("options", CHANGES, ids=str)
def test_what_is_refused_would_change_the_gradient(options, tmp_path, monkeypatch):
    monkeypatch.setattr(sorted_rows, "refuse_unfit_for_sorting", lambda trainer: None)
    (want,), (got,), _ = gradients("grpo", tmp_path, max_steps=1, **options)
    distance = max((got[name] - want[name]).norm() / want[name].norm() for name in want if want[name].norm() > 0)
    assert distance > 1e-3


def test_experts_without_an_auxiliary_loss_are_sorted(tmp_path):
    """Their routers score in fp32."""
    assert_same_steps("rloo", tmp_path, 1e-7, model="qwen3_moe", router_aux_loss_coef=0.0, max_steps=1)


def test_other_faults_are_refused(tmp_path):
    with pytest.raises(ValueError, match="share_prompts is False. Set share_prompts=True"):
        one("grpo", tmp_path, sort_by_prompt=True, share_prompts=False)
    with pytest.raises(ValueError, match="gradient_accumulation_steps is 4 and steps_per_generation is 6"):
        one("grpo", tmp_path, sort_by_prompt=True, steps_per_generation=6)

    class Own(LigerGRPOTrainer):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs)

    with pytest.raises(ValueError, match="Own overrides _compute_loss, and its loss may depend on"):
        one("grpo", tmp_path, sort_by_prompt=True, trainer_class=Own)
    for _, args in CLASSES.values():
        with pytest.raises(ValueError, match="sort_by_prompt is 'no'; expected true or false"):
            args(output_dir=str(tmp_path), sort_by_prompt="no", use_cpu=True, bf16=False)


def test_every_kind_of_value_goes_with_its_row():
    ids = torch.tensor([[0, 5], [7, 8], [0, 5], [7, 8]])
    mask = torch.tensor([[0, 1], [1, 1], [0, 1], [1, 1]])
    batch = {"prompt_ids": ids, "prompt_mask": mask, "completion_mask": torch.ones(4, 3, dtype=torch.long)}
    batch |= {"number": torch.arange(4), "texts": ["a", "b", "c", "d"], "count": torch.tensor(9), "none": None}
    halves = [
        {k: x[i : i + 2] if getattr(x, "ndim", 1) and x is not None else x for k, x in batch.items()} for i in (0, 2)
    ]
    prompts = Prompts.of(halves)
    assert prompts.lengths == [1, 2, 1, 2] and prompts.tokens == [4, 5, 4, 5]
    order = prompts.order()
    assert order == [0, 2, 1, 3]
    first, second = in_order(halves, order)
    assert first["number"].tolist() == [0, 2] and second["number"].tolist() == [1, 3]
    assert first["texts"] == ["a", "c"] and second["texts"] == ["b", "d"]
    assert first["count"] == second["count"] == 9 and first["none"] is None
    assert second["prompt_ids"].tolist() == [[7, 8], [7, 8]]
    assert prompts.saved([0, 1, 2, 3], 2, groups.ALWAYS) == 0
    assert prompts.saved(order, 2, groups.ALWAYS) == 1  # a prompt of one token has nothing to share


def test_the_table_of_what_a_shuffle_leaves():
    """docs/shared_prompts.md: of what 8 completions of a prompt could save, what is left after TRL's shuffle."""
    text = (ROOT / "docs" / "shared_prompts.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ([\d %|]+) \|$", text, re.M)
    assert [int(rows_of_batch) for rows_of_batch, _ in rows] == [2, 4, 8, 16]
    for rows_of_batch, cells in rows:
        shown = [int(cell.strip(" %")) for cell in cells.split("|")]
        assert shown == [round(100 * left(int(rows_of_batch), steps)) for steps in (1, 2, 4, 8, 16)]


def left(rows, steps, completions=8):
    """The part that is left, of micro-batches of `rows`, `steps` of them from a generation of at least one prompt."""
    prompts = max(1, rows * steps // completions)
    everything = prompts * completions
    drawn = min(rows, everything)
    absent = math.comb(everything - completions, drawn) / math.comb(everything, drawn)
    distinct = prompts * (1 - absent)
    return (rows - distinct) / (rows - max(1, rows / completions))
