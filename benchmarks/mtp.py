"""The cost of an MTP head: trained together with the model (SFT), and alone on the frozen model.

    python benchmarks/mtp.py
    python benchmarks/mtp.py --arms "LigerMTPTrainer, labels" "both logits, labels"
    python benchmarks/mtp.py --layers 16
    python benchmarks/mtp.py --tiny

The model has the shape of Qwen3.5-9B with attention in every layer, so that no package for its other layers is needed,
and random weights. Its head is one more layer, a product of two hidden states in front of it, and the model's LM head.
Weights, gradients and the fused AdamW are bf16, and fp32 for the head on the frozen model. The learning rate is 0, so
that the losses of all arms can be compared.

With SFT all of the model is trained. `slower` is the cost in time of a step, and `more` the cost in GiB of the peak.
`head_static` is the head's part of it: weights, gradients and two states of AdamW. `head_tflop` are its products, and
`tflop` the model's, in a step.

On the frozen model the head learns from the labels, or from the model's distribution (`mtp_targets: soft`). "both
logits" is the same trainer with a plain loss: the logits of the model, which a plain forward pass computes whether they
are used or not, and of the head, for all rows, in PyTorch. `speedup` is against that arm, and `less` are the GiB that
its peak is higher.
"""

import tempfile
from functools import partial
from pathlib import Path

import torch
from _arms import (
    check_steps,
    difference,
    logged,
    print_rows,
    reset_peak,
    run_arm,
    run_arms,
    static_bytes,
    static_memory,
    training_fields,
)
from _measure import Record, arguments
from _rows import sft_rows
from _steps import Run, build, clock_of, counting, timed_steps, tokenizer_of
from training import profiler

WITHOUT, WITH = "LigerSFTTrainer", "LigerSFTTrainer + train_mtp"
WITH_SOFT = "LigerSFTTrainer + train_mtp, model's distribution"
PLAIN = {  # the same head on the frozen model, with a plain loss
    "LigerMTPTrainer, labels": "both logits, labels",
    "LigerMTPTrainer, model's distribution": "both logits, model's distribution",
}
ALONE = (*PLAIN, *PLAIN.values())
ARMS = (WITHOUT, WITH, WITH_SOFT, *ALONE)
# Relative. Plain logits are rounded to bf16 as ours are, but summed in another order.
CLOSE = {"labels": 1e-3, "model's distribution": 1e-2}
SKIP = 3  # steps before the clock starts
LOG = 3


def give_head(model, folder):
    """Write a checkpoint that has the config and an MTP head alone, and name it as the model's base."""
    from safetensors.torch import save_file

    size = model.config.hidden_size
    dtype = model.dtype
    torch.manual_seed(1)
    tensors = {f"mtp.layers.0.{name}": t.detach().cpu() for name, t in model.model.layers[0].state_dict().items()}
    tensors["mtp.fc.weight"] = (0.02 * torch.randn(size, 2 * size)).to(dtype)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{name}.weight"] = torch.zeros(size, dtype=dtype)
    model.config.mtp_num_hidden_layers = 1
    model.config.save_pretrained(folder)
    save_file({n: t.contiguous() for n, t in tensors.items()}, Path(folder, "model.safetensors"), {"format": "pt"})
    model.name_or_path = folder
    model.config._name_or_path = folder


def is_soft(arm):
    return arm.endswith("model's distribution")


def plain_loss(head, rows, hidden, weight, target, soft, logit_scale, softcap, **_):
    """`TrainedPredictor._head_loss` with all logits of the model and of the head. `head` is a `TrainedPredictor`."""
    from liger_trainer.mtp.predictor import predict
    from liger_triton import HeadsLoss

    embedding = head._model.get_input_embeddings().weight
    states = rows.of(hidden)
    guessed = predict(head.predictor, states, embedding, rows, head._by_rows)
    logits = states @ weight.T
    log_p = (guessed @ weight.T).float().log_softmax(-1)
    valid = target[0] != -100
    labels = target[0].clamp(min=0)
    if soft:
        log_q = logits.float().log_softmax(-1).roll(-1, 0)
        losses = (log_q.exp() * (log_q - log_p)).sum(-1)
    else:
        losses = -log_p.gather(1, labels[:, None])[:, 0]
    loss = torch.where(valid, losses, 0.0).sum()
    hits = ((log_p.argmax(-1) == labels) & valid).sum()
    return HeadsLoss(loss, loss.detach()[None], hits[None], valid.sum()[None])


def run_of(options):
    return Run(options.model, options.batch, options.length, steps=options.steps, skip=SKIP, layers=options.layers)


def make_trainer(arm, options, callbacks):
    from datasets import Dataset

    from liger_trainer import LigerMTPConfig, LigerMTPTrainer, LigerSFTConfig, LigerSFTTrainer

    alone = arm in ALONE
    config_class, trainer_class = (LigerMTPConfig, LigerMTPTrainer) if alone else (LigerSFTConfig, LigerSFTTrainer)
    run = run_of(options)
    model = build(run)
    give_head(model, tempfile.mkdtemp())
    rows, _ = sft_rows(run, model.config.vocab_size, tokenizer_of())
    args = config_class(
        **training_fields(options, LOG),
        activation_checkpointing=options.checkpointing,
        max_length=options.length,
        dataset_kwargs={"skip_prepare_dataset": True},
        train_mtp=arm in (WITH, WITH_SOFT),
        mtp_targets="soft" if is_soft(arm) else "hard",
    )
    trainer = counting(trainer_class)(
        model, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer_of(), callbacks=callbacks
    )
    if arm in PLAIN.values():
        trainer._head._head_loss = partial(plain_loss, trainer._head, soft=is_soft(arm))
    return trainer


def tflop_of(model, tokens, length, arm):
    """(TFLOP of the products of a step without the head, and of the head's)."""
    config = model.config
    per_layer = sum(p.numel() for p in model.model.layers[0].parameters() if p.ndim == 2)
    attention = 6 * length * config.num_attention_heads * config.head_dim
    lm_head = config.vocab_size * config.hidden_size
    whole = config.num_hidden_layers * (6 * per_layer + attention) + 6 * lm_head
    if arm in ALONE:  # a forward pass, and the model's logits where they are the targets
        whole = config.num_hidden_layers * (6 * per_layer + attention) / 3
    if is_soft(arm):
        whole += 2 * lm_head
    # The head gives nothing back to the LM head's weight, and fc gives nothing to the hidden states.
    head = 6 * per_layer + attention + 4 * 2 * config.hidden_size**2 + 4 * lm_head
    return whole * tokens / 1e12, head * tokens / 1e12


def measure(arm, options):
    """Train, and return a row."""
    run = run_of(options)
    clock = clock_of(run)
    trainer = make_trainer(arm, options, [clock, *([profiler(run.skip)] if options.profile else [])])
    reset_peak()
    row, _ = timed_steps(trainer, run, clock)
    model = trainer.model
    head = 0.0 if arm == WITHOUT else static_bytes(model.mtp) / 2**30
    whole, of_head = tflop_of(model, options.batch * options.length, options.length, arm)
    row |= static_memory(model, row["gib"])
    return row | {
        "arm": arm,
        "head_static": head,
        "tflop": whole,
        "head_tflop": 0.0 if arm == WITHOUT else of_head,
        "losses": logged(trainer, "loss"),
        "mtp_losses": logged(trainer, "mtp_loss"),
    }


def flag(rows):
    """Compare the losses of the arms, which are the same to a rounding, and note what the head costs or saves."""
    by_arm = {row["arm"]: row for row in rows if "losses" in row}
    without = by_arm.get(WITHOUT)
    for arm in (WITH, WITH_SOFT):
        row = by_arm.get(arm)
        if row is None or without is None:
            continue
        compare(row, "losses", without, 1e-4)
        row["slower"] = row["ms"] / without["ms"] - 1
        if row["gib"]:
            row["more"] = row["gib"] - without["gib"]
    for arm, plain in PLAIN.items():
        row, wanted = by_arm.get(arm), by_arm.get(plain)
        if row is None or wanted is None:
            continue
        compare(row, "mtp_losses", wanted, CLOSE[arm.partition(", ")[2]])
        row["speedup"] = wanted["ms"] / row["ms"]
        if row["gib"]:
            row["less"] = wanted["gib"] - row["gib"]


def compare(row, name, wanted, close):
    """Mark `row` as wrong if its losses `name` are not the ones of the row `wanted`."""
    wrong = difference(row, wanted, {name: close}, called=wanted["arm"])
    if wrong:
        row["wrong"] = wrong


COLUMNS = {
    "arm": ("arm", ""),
    "tokens_per_s": ("tokens/s", ".0f"),
    "ms": ("ms a step", ".1f"),
    "gib": ("peak GiB", ".2f"),
    "above": ("above", ".2f"),
    "slower": ("slower", ".1%"),
    "more": ("more GiB", ".2f"),
    "head_static": ("the head's own", ".2f"),
    "speedup": ("speedup", ".2f"),
    "less": ("less GiB", ".2f"),
    "note": ("", ""),
}


def parsed(argv=None):
    parser = arguments(__doc__, "--arm")
    parser.add_argument("--model", default="Qwen3.5-9B-attention")
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=12, help=f"training steps, more than {SKIP}")
    parser.add_argument("--checkpointing", action="store_true", help="activation_checkpointing")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--profile", action="store_true", help="print where the GPU time of two steps goes")
    parser.add_argument("--tiny", action="store_true", help="a model and rows that a CPU can do")
    parser.add_argument("--minutes", type=float, default=10, help="stop an arm after so long")
    options = parser.parse_args(argv)
    if options.tiny:
        options.model, options.layers, options.batch, options.length, options.steps = "tiny-attention", 2, 2, 48, 6
    check_steps(parser, options.steps, SKIP)
    return options


def main(argv=None):
    options = parsed(argv)
    if options.arm:
        run_arm(options, measure)
        return
    record = Record("mtp", options.model.lower(), options.json, options.tiny, argv)
    rows = run_arms(options, record, flag, echo=options.profile)
    print_rows(rows, COLUMNS)
    record.say_where()


if __name__ == "__main__":
    main()
