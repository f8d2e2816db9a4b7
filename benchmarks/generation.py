"""Time of a generated token: stock models, and models with our patches, by transformers' `generate`.

    python benchmarks/generation.py [--models Llama-3.2-1B Llama-3.2-3B] [--lora 16] [--batch 32] [--prompt 256]
        [--tokens 128] [--arms stock ours "ours, kernels"]

Weights are random, in bf16, and all rows have as many tokens. `--lora` adds adapters in fp32 to every linear layer, and
calls the model under autocast, as TRL's trainers do. Ours runs the modules' own code in each call that continues rows
by a cache; "ours, kernels" runs our code there too. Sampling is greedy, and first tokens that differ from stock's are
counted: in bf16 an argmax of random weights may change with rounding.

All arms of a model are in one process and take turns, because the host's speed, which decides here, changes from one
process to the next. `ms` is the median time of a call of `generate` over its tokens, which includes reading the prompt,
and `fastest_ms` that of the fastest call. `--models tiny` tries the script out on a CPU.
"""

import contextlib
import statistics
import time

import torch
from _measure import DEVICE, Record, arguments, synchronize, table
from _models import MODELS
from _processes import release
from _steps import Run, build

ARMS = ("stock", "ours", "ours, kernels")


@contextlib.contextmanager
def with_kernels():
    """Let patched models run our code in calls that continue rows by a cache too."""
    from liger_trainer.head import calls

    rule = calls._continues_by_a_cache
    calls._continues_by_a_cache = lambda kwargs: False
    try:
        yield
    finally:
        calls._continues_by_a_cache = rule


def model_of(name, options, is_patched):
    """A model of random weights, the same in each call."""
    model = build(Run(name, options.batch, options.prompt, layers=options.layers))
    if options.lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(r=options.lora, target_modules="all-linear", task_type="CAUSAL_LM"))
    if is_patched:
        from liger_trainer import apply_liger

        apply_liger(model)
    return model.eval()


def generate(model, ids, options):
    """(seconds, tokens) of one call."""
    synchronize()
    start = time.perf_counter()
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16, enabled=bool(options.lora)):
        written = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=options.tokens,
            min_new_tokens=options.tokens,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
        )
    synchronize()
    return time.perf_counter() - start, written[:, options.prompt :]


def rows_of(name, options):
    """A row for each arm of a model."""
    stock = model_of(name, options, is_patched=False)
    ours = model_of(name, options, is_patched=True)
    draw = torch.Generator().manual_seed(0)
    shape = options.batch, options.prompt
    ids = torch.randint(2, stock.config.vocab_size, shape, generator=draw).to(DEVICE)
    times = {arm: [] for arm in options.arms}
    first_tokens = {}
    for turn in range(1 + options.rounds):
        for arm in options.arms:
            model = stock if arm == "stock" else ours
            with with_kernels() if arm == "ours, kernels" else contextlib.nullcontext():
                seconds, written = generate(model, ids, options)
            first_tokens[arm] = written[:, 0].tolist()
            if turn:  # the first compiles
                times[arm].append(1e3 * seconds / options.tokens)
    for arm in options.arms:
        row = {"model": name, "arm": arm, "ms": statistics.median(times[arm]), "fastest_ms": min(times[arm])}
        yield row | {"call_ms": times[arm], "first_tokens": first_tokens[arm]}


def main():
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["Llama-3.2-1B", "Llama-3.2-3B"])
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--lora", type=int, help="rank of adapters on every linear layer")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens to generate")
    parser.add_argument("--rounds", type=int, default=5, help="calls of each arm on the clock")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    options = parser.parse_args()
    case = f"{'lora' if options.lora else 'full'}-{options.batch}x{options.prompt}"
    record = Record("generation", case, options.json, DEVICE == "cpu")
    rows = []
    for name in options.models:
        rows += rows_of(name, options)
        release()
        compare(rows)
        record.write({"options": vars(options), "rows": rows})
    columns = {"model": ("model", ""), "arm": ("", ""), "ms": ("ms a token", ".2f"), "fastest_ms": ("fastest", ".2f")}
    table(rows, columns | {"others": ("other first tokens", "")})
    record.say_where()


def compare(rows):
    """Count in each row the first tokens that differ from stock's for the same model."""
    stock = {row["model"]: row["first_tokens"] for row in rows if row["arm"] == "stock" and "model" in row}
    for row in rows:
        if row.get("model") in stock:
            row["others"] = sum(a != b for a, b in zip(row["first_tokens"], stock[row["model"]], strict=True))


if __name__ == "__main__":
    main()
