"""Rows of prompt, chosen and rejected, and a stock and a Liger trainer run on them side by side."""

import copy

import torch
from datasets import Dataset
from parity import KeepGradients, LargestTensor, without_times
from step_parity import words
from tiny_models import tiny_tokenizer

from liger_trainer.trainers.base import LigerTrainerMixin

SPLITS = [(4, 1), (1, 4)]
WORDS = 4096  # in the vocabulary of `assert_no_logits`
CHUNK_BYTES = 8 * 4 * WORDS  # eight rows of logits at a time, in fp32


def pair_rows(n=8, seed=4):
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "prompt": words(generator, 2, 8),
            "chosen": " " + words(generator, 2, 9),
            "rejected": " " + words(generator, 2, 9),
        }
        for _ in range(n)
    ]


def build(trainer_class, args_class, model, folder, split=(4, 1), tokenizer=None, trainer_options=None, **options):
    """A trainer of two steps over 8 rows; dropout, which would differ in its draws, is off by TRL's default."""
    defaults = {"gradient_checkpointing": False, "bf16": False, "learning_rate": 1e-2, "num_train_epochs": 1}
    args = args_class(
        output_dir=str(folder / trainer_class.__name__),
        per_device_train_batch_size=split[0],
        gradient_accumulation_steps=split[1],
        per_device_eval_batch_size=3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **(defaults | options),
    )
    rows = Dataset.from_list(pair_rows())
    evaluates = args.eval_strategy != "no" or getattr(args, "precompute_ref_log_probs", False)
    trainer = trainer_class(
        model=model if isinstance(model, str) else copy.deepcopy(model),
        args=args,
        train_dataset=rows,
        eval_dataset=rows if evaluates else None,
        processing_class=tokenizer or tiny_tokenizer(),
        **(trainer_options or {}),
    )
    if trainer.eval_dataset is None:  # TRL would prepare the same rows once more
        trainer.eval_dataset = trainer.train_dataset
    return trainer


def logged(trainer):
    """Train; every logged number of every step but the times."""
    return trained(trainer)[0]


def trained(trainer):
    """Train; the logs without times, and the gradients of the first step: Adam enlarges errors in those that follow."""
    keep = KeepGradients()
    trainer.add_callback(keep)
    trainer.train()
    return [without_times(log) for log in trainer.state.log_history], keep.steps[0]


def assert_same_training(ours, stock):
    """Every logged number of every step and the gradients of the first agree. Returns what the stock trainer logged."""
    (got, got_grads), (want, want_grads) = trained(ours), trained(stock)
    for ours_log, stock_log in zip(got, want, strict=True):
        assert_same_metrics(ours_log, stock_log)
    assert_same_gradients(got_grads, want_grads)
    return want


def batch_of(trainer):
    return next(iter(trainer.get_train_dataloader()))


def step(trainer, batch=None, upstream=lambda loss, model: loss):
    """Loss, metrics and gradients of one batch, without an optimizer."""
    batch = batch_of(trainer) if batch is None else batch
    trainer.model.train()
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, batch)
    upstream(loss, trainer.model).backward()
    metrics = {name: values[-1] for name, values in trainer._stored_metrics["train"].items()}
    grads = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    return {"loss": loss.item()} | metrics, grads


# A difference of two numbers that agree to 1e-5 agrees to 1e-5 of those numbers, not of itself; and so does the mean of
# thousands of logits of both signs, each of size 1.
DIFFERENCES = {
    "rewards/margins": ("rewards/chosen", "rewards/rejected"),
    "log_odds_chosen": ("logps/chosen", "logps/rejected"),
}
SMALLEST = {"logits/chosen": 1e-3, "logits/rejected": 1e-3}


def assert_same_metrics(got, want, rtol=1e-5):
    assert got.keys() == want.keys()
    for name, value in want.items():
        prefix = "eval_" if name.startswith("eval_") else ""
        of = DIFFERENCES.get(name.removeprefix("eval_"), ())
        scale = max(abs(value), SMALLEST.get(name.removeprefix("eval_"), 0), *(abs(want[prefix + part]) for part in of))
        assert abs(got[name] - value) <= rtol * scale, f"{name}: {got[name]} against {value}"


def assert_same_gradients(got, want, rtol=1e-5):
    assert got.keys() == want.keys()
    for name, grad in want.items():
        error = (got[name] - grad).norm() / grad.norm()
        assert error <= rtol, f"gradient of {name}: {error:.1e}"


def assert_same_step(got, want, rtol=1e-5):
    assert_same_metrics(got[0], want[0], rtol)
    assert_same_gradients(got[1], want[1], rtol)


def assert_no_logits(ours, stock):
    """Of a model with `WORDS`, in chunks of `CHUNK_BYTES`: our largest tensor is the head's weight, of 32 columns."""
    batch = batch_of(stock)
    labels = sum(int((batch[f"{kind}_labels"] != -100).sum()) for kind in ("chosen", "rejected"))
    tokens = 8 * max(batch["chosen_input_ids"].shape[1], batch["rejected_input_ids"].shape[1])
    assert tokens > labels > 32
    with LargestTensor() as largest:
        step(ours, batch)
        ours.prediction_step(ours.model, batch, prediction_loss_only=False)
    assert largest.numel == 32 * WORDS
    with LargestTensor() as control:
        step(stock, batch)
    assert control.numel >= tokens * WORDS


def assert_head_is_ours(trainer):
    assert isinstance(trainer, LigerTrainerMixin) and trainer.head_is_ours
