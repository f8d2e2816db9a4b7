"""Rows found from values on the host equal rows found from the device's, and batches on their way to the device."""

import copy
import pickle

import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from torch.utils.data import DataLoader, IterableDataset
from transformers import BatchFeature, LlamaConfig, LlamaForCausalLM

from liger_trainer import LigerTrainer, LigerTrainingArguments
from liger_trainer.varlen import host_copies
from liger_trainer.varlen.host_copies import HostBatch, remembering, values_of
from liger_trainer.varlen.plan_batch import plan_batch

CONFIG = LlamaConfig(attn_implementation="sdpa", use_cache=False)
MASKS, LABELS = ([1, 1, 0, 0], [1, 1, 1, 0]), [[-100, 5, -100, -100], [4, 5, 6, -100]]


def batch(*masks, labels=None):
    mask = torch.tensor(masks)
    ids = torch.arange(mask.numel()).view(mask.shape) + 3
    given = {"input_ids": ids, "attention_mask": mask}
    return given | ({} if labels is None else {"labels": torch.tensor(labels)})


def moved(given):
    """`given` on a device. On the CPU, moving a tensor returns the tensor itself, and its values are known anyway."""
    given = HostBatch(given)
    there = {name: x.clone() for name, x in given.items()}
    for name in there.keys() & {"attention_mask", "position_ids", "labels", "shift_labels"}:
        setattr(there[name], host_copies._ATTRIBUTE, host_copies._HostCopy(given[name], there[name]._version))
    return there


def rows_of(plan):
    if plan is None:
        return None
    assert plan.rows.offsets.tolist() == [0, *torch.tensor(plan.rows.lengths).cumsum(0).tolist()]
    assert plan.rows.offsets.dtype == torch.int32
    index = None if plan.index is None else plan.index.tolist()
    return plan.rows.lengths, plan.rows.tokens, plan.rows.longest, index, plan.reaches_end


@pytest.mark.parametrize(
    "masks, rows",
    [
        ([[1, 1, 0, 0], [1, 1, 1, 0]], ([2, 3], 5, 3, [0, 1, 4, 5, 6], False)),
        ([[0, 0, 1, 1], [0, 1, 1, 1]], ([2, 3], 5, 3, [2, 3, 5, 6, 7], True)),
        ([[1, 1, 1, 1], [1, 0, 0, 0]], ([4, 1], 5, 4, [0, 1, 2, 3, 4], True)),
        ([[0, 0, 0, 0], [1, 1, 0, 0]], ([0, 2], 2, 2, [4, 5], False)),
        ([[1, 1, 1, 1], [1, 1, 1, 1]], None),
        ([[0, 0, 0, 0], [0, 0, 0, 0]], None),
        ([[1, 0, 1, 0], [1, 1, 1, 0]], None),
    ],
)
@pytest.mark.parametrize("labels", [None, "real", "all", "after"])
@pytest.mark.parametrize("shifted", [False, True])
def test_rows_of_a_padded_batch(masks, rows, labels, shifted):
    mask = torch.tensor(masks)
    given = batch(*masks)
    if labels is not None:
        seen = {"real": mask.bool(), "all": torch.ones_like(mask).bool(), "after": mask.roll(1, 1).bool()}[labels]
        given["shift_labels" if shifted else "labels"] = torch.where(seen, 5, -100)
        predicting = mask if shifted else mask[:, :-1]
        if ((seen if shifted else seen[:, 1:]) & (predicting == 0)).any():
            rows = None
    assert rows_of(plan_batch(CONFIG, given)) == rows_of(plan_batch(CONFIG, moved(given))) == rows


@pytest.mark.parametrize(
    "positions, lengths",
    [([0, 1, 2, 0, 0, 1, 2], [3, 1, 3]), ([0, 1, 2, 3, 4, 5, 6], None), ([5, 6, 0, 1, 2, 3, 4], [2, 5])],
)
def test_packed_rows(positions, lengths):
    given = {"input_ids": torch.arange(7)[None], "position_ids": torch.tensor([positions])}
    for call in (given, moved(given)):
        assert rows_of(plan_batch(CONFIG, call)) == (lengths and (lengths, 7, max(lengths), None, True))


@pytest.mark.parametrize(
    "change",
    [
        lambda given: given["attention_mask"].__setitem__((0, 2), 1),
        lambda given: given["labels"].__setitem__((0, 3), 5),
        lambda given: given.update(attention_mask=given["attention_mask"].clone()),
        lambda given: given.update(labels=given["labels"].clone()),
        lambda given: given.update(copy.deepcopy(given)),
        lambda given: given.update(pickle.loads(pickle.dumps(given))),
    ],
    ids=["mask in place", "labels in place", "another mask", "other labels", "a copy", "a pickle"],
)
def test_values_that_have_changed_since_are_the_device_s(change):
    given = moved(batch(*MASKS, labels=LABELS))
    pair = given["attention_mask"], given["labels"]
    assert all(known is not x for known, x in zip(values_of(*pair), pair, strict=True))
    change(given)
    pair = given["attention_mask"], given["labels"]
    assert all(known is x for known, x in zip(values_of(*pair), pair, strict=True))
    assert rows_of(plan_batch(CONFIG, given)) == rows_of(
        plan_batch(CONFIG, {name: x.clone() for name, x in given.items()})
    )


def test_a_batch_arrives_as_accelerate_moves_it():
    given = batch(*MASKS) | {"names": ["a", "b"], "nested": {"x": [torch.ones(2)]}, "nothing": None}
    there = HostBatch(given).to("meta")
    assert type(there) is dict
    assert there["nested"]["x"][0].device.type == "meta" and there["input_ids"].device.type == "meta"
    assert there["names"] == ["a", "b"] and there["nothing"] is None
    want = given["attention_mask"].clone()
    given["attention_mask"].numpy()[:] = 1  # like a collate function that fills the same memory for each batch
    assert torch.equal(*values_of(there["attention_mask"]), want)
    nested = there["nested"]["x"]
    assert values_of(*nested)[0].device.type == "meta", "only what rows and places are found from is kept"


def test_a_batch_of_a_processor_keeps_its_class():
    given = BatchFeature({"image_grid_thw": torch.tensor([[1, 4, 6]]), "pixel_values": torch.ones(24, 3)})
    there = remembering(lambda rows: given)([]).to("meta")
    assert type(there) is BatchFeature and there["pixel_values"].device.type == "meta"
    assert torch.equal(*values_of(there["image_grid_thw"]), given["image_grid_thw"])


@pytest.mark.parametrize("given", [[1, 2], {1: 2}.keys(), HostBatch(a=1)], ids=lambda x: type(x).__name__)
def test_other_batches_than_a_dict_stay(given):
    assert remembering(lambda rows: rows)(given) is given
    twice = remembering(remembering(dict))
    assert type(twice([])) is HostBatch and type(twice._liger_collate([])) is dict


class Collator:
    def __init__(self):
        self.width = 4

    def __call__(self, rows):
        masks = [row["attention_mask"][: self.width] for row in rows]
        return batch(*masks, labels=[row["labels"][: self.width] for row in rows])


def collate(rows):
    return Collator()(rows)


ROWS = [{"attention_mask": mask, "labels": labels} for mask, labels in zip(MASKS * 4, LABELS * 4, strict=True)]


class Streamed(IterableDataset):
    def __iter__(self):
        return iter(ROWS)


def test_a_collator_is_found_behind_ours():
    own = Collator()
    ours = remembering(own)
    for each in (ours, pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours), copy.copy(ours)):
        assert isinstance(each, Collator) and each.width == 4
        with pytest.raises(AttributeError, match="'Collator' object has no attribute 'nothing'"):
            each.nothing  # noqa: B018
    ours.width = 3
    assert own.width == 3 and ours(ROWS[:2])["labels"].shape == (2, 3)
    assert remembering(collate).__name__ == "collate"


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Moves batches as to another device: moving a tensor to the CPU makes another tensor."""
    send = host_copies.send_to_device
    fresh = {"attention_mask", "labels"}
    monkeypatch.setattr(
        host_copies,
        "send_to_device",
        lambda x, *args, **kwargs: {
            name: value.clone() if name in fresh else value for name, value in send(x, *args, **kwargs).items()
        },
    )


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("skipped", [0, 2])
def test_through_a_dataloader_of_accelerate(workers, skipped, as_on_a_gpu):
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(ROWS, batch_size=2, collate_fn=Collator(), num_workers=workers))
    loader.base_dataloader.collate_fn = remembering(loader.base_dataloader.collate_fn)
    assert loader.collate_fn.width == 4
    got = list(skip_first_batches(loader, skipped) if skipped else loader)
    assert len(got) == 4 - skipped
    for given in got:
        assert type(given) is dict
        mask, labels = values_of(given["attention_mask"], given["labels"])
        assert mask is not given["attention_mask"] and torch.equal(mask, given["attention_mask"])
        assert labels is not given["labels"] and torch.equal(labels, given["labels"])


def trainer_of(tmp_path, rows=ROWS, trainer_class=LigerTrainer, **options):
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
        use_cache=False,
    )
    args = LigerTrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        report_to="none",
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        per_device_train_batch_size=2,
        remove_unused_columns=False,
        seed=0,
        **options,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    return trainer_class(model=model, args=args, train_dataset=rows, eval_dataset=ROWS, data_collator=Collator())


def test_a_trainer_finds_rows_on_the_host_in_training_and_evaluation(tmp_path, monkeypatch, as_on_a_gpu, tokens):
    trainer = trainer_of(tmp_path)
    own, known = host_copies._known, []
    monkeypatch.setattr(host_copies, "_known", lambda x: known.append(own(x)) or known[-1])
    seen, step = [], trainer.training_step
    trainer.training_step = lambda model, inputs, *args: seen.append(type(inputs)) or step(model, inputs, *args)
    tokens.clear()
    trainer.train()
    assert seen == [dict, dict] and len(tokens) == 2
    assert len(known) == 4 and all(x is not None for x in known), "a mask and labels in each step"
    found_on_host = trainer.evaluate()["eval_loss"]
    monkeypatch.setattr(HostBatch, "to", lambda self, device, non_blocking=False: dict(self))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(found_on_host, rel=1e-6)


class OfItsOwn(LigerTrainer):
    def get_train_dataloader(self):
        return DataLoader(ROWS, batch_size=2, collate_fn=self.data_collator)


@pytest.mark.parametrize(
    "rows, trainer_class, options",
    [
        (Streamed(), LigerTrainer, {}),
        (Streamed(), LigerTrainer, {"accelerator_config": {"dispatch_batches": True}}),
        (ROWS, LigerTrainer, {"accelerator_config": {"split_batches": True}}),
        (ROWS, LigerTrainer, {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}),
        (ROWS, OfItsOwn, {}),
    ],
    ids=["streamed", "dispatched", "split", "worker", "own loader"],
)
def test_loaders_of_every_kind_train(rows, trainer_class, options, tmp_path, tokens):
    trainer = trainer_of(tmp_path, rows, trainer_class, **options)
    assert trainer.get_train_dataloader().collate_fn.width == 4
    tokens.clear()
    trainer.train()
    assert len(tokens) == 2 and 4 <= tokens[0] <= 6, "of two rows"


@pytest.mark.parametrize("options", [{"use_liger": False}, {"liger_config": {"varlen_attention": False}}])
def test_switched_off(options, tmp_path):
    trainer = trainer_of(tmp_path, **options)
    assert trainer.get_train_dataloader().collate_fn is trainer.data_collator
