"""Rows counted on the host, beside those that a plan counts on the device, and on their way through dataloaders."""

import copy
import pickle

import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from liger_trainer import LigerTrainer, LigerTrainingArguments
from liger_trainer.varlen import counted, plan
from liger_trainer.varlen.counted import CountedBatch, counting, counts_of

CONFIG = LlamaConfig(attn_implementation="sdpa", use_cache=False)


def batch(*masks, labels=None):
    mask = torch.tensor(masks)
    ids = torch.arange(mask.numel()).view(mask.shape) + 3
    given = {"input_ids": ids, "attention_mask": mask}
    return given | ({} if labels is None else {"labels": torch.tensor(labels)})


def plan_of(moved, **changed):
    call = moved | changed
    return plan.plan_of(CONFIG, call, call.get("labels"), call.get("shift_labels"))


def waits(monkeypatch):
    """The plans that are counted on the device."""
    found = []
    for name in ("_padded_plan", "_next_labels"):
        own = getattr(plan, name)
        monkeypatch.setattr(plan, name, lambda *args, own=own: found.append(args) or own(*args))
    return found


def same(got, want):
    if want is None:
        assert got is None
        return
    assert torch.equal(got.rows.offsets, want.rows.offsets) and got.rows.offsets.dtype == torch.int32
    assert (got.rows.tokens, got.rows.longest) == (want.rows.tokens, want.rows.longest)
    assert got.reaches_end == want.reaches_end and (got.index is None) == (want.index is None)
    assert got.index is None or torch.equal(got.index, want.index)


@pytest.mark.parametrize(
    "masks",
    [
        [[1, 1, 0, 0], [1, 1, 1, 0]],
        [[0, 0, 1, 1], [0, 1, 1, 1]],
        [[1, 1, 1, 1], [1, 0, 0, 0]],
        [[1, 1, 1, 1], [1, 1, 1, 1]],
        [[0, 0, 0, 0], [1, 1, 0, 0]],
        [[0, 0, 0, 0], [0, 0, 0, 0]],
        [[1, 0, 1, 0], [1, 1, 1, 0]],
    ],
)
@pytest.mark.parametrize("labels", [None, "real", "first", "after"])
def test_plans_are_those_of_the_device(masks, labels, monkeypatch):
    if labels is not None:
        mask = torch.tensor(masks)
        seen = {"real": mask.bool(), "first": torch.ones_like(mask).bool(), "after": mask.roll(1, 1).bool()}[labels]
        labels = torch.where(seen, 5, -100).tolist()
    given = batch(*masks, labels=labels)
    want = plan_of(given)
    found = waits(monkeypatch)
    moved = CountedBatch(given).to("cpu")
    assert type(moved) is dict
    same(plan_of(moved), want)
    assert not found


def test_packed_rows(monkeypatch):
    ids, positions = torch.arange(7)[None], torch.tensor([[0, 1, 2, 0, 0, 1, 2]])
    for given in (positions, torch.arange(7)[None]):
        want = plan.plan_of(CONFIG, {"input_ids": ids, "position_ids": given})
        moved = CountedBatch(input_ids=ids, position_ids=given).to("cpu")
        monkeypatch.setattr(torch.Tensor, "cpu", None)  # nobody asks the device
        same(plan.plan_of(CONFIG, moved), want)
        monkeypatch.undo()


MASKS, LABELS = ([1, 1, 0, 0], [1, 1, 1, 0]), [[-100, 5, -100, -100], [4, 5, 6, -100]]


@pytest.mark.parametrize(
    "change",
    [
        lambda moved: moved["attention_mask"].__setitem__((0, 2), 1),
        lambda moved: moved["labels"].__setitem__((0, 3), 5),
        lambda moved: moved.update(attention_mask=moved["attention_mask"].clone()),
        lambda moved: moved.update(labels=moved["labels"].clone()),
        lambda moved: moved.update(shift_labels=moved["labels"]),
        lambda moved: moved.update(copy.deepcopy(moved)),
    ],
    ids=["mask in place", "labels in place", "another mask", "other labels", "shift_labels", "a copy"],
)
def test_what_is_no_longer_what_was_counted_is_counted_again(change, monkeypatch):
    moved = CountedBatch(batch(*MASKS, labels=LABELS)).to("cpu")
    change(moved)
    fresh = {name: x.clone() for name, x in moved.items()}
    found = waits(monkeypatch)
    got = plan_of(moved)
    assert found
    same(got, plan_of(fresh))


def test_without_the_labels_the_rows_are_still_those_counted():
    moved = CountedBatch(batch(*MASKS, labels=LABELS)).to("cpu")
    labels = moved.pop("labels")
    assert counts_of(moved["attention_mask"]) is not None
    assert counts_of(moved["attention_mask"], labels) is not None
    assert counts_of(moved["attention_mask"], labels.clone()) is None


def test_notes_are_not_in_pickles():
    mask = CountedBatch(batch(*MASKS)).to("cpu")["attention_mask"]
    for other in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask)):
        assert counts_of(other) is None and torch.equal(other, mask)


def test_whatever_else_is_in_a_batch_arrives_as_accelerate_moves_it():
    given = batch(*MASKS) | {"names": ["a", "b"], "nested": {"x": [torch.ones(2)]}, "nothing": None}
    moved = CountedBatch(given).to("meta")
    assert moved["nested"]["x"][0].device.type == "meta" and moved["input_ids"].device.type == "meta"
    assert moved["names"] == ["a", "b"] and moved["nothing"] is None


@pytest.mark.parametrize("given", [[1, 2], {1: 2}.keys(), CountedBatch(a=1)], ids=lambda x: type(x).__name__)
def test_other_batches_than_a_dict_stay(given):
    assert counting(lambda rows: rows)(given) is given
    assert type(counting(counting(dict))([])) is CountedBatch


def collate(rows):
    return batch(*(row["attention_mask"] for row in rows), labels=[row["labels"] for row in rows])


ROWS = [{"attention_mask": mask, "labels": labels} for mask, labels in zip(MASKS * 4, LABELS * 4, strict=True)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("skipped", [0, 2])
def test_through_a_dataloader_of_accelerate(workers, skipped):
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(ROWS, batch_size=2, collate_fn=collate, num_workers=workers))
    loader.base_dataloader.collate_fn = counting(loader.base_dataloader.collate_fn)
    got = list(skip_first_batches(loader, skipped) if skipped else loader)
    assert len(got) == 4 - skipped
    for moved in got:
        assert type(moved) is dict
        assert counts_of(moved["attention_mask"], moved["labels"]).tokens == 5


def trainer_of(tmp_path, stock=False, **options):
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    args = LigerTrainingArguments(
        output_dir=str(tmp_path), max_steps=2, report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True,
        per_device_train_batch_size=2, remove_unused_columns=False, seed=0, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    return LigerTrainer(model=model, args=args, train_dataset=ROWS, eval_dataset=ROWS, data_collator=collate)


def test_a_trainer_counts_on_the_host_in_training_and_evaluation(tmp_path, monkeypatch):
    trainer = trainer_of(tmp_path)
    assert trainer.data_collator is collate
    found, plans = waits(monkeypatch), []
    own = plan._counted_plan
    monkeypatch.setattr(plan, "_counted_plan", lambda *args: plans.append(own(*args)) or plans[-1])
    seen, step = [], trainer.training_step
    trainer.training_step = lambda model, inputs, *args: seen.append(type(inputs)) or step(model, inputs, *args)
    trainer.train()
    assert seen == [dict, dict] and len(plans) == 2 and not found
    assert all(made.used for made in plans)
    counted_loss = trainer.evaluate()["eval_loss"]
    monkeypatch.setattr(counted.CountedBatch, "to", lambda self, device, non_blocking=False: dict(self))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(counted_loss, rel=1e-6)


@pytest.mark.parametrize("options", [{"use_liger": False}, {"liger_config": {"varlen_attention": False}}])
def test_switched_off(options, tmp_path):
    loader = trainer_of(tmp_path, **options).get_train_dataloader()
    assert not isinstance(loader.collate_fn, counted._Counting)
