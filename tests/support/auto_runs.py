"""A training with dropout, accumulation and uneven rows, whose layers are checkpointed as a test says.

The model is not patched unless a test says so: that is much faster where Triton's kernels are interpreted.
"""

import torch
from counted_memory import CountedMemory
from tiny_models import collate, ragged_rows, tiny_model
from transformers import TrainerCallback

from liger_trainer import LigerTrainer, LigerTrainingArguments
from liger_trainer.memory.planner import ActivationPlanner

LAYERS = 6


def uneven_rows(n=128, shortest=4, longest=48):
    """Rows of which the longest are some ten times as long as the shortest."""
    generator = torch.Generator().manual_seed(3)
    rows = ragged_rows(n)
    for row in rows:
        length = int(torch.randint(shortest, longest, (), generator=generator))
        row["input_ids"] = (row["input_ids"] * 12)[:length]
        row["labels"] = list(row["input_ids"])
    return rows


def rows_of_one_length(length=64):
    """Rows that differ in nothing but their tokens."""
    rows = ragged_rows(48)
    for row in rows:
        row["input_ids"] = (row["input_ids"] * length)[:length]
        row["labels"] = list(row["input_ids"])
    return rows


def frozen_model(layers=24, attention_dropout=0.1):
    """Only its norms learn: there are hardly any gradients, and the peak lies at the end of the forward pass."""
    model = tiny_model("llama", attention_dropout=attention_dropout, num_hidden_layers=layers)
    for name, weight in model.named_parameters():
        weight.requires_grad_("layernorm" in name)
    return model


def memory_with(carries, size=None):
    """A counted memory from which `carries` takes activations to the host."""
    memory = CountedMemory(size)
    memory.carries = carries
    return memory


def build(
    out, checkpointing, memory=None, callbacks=(), trainer_class=LigerTrainer, model=None, model_init=None, **options
):
    defaults = {
        "max_steps": 6, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "learning_rate": 1e-2,
        "logging_steps": 1, "save_strategy": "no", "seed": 11, "remove_unused_columns": False, "use_liger": False,
    }  # fmt: skip
    args = LigerTrainingArguments(
        output_dir=str(out), report_to="none", use_cpu=True, disable_tqdm=True, activation_checkpointing=checkpointing,
        **(defaults | options),
    )  # fmt: skip
    if model is None and model_init is None:
        model = tiny_model("llama", attention_dropout=0.1, num_hidden_layers=LAYERS)
    rows = uneven_rows()
    trainer = trainer_class(
        model=model, model_init=model_init, args=args, train_dataset=rows, eval_dataset=rows[:6],
        data_collator=collate, callbacks=list(callbacks),
    )  # fmt: skip
    trainer.device_memory = memory
    return trainer


def train(trainer, **resume):
    """Train, with the trainer's memory counting; returns the logged losses and the weights."""
    if trainer.device_memory is None:
        trainer.train(**resume)
    else:
        with trainer.device_memory:
            trainer.train(**resume)
    losses = [log[name] for log in trainer.state.log_history for name in ("loss", "eval_loss") if name in log]
    return losses, {name: weight.clone() for name, weight in trainer.model.state_dict().items()}


def planned_and_real(monkeypatch):
    """A list that gets, for each micro-batch with a plan, the peak that was predicted and the real one."""
    found, note = [], ActivationPlanner._note

    def noting(self, now, peak):
        if not now.plan.is_empty:
            found.append((now.plan.peak, peak))
        return note(self, now, peak)

    monkeypatch.setattr(ActivationPlanner, "_note", noting)
    return found


def same_bits(got, want):
    return got[0] == want[0] and all(torch.equal(got[1][name], want[1][name]) for name in want[1])


class At(TrainerCallback):
    """Calls `action` before a micro-batch of step `step`: the first of them, or the second with `second`."""

    def __init__(self, step, action, second=False):
        self.step, self.action, self.second = step, action, second

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step and not self.second:
            self.action()

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == self.step and self.second:
            self.action()
