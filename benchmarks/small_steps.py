"""Training steps of few tokens on one GPU, which wait for the host: useful tokens/s, ms a step, memory and first losses
of TRL's SFTTrainer and ours, by their `train()`.

    python benchmarks/small_steps.py --data alpaca_en_demo.llama3.npz [--cases 8b-lora 1b-full] [--rows alpaca 512]
        [--arms stock trl_liger ours ours_captured] [--profile [2]]
    python benchmarks/small_steps.py --trainers kto orpo rloo --data dpo_en_demo.json [--judged kto_en_demo.json]
        [--length 1024] [--cases 8b-lora 1b-full] [--arms stock ours_auto trl_liger ours] [--minutes 8] [--together]

Weights are random, shapes are real, and rows are token ids. `alpaca` is 8 rows of `--data` a step, as they come; `512`
is one row of 512 tokens. A case is a model and how it is trained (`CASES`); an arm is a trainer (`ARMS`). "flat" is
TRL's padding_free, "compile" compiles each layer for any number of tokens, "captured" is cuda_graphs="true".

`--trainers` takes TRL's other trainers and ours, on 8 real pairs a step. `--data` is then a file of pairs as for
`training.py --trainer dpo`; answers are cut so that they and the prompt have `--length` tokens. KTO trains on 8 answers
a step, of the pairs or of `--judged` (`preferences.py`), distillation on the chosen answers of 8 prompts, GRPO and RLOO
on both answers of 4 prompts. Nothing is generated: `_trainers.py` says what takes its place. A reference or a teacher
has Liger's layers in "trl_liger". "answers" is padding_in_metrics=False, which CPO and ORPO have, and
"unshared" share_prompts=False. tokens/s counts each token of a row once, however many models read it.

Every case, trainer and arm has its own process, which takes one kind of rows after the other. With `--together`, the
trainers of an arm share one, so that Python starts once for all. What fails is a row that says why. `--minutes` ends
the whole run: what has not begun by then is a row that says so. Steps before the clock starts train on the rows of the
timed ones, so that everything is compiled, captured and allocated by then. `ms` is the median step by events on the
GPU's stream, without making the host wait. tokens/s counts real tokens over all timed steps.

Memory is the process's memory at the ends of steps by the driver (`gib_used`), and the allocator's peak. Only the first
includes the pools of captured graphs in replays. `--profile` runs 4 more steps, or as many as it says, under PyTorch's
profiler and adds `gpu_ms`, the time per step while a kernel or a copy runs.

`--tiny` tries the script out, on a CPU too.
"""

import itertools
import os
import statistics
import time
import traceback
from dataclasses import dataclass, field

import _trainers
import torch
from _measure import DEVICE, Record, arguments, table, with_rounded_losses
from _processes import emit, release, rows_from
from _steps import Run, classes_of, flag_losses, flag_tokens, make_trainer

CASES = {
    "8b-lora": {"model": "Llama-3-8B", "lora": 16, "checkpointing": True},
    "8b-16-layers-lora": {"model": "Llama-3-8B", "layers": 16, "lora": 16, "checkpointing": True},
    "8b-nf4": {"model": "Llama-3-8B", "lora": 16, "nf4": True, "checkpointing": True},
    "8b-full": {"model": "Llama-3-8B", "checkpointing": True},
    "1b-full": {"model": "Llama-3.2-1B", "teacher": "Llama-3.2-3B"},
    "135m-full": {"model": "SmolLM2-135M"},
    "qwen3.5-lora": {"model": "Qwen3.5-4B-16-layers", "lora": 16, "checkpointing": True},
    "gemma4-lora": {"model": "Gemma-4-E4B", "lora": 16, "checkpointing": True},
    "moe24-lora-attn": {"model": "Qwen3-30B-A3B", "layers": 24, "lora": 16, "checkpointing": True},
}
PAIRS = "pairs"  # the rows of all trainers but SFTTrainer
OWN_ROWS = ("alpaca", "128", "256", "512", "1024", "2048", "4096")


@dataclass
class Arm:
    trainer: str  # a name of `_steps.ARMS`, with the class of another trainer in the place of SFTTrainer
    options: dict = field(default_factory=dict)  # fields of its arguments
    compiled: bool = False  # each layer, with the number of tokens as a variable
    only: tuple = ()  # the trainers that have it, if not all do


FLAT = {"padding_free": True, "max_length": None}  # TRL cuts no rows then; they are cut already
ARMS = {
    "stock": Arm("SFTTrainer"),
    "stock_flat": Arm("SFTTrainer", FLAT),
    "stock_compile": Arm("SFTTrainer", compiled=True),
    "stock_flat_compile": Arm("SFTTrainer", FLAT, compiled=True),
    "trl_liger": Arm("SFTTrainer + Liger"),
    "ours": Arm("LigerSFTTrainer", {"cuda_graphs": "false"}),
    "ours_auto": Arm("LigerSFTTrainer"),
    "ours_captured": Arm("LigerSFTTrainer", {"cuda_graphs": "true"}),
    "ours_answers": Arm("LigerSFTTrainer", {"padding_in_metrics": False}, only=("cpo", "orpo")),
    "ours_unshared": Arm("LigerSFTTrainer", {"share_prompts": False}, only=("dpo", "reward", "grpo", "rloo")),
}
DEFAULT_ARMS = ("stock", "stock_flat", "stock_compile", "stock_flat_compile", "trl_liger", "ours", "ours_captured")
ARMS_OF_PAIRS = ("stock", "ours_auto", "ours_answers", "trl_liger", "ours")
SHORTEST = 5  # seconds; no process starts in less


def tiny_of(model):
    """The name of a tiny model with the kinds of layers of `model`."""
    if model.startswith("Qwen3.5"):
        return "tiny-states"
    return "tiny-moe" if "A3B" in model else "tiny"


def run_of(case, rows, options, trainer="sft"):
    """The training to run, and the number of timed steps. Batches of real rows repeat after so many steps."""
    kind = CASES[case] | {"trainer": trainer}
    batches, rounds = options.batches, options.rounds
    if options.tiny:
        kind["model"] = tiny_of(kind["model"])
        kind.pop("layers", None)
        kind.pop("teacher", None)
    steps = batches * (rounds + 1) + min(options.profile, batches)
    data = options.judged if trainer == "kto" and options.judged else options.data
    kind |= {"steps": steps, "skip": steps - batches, "data": data}
    kind["workers"] = 4 if DEVICE == "cuda" else 0
    if rows in ("alpaca", PAIRS):
        return Run(batch=8, length=options.length, rows="padded", **kind), batches
    return Run(batch=1, length=int(rows), **kind), batches


def class_of(arm, trainer):
    """The name of the class that `arm` trains with, for `_steps.make_trainer`."""
    return arm.trainer.replace("SFTTrainer", _trainers.CLASSES[trainer])


def options_of(arm, trainer="sft"):
    """The fields of `arm`'s arguments. ValueError if it asks for something that the trainer lacks."""
    given = dict(arm.options)
    args_class = classes_of(class_of(arm, trainer))[1]
    known = args_class.__dataclass_fields__
    if given.get("cuda_graphs") == "false" and "cuda_graphs" not in known:
        del given["cuda_graphs"]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ValueError(f"{args_class.__name__} has no field {', '.join(unknown)}")
    return given


def compile_layers(model):
    """Compile each decoder layer separately."""
    torch._dynamo.config.recompile_limit = 64  # each kind of rows makes a new model
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    for layer in base.model.layers:
        layer.compile(dynamic=True)


def gib_used():
    """The GPU memory that all processes use."""
    if DEVICE != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def stamp():
    if DEVICE != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds_between(start, end):
    return (end - start) * 1e3 if DEVICE != "cuda" else start.elapsed_time(end)


def clock_of(start, count):
    """A callback that marks the ends of the steps from `start` to `start + count`, and profiles the steps after."""
    from torch.profiler import ProfilerActivity, profile
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self):
            self.stamps = []
            self.used = 0.0
            self.allocated = 0
            self.profiler = None

        def on_step_end(self, args, state, control, **kwargs):
            step = state.global_step
            if step == start and DEVICE == "cuda":
                torch.cuda.reset_peak_memory_stats()
            if start <= step <= start + count:
                self.stamps.append(stamp())
                self.used = max(self.used, gib_used())
            if step == start + count < state.max_steps:
                self.end_of_clock()
                watched = ProfilerActivity.CUDA if DEVICE == "cuda" else ProfilerActivity.CPU
                self.profiler = profile(activities=[watched])
                self.profiler.start()
            elif step == state.max_steps:
                self.end_of_clock()
                if self.profiler is not None:
                    self.profiler.stop()

        def end_of_clock(self):
            if DEVICE == "cuda":
                torch.cuda.synchronize()
                if not self.allocated:
                    self.allocated = torch.cuda.max_memory_allocated()

        def busy_ms(self, steps):
            """The time per step, in ms, while anything ran on the GPU, over the last `steps`."""
            spans = [event.time_range for event in self.profiler.events() if event.device_type.name == "CUDA"]
            total, end = 0.0, 0.0
            for span in sorted(spans, key=lambda span: span.start):
                total += max(0.0, span.end - max(span.start, end))
                end = max(end, span.end)
            return total / 1e3 / steps

    return Clock()


def train(options, rows, before):
    """Train this process's arm on one kind of rows. `before` is the GPU memory in use when the process started."""
    arm = ARMS[options.arm]
    run, timed = run_of(options.case, rows, options, options.trainer)
    first = timed * options.rounds
    clock = clock_of(first, timed)
    trainer = make_trainer(class_of(arm, run.trainer), run, [clock], **options_of(arm, run.trainer))
    if arm.compiled:
        compile_layers(trainer.model)
    release()
    trainer.train()
    times = [milliseconds_between(a, b) for a, b in zip(clock.stamps, clock.stamps[1:], strict=False)]
    counted = [tuple(map(int, step)) for step in trainer.counted[first : first + timed]]
    tokens = [real for real, _, _ in counted]
    row = {
        "tokens_per_s": 1e3 * sum(tokens) / sum(times),
        "ms": statistics.median(times),
        "step_ms": times,
        "step_tokens": tokens,
        "padding": 1 - sum(tokens) / sum(positions for _, _, positions in counted),
        "losses": logged(trainer, "loss"),
        "attention": trainer.model.config._attn_implementation,
    }
    kind = _trainers.KINDS.get(run.trainer)
    if kind is not None and kind.compared != "loss":
        row[kind.compared] = logged(trainer, kind.compared)
    if DEVICE == "cuda":
        row |= {"gib_used": clock.used - before, "gib_allocated": clock.allocated / 2**30}
    if options.profile and DEVICE == "cuda":
        row["gpu_ms"] = clock.busy_ms(run.steps - first - timed)
    report = getattr(trainer, "liger_report", None)
    if report is not None:
        row["patched"] = report.one_line()
    captured = getattr(trainer, "captured_steps", None)
    if captured is not None:
        row["captured"] = captured.to_dict()
    trainer.accelerator.free_memory()
    return row


def logged(trainer, name):
    """The first three values that `trainer` logged under `name`."""
    return [log[name] for log in trainer.state.log_history if name in log][:3]


def title_of(case, trainer):
    """The name of a case's trainer in tables."""
    shape = CASES[case]
    weights = "LoRA" if "lora" in shape else "all weights"
    layers = f", {shape['layers']} layers" if "layers" in shape else ""
    method = "Reward" if trainer == "reward" else "Distillation" if trainer == "distillation" else trainer.upper()
    return f"{method}, {shape['model']}{layers}, {weights}"


def one_arm(options):
    before = gib_used()
    trainers = options.trainer.split(",")
    for trainer, rows in itertools.product(trainers, options.rows):
        options.trainer = trainer
        about = {"case": options.case, "method": trainer, "rows": rows, "arm": options.arm}
        about["title"] = title_of(options.case, trainer)
        try:
            emit(about | train(options, rows, before))
        except Exception as error:
            traceback.print_exc()
            first = (str(error).strip() or "no message").splitlines()[0]
            emit(about | {"note": f"{type(error).__name__}: {first[:200]}"})
        release()


def check_data(parser, options):
    for rows in ("alpaca", PAIRS):
        if rows in options.rows and options.data is None:
            parser.error(f"--rows {rows} takes the rows of a file: name it with --data")
    if any((trainer == "sft") == (rows == PAIRS) for trainer in options.trainers for rows in options.rows):
        parser.error(
            f"--trainers is {options.trainers} and --rows is {options.rows}; sft takes {', '.join(OWN_ROWS)}, and the "
            f"others take {PAIRS}"
        )


COLUMNS = {
    "case": ("case", ""),
    "method": ("", ""),
    "rows": ("rows", ""),
    "arm": ("trainer", ""),
    "tokens_per_s": ("tokens/s", ".0f"),
    "ms": ("ms", ".1f"),
    "gpu_ms": ("GPU ms", ".1f"),
    "gib_used": ("GiB used", ".1f"),
    "gib_allocated": ("allocated", ".1f"),
    "padding": ("padding", ".0%"),
    "losses": ("loss: step 1, means of 2-5, 6-10", ""),
    "note": ("", ""),
}


def main():
    parser = arguments(__doc__, "--arm", "--case", "--trainer")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--trainers", nargs="+", choices=_trainers.CLASSES, default=["sft"])
    parser.add_argument("--rows", nargs="+", choices=(*OWN_ROWS, PAIRS), help=f"all for sft, {PAIRS} for the others")
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="seven for sft, five for the others")
    parser.add_argument("--data", help="an .npz of rows, as in training.py; single rows take random ids without it")
    parser.add_argument("--judged", help="a .json of judged answers, for KTO instead of --data")
    parser.add_argument("--length", type=int, default=2048, help="the most tokens of a row of --data")
    parser.add_argument("--batches", type=int, default=12, help="steps on the clock, each with rows of its own")
    parser.add_argument("--rounds", type=int, default=2, help="how often their rows are trained on before")
    parser.add_argument("--timeout", type=float, default=300, help="seconds after which a process is given up")
    parser.add_argument("--minutes", type=float, default=60, help="end the whole run after so many minutes")
    parser.add_argument(
        "--profile", type=int, nargs="?", const=4, default=0, help="add the time that the GPU is busy in 4 more steps"
    )
    parser.add_argument("--together", action="store_true", help="train all trainers of an arm in one process")
    parser.add_argument("--tiny", action="store_true", help="two layers, to try the script out")
    options = parser.parse_args()
    is_sft = options.trainers == ["sft"]
    if options.rows is None:
        options.rows = list(OWN_ROWS) if is_sft else [PAIRS]
    if options.arms is None:
        options.arms = list(DEFAULT_ARMS if is_sft else ARMS_OF_PAIRS)
    check_data(parser, options)
    if options.arm:
        return one_arm(options)
    measured = options.cases if is_sft else options.cases + options.trainers
    record = Record("small_steps", "-".join(measured), options.json, options.tiny)
    one_gpu = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    found, ends = [], time.monotonic() + 60 * options.minutes
    for case, arm, trainers in processes_of(options):
        about = {"case": case, "method": trainers[0], "title": title_of(case, trainers[0])}
        left = min(options.timeout * len(trainers), ends - time.monotonic())
        if left < SHORTEST:
            found.append(about | {"arm": arm, "note": f"not begun after {options.minutes:g} minutes"})
        else:
            for row in rows_from(arm, left, env=one_gpu, more=("--case", case, "--trainer", ",".join(trainers))):
                found.append(about | row)
                record.write({"options": vars(options), "rows": found})
        flag(found)
        record.write({"options": vars(options), "rows": found})
    table(with_rounded_losses(found), COLUMNS)
    record.say_where()


def processes_of(options):
    """Yield the (case, arm, trainers) of each process.

    The first arms of all trainers come first, so that a run that is cut off has trainers to compare.
    """
    for case, arm in itertools.product(options.cases, options.arms):
        trainers = [trainer for trainer in options.trainers if not ARMS[arm].only or trainer in ARMS[arm].only]
        parts = [trainers] if options.together else [[trainer] for trainer in trainers]
        for part in parts:
            if part:
                yield case, arm, part


def flag(found):
    """Note the rows that have other losses than the stock trainer, or other tokens than the first arm.

    With adapters, the first loss alone is compared. PEFT adds the adapter's output to a base output that is rounded
    already. In the first steps, most of that small term is lost. Ours rounds the sum and learns sooner (docs/lora.md).
    """
    groups = {}
    for row in found:
        groups.setdefault((row["case"], row["method"], row.get("rows")), []).append(row)
    for (case, method, _), alike in groups.items():
        kind = _trainers.KINDS.get(method)
        compared = "losses" if kind is None or kind.compared == "loss" else kind.compared
        stock = [arm for arm in ARMS if arm.startswith("stock")]
        flag_losses(alike, stock, compared, first_alone="lora" in CASES[case])
        flag_tokens(alike)


if __name__ == "__main__":
    main()
