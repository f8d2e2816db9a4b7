"""The time of one forward and backward pass of few tokens, which the host sets, not the GPU.

    python benchmarks/host.py
        [--cases SmolLM2-135M:1x256 Llama-3.2-1B:1x256:lora] [--arms stock ours] [--profile]

A case is the shape of a model, rows x tokens, and `lora` for LoRA of rank 16 on every linear layer. The model computes
its loss from labels in bf16, as a Trainer calls it, without an optimizer. A time is the median of the passes, waiting
for each; the second time ends when the last kernel is launched. Every arm runs in its own process.
"""

import statistics
import time

import torch
from _measure import DEVICE, Record, arguments, synchronize, table
from _models import MODELS
from _processes import emit, rows_from
from _steps import Run, build

CASES = (
    "SmolLM2-135M:1x256",
    "SmolLM2-135M:4x1024",
    "Llama-3.2-1B:1x1024",
    "SmolLM2-135M:1x256:lora",
    "Llama-3.2-1B:1x1024:lora",
)
ARMS = ("stock", "Liger", "ours")


def model_of(arm, name, lora):
    if arm == "Liger":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    model = build(Run(name, 1, 1))
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    if arm == "ours":
        from liger_trainer import apply_liger

        apply_liger(model)
    return model.train()


def pass_of(model, rows, tokens):
    """A function that runs one forward and backward pass."""
    vocab = model.config.vocab_size
    ids = torch.randint(0, vocab, (rows, tokens), device=DEVICE)
    parameters = [p for p in model.parameters() if p.requires_grad]

    def run():
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, use_cache=False).loss
        loss.backward()
        for p in parameters:
            p.grad = None

    return run


def one_arm(arm, cases, profile):
    for case in cases:
        name, shape, *lora = case.split(":")
        rows, tokens = map(int, shape.split("x"))
        run = pass_of(model_of(arm, name, bool(lora)), rows, tokens)
        for _ in range(8):
            run()
        launched, whole = [], []
        for _ in range(40 if DEVICE == "cuda" else 3):
            synchronize()
            start = time.perf_counter()
            run()
            launched.append(time.perf_counter() - start)
            synchronize()
            whole.append(time.perf_counter() - start)
        emit(
            {
                "arm": arm,
                "case": case,
                "ms": 1e3 * statistics.median(whole),
                "host_ms": 1e3 * statistics.median(launched),
            }
        )
        if profile:
            print_profile(run)


def print_profile(run, passes=20):
    """Print the Python functions that a pass spends its time in. The profiler itself makes them slower."""
    import cProfile
    import pstats

    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(passes):
        run()
    synchronize()
    profiler.disable()
    pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(45)


def main():
    parser = arguments(__doc__, "--arm")
    parser.add_argument("--cases", nargs="*", default=CASES, help=f"shapes: {', '.join(MODELS)}")
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=ARMS)
    parser.add_argument("--profile", action="store_true", help="print where Python's time goes")
    options = parser.parse_args()
    if options.arm:
        return one_arm(options.arm, options.cases, options.profile)
    record = Record("host", "passes", options.json, DEVICE == "cpu")
    rows = []
    for arm in options.arms:
        rows += rows_from(arm, 300, echo=options.profile)
        record.write({"options": vars(options), "rows": rows})
    rows.sort(key=lambda row: options.cases.index(row["case"]) if "case" in row else -1)
    table(
        rows,
        {
            "case": ("case", ""),
            "arm": ("model", ""),
            "ms": ("ms", ".1f"),
            "host_ms": ("host ms", ".1f"),
            "note": ("", ""),
        },
    )
    record.say_where()


if __name__ == "__main__":
    main()
