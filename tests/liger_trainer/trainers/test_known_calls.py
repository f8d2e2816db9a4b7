"""KTO and distillation call their models with rows and labels that the host knows, so that it need not wait."""

import copy

import torch
from accelerate.utils.other import extract_model_from_parallel
from datasets import Dataset
from tiny_models import pair_rows, tiny_model, tiny_tokenizer
from transformers import TrainerCallback

from liger_trainer import (
    LigerDistillationConfig,
    LigerDistillationTrainer,
    LigerKTOConfig,
    LigerKTOTrainer,
)
from liger_trainer.varlen import host_copies, plan_batch


def by_lengths(seed=0):
    """A model that leaves padding out."""
    torch.manual_seed(seed)
    model = copy.deepcopy(tiny_model("llama"))
    model.set_attn_implementation("sdpa")
    return model


class Watched:
    """The questions of plans to the host, once `begins` was called, and whether it knew."""

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch
        self.known = []

    def begins(self):
        stock = plan_batch.values_of

        def values(*tensors):
            self.known += [self.knows(x) for x in tensors]
            return stock(*tensors)

        self.monkeypatch.setattr(plan_batch, "values_of", values)

    @staticmethod
    def knows(x):
        values = host_copies._known(x)
        return values is not None and torch.equal(values, x)

    def sees_labels(self, module, args, given):
        self.known.append(self.knows(given["labels"]))


def arguments(args_class, tmp_path, **options):
    return args_class(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        use_cpu=True,
        bf16=False,
        report_to="none",
        gradient_checkpointing=False,
        max_steps=2,
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )


def test_kto_s_four_passes(tmp_path, monkeypatch):
    rows = [
        {"prompt": row["prompt"], "completion": row[answer], "label": answer == "chosen"}
        for row in pair_rows(4)
        for answer in ("chosen", "rejected")
    ]
    trainer = LigerKTOTrainer(
        by_lengths(),
        by_lengths(1),
        arguments(LigerKTOConfig, tmp_path),
        train_dataset=Dataset.from_list(rows),
        processing_class=tiny_tokenizer(),
    )
    batch = next(iter(trainer.get_train_dataloader()))
    assert (
        batch["input_ids"].shape != batch["KL_input_ids"].shape or (batch["input_ids"] != batch["KL_input_ids"]).any()
    )
    want = trainer.compute_loss(trainer.model, dict(batch))  # a proof makes its batches on the host
    for name in ("input_ids", "attention_mask", "completion_mask"):
        for prefix in ("", "KL_"):
            x = batch[prefix + name]
            host_copies.remember(x, x.clone())
    watched = Watched(monkeypatch)
    watched.begins()
    for model in (trainer.model, trainer.ref_model):
        model.register_forward_pre_hook(watched.sees_labels, with_kwargs=True)
    assert trainer.compute_loss(trainer.model, dict(batch)) == want
    assert len(watched.known) == 4 * 3 and all(watched.known), "mask and labels of each plan, and labels of each call"


def test_labels_of_rows_as_long_as_others_are_not_mixed_up(tmp_path):
    """The mismatched rows may have the shape of the others: each call is known by its ids."""
    from liger_trainer.trainers.kto_trainer import _with_known_labels

    ids = torch.arange(8).view(2, 4)
    others = ids + 10
    mask = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1]])
    for x in (ids, others, mask):
        host_copies.remember(x, x.clone())
    seen = []
    model = _with_known_labels(lambda **given: seen.append(given["labels"]), ids, mask)
    model = _with_known_labels(model, others, mask)
    for x in (others, ids, ids.clone()):
        model(input_ids=x, labels=x.masked_fill(mask == 0, -100))
    assert [Watched.knows(labels) for labels in seen] == [True, True, False]


def test_distillation_s_two_passes(tmp_path, monkeypatch):
    args = arguments(LigerDistillationConfig, tmp_path, max_completion_length=6)
    rows = Dataset.from_list([{"prompt": row["prompt"]} for row in pair_rows(8)])
    given = {"train_dataset": rows, "processing_class": tiny_tokenizer()}
    trainer = LigerDistillationTrainer(by_lengths(), by_lengths(1), args, **given)
    monkeypatch.setattr("liger_trainer.trainers.online.rows._is_on_host", lambda x: host_copies._known(x) is not None)
    watched = Watched(monkeypatch)
    trainer.add_callback(BeginsAfterOneStep(watched))
    trainer.train()
    assert len(watched.known) == 2 and all(watched.known), "the masks of student and teacher"


def test_accelerate_does_not_walk_through_the_models_of_distillation():
    from liger_trainer.trainers.distillation_trainer import _LogitsForHiddenStates

    model = by_lengths()
    stand_in = _LogitsForHiddenStates(model)
    assert list(stand_in.modules()) == [stand_in]
    assert extract_model_from_parallel(stand_in) is stand_in


class BeginsAfterOneStep(TrainerCallback):
    """The first step proves, on batches of the host."""

    def __init__(self, watched):
        self.watched = watched

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.watched.begins()
