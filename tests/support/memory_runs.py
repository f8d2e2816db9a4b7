"""Train, and run layers, in a memory that counts bytes and has the size a test wants. Needs no GPU.

Models are patched only if a test says so: training is much faster where Triton's kernels are not interpreted.
"""

import weakref

import torch
from tiny_models import collate, ragged_rows, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from transformers import TrainerCallback

from liger_trainer import LigerTrainer, LigerTrainingArguments
from liger_trainer.memory.pinned_memory import PinnedMemory
from liger_trainer.memory.planner import ActivationPlanner


class CountedMemory(TorchDispatchMode):
    """Counts the storages that operations create while the mode is active, until they are freed.

    Attributes:
        size (`int` or `None`): Bytes available. None stands for as many as a plan can want.
        claims (`int` or `None`): Bytes it says are available, if that differs.
        failures (`int`): Operations that did not fit.
        highest (`int`): Most bytes in use at a time.
        carries (`HostCopier` or `None`): Takes activations to the host.
    """

    def __init__(self, size=None):
        super().__init__()
        self.size = size
        self.claims = None
        self.now = 0
        self.failures = 0
        self.highest = 0
        self._peak = 0
        self._known = {}
        self.carries = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                self._count(
                    getattr(tensor, "_local_tensor", tensor).untyped_storage()
                )  # this rank's part of a sharded tensor
        return out

    def _count(self, storage):
        key, nbytes = id(storage), storage.nbytes()
        if key in self._known or not nbytes or (self.carries is not None and self.carries.has(storage)):
            return
        if self.size is not None and self.now + nbytes > self.size:
            self.failures += 1
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {nbytes} bytes.")
        self._known[key] = weakref.ref(storage, lambda _: self._gone(key, nbytes))
        self.now += nbytes
        self._peak, self.highest = max(self._peak, self.now), max(self.highest, self.now)

    def _gone(self, key, nbytes):
        del self._known[key]
        self.now -= nbytes

    def allocated(self):
        return self.now

    def peak(self):
        peak, self._peak = self._peak, self.now
        return peak

    def capacity(self):
        return self.claims or self.size or 1 << 40

    def retries(self):
        return 0

    def transport(self, host_gib):
        return self.carries


class Carries:
    """Carries activations to memory that is not counted, as fast as a test says.

    A layer's call takes half a second.

    Attributes:
        most (`int`): The most bytes it has held.
    """

    stream = None

    def __init__(self, room=1 << 30, rate=1e15):
        self.host = PinnedMemory(room, self._pin, slab=1 << 20, small=1)
        self.rate = rate
        self.clock = 0.0
        self.most = 0
        self._slabs = []

    def _pin(self, size):
        with _disable_current_modes():
            self._slabs.append(torch.empty(size, dtype=torch.uint8))
        self.most = max(self.most, self.host.taken + size)
        return self._slabs[-1]

    def has(self, storage):
        """True if `storage` is in the host's memory."""
        return any(storage.data_ptr() == slab.data_ptr() for slab in self._slabs)

    def mark(self):
        self.clock += 0.5
        return self.clock

    def seconds(self, begin, end):
        return end - begin


GPU = torch.device("cuda") if torch.cuda.is_available() else None


class Host(PinnedMemory):
    """Host memory for tensors of any size that counts the bytes it was asked for."""

    def __init__(self, room=1 << 24):
        super().__init__(room, self._empty, slab=1 << 16, small=1)
        self.asked = []

    @staticmethod
    def _empty(size):
        return torch.empty(size, dtype=torch.uint8, pin_memory=GPU is not None)

    def take(self, size):
        self.asked.append(size)
        return super().take(size)

    @property
    def in_use(self):
        return sum(slab.slots for slab in self._slabs)


def same(got, want):
    return len(got) == len(want) and all(map(torch.equal, got, want))


LAYERS = 6


def uneven_rows(n=128, shortest=4, longest=48):
    """Rows of very uneven length: the longest are some ten times as long as the shortest."""
    generator = torch.Generator().manual_seed(3)
    rows = ragged_rows(n)
    for row in rows:
        length = int(torch.randint(shortest, longest, (), generator=generator))
        row["input_ids"] = (row["input_ids"] * 12)[:length]
        row["labels"] = list(row["input_ids"])
    return rows


def rows_of_one_length(length=64):
    """Rows of one length that differ only in their tokens."""
    rows = ragged_rows(48)
    for row in rows:
        row["input_ids"] = (row["input_ids"] * length)[:length]
        row["labels"] = list(row["input_ids"])
    return rows


def frozen_model(layers=24, attention_dropout=0.1):
    """A model in which only norms learn: there are hardly any gradients, and forward ends at the peak."""
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
        "max_steps": 6,
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "seed": 11,
        "remove_unused_columns": False,
        "use_liger": False,
    }
    args = LigerTrainingArguments(
        output_dir=str(out),
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        activation_checkpointing=checkpointing,
        **(defaults | options),
    )
    if model is None and model_init is None:
        model = tiny_model("llama", attention_dropout=0.1, num_hidden_layers=LAYERS)
    rows = uneven_rows()
    trainer = trainer_class(
        model=model,
        model_init=model_init,
        args=args,
        train_dataset=rows,
        eval_dataset=rows[:6],
        data_collator=collate,
        callbacks=list(callbacks),
    )
    trainer.device_memory = memory
    return trainer


def train(trainer, **resume):
    """Train while the trainer's memory is counted; return the logged losses and the weights."""
    if trainer.device_memory is None:
        trainer.train(**resume)
    else:
        with trainer.device_memory:
            trainer.train(**resume)
    losses = [log[name] for log in trainer.state.log_history for name in ("loss", "eval_loss") if name in log]
    return losses, {name: weight.clone() for name, weight in trainer.model.state_dict().items()}


def planned_and_real(monkeypatch):
    """A list that gets the predicted and the real peak of each micro-batch with a plan."""
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
    """Calls `action` before the first micro-batch of step `step`, or before the second with `second`."""

    def __init__(self, step, action, second=False):
        self.step = step
        self.action = action
        self.second = second

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step and not self.second:
            self.action()

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == self.step and self.second:
            self.action()


OPTIONS = {"max_steps": 8, "gradient_accumulation_steps": 1, "max_grad_norm": 0.0, "weight_decay": 0.1}


def make(out, in_backward, checkpointing=False, **options):
    return build(out, checkpointing, optimizer_in_backward=in_backward, **(OPTIONS | options))


def logs_of(trainer):
    """The log of each step, without times."""
    names = ("loss", "grad_norm", "learning_rate", "eval_loss")
    return [{name: log[name] for name in names if name in log} for log in trainer.state.log_history]


def same_training(out, **options):
    """Train in both ways. Assert that losses, norms, learning rates, weights and states are bit-identical."""
    made = []
    for in_backward in (False, True):
        given = {
            name: value() if name in ("model", "memory", "callbacks") else value for name, value in options.items()
        }
        trainer = make(out / str(in_backward), in_backward, **given)
        _, weights = train(trainer)
        made.append((logs_of(trainer), weights, states_of(trainer)))
    ordinary, ours = made
    assert ours[0] == ordinary[0] and len(ours[0]) >= 3
    assert all(log["grad_norm"] > 0 for log in ours[0] if "loss" in log)
    assert ours[1].keys() == ordinary[1].keys()
    for kind in (1, 2):
        assert ours[kind].keys() == ordinary[kind].keys()
        different = [name for name, value in ours[kind].items() if not equal(value, ordinary[kind][name])]
        assert not different
    return ordinary, ours


def states_of(trainer):
    """The state of each weight, by name."""
    names = {weight: name for name, weight in trainer.model.named_parameters()}
    return {
        (names[weight], kind): value
        for weight, state in trainer.optimizer.state.items()
        for kind, value in state.items()
    }


def equal(got, want):
    same = got == want
    return bool(same.all()) if hasattr(same, "all") else bool(same)
