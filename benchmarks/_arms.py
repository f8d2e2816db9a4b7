"""Shared by benchmarks that train or compute the same thing in several ways (arms): mtp, eagle, eagle_loss and medusa.

Each arm runs in its own process and emits a row. Rows are compared, recorded and printed as a table. The arms that
train have a learning rate of 0, so that every arm sees the same weights at every step and its losses must agree.
"""

import tempfile

import numpy as np
import torch
from _measure import DEVICE, table
from _processes import emit, is_out_of_memory, release, rows_from


def training_fields(options, log_every):
    """The fields of the training arguments that all arms have in common.

    Args:
        options (`argparse.Namespace`): With `steps` and `batch`.
        log_every (`int`): Steps between logs, which wait for the GPU. The first step is logged too.
    """
    return {
        "output_dir": tempfile.mkdtemp(),
        "max_steps": options.steps,
        "per_device_train_batch_size": options.batch,
        "logging_steps": log_every,
        "logging_first_step": True,
        "dataloader_num_workers": 4 if DEVICE == "cuda" else 0,
        "dataloader_drop_last": True,
        "learning_rate": 0.0,
        "weight_decay": 0.0,
        "lr_scheduler_type": "constant",
        "bf16": DEVICE == "cuda",
        "optim": "adamw_torch_fused",
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": DEVICE == "cpu",
        "disable_tqdm": True,
    }


def check_steps(parser, steps, skip):
    """End the script unless a step is left after the `skip` steps before the clock starts."""
    if steps <= skip:
        parser.error(f"--steps is {steps}; the clock starts after {skip}, so take at least {skip + 1}")


def reset_peak():
    """Start counting peak memory from here, so that making or quantizing the model does not count."""
    release()
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()


def static_bytes(model):
    """The bytes of the weights, plus a gradient and two AdamW states for trained ones, all in the weight's dtype."""
    return sum(p.numel() * p.element_size() * (4 if p.requires_grad else 1) for p in model.parameters())


def static_memory(model, peak_gib):
    """`static` in GiB, and `above`: the peak minus that, or None without a GPU."""
    static = static_bytes(model) / 2**30
    return {"static": static, "above": None if peak_gib is None else peak_gib - static}


def logged(trainer, name):
    """The values of `name` in the logs of training steps, in their order."""
    return [float(log[name]) for log in trainer.state.log_history if "loss" in log and name in log]


def run_arm(options, measure):
    """Emit the row `measure(arm, options)` of this process's arm, or a row that says that memory ran out."""
    try:
        emit(measure(options.arm, options))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        emit({"arm": options.arm, "note": "out of memory"})


def run_arms(options, record, flag, echo=False):
    """Run each arm of `options.arms` in its own process, and return the rows.

    After each arm, `flag(rows)` compares the rows so far and `record` writes them, so an interrupted run keeps them.
    """
    rows = []
    for arm in options.arms:
        rows += rows_from(arm, options.minutes * 60, echo=echo)
        flag(rows)
        record.write({"options": recorded(options), "rows": rows})
    return rows


def recorded(options):
    """The options as a dict, without the hidden ones of subprocesses."""
    return {name: value for name, value in vars(options).items() if name not in ("arm", "todo")}


def difference(row, reference, limits, called="ours"):
    """The first value of `row` that differs from the reference's by more than its limit, in words, or None.

    Args:
        row, reference (`dict`): A number, or a list of as many numbers in both, for each name in `limits`.
        limits (`dict[str, float]`): The largest relative difference, by name.
        called (`str`, *optional*, defaults to `"ours"`): What the words call the reference.
    """
    for name, limit in limits.items():
        for got, want in zip(np.atleast_1d(row[name]), np.atleast_1d(reference[name]), strict=True):
            if not abs(got - want) <= limit * abs(want):  # NaN differs too
                return f"{name} {got:.4f}, {called} {want:.4f}"
    return None


def print_rows(rows, columns):
    """Print a table. The note of a row with `wrong` says so."""
    printed = []
    for row in rows:
        if "wrong" in row:
            row = row | {"note": "WRONG: " + row["wrong"]}
        printed.append(row)
    table(printed, columns)
