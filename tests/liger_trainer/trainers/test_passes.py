"""A run over a stream shorter than the run resumes in a later pass with the next rows."""

import pytest
import torch
from datasets import Dataset, IterableDataset
from tiny_models import collate, ragged_rows, tiny_model, tiny_tokenizer
from transformers import Trainer, TrainingArguments

from liger_trainer import LigerSFTConfig, LigerSFTTrainer, LigerTrainer, LigerTrainingArguments

ROWS = ragged_rows(10)  # five batches of two


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from ROWS


def shuffled():
    return IterableDataset.from_generator(lambda: iter(ROWS)).shuffle(seed=3, buffer_size=4)


def train(folder, trainer_class, stream, resume=None, **options):
    args_class = LigerTrainingArguments if issubclass(trainer_class, LigerTrainer) else TrainingArguments
    args = args_class(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        save_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        logging_steps=1,
        **{"max_steps": 12} | options,
    )
    trainer = trainer_class(model=tiny_model("llama"), args=args, train_dataset=stream(), data_collator=collate)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights_of(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def furthest(got, want):
    return max(float((got[name] - p).abs().max()) for name, p in want.items())


@pytest.mark.diagonal
@pytest.mark.parametrize("stream", [Stream, shuffled], ids=["plain", "shuffled"])
@pytest.mark.parametrize("step", [3, 5, 7, 11])
def test_a_stream_goes_on_in_its_row(step, stream, tmp_path):
    """Resumed in the first pass, at its end, in the second and in the third."""
    whole = weights_of(train(tmp_path, LigerTrainer, stream))
    again = train(tmp_path / "again", LigerTrainer, stream, str(tmp_path / f"checkpoint-{step}"))
    assert again.state.global_step == 12
    assert furthest(weights_of(again), whole) == 0


@pytest.mark.parametrize("step", [2, 4, 8])
def test_with_accumulation(step, tmp_path):
    """A pass of five batches ends within a step of two."""
    whole = weights_of(train(tmp_path, LigerTrainer, Stream, gradient_accumulation_steps=2))
    resume = str(tmp_path / f"checkpoint-{step}")
    again = train(tmp_path / "again", LigerTrainer, Stream, resume, gradient_accumulation_steps=2)
    assert furthest(weights_of(again), whole) == 0


def test_more_steps_than_were_planned(tmp_path):
    """The checkpoint counts its batches by the planned steps."""
    options = {"lr_scheduler_type": "constant"}
    longer = weights_of(train(tmp_path / "longer", LigerTrainer, Stream, max_steps=20, **options))
    train(tmp_path / "short", LigerTrainer, Stream, **options)
    resume = str(tmp_path / "short" / "checkpoint-8")
    again = train(tmp_path / "again", LigerTrainer, Stream, resume, max_steps=20, **options)
    assert furthest(weights_of(again), longer) == 0


def test_stock_goes_on_with_other_rows(tmp_path):
    """If this fails, `Trainer` does it right by itself, and `trainers/passes.py` can go."""
    whole = weights_of(train(tmp_path, Trainer, Stream))
    again = train(tmp_path / "again", Trainer, Stream, str(tmp_path / "checkpoint-7"))
    assert furthest(weights_of(again), whole) > 1e-4


def test_trl_s_streams_too(tmp_path):
    def build(folder, resume=None):
        args = LigerSFTConfig(
            output_dir=str(folder),
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            max_steps=12,
            save_steps=7,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            max_length=64,
        )
        trainer = LigerSFTTrainer(
            model=tiny_model("llama"),
            args=args,
            train_dataset=Dataset.from_list(ROWS).to_iterable_dataset(),
            processing_class=tiny_tokenizer(),
        )
        trainer.train(resume_from_checkpoint=resume)
        return weights_of(trainer)

    whole = build(tmp_path / "whole")
    again = build(tmp_path / "again", str(tmp_path / "whole" / "checkpoint-7"))
    assert furthest(again, whole) == 0
