"""TRL's metrics of a training step are read from the device only when logged, and have the same values."""

import pytest
import torch
from datasets import Dataset
from tiny_models import tiny_model, tiny_tokenizer

import liger_trainer.head.answers
from liger_trainer import LigerSFTConfig, LigerSFTTrainer
from liger_trainer.varlen.host_copies import remember


class AtOnce(LigerSFTTrainer):
    def _metrics_may_be_late(self, *args):
        return False


class OnDevice(torch.Tensor):
    """A tensor that must not be read, nor anything computed from it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__bool__, torch.Tensor.__float__):
            raise AssertionError(f"the host waits for the device: {func}")
        return super().__torch_function__(func, types, args, kwargs)


def rows():
    """Eight rows. The third and fourth, one micro-batch, have no labels."""
    found = []
    for k in range(8):
        ids = [(7 * k + 3 * j) % 60 + 2 for j in range(5 + k)]
        found.append({"input_ids": ids, "labels": [-100] * len(ids) if k in (2, 3) else ids})
    return Dataset.from_list(found)


def build(folder, trainer_class=LigerSFTTrainer, **options):
    options = {"gradient_accumulation_steps": 2, "logging_steps": 1} | options
    args = LigerSFTConfig(
        output_dir=str(folder),
        max_steps=4,
        learning_rate=1e-2,
        per_device_train_batch_size=2,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        dataset_kwargs={"skip_prepare_dataset": True},
        train_sampling_strategy="sequential",
        **options,
    )
    return trainer_class(tiny_model("llama"), args, train_dataset=rows(), processing_class=tiny_tokenizer())


def logged(trainer):
    trainer.train()
    timed = ("train_runtime", "train_samples_per_second", "train_steps_per_second")
    return [{name: x for name, x in log.items() if name not in timed} for log in trainer.state.log_history]


@pytest.mark.parametrize("options", [{}, {"logging_steps": 3}, {"padding_free": True, "max_length": None}], ids=str)
def test_the_logs_are_the_same_to_the_last_digit(options, tmp_path):
    got, want = (logged(build(tmp_path, trainer_class, **options)) for trainer_class in (LigerSFTTrainer, AtOnce))
    assert got == want
    assert got[0]["entropy"] > 0 and got[0]["num_tokens"] > 0


def test_nothing_is_read_before_the_metrics_are(tmp_path, monkeypatch):
    stock = liger_trainer.head.answers.token_scores

    def on_device(*args, **kwargs):
        return {name: x.as_subclass(OnDevice) for name, x in stock(*args, **kwargs).items() if x is not None}

    monkeypatch.setattr(liger_trainer.head.answers, "token_scores", on_device)
    trainer = build(tmp_path)
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.train()
    with pytest.raises(AssertionError, match="the host waits"):
        build(tmp_path, AtOnce).compute_loss(trainer.model, dict(batch), num_items_in_batch=torch.tensor(9))
    trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=torch.tensor(9))
    with pytest.raises(AssertionError, match="the host waits"):
        trainer._metrics  # noqa: B018


def test_a_look_at_the_metrics_finds_numbers(tmp_path):
    trainer = build(tmp_path)
    trainer.model.train()
    for batch in trainer.get_train_dataloader():
        trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=torch.tensor(9))
    entropies = trainer._metrics["train"]["entropy"]
    assert len(entropies) == 4 and entropies[1] == 0.0, "no labels"
    assert all(type(x) is float and x > 0 for k, x in enumerate(entropies) if k != 1)


def test_without_a_number_of_items_trl_reads_the_labels_mask(tmp_path):
    """It divides by the number of labels then."""
    trainer = build(tmp_path)
    trainer.model.train()
    batch = next(iter(trainer.get_train_dataloader()))
    labels = (batch["labels"][:, 1:] != -100).sum()
    alone = trainer.compute_loss(trainer.model, dict(batch))
    assert alone == trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=labels)


def test_tokens_are_counted_on_the_host_and_the_model_gets_the_mask_of_the_device(tmp_path, monkeypatch):
    trainer = build(tmp_path)
    trainer.model.train()
    batch = next(iter(trainer.get_train_dataloader()))
    mask = batch["attention_mask"].clone()
    remember(mask, batch["attention_mask"] * 3)  # other values, to tell which were counted
    seen = []
    stock = liger_trainer.head.answers._token_scores

    def spy(call):
        seen.append(call.kwargs["attention_mask"])
        return stock(call)

    monkeypatch.setattr(liger_trainer.head.answers, "_token_scores", spy)
    trainer.compute_loss(trainer.model, batch | {"attention_mask": mask}, num_items_in_batch=torch.tensor(9))
    assert len(seen) == 1 and seen[0] is mask
    assert trainer._metrics["train"]["num_tokens"] == [3 * int(mask.sum())]


class Overriding(LigerSFTTrainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


@pytest.mark.parametrize("seen_by", ["override", "hook", "nothing"])
def test_trl_reads_its_metrics_from_outputs_that_others_see(seen_by, tmp_path):
    trainer = build(tmp_path, Overriding if seen_by == "override" else LigerSFTTrainer)
    if seen_by == "hook":
        trainer.model.register_forward_hook(lambda module, args, outputs: None)
    trainer.model.train()
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=torch.tensor(9))
    assert len(trainer._late_metrics._pending) == (seen_by == "nothing")
    assert trainer._late_metrics.lists["train"]["entropy"][0] > 0 or seen_by == "nothing"


def test_a_trl_that_appends_otherwise_is_told(tmp_path):
    trainer = build(tmp_path)
    with pytest.raises(RuntimeError, match="trl>=1.16"), trainer._late_metrics.recording([]):
        pass
