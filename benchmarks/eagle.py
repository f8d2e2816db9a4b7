"""Samples/s and memory of training an EAGLE-3 drafter without logits, and of the same drafter with both logits.

    python benchmarks/eagle.py --json eagle.json
    python benchmarks/eagle.py --data rows.npz --rows padded --arms LigerEagleTrainer "both logits"
    python benchmarks/eagle.py --recompute --fp8
    python benchmarks/eagle.py --prompt 1024
    python benchmarks/eagle.py --tiny

eagle_loss.py measures the loss alone, with the losses of other trainers too.

`both logits` computes the loss as plain trainers of drafters do: the target's logits over the draft vocabulary, the
drafter's logits for each step, log_softmax of both in fp32, and the sum of q (log q - log p), with PyTorch's autograd.
Every token drafts, even without a target. Everything else is the same in both arms: the frozen model and its layers,
the drafter and its attention. Random rows only have ids of the draft vocabulary, so every token is a target. With
--prompt, the first tokens of a row have no label. Weights are random. The learning rate is 0, so every arm sees the
same weights at every step. Losses of all steps and gradient norms of logged steps are compared, and an arm that differs
is flagged.

The frozen model is bf16. The drafter is what the trainer makes of it in both arms: weights, gradients and the states of
the fused AdamW in fp32, and products in bf16 by autocast. With --recompute, backward recomputes each step of the
drafter in both arms, but not the logits of `both logits`. With --fp8, both arms hold the frozen model in FP8. Rows are
full, padded or packed (see training.py), and samples/s counts the rows that were trained on. `parts_ms` has the GPU's
time of each part of a step, and `parts_tflop` the products that ours needs for it. `static` is the memory of the
weights, plus gradients and both optimizer states of the trained ones; `above` is the peak minus that.
"""

import torch
from _arms import (
    check_steps,
    difference,
    logged,
    print_rows,
    reset_peak,
    run_arm,
    run_arms,
    static_memory,
    training_fields,
)
from _eagle_parts import PartTimes, parts_tflop, show_parts
from _measure import Record, arguments
from _rows import KINDS, sft_rows
from _steps import Run, build, clock_of, counting, timed_steps, tokenizer_of
from training import profiler

OURS, PLAIN = "LigerEagleTrainer", "both logits"
ARMS = (OURS, PLAIN)
SKIP = 3  # steps before the clock starts
LOG = 3  # steps between logs, which wait for the GPU; the first step is logged too


def logits_loss(
    drafter,
    rows,
    states,
    embedding,
    recompute,
    hidden,
    weight,
    target,
    row_weight,
    logit_scale,
    softcap,
    **_,
):
    """`liger_trainer.eagle.loss.drafter_loss` with all logits of target and drafter."""
    from liger_triton import HeadsLoss

    outputs = drafter(states, embedding, rows, len(target), recompute)
    valid = (target != -100) & drafter.t2d[target.clamp(min=0)]
    draft_ids = drafter.t2d.cumsum(0) - 1
    with torch.no_grad():
        log_q = (rows.of(hidden) @ weight[drafter.target_ids].T).float().log_softmax(-1)
        q = log_q.exp()
    losses, hits = [], []
    for k, output in enumerate(outputs, 1):
        log_p = drafter.lm_head(output).float().log_softmax(-1)
        ahead = torch.roll(q, -k, 0), torch.roll(log_q, -k, 0)
        kl = (ahead[0] * (ahead[1] - log_p)).sum(-1)
        losses.append(torch.where(valid[k - 1], kl, 0.0).sum())
        wanted = draft_ids[target[k - 1].clamp(min=0)]
        hits.append(((log_p.argmax(-1) == wanted) & valid[k - 1]).sum())
    losses = torch.stack(losses)
    return HeadsLoss((losses * row_weight).sum(), losses.detach(), torch.stack(hits), valid.sum(1))


def run_of(options):
    return Run(
        options.model,
        options.batch,
        options.length,
        steps=options.steps,
        skip=SKIP,
        layers=options.layers,
        data=options.data,
        rows=options.rows,
    )


def guessable(rows, vocab, options):
    """Random rows with `--draft-vocab` different ids at most, and without labels for the tokens of `--prompt`."""
    found = []
    for row in rows:
        ids = [i % options.draft_vocab * (vocab // options.draft_vocab) for i in row["input_ids"]]
        found.append({"input_ids": ids, "labels": [-100] * options.prompt + ids[options.prompt :]})
    return found


def make_trainer(arm, options, callbacks):
    from datasets import Dataset

    from liger_trainer import LigerEagleConfig, LigerEagleTrainer

    run = run_of(options)
    model = build(run)
    rows, _ = sft_rows(run, model.config.vocab_size, tokenizer_of())
    if options.data is None:
        rows = guessable(rows, model.config.vocab_size, options)
    args = LigerEagleConfig(
        **training_fields(options, LOG),
        activation_checkpointing=options.recompute,
        max_length=options.length,
        dataset_kwargs={"skip_prepare_dataset": True},
        packing=run.rows == "packed",
        train_sampling_strategy="random" if run.rows == "full" else "sequential",
        fp8=options.fp8,
        eagle_steps=options.eagle_steps,
        eagle_draft_vocab_size=options.draft_vocab,
        eagle_layers=options.eagle_layers,
    )
    torch.manual_seed(0)
    own = {} if arm == OURS else {"_batch_loss": staticmethod(logits_loss)}
    return counting(LigerEagleTrainer, **own)(
        model, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer_of(), callbacks=callbacks
    )


def measure(arm, options):
    """Train, and return a row."""
    run = run_of(options)
    clock = clock_of(run)
    trainer = make_trainer(arm, options, [clock, *([profiler(run.skip)] if options.profile else [])])
    reset_peak()
    parts = PartTimes(run.skip)
    parts.watch(trainer)
    row, _ = timed_steps(trainer, run, clock)
    if options.data is None:
        tokens = options.batch * options.length
        drafted = options.batch * (options.length - options.prompt)
        row["parts_tflop"] = parts_tflop(trainer.model, tokens, drafted, options.length, options.eagle_steps)
        row["parts_ms"] = parts.ms()
    row |= static_memory(trainer.model, row["gib"])
    return row | {
        "arm": arm,
        "samples_per_s": options.batch / row["ms"] * 1e3,
        "trained": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        "losses": logged(trainer, "loss"),
        "grad_norms": logged(trainer, "grad_norm"),
    }


def flag(rows):
    """Compare each row's losses and gradient norms with ours, step by step, with room for bf16 rounding."""
    ours = next((row for row in rows if row["arm"] == OURS and "losses" in row), None)
    for row in rows:
        row.pop("wrong", None)
        if ours is None or row is ours or "losses" not in row:
            continue
        wrong = difference(row, ours, {"losses": 0.005, "grad_norms": 0.03, "step_tokens": 0})
        if wrong:
            row["wrong"] = wrong
        row["faster"] = ours["samples_per_s"] / row["samples_per_s"]
        if row["gib"]:
            row["less"] = 1 - ours["gib"] / row["gib"]


COLUMNS = {
    "arm": ("arm", ""),
    "samples_per_s": ("samples/s", ".2f"),
    "tokens_per_s": ("tokens/s", ".0f"),
    "ms": ("ms a step", ".0f"),
    "gib": ("peak GiB", ".1f"),
    "static": ("static", ".1f"),
    "above": ("above", ".1f"),
    "first_loss": ("loss", ".4f"),
    "faster": ("ours x faster", ".2f"),
    "less": ("ours less peak", ".0%"),
    "note": ("", ""),
}


def show(rows):
    print_rows([row | {"first_loss": row.get("losses", [None])[0]} for row in rows], COLUMNS)


def parsed(argv=None):
    parser = arguments(__doc__, "--arm")
    parser.add_argument("--model", default="Llama-3-8B")
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--eagle-steps", type=int, default=7)
    parser.add_argument("--draft-vocab", type=int, default=32000)
    parser.add_argument("--prompt", type=int, default=0, help="first tokens of each random row, which have no label")
    parser.add_argument("--steps", type=int, default=12, help=f"training steps, more than {SKIP}")
    parser.add_argument("--rows", choices=KINDS, default="full", help="padded and packed rows come from --data")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--recompute", action="store_true", help="compute the drafter's steps again in backward")
    parser.add_argument("--fp8", action="store_true", help="hold the frozen model in FP8")
    parser.add_argument("--data", help=".npz or .json of token ids; random ids without it")
    parser.add_argument("--profile", action="store_true", help="print where the GPU time of two steps goes")
    parser.add_argument("--tiny", action="store_true", help="a model and rows that a CPU can do")
    parser.add_argument("--minutes", type=float, default=30, help="stop an arm after so long")
    options = parser.parse_args(argv)
    options.eagle_layers = None
    if options.tiny:
        options.model = "tiny"
        options.layers = 7
        options.batch = 2
        options.length = 48
        options.draft_vocab = 200
        options.eagle_steps = 3
        options.steps = 7
    check_steps(parser, options.steps, SKIP)
    if options.prompt and options.data:
        parser.error(f"--prompt is {options.prompt}, and the rows of --data have their own: remove one of them")
    if not 0 <= options.prompt < options.length - 1:
        parser.error(f"--prompt is {options.prompt}; expected less than the {options.length} tokens of a row, minus 1")
    if options.rows != "full" and not options.data:
        parser.error(f"--rows {options.rows} takes the rows of a file: name it with --data")
    return options


def main(argv=None):
    options = parsed(argv)
    if options.arm:
        run_arm(options, measure)
        return
    record = Record("eagle", options.model.lower(), options.json, options.tiny, argv)
    rows = run_arms(options, record, flag, echo=options.profile)
    show(rows)
    show_parts(rows)
    record.say_where()


if __name__ == "__main__":
    main()
