"""Training steps of ours and of others: tokens/s, peak memory, model FLOP utilisation and the losses of the first
steps.

    python benchmarks/training.py --model Llama-3.2-1B --batch 16 --length 1024 --data rows.npz
        [--checkpointing [--offload]] [--lora 16 [--nf4 | --mxfp4]] [--no_autocast] [--no_waits]
        [--arms LigerTrainer "Trainer + compile" "LigerTrainer + compile"]
    python benchmarks/training.py --trainer dpo --model Llama-3.2-1B --batch 4 --length 1024 --data pairs.npz
    python benchmarks/training.py --model Llama-3.2-1B --batch 8 --length 2048 --rows padded --data rows.npz

It is full fine-tuning of random weights in bf16 with fused AdamW, or LoRA on every linear layer (on attention in
mixtures of experts). By default rows have no padding: the token ids of `--data`, or random ones, are joined and cut
into rows. Every arm runs in its own process, because Liger's patches affect the whole process. An arm that fails is a
row that says why. Losses and rows that differ from the stock trainer's are flagged.

`--rows padded` takes the rows of `--data` as they come, each cut to `--length`, `--batch` of them a step, padded to the
longest; `--rows packed` packs them as TRL does under `packing=True`. Labels are on all tokens. tokens/s and MFU then
count only real tokens, in the batches trained on while the clock ran. Half of the steps come before the clock and train
on the same batches.

`--data` is an .npz with a flat array `ids`, and `offsets` (rows + 1) too for real rows, or a .json/.jsonl file that
`datasets` reads, with a column `input_ids`. For DPO it is an .npz made by `preferences.py`, or the .json that
`preferences.py` takes; its texts are replaced by about as many random ids. `--batch` then counts pairs, and `--length`
the tokens of each sequence. The reference model is computed on the fly, and under "DPOTrainer + Liger" it has Liger's
layers too. `scaling.py` finds the longest context that fits.

With `--optimizer_in_backward`, our trainers step each weight in the backward pass, and no trainer clips gradients. The
arm "LigerTrainer - in_backward" is ours with the ordinary step. With `--auto`, "LigerTrainer - host" is ours without
host memory.

Each row has the memory by kind of tensor (`_memory_kinds.py`). For full rows, if every layer attends to all earlier
tokens, it also has the share of a step that products and attention need: products at the rate of the
largest, causal attention at the rate of PyTorch's forward and backward pass at this length (above 65,536 tokens at the
rate there), both measured in the same run. `share` is without, and `share_recomputed` with, a second forward pass of
all layers, which a step with --checkpointing computes. One step takes minutes for a long row:

    python benchmarks/training.py --model Llama-3-8B --lora 32 --nf4 --checkpointing --offload --batch 1
        --length 131072 --gpu_memory 24 --skip 1 --steps 2 --arms LigerSFTTrainer --timeout 560

With `--skip 0` the first step is on the clock too, with what it compiles and allocates. `--layers` cuts the model.

`--config_file configs/fsdp2.yaml --processes 2` runs every arm through `accelerate launch`. Batch, tokens/s and memory
are then per process. Under context parallelism the processes share each row, and its tokens/s too.
"""

import importlib.util
import os
import time

import torch
from _measure import DEVICE, Record, arguments, attention_ms, ceilings, table, with_rounded_losses
from _models import MODELS
from _processes import emit, rows_from
from _rows import KINDS
from _steps import ARMS, Run, check_arms, flag_losses, flag_tokens, train

LORA_ARMS = ("LigerSFTTrainer", "LigerSFTTrainer - varlen", "SFTTrainer", "SFTTrainer + Liger")
PROFILED = 3  # steps under the profiler
STEPS = {"full": 14, "padded": 32, "packed": 32}


def profiler(skip):
    """A callback that profiles two steps after `skip` + 1, and prints their slowest kernels and where the GPU waits.

    The step before these two runs under PyTorch's profiler too. Starting it waits for the GPU, so in that step the host
    lacks the head start that it has in training.
    """
    from torch.profiler import ProfilerActivity, record_function
    from torch.profiler import profile as torch_profile
    from transformers import TrainerCallback

    begin = "the first step that counts"

    def gaps(events, longest=12):
        """Print where the GPU waits: the longest times from the end of all earlier kernels to the start of the next.

        With each comes what the host did meanwhile: calls of PyTorch and CUDA without the calls inside them.
        """
        (since,) = [event.time_range.start for event in events if event.name == begin]
        on_gpu = [e for e in events if e.device_type.name == "CUDA" and e.time_range.start > since and e.name != begin]
        calls = [event for event in events if event.device_type.name == "CPU" and not event.cpu_children]
        spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in on_gpu)
        found = []
        end = spans[0][1]
        before = spans[0][2]
        for start, stop, name in spans:
            if start > end:
                found.append((start - end, end, before[:60], name[:60]))
            if stop > end:
                end, before = stop, name
        total = sum(gap for gap, *_ in found)
        print(f"GPU idle {total / 2e3:.1f} ms a step of {(end - spans[0][0]) / 2e3:.1f}; the longest, in us:")
        for gap, since, before, after in sorted(found, reverse=True)[:longest]:
            print(f"  {gap:8.0f}  after {before}  before {after}")
            print(f"            {meanwhile(calls, since, since + gap)}")

    def meanwhile(calls, since, until, most=4):
        """Return the `most` longest calls between two times, by name, with their us in that time."""
        times = {}
        for call in calls:
            inside = min(call.time_range.end, until) - max(call.time_range.start, since)
            if inside > 0:
                times[call.name] = times.get(call.name, 0) + inside
        ranked = sorted(times.items(), key=lambda pair: -pair[1])[:most]
        named = [f"{name[:40]} {us:.0f}" for name, us in ranked]
        return ", ".join([*named, f"in all calls {sum(times.values()):.0f}"])

    class Profiler(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == skip:
                self.profiler = torch_profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
                self.profiler.__enter__()
            if state.global_step == skip + 1:
                with record_function(begin):
                    pass
            if state.global_step == skip + PROFILED:
                torch.cuda.synchronize()
                self.profiler.__exit__(None, None, None)
                gaps(self.profiler.events())
                for order, rows in (("self_cuda_time_total", 45), ("self_cpu_time_total", 15)):
                    print(f"{PROFILED} steps, by {order}:")
                    print(self.profiler.key_averages().table(sort_by=order, row_limit=rows, max_name_column_width=90))

    return Profiler()


def one_arm(options):
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        if options.gpu_memory is not None:
            total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, options.gpu_memory * 2**30 / total))
    run = Run(
        options.model,
        options.batch,
        options.length,
        options.trainer,
        options.steps,
        data=options.data,
        checkpointing=options.checkpointing,
        auto=options.auto,
        memory_budget=options.memory_budget,
        optimizer_in_backward=options.optimizer_in_backward,
        lora=options.lora,
        lora_experts=options.lora_experts,
        nf4=options.nf4,
        mxfp4=options.mxfp4,
        offload=options.offload,
        workers=4 if DEVICE == "cuda" else 0,
        autocast=not options.no_autocast,
        waits=not options.no_waits,
        processes=options.processes,
        rows=options.rows,
        skip=skip_of(options),
        layers=options.layers,
        prompt=options.prompt,
    )
    emit(train(options.arm, run, [profiler(run.skip + 1)] if options.profile else []))
    if options.processes > 1:
        time.sleep(0.5)  # as at the end of liger_trainer/command/run/train.py


def skip_of(options):
    """Steps before the clock starts. For real rows half of them, which train on the other half's batches."""
    if options.skip is not None:
        return options.skip
    return Run.skip if options.rows == "full" else (options.steps + 1) // 2


def default_arms(options):
    arms = LORA_ARMS if options.lora and options.trainer == "sft" else ARMS[options.trainer]
    left_out = ("compile", "fp8", "rowwise", "float8") + ("varlen",) * (options.rows == "full")
    is_short = options.rows == "full" and options.prompt <= Run.prompt  # too short to be shared
    left_out += ("shared",) if is_short else ()
    left_out += () if options.optimizer_in_backward else ("in_backward",)
    left_out += () if options.auto else ("host",)
    return [arm for arm in arms if not arm.endswith(left_out)]


def case_of(options):
    """The folder of the record."""
    parts = [options.trainer, options.model.lower()] + [f"{options.layers}-layers"] * bool(options.layers)
    parts += [f"{options.batch}x{options.length}"]
    parts += [options.rows] * (options.rows != "full")
    parts += [f"prompt{options.prompt}"] * (options.prompt != Run.prompt)
    parts += ["checkpointing"] * options.checkpointing + [f"lora{options.lora}"] * bool(options.lora)
    parts += ["nf4"] * options.nf4 + ["mxfp4"] * options.mxfp4 + ["offload"] * options.offload
    parts += ["experts"] * options.lora_experts
    parts += ["no_autocast"] * options.no_autocast
    if options.auto:
        parts.append("auto" if options.memory_budget is None else f"auto-{options.memory_budget:g}gib")
    parts += [f"of-{options.gpu_memory:g}gib"] if options.gpu_memory is not None else []
    has_rule = MODELS[options.model][0].startswith("qwen3_5")
    parts += ["without-fla"] * (has_rule and importlib.util.find_spec("fla") is None)
    parts += ["optimizer_in_backward"] * options.optimizer_in_backward + ["no_waits"] * options.no_waits
    if options.config_file:
        parts += [os.path.splitext(os.path.basename(options.config_file))[0], f"x{options.processes}"]
    return "-".join(parts)


def attention_of(options):
    """[ms of forward, of forward and backward] of one layer's attention; None if layers differ."""
    shape = MODELS[options.model][1]
    if options.rows != "full" or options.trainer != "sft" or options.processes > 1 or "sliding_window" in shape:
        return None
    heads = shape["num_attention_heads"]
    head_dim = shape.get("head_dim", shape["hidden_size"] // heads)
    return attention_ms(options.batch, options.length, heads, shape["num_key_value_heads"], head_dim)


def shares(row, options, rate, attention):
    """The share of a step that its products and its attention need.

    It is given without and with a second forward pass of all layers. The second is None unless all are recomputed.
    """
    tokens = options.batch * options.length
    once = 1e3 * tokens * row["flop_per_token_of_products"] / rate + row["layers"] * attention[1]
    again = 1e3 * tokens * row["flop_per_token_of_layers_forward"] / rate + row["layers"] * attention[0]
    all_again = options.checkpointing and not options.auto
    return {"share": once / row["ms"], "share_recomputed": (once + again) / row["ms"] if all_again else None}


COUNTED = "tokens without padding, of the batches trained on while the clock ran"
COLUMNS = {
    "arm": ("trainer", ""),
    "tokens_per_s": ("tokens/s", ".0f"),
    "gib": ("peak GiB", ".1f"),
    "mfu": ("MFU %", ".1f"),
    "share": ("share", ".3f"),
    "share_recomputed": ("recomputed", ".3f"),
    "padding": ("padding", ".0%"),
    "losses": ("loss: step 1, means of 2-5, 6-10", ""),
    "note": ("", ""),
}


def make_parser():
    parser = arguments(__doc__, "--arm")
    parser.add_argument("--trainer", choices=ARMS, default="sft")
    parser.add_argument("--model", choices=MODELS, default="Llama-3.2-1B")
    parser.add_argument("--batch", type=int, default=16, help="rows, or pairs for DPO")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, help="; ".join(f"{kind}: {steps}" for kind, steps in STEPS.items()))
    parser.add_argument("--skip", type=int, help="steps before the clock starts, where rows are full (default 4)")
    parser.add_argument("--layers", type=int, help="cut the model to so many")
    parser.add_argument("--prompt", type=int, default=Run.prompt, help="tokens of the prompts of random pairs")
    parser.add_argument("--data")
    parser.add_argument("--rows", choices=KINDS, default="full", help="for DPO full or padded")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--auto", action="store_true", help="with --checkpointing: ours choose what they recompute")
    parser.add_argument("--memory_budget", type=float, help="with --auto: GiB")
    parser.add_argument("--gpu_memory", type=float, help="GiB that PyTorch's allocator may take, for every trainer")
    parser.add_argument(
        "--optimizer_in_backward", action="store_true", help="ours step weights in the backward pass, and none clips"
    )
    parser.add_argument("--no_waits", action="store_true", help="non_blocking=True, logging_nan_inf_filter=False")
    parser.add_argument("--lora", type=int, nargs="?", const=16, help="rank (16 if not given)")
    parser.add_argument("--nf4", action="store_true", help="with --lora: the frozen layers in 4 bits (bitsandbytes)")
    parser.add_argument("--mxfp4", action="store_true", help="with --lora and gpt-oss: the experts in 4 bits")
    parser.add_argument(
        "--offload", action="store_true", help="with --checkpointing: ours have layers' inputs on the host"
    )
    parser.add_argument("--lora_experts", action="store_true", help="with --lora: on the parameters of experts too")
    parser.add_argument("--no_autocast", action="store_true", help="bf16=False: the model's own dtypes, no autocast")
    parser.add_argument("--arms", nargs="*", help="; ".join(f"{k}: {', '.join(v)}" for k, v in ARMS.items()))
    parser.add_argument("--timeout", type=float, default=300, help="seconds after which an arm is given up")
    parser.add_argument("--config_file", help="of accelerate, to launch with")
    parser.add_argument("--processes", type=int, default=1, help="with --config_file")
    parser.add_argument("--profile", action="store_true", help="print where the time of two steps goes")
    return parser


def check(parser, options):
    """End with an error if options contradict each other. Sets `steps` if it is not given."""
    if options.steps is None:
        options.steps = STEPS[options.rows]
    if options.steps <= skip_of(options):
        least = skip_of(options) + 1 if options.rows == "full" else 2
        parser.error(f"--steps is {options.steps}; the clock starts after {skip_of(options)}, so take at least {least}")
    if options.profile and options.steps <= skip_of(options) + PROFILED:
        parser.error(f"--steps is {options.steps}; take at least {skip_of(options) + PROFILED + 1} with --profile")
    if options.rows != "full" and not options.data:
        parser.error(f"--rows {options.rows} takes the rows of a file: name it with --data")
    if options.skip is not None and (options.skip < 0 or options.rows != "full"):
        parser.error(f"--skip is {options.skip}; expected 0 or more, and --rows full")
    if options.auto > options.checkpointing or (options.memory_budget is not None) > options.auto:
        parser.error("--auto needs --checkpointing, for the other trainers, and --memory_budget needs --auto")
    if (options.nf4 or options.mxfp4) > bool(options.lora) or options.offload > options.checkpointing:
        parser.error("--nf4 and --mxfp4 need --lora, and --offload needs --checkpointing")
    if options.rows == "packed" and options.trainer == "dpo":
        parser.error("--rows packed is for --trainer sft: TRL's DPOTrainer does not pack. Take --rows padded")
    if options.processes > 1 and not options.config_file:
        parser.error(f"--processes is {options.processes}; it needs the --config_file of accelerate")


def launcher_of(options):
    """The command words between `python` and the script that start all processes. Empty for one process."""
    if not options.config_file:
        return ()
    launch = ("-m", "accelerate.commands.launch", "--config_file", options.config_file)
    return (*launch, "--num_processes", str(options.processes), "--main_process_port", "0")


def title_of(options):
    unit = "pairs of 2 x" if options.trainer == "dpo" else "x"
    title = f"{options.trainer.upper()} {options.model}, {options.batch} {unit} {options.length}"
    title += f", {options.rows} rows" if options.rows != "full" else ""
    title += f", LoRA r={options.lora}" if options.lora else ""
    title += ", NF4" * options.nf4 + ", MXFP4" * options.mxfp4
    title += ", inputs on the host" if options.offload else ""
    title += ", bf16=False" if options.no_autocast else ""
    title += ", no waits" if options.no_waits else ""
    title += (
        f", each of {options.processes} with {os.path.basename(options.config_file)}" if options.config_file else ""
    )
    return title + (", checkpointing" if options.checkpointing else ", no checkpointing")


def show(options, rows, attention):
    """Print the table of the arms, and the memory and the report of each."""
    print(title_of(options))
    left_out = ("padding",) if options.rows == "full" else ()
    left_out += ("share", "share_recomputed") if attention is None else ()
    columns = {name: title for name, title in COLUMNS.items() if name not in left_out}
    table(with_rounded_losses(rows), columns)
    for row in rows:
        if row.get("gib_by_kind"):
            kinds = ((kind, gib) for kind, gib in row["gib_by_kind"].items() if gib is not None)
            print(row["arm"], "GiB:", ", ".join(f"{kind} {gib:.2f}" for kind, gib in kinds))
        if row.get("patched"):
            print(row["arm"], row["patched"])
        if row.get("chosen"):
            print(row["arm"], row["chosen"])


def main():
    parser = make_parser()
    options = parser.parse_args()
    check(parser, options)
    arms = default_arms(options) if options.arms is None else options.arms
    check_arms(parser, options.trainer, arms)
    if options.arm:
        return one_arm(options)
    launcher = launcher_of(options)
    record = Record("training", case_of(options), options.json, options.model == "tiny")
    rate, attention = ceilings()[1], attention_of(options)
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
    rows = []
    for arm in arms:
        for row in rows_from(arm, options.timeout, echo=options.profile, launcher=launcher):
            if "tokens_per_s" in row:
                row["mfu"] = 100 * row["tokens_per_s"] * row["flop_per_token"] / rate
                row |= {} if attention is None else shares(row, options, rate, attention)
            rows.append(row)
        flag_losses(rows)
        flag_tokens(rows)
        about = {"options": vars(options), "matmul_flop_per_s": rate, "attention_ms": attention, "tokens": COUNTED}
        record.write(about | {"rows": rows})
    show(options, rows, attention)
    record.say_where()


if __name__ == "__main__":
    main()
