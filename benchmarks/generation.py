"""Time of a generated token: stock models, and models with our patches, by transformers' `generate`.

    python benchmarks/generation.py [--models Llama-3.2-1B Llama-3.2-3B] [--lora 16] [--batch 32] [--prompt 256]
        [--tokens 128] [--arms stock ours "ours, own code"]

Weights are random, in bf16, and all rows have as many tokens. `--lora` adds adapters in fp32 to every linear layer, and
calls the model under autocast, as TRL's trainers do. "ours, own code" is ours with the modules' own code in each call
that continues rows by a cache, which is what ours does on a CPU. Sampling is greedy, and tokens that differ from
stock's are counted: in bf16 an argmax of random weights may change with rounding.

`ms` is the median time of a call of `generate` over its tokens, which includes reading the prompt. Each arm runs in its
own process. `--models tiny` tries the script out on a CPU.
"""

import statistics
import time

import torch
from _measure import DEVICE, Record, arguments, synchronize, table
from _models import MODELS
from _processes import emit, rows_from
from _steps import Run, build

ARMS = ("stock", "ours", "ours, own code")


def always_in_own_code():
    """Let patched models run their modules' own code in calls that continue rows by a cache, on a GPU too."""
    from liger_trainer.head import calls

    calls._generates_on_a_cpu = lambda model, kwargs: calls.cache_of(kwargs) is not None


def patched(model, arm):
    """Return `model`, with the patches of `arm`."""
    if arm == "stock":
        return model
    from liger_trainer import apply_liger

    if arm == "ours, own code":
        always_in_own_code()
    apply_liger(model)
    return model


def one_arm(options):
    for name in options.models:
        model = build(Run(name, options.batch, options.prompt, layers=options.layers))
        vocab = model.config.vocab_size
        if options.lora:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(
                model, LoraConfig(r=options.lora, target_modules="all-linear", task_type="CAUSAL_LM")
            )
        model = patched(model, options.arm).eval()
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(2, vocab, (options.batch, options.prompt), generator=draw).to(DEVICE)
        times = []
        for _ in range(1 + options.rounds):  # the first compiles
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
            times.append(time.perf_counter() - start)
        ms = 1e3 * statistics.median(times[1:]) / options.tokens
        emit({"model": name, "arm": options.arm, "ms": ms, "first_tokens": written[:, options.prompt].tolist()})
        del model


def main():
    parser = arguments(__doc__, "--arm")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["Llama-3.2-1B", "Llama-3.2-3B"])
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--lora", type=int, help="rank of adapters on every linear layer")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens to generate")
    parser.add_argument("--rounds", type=int, default=3, help="calls on the clock")
    parser.add_argument("--timeout", type=float, default=300, help="seconds after which an arm is given up")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    options = parser.parse_args()
    if options.arm:
        return one_arm(options)
    case = f"{'lora' if options.lora else 'full'}-{options.batch}x{options.prompt}"
    record = Record("generation", case, options.json, DEVICE == "cpu")
    rows = []
    for arm in options.arms:
        rows += rows_from(arm, options.timeout)
        compare(rows)
        record.write({"options": vars(options), "rows": rows})
    columns = {"model": ("model", ""), "arm": ("", ""), "ms": ("ms a token", ".2f")}
    table(rows, columns | {"others": ("other first tokens", ""), "note": ("", "")})
    record.say_where()


def compare(rows):
    """Count in each row the first tokens that differ from stock's for the same model."""
    stock = {row["model"]: row["first_tokens"] for row in rows if row["arm"] == "stock" and "model" in row}
    for row in rows:
        if row.get("model") in stock:
            row["others"] = sum(a != b for a, b in zip(row["first_tokens"], stock[row["model"]], strict=True))


if __name__ == "__main__":
    main()
