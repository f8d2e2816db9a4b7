"""Where the time of a drafter's training step goes: the GPU's time for each part, and the products that it needs.

target      the forward pass of the frozen model
drafter     the forward pass of the drafter, of all its steps
loss        the losses of all steps. Ours computes their gradients here too; autograd computes them in `backward`
backward    the backward pass
optimizer   clipping, the optimizer, and what the Trainer does between steps
"""

import time
from collections import defaultdict

import torch
from _measure import DEVICE
from transformers import TrainerCallback

PARTS = ("target", "drafter", "loss", "backward", "optimizer")


class PartTimes(TrainerCallback):
    """Marks the end of each part of the steps after `skip`. Nothing waits for the GPU until `ms` is called."""

    def __init__(self, skip):
        self.skip = skip
        self.marks = []  # (part that has ended, or None at the start of a step; event or seconds)
        self.watches = False

    def watch(self, trainer):
        """Mark the parts of `trainer`, which has its drafter."""
        self.trainer = trainer
        trainer.add_callback(self)
        trainer.model.eagle_drafter.register_forward_pre_hook(lambda *_: self.mark("target"))
        trainer.model.eagle_drafter.register_forward_hook(lambda *_: self.mark("drafter"))
        stock_loss = trainer.compute_loss
        stock_step = trainer.training_step

        def compute_loss(*args, **kwargs):
            loss = stock_loss(*args, **kwargs)
            self.mark("loss")
            return loss

        def training_step(*args, **kwargs):
            self.mark(None)
            loss = stock_step(*args, **kwargs)
            self.mark("backward")
            return loss

        trainer.compute_loss = compute_loss
        trainer.training_step = training_step

    def on_step_begin(self, args, state, control, **kwargs):
        self.watches = state.global_step >= self.skip

    def on_step_end(self, args, state, control, **kwargs):
        self.mark("optimizer")

    def mark(self, part):
        if not self.watches:
            return
        now = time.perf_counter()
        if DEVICE == "cuda":
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        self.marks.append((part, now))

    def ms(self):
        """The mean of each part, in ms of the GPU (on a CPU, of the clock)."""
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        sums = defaultdict(float)
        steps = 0
        for (_, before), (part, now) in zip(self.marks, self.marks[1:], strict=False):
            if part is None:
                steps += 1
            else:
                sums[part] += before.elapsed_time(now) if DEVICE == "cuda" else (now - before) * 1e3
        return {part: sums[part] / max(steps + 1, 1) for part in PARTS}


def parts_tflop(model, tokens, drafted, length, steps):
    """TFLOP of the products of a step, by part of ours.

    Args:
        model (`PreTrainedModel`): With its drafter.
        tokens, drafted (`int`): All tokens of a batch, and the ones that the drafter starts from, all with a target in
            every step.
        length (`int`): Of a row.
        steps (`int`): K.
    """
    drafter = model.eagle_drafter
    config = drafter.config
    queries = config.num_attention_heads * config.head_dim
    layers = sum(m.weight.numel() for m in model.model.layers.modules() if hasattr(m, "weight") and m.weight.ndim == 2)
    shape = model.config
    head_dim = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    causal = 2 * length * tokens  # of a product of all queries with the keys before them, for each number of a head
    target = 2 * tokens * layers + shape.num_hidden_layers * causal * shape.num_attention_heads * head_dim

    keys = 2 * config.num_key_value_heads * config.head_dim
    hidden = config.hidden_size
    attention = steps * causal * queries
    once = tokens * (drafter.fc.weight.numel() + (queries + keys) * hidden + keys * hidden)
    mlp = 3 * hidden * config.intermediate_size
    each = drafted * (steps * (2 * queries * hidden + mlp) + (steps - 1) * keys * hidden)
    forward = 2 * (once + each)
    without_dx = 2 * tokens * drafter.fc.weight.numel()  # the model's hidden states get no gradient
    head = 2 * hidden * config.draft_vocab_size
    return {
        "target": target / 1e12,
        "drafter": (forward + attention) / 1e12,
        "loss": (3 * steps * drafted + tokens) * head / 1e12,
        "backward": (2 * forward - without_dx + 2.5 * attention) / 1e12,
    }


def show_parts(rows):
    """Print the parts of each row."""
    for row in rows:
        if "parts_ms" not in row:
            continue
        print(f"{row['arm']}:")
        for part, ms in row["parts_ms"].items():
            tflop = row["parts_tflop"].get(part)
            rate = "" if tflop is None else f"{tflop:8.2f} TFLOP, {tflop / ms * 1e3:6.0f} TFLOP/s"
            print(f"  {part:<10} {ms:8.1f} ms {rate}")
