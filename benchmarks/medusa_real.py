"""Medusa heads or a drafter on a real model: how much more a forward pass yields on held-out prompts.

    python benchmarks/medusa_real.py --data alpaca_en_demo.json [--json FILE]
    python benchmarks/medusa_real.py --kind eagle --data alpaca_en_demo.json

The model answers nine tenths of the prompts greedily, and heads are trained on those answers: Medusa's, or with `--kind
eagle` an EAGLE-3 drafter that guesses as many tokens. They are measured on the other prompts, before and after
training, with the same seed, all in fp32. `--data` holds rows in the form that
`liger-trainer medusa-eval --prompts` takes.
"""

import random
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch
from _measure import DEVICE, Record, arguments, table
from _models import trained

from liger_trainer import (
    LigerEagleConfig,
    LigerEagleTrainer,
    LigerMedusaConfig,
    LigerMedusaTrainer,
    LigerMTPConfig,
    LigerMTPTrainer,
)
from liger_trainer.command.tools.heads import read_prompts
from liger_trainer.data.answers import answer, encode, end_tokens
from liger_trainer.eagle.evaluate import evaluate as evaluate_drafter
from liger_trainer.eagle.fresh import drafter_of
from liger_trainer.medusa.evaluate import evaluate
from liger_trainer.medusa.heads import heads_of


def split(prompts, seed):
    """(nine tenths of the prompts to train on, the others)."""
    order = list(range(len(prompts)))
    random.Random(seed).shuffle(order)
    cut = max(1, len(prompts) // 10)
    return [prompts[i] for i in sorted(order[cut:])], [prompts[i] for i in sorted(order[:cut])]


def answered(model, tokenizer, prompts, ends, options):
    """(rows of prompt and completion, how many answers of each kind). Leaves out cut and empty answers."""
    rows, counts = [], {"written": 0, "cut": 0, "empty": 0}
    for first in range(0, len(prompts), options.answer_batch):
        batch = prompts[first : first + options.answer_batch]
        new = answer(model, [encode(tokenizer, prompt) for prompt in batch], ends, options.max_new_tokens)
        for prompt, tokens in zip(batch, new, strict=True):
            text = tokenizer.decode(tokens[:-1], skip_special_tokens=True)
            if tokens[-1] not in ends:
                kind = "cut"
            else:
                kind = "written" if text.strip() else "empty"
            counts[kind] += 1
            if kind == "written":
                completion = text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
                rows.append({"prompt": prompt, "completion": completion})
    return rows, counts


def trainer_of(model, tokenizer, rows, options):
    """The trainer of a head of the kind `options.kind`. A model for `mtp` has an MTP head in its checkpoint."""
    from datasets import Dataset

    if options.kind == "eagle":
        config_class, trainer_class = LigerEagleConfig, LigerEagleTrainer
        own = {"eagle_steps": options.heads, "eagle_draft_vocab_size": options.draft_vocab}
    elif options.kind == "mtp":
        config_class, trainer_class = LigerMTPConfig, LigerMTPTrainer
        own = {"mtp_targets": options.targets}
    else:
        config_class, trainer_class = LigerMedusaConfig, LigerMedusaTrainer
        own = {
            "medusa_num_heads": options.heads,
            "medusa_tied": options.projection == "tied",
            "medusa_targets": options.targets,
        }
    args = config_class(
        output_dir=tempfile.mkdtemp(),
        max_length=1024,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.batch,
        learning_rate=options.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        bf16=False,
        seed=options.seed,
        report_to="none",
        save_strategy="no",
        logging_steps=20,
        logging_first_step=True,
        use_cpu=DEVICE == "cpu",
        disable_tqdm=True,
        gradient_checkpointing=False,
        **own,
    )
    return trainer_class(model, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)


def measured(model, prompts, ends, options):
    """The report on the heads that `model` has."""
    common = {"max_new_tokens": options.max_new_tokens, "batch_size": options.answer_batch}
    if options.kind == "eagle":
        return evaluate_drafter(model, drafter_of(model), prompts, ends, steps=options.heads, **common)
    return evaluate(model, heads_of(model), prompts, ends, **common)


def main(argv=None):
    parser = arguments(__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--data", required=True, help=".json or .jsonl of prompts")
    parser.add_argument("--rows", type=int, help="the first so many prompts only")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--answer-batch", type=int, default=256, help="prompts answered at once")
    parser.add_argument("--kind", default="medusa", choices=("medusa", "eagle"))
    parser.add_argument("--heads", type=int, default=3, help="tokens that are guessed for a pass")
    parser.add_argument("--draft-vocab", type=int, default=16384, help="of a drafter")
    parser.add_argument("--projection", default="tied", choices=("tied", "untied"))
    parser.add_argument("--targets", default="hard", choices=("hard", "soft"))
    parser.add_argument("--epochs", type=float, default=20)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)

    case = Path(options.model).name + ("-eagle" if options.kind == "eagle" else "")
    record = Record("medusa_real", case, options.json, argv=argv)
    start, seconds = time.perf_counter(), {}

    def lap(name):
        seconds[name] = time.perf_counter() - start - sum(seconds.values())
        print(f"{name}: {seconds[name]:.0f} s", flush=True)

    model, tokenizer = trained(options.model, torch.float32)
    model.to(DEVICE).eval()
    train, held_out = split(read_prompts(options.data, bool(tokenizer.chat_template), options.rows), options.seed)
    ends = end_tokens(model, tokenizer)  # read now, because Trainer.train keeps only the tokenizer's
    lap("load")
    rows, counts = answered(model, tokenizer, train, ends, options)
    print(f"{len(train)} prompts to train on: {counts}; {len(held_out)} held out")
    lap("answers")

    trainer = trainer_of(model, tokenizer, rows, options)

    unseen = [encode(tokenizer, prompt) for prompt in held_out]
    before = measured(trainer.model, unseen, ends, options)
    lap("evaluation before")
    trainer.train()
    lap(f"training, {trainer.state.global_step} steps")
    after = measured(trainer.model, unseen, ends, options)
    lap("evaluation after")

    print(f"\n{after}\n")
    compared = [
        {"what": f"head {k + 1}, accuracy", "before": before.accuracy[k], "after": after.accuracy[k]}
        for k in range(options.heads)
    ]
    compared += [{"what": "tokens a pass", "before": before.tokens_per_pass, "after": after.tokens_per_pass}]
    table(compared, {"what": ("", ""), "before": ("before", ".3f"), "after": ("after", ".3f")})
    print(f"{after.tokens_per_pass - 1:.0%} more tokens a forward pass")
    losses = {log["step"]: log["loss"] for log in trainer.state.log_history if "loss" in log}
    found = {"options": vars(options), "seconds": seconds, "answers": counts, "losses": losses}
    record.write(found | {"before": asdict(before), "after": asdict(after)})
    record.say_where()


if __name__ == "__main__":
    main()
