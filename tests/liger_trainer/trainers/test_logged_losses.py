"""Non-finite losses are logged as by the stock trainers, to the last digit, without waiting for the GPU."""

import math

import pytest
import torch
from datasets import Dataset
from tiny_models import collate, ragged_rows, tiny_model, tiny_tokenizer
from transformers import Trainer, TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer

from liger_trainer import LigerSFTConfig, LigerSFTTrainer, LigerTrainer, LigerTrainingArguments


class Breaking:
    """Adds `broken` to the loss of the calls `when`. Gradients stay the same, so only the logs differ."""

    broken = math.nan
    when = ()
    calls = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss = result[0] if return_outputs else result
        # All trainers need the same numbers, and the kernels' results differ in the last digit
        loss = loss * 0 + (self.broken if self.calls in self.when else 1 / (3 + self.calls))
        self.calls += 1
        return (loss, result[1]) if return_outputs else loss


class StockTrainer(Breaking, Trainer):
    args_class = TrainingArguments


class OurTrainer(Breaking, LigerTrainer):
    args_class = LigerTrainingArguments


class StockSFTTrainer(Breaking, SFTTrainer):
    args_class = SFTConfig


class OurSFTTrainer(Breaking, LigerSFTTrainer):
    args_class = LigerSFTConfig


def build(trainer_class, folder, accumulation=1, rows=None, **options):
    sft = issubclass(trainer_class, SFTTrainer)
    options = {"learning_rate": 1e-3, "max_steps": 7, "save_strategy": "no", "logging_steps": 1} | options
    options |= {"gradient_checkpointing": False, "bf16": False} if sft else {"remove_unused_columns": False}
    args = trainer_class.args_class(
        output_dir=str(folder / trainer_class.__name__),
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=accumulation,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    rows = rows or ragged_rows(8)
    rows = Dataset.from_list(rows) if sft else rows
    given = {"processing_class": tiny_tokenizer()} if sft else {"data_collator": collate}
    return trainer_class(model=tiny_model("llama"), args=args, train_dataset=rows, eval_dataset=rows, **given)


def logged(trainer):
    """Return the logged losses. The last one is the loss of the whole training."""
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return [*losses, trainer.state.log_history[-1]["train_loss"]]


def same(got, want):
    """Equal to the last digit; NaN equals NaN."""
    return len(got) == len(want) and all(x == y or (x != x and y != y) for x, y in zip(got, want, strict=True))


PAIRS = {"Trainer": (OurTrainer, StockTrainer), "SFT": (OurSFTTrainer, StockSFTTrainer)}


@pytest.mark.parametrize(
    "name, logging_steps, accumulation, broken",
    [
        ("Trainer", 1, 1, math.nan),
        ("Trainer", 3, 1, math.inf),
        ("Trainer", 3, 2, -math.inf),
        ("SFT", 1, 2, math.inf),
        ("SFT", 3, 2, math.nan),
    ],
)
def test_the_filter_logs_what_the_stock_one_logs(name, logging_steps, accumulation, broken, tmp_path):
    ours, stock = PAIRS[name]
    when = (0, 3, 4, 8, 9)
    runs = []
    for trainer_class in (stock, ours):
        trainer = build(trainer_class, tmp_path, accumulation, logging_steps=logging_steps)
        trainer.broken, trainer.when = broken, when
        runs.append(logged(trainer))
    want, got = runs
    assert all(map(math.isfinite, want))
    assert same(got, want), f"{got} against {want}"


@pytest.mark.parametrize("name, setting", [("Trainer", True), ("Trainer", False), ("SFT", False)])
def test_the_filter_as_set(name, setting, tmp_path):
    ours, stock = PAIRS[name]
    runs = []
    for trainer_class in (stock, ours):
        trainer = build(trainer_class, tmp_path, logging_nan_inf_filter=setting)
        trainer.when = (2,)
        runs.append(logged(trainer))
    want, got = runs
    assert any(map(math.isnan, want)) == (not setting)
    assert same(got, want), f"{got} against {want}"


@pytest.mark.parametrize("options", [{}, {"logging_nan_inf_filter": False}], ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_evaluation_filters_as_in_stock(name, options, tmp_path):
    ours, stock = PAIRS[name]
    runs = []
    for trainer_class in (stock, ours):
        trainer = build(trainer_class, tmp_path, **options)
        trainer.when = (1,)
        runs.append(trainer.evaluate()["eval_loss"])
    assert math.isnan(runs[0]) or not options  # transformers 5.17 has no filter there
    assert same(runs[1:], runs[:1]), runs


def test_a_batch_without_labels_costs_one_logged_loss(tmp_path):
    """The first batch has no label. Stock divides zero by zero there, logs 0.0 and goes on."""
    rows = ragged_rows(8)
    for row in rows[:2]:
        row["labels"] = [-100] * len(row["labels"])
    runs = []
    for trainer_class in (Trainer, LigerTrainer):
        args_class = LigerTrainingArguments if trainer_class is LigerTrainer else TrainingArguments
        in_order = type(trainer_class.__name__, (InOrder, trainer_class), {"args_class": args_class})
        trainer = build(in_order, tmp_path, rows=rows, max_steps=3, learning_rate=0.0)
        runs.append(logged(trainer))
    want, got = runs
    assert want[0] == got[0] == 0.0
    assert got == pytest.approx(want, rel=1e-5)


class InOrder:
    def _get_train_sampler(self, *args):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def test_the_filter_asks_no_tensor_whether_it_is_finite(tmp_path, monkeypatch):
    """Asking a GPU tensor would wait for the answer."""
    asked = []
    for name in ("isnan", "isinf"):
        stock = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda x, stock=stock: asked.append(type(x)) or stock(x))
    counts = {}
    for trainer_class in (StockTrainer, OurTrainer):
        trainer = build(trainer_class, tmp_path)
        asked.clear()
        trainer.train()
        counts[trainer_class] = sum(kind is torch.Tensor for kind in asked)
    assert counts == {StockTrainer: 14, OurTrainer: 0}


def test_a_custom_training_step_sees_the_unfiltered_loss(tmp_path):
    class Watching(OurTrainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            seen.append(loss)
            return loss

    seen = []
    trainer = build(Watching, tmp_path, max_steps=3)
    trainer.when = (1,)
    trainer.train()
    assert [math.isnan(loss) for loss in seen] == [False, True, False]
    assert all(type(loss) is torch.Tensor for loss in seen)
    assert not {"training_step", "floating_point_ops"} & vars(trainer).keys()


def test_a_training_step_that_the_user_has_set_on_the_trainer_stays(tmp_path):
    trainer = build(OurTrainer, tmp_path, max_steps=2)
    calls, stock = [], trainer.training_step
    own = trainer.training_step = lambda *args, **kwargs: calls.append(1) or stock(*args, **kwargs)
    trainer.train()
    assert len(calls) == 2 and trainer.training_step is own


class Setting(TrainerCallback):
    """Records `logging_nan_inf_filter` in every event, and acts at the second step."""

    def __init__(self, at_second=lambda trainer: None):
        self.seen, self.at_second = [], at_second

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def event(args, state, control, **kwargs):
            self.seen.append(args.logging_nan_inf_filter)
            if name == "on_step_begin" and state.global_step == 2:
                self.at_second(self.trainer)

        return event


def wrap(name):
    """A callback wraps a method of the trainer and leaves the wrapper in place."""

    def wrapping(trainer):
        inner = getattr(trainer, name)
        setattr(trainer, name, lambda *args, **kwargs: inner(*args, **kwargs))

    return wrapping


def step_apart(trainer):
    """A callback runs a training step of its own."""
    assert type(trainer.training_step(trainer.model, collate(ragged_rows(2)))) is torch.Tensor
    trainer.model.zero_grad()


@pytest.mark.parametrize(
    "at_second",
    [lambda trainer: None, wrap("training_step"), wrap("floating_point_ops"), step_apart],
    ids=["as it is", "training_step", "floating_point_ops", "apart"],
)
def test_the_argument_is_as_set_for_all_that_looks(at_second, tmp_path):
    runs, found = [], []
    for trainer_class in (StockTrainer, OurTrainer):
        trainer = build(trainer_class, tmp_path, save_strategy="steps", save_steps=3)
        callback = Setting(at_second)
        trainer.add_callback(callback)
        callback.trainer, trainer.when = trainer, (0, 3, 5)
        runs.append(logged(trainer))
        saved = torch.load(f"{trainer.args.output_dir}/checkpoint-3/training_args.bin", weights_only=False)
        found.append({*callback.seen, trainer.args.logging_nan_inf_filter, saved.logging_nan_inf_filter})
    assert same(*runs) and found == [{True}, {True}]


def test_the_argument_is_as_set_after_an_error(tmp_path):
    trainer = build(OurTrainer, tmp_path)
    trainer.floating_point_ops = None  # it fails right after the loss is added
    with pytest.raises(TypeError):
        trainer.train()
    assert trainer.args.logging_nan_inf_filter is True and trainer.floating_point_ops is None


def test_a_callback_may_switch_the_filter_off(tmp_path):
    runs = []
    for trainer_class in (StockTrainer, OurTrainer):
        trainer = build(trainer_class, tmp_path)
        callback = Setting(lambda trainer: vars(trainer.args).update(logging_nan_inf_filter=False))
        trainer.add_callback(callback)
        callback.trainer, trainer.when = trainer, (0, 3)
        runs.append(logged(trainer))
    assert same(*runs) and math.isnan(runs[0][-1]) and not math.isnan(runs[0][0])
