"""Tokens/s and memory of training Medusa heads without their logits, and heads of the same maths with all logits.

    python benchmarks/medusa.py --data rows.npz --json medusa.json --minutes 8
    python benchmarks/medusa.py --heads 5 --stages 1 --lengths 2048 --projection tied [--profile]
    python benchmarks/medusa.py --heads 5 --stages 1 --lengths 2048 --projection tied --data rows.npz --rows padded
    python benchmarks/medusa.py --tiny

`unfused` is the plain way: transformers' Trainer, all logits of each head, F.cross_entropy of each in fp32, and in
stage 1 no graph through the frozen model. `unfused + patched` also has our layers in the model, so that only the loss
differs. `LigerMedusaTrainer + fp8` holds the frozen model of stage 1 in FP8, and its peak is the peak of training.
Weights are random, even in the residual blocks, which would do nothing otherwise. The learning rate is 0, so that every
arm sees the same weights at every step. Losses of all steps and gradient norms of logged steps are compared, and an arm
that differs is flagged; FP8 gets six times the tolerance. An arm that runs out of memory is a row that says so. As in
training.py, a log of every fifth step waits for the GPU, and four processes read the rows.

Weights and gradients are bf16, and so is the fused AdamW. Rows are full, padded or packed (see training.py), and
tokens/s counts real tokens only. With padded and packed rows, half of the steps come before the clock and train on the
same batches as the other half. `static` is the memory of the weights, plus gradients and both optimizer states of the
trained ones; `above` is the peak minus that. A case already in the file of `--json` is not run again, so that an
interrupted run can be continued.
"""

import itertools
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from _arms import (
    check_steps,
    difference,
    logged,
    print_rows,
    recorded,
    reset_peak,
    static_memory,
    training_fields,
)
from _measure import DEVICE, Record, arguments
from _processes import emit, is_out_of_memory, release, rows_from
from _rows import KINDS, sft_rows
from _steps import Run, build, clock_of, counting, timed_steps, tokenizer_of
from training import STEPS, profiler

OURS = "LigerMedusaTrainer"
FP8 = "LigerMedusaTrainer + fp8"
UNFUSED = "unfused"
PATCHED = "unfused + patched"
ARMS = (OURS, FP8, UNFUSED, PATCHED)
DECAY = 0.8
COEFFICIENT = {1: 1.0, 2: 0.2}
SKIP = 2  # steps before the clock starts, for full rows
LOG = 5  # steps between logs, which wait for the GPU; the first step is logged too


def cases_of(options):
    """All combinations of `--stages`, `--heads`, `--projection` and `--lengths`, as dicts, longer ones later."""
    combinations = itertools.product(options.stages, options.heads, options.projection, options.lengths)
    return [
        {"stage": stage, "heads": heads, "tied": projection == "tied", "length": length}
        for stage, heads, projection, length in combinations
    ]


def key_of(row):
    return (*(row[name] for name in ("arm", "stage", "heads", "tied", "length", "batch")), row.get("rows", "full"))


def run_of(case, options):
    skip = SKIP if options.rows == "full" else (options.steps + 1) // 2
    return Run(
        options.model,
        options.batch,
        case["length"],
        steps=options.steps,
        skip=skip,
        data=options.data,
        rows=options.rows,
    )


def add_heads(model, case):
    from liger_trainer import MedusaHeads
    from liger_trainer.medusa.heads import attach_heads

    heads = attach_heads(model, MedusaHeads.for_model(model, case["heads"], 1, case["tied"]))
    torch.manual_seed(1)
    for head in heads:
        torch.nn.init.normal_(head[0].linear.weight, std=0.02)
        torch.nn.init.normal_(head[0].linear.bias, std=0.02)


def unfused_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    """The loss of `LigerMedusaTrainer` from the logits of every head, as a trainer's `compute_loss`."""
    from liger_trainer.head.targets import head_targets

    def cross_entropy(logits, targets, ahead):
        rows, target = logits[:, :-ahead].flatten(0, 1), targets[:, :-ahead].flatten()
        return F.cross_entropy(rows.float(), target, reduction="sum")

    base = self.model
    targets = head_targets(inputs, len(base.medusa_head))
    rows = {name: value for name, value in inputs.items() if name != "labels"}
    with torch.set_grad_enabled(self.stage == 2):
        hidden = base.model(**rows, use_cache=False).last_hidden_state
    total = cross_entropy(base.lm_head(hidden), targets[0], 1) if self.stage == 2 else 0.0
    for k, head in enumerate(base.medusa_head, start=1):
        logits = (head.lm_head or base.lm_head)(head(hidden))
        total = total + COEFFICIENT[self.stage] * DECAY**k * cross_entropy(logits, targets[k], k + 1)
    return total / num_items_in_batch


def make_trainer(arm, case, options, callbacks):
    run = run_of(case, options)
    model = build(run)
    add_heads(model, case)
    rows, collator = sft_rows(run, model.config.vocab_size, tokenizer_of())
    common = dict(
        **training_fields(options, LOG),
        gradient_checkpointing=case["stage"] == 2 and not options.no_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        remove_unused_columns=False,
        train_sampling_strategy="random" if run.rows == "full" else "sequential",
    )
    if arm in (OURS, FP8):
        from datasets import Dataset

        from liger_trainer import LigerMedusaConfig, LigerMedusaTrainer

        args = LigerMedusaConfig(
            **common,
            medusa_num_heads=case["heads"],
            medusa_tied=case["tied"],
            medusa_stage=case["stage"],
            medusa_decay=DECAY,
            max_length=case["length"],
            dataset_kwargs={"skip_prepare_dataset": True},
            packing=run.rows == "packed",
            fp8=arm == FP8,
        )
        return counting(LigerMedusaTrainer)(
            model, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer_of(), callbacks=callbacks
        )
    from transformers import Trainer, TrainingArguments

    from liger_trainer import apply_liger

    if arm == PATCHED:
        apply_liger(model, {"fused_linear_cross_entropy": False})
    if case["stage"] == 1:
        model.requires_grad_(False)
        model.medusa_head.requires_grad_(True)
    trainer_class = counting(Trainer, compute_loss=unfused_loss, stage=case["stage"])
    return trainer_class(
        model, TrainingArguments(**common), train_dataset=rows, data_collator=collator, callbacks=callbacks
    )


def measure(arm, case, options):
    """Train, and return a row."""
    run = run_of(case, options)
    clock = clock_of(run)
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trainer = make_trainer(arm, case, options, [clock, *([profiler(run.skip)] if options.profile else [])])
    if arm == FP8:
        reset_peak()
    row, _ = timed_steps(trainer, run, clock)
    row |= static_memory(trainer.model, row["gib"])
    return row | {"losses": logged(trainer, "loss"), "grad_norms": logged(trainer, "grad_norm")}


def run_arm(options):
    """Run all cases of one arm and stage that `--todo` names in this process. Emit a row for each."""
    full = set()  # (heads, projection) that ran out of memory with shorter rows
    for case in json.loads(options.todo):
        row = {"arm": options.arm, "batch": options.batch, "rows": options.rows} | case
        shape = (case["heads"], case["tied"])
        if shape in full:
            emit(row | {"note": "out of memory with shorter rows"})
            continue
        try:
            emit(row | measure(options.arm, case, options))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            full.add(shape)
            emit(row | {"note": "out of memory"})
        release()


def flag(rows):
    """Compare each row's losses and gradient norms with ours of the same case, step by step.

    The limits allow for bf16 rounding.
    """
    ours = {key_of(row)[1:]: row for row in rows if row["arm"] == OURS and "losses" in row}
    for row in rows:
        row.pop("wrong", None)
        against = ours.get(key_of(row)[1:])
        if against is None or row["arm"] == OURS or "losses" not in row:
            continue
        times = 6 if row["arm"] == FP8 else 1
        wrong = difference(row, against, {"losses": 0.005 * times, "grad_norms": 0.03 * times, "step_tokens": 0})
        if wrong:
            row["wrong"] = wrong
        row["faster"] = against["tokens_per_s"] / row["tokens_per_s"]
        if row["above"]:
            row["less"] = 1 - against["above"] / row["above"]


COLUMNS = {
    "stage": ("stage", ""),
    "projection": ("heads", ""),
    "heads": ("K", ""),
    "length": ("length", ""),
    "rows": ("rows", ""),
    "arm": ("arm", ""),
    "tokens_per_s": ("tokens/s", ".0f"),
    "gib": ("peak GiB", ".1f"),
    "static": ("static", ".1f"),
    "above": ("above", ".1f"),
    "loss": ("loss", ".4f"),
    "faster": ("ours x faster", ".2f"),
    "less": ("ours less above", ".0%"),
    "note": ("", ""),
}


def show(rows):
    order = sorted(rows, key=lambda r: (r["stage"], not r["tied"], r["heads"], r["length"], ARMS.index(r["arm"])))
    printed = []
    for row in order:
        more = {"projection": "tied" if row["tied"] else "untied", "loss": row.get("losses", [None])[0]}
        more["rows"] = row.get("rows", "full")
        printed.append(row | more)
    print_rows(printed, COLUMNS)


def main(argv=None):
    parser = arguments(__doc__, "--arm", "--todo")
    parser.add_argument("--model", default="Llama-3-8B")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2], choices=(1, 2))
    parser.add_argument("--heads", type=int, nargs="+", default=[3, 5])
    parser.add_argument("--projection", nargs="+", default=["tied", "untied"], choices=("tied", "untied"))
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--steps", type=int, help=f"full: 10, more than {SKIP}; padded and packed: {STEPS['padded']}")
    parser.add_argument("--rows", choices=KINDS, default="full", help="padded and packed rows come from --data")
    parser.add_argument("--arms", nargs="+", default=[OURS, UNFUSED], choices=ARMS)
    parser.add_argument("--no-checkpointing", action="store_true", help="stage 2 without gradient checkpointing")
    parser.add_argument("--data", help=".npz or .json of token ids; random ids without it")
    parser.add_argument("--profile", action="store_true", help="print where the GPU time of two steps goes")
    parser.add_argument("--tiny", action="store_true", help="a model and rows that a CPU can do")
    parser.add_argument("--minutes", type=float, default=60, help="stop after so long, in the middle of a case too")
    options = parser.parse_args(argv)
    if options.tiny:
        options.model = "tiny"
        options.batch = 2
        options.lengths = [32, 64]
        options.heads = [2]
    if options.steps is None:
        options.steps = 10 if options.rows == "full" else STEPS[options.rows]
    if options.arm:
        return run_arm(options)
    check_steps(parser, options.steps, SKIP)
    if options.rows != "full" and not options.data:
        parser.error(f"--rows {options.rows} takes the rows of a file: name it with --data")
    record = Record("medusa", options.model.lower(), options.json, options.tiny, argv)
    end = time.monotonic() + options.minutes * 60
    rows = json.loads(Path(options.json).read_text())["rows"] if options.json and Path(options.json).exists() else []
    for stage in options.stages:
        for arm in options.arms:
            have = {key_of(row) for row in rows}
            todo = [case for case in cases_of(options) if case["stage"] == stage]
            asked = {"arm": arm, "batch": options.batch, "rows": options.rows}
            todo = [case for case in todo if key_of(asked | case) not in have]
            left = end - time.monotonic()
            if not todo or left < 0:
                continue
            for row in rows_from(arm, left, echo=options.profile, more=["--todo", json.dumps(todo)]):
                if "stage" not in row:  # the process ended early, and the remaining cases can run later
                    print(f"{arm}, stage {stage}: {row['note']}")
                    continue
                rows.append(row)
                flag(rows)
                record.write({"options": recorded(options), "rows": rows})
    flag(rows)
    show(rows)
    record.say_where()
    missing = len(options.arms) * len(cases_of(options)) - len(rows)
    if missing > 0:
        print(f"{missing} cases not run; start it again with --json {record.path or 'FILE'}")


if __name__ == "__main__":
    main()
