"""Train on given completions: a GRPO step's loss, backward pass and optimizer, by `train()` of TRL's GRPOTrainer and of
ours.

    python benchmarks/completions.py [--model Llama-3.2-1B] [--prompt 512] [--completions 8] [--lora 16]
        [--micro_batches 4]
        [--arms GRPOTrainer "LigerGRPOTrainer - shared" LigerGRPOTrainer "LigerGRPOTrainer - graphs"]

A step trains on `--completions` completions of one prompt. Prompts and completions are random ids. The lengths of
completions are drawn from 64 to `--longest` and are the same in all arms. Nothing is generated or scored. Weights are
random, in bf16 with checkpointing, and AdamW is fused. With `--micro_batches`, a step has that many micro-batches of
`--completions` rows, and completions of that many prompts, which TRL shuffles before it splits them.

"- graphs" is cuda_graphs="false", "- shared" is share_prompts=False, and "+ sorted" is sort_by_prompt=True.
"+ gathered" stands for TRL's tree of AsyncGRPO: prompts are shared, but each completion attends in one call to a copy
of its prompt's keys and values. `--always` shares even if that saves little, to find where it starts to pay.

`ms` is the median of the timed steps, by events on the GPU's stream. `gib_used` is the memory of the process by the
driver. `gib_above` is what PyTorch's allocator took for all that is no weight, gradient or state of AdamW. `saved` is
the part of the real tokens that sharing does not compute. Each arm runs in its own process. `--profile` runs three more
steps under PyTorch's profiler, and prints where the time of the last two goes.
"""

import itertools
import statistics
import tempfile

import torch
from _arms import static_bytes
from _measure import DEVICE, Record, arguments, table
from _models import MODELS
from _processes import emit, rows_from
from _steps import ATTENTION, Run, build, classes_of, tokenizer_of
from small_steps import gib_used, milliseconds_between, stamp
from training import PROFILED, profiler

ARMS = (
    "GRPOTrainer",
    "LigerGRPOTrainer",
    "LigerGRPOTrainer - graphs",
    "LigerGRPOTrainer - shared",
    "LigerGRPOTrainer - graphs - shared",
    "LigerGRPOTrainer - graphs + gathered",
    "LigerGRPOTrainer + sorted",
    "LigerGRPOTrainer - graphs + sorted",
)
LEAST = 64  # tokens of a completion


def group_of(options, vocab, step):
    """Return the batch that GRPOTrainer trains on in a step, in the form of its own rollout."""
    draw = torch.Generator().manual_seed(step)
    count = options.completions * options.micro_batches
    lengths = torch.randint(LEAST, options.longest + 1, (count,), generator=draw)
    lengths[0] = options.longest  # all steps have the same padding
    ids = torch.randint(2, vocab, (count, options.longest), generator=draw)
    prompts = torch.randint(2, vocab, (options.micro_batches, options.prompt), generator=draw)
    prompt = prompts.repeat_interleave(options.completions, 0)
    mask = (torch.arange(options.longest) < lengths[:, None]).long()
    advantages = torch.randn(count, generator=draw)
    group = {
        "prompt_ids": prompt,
        "prompt_mask": torch.ones_like(prompt),
        "completion_ids": ids * mask,
        "completion_mask": mask,
        "advantages": advantages,
    }
    return {name: value.to(DEVICE) for name, value in group.items()} | {"num_items_in_batch": lengths.sum().to(DEVICE)}


def on_given_completions(trainer_class, options, vocab):
    """Return `trainer_class` with given completions instead of its rollout."""
    steps = itertools.count()

    def rollout(self, inputs):
        return group_of(options, vocab, next(steps) % options.batches)

    return type(trainer_class.__name__, (trainer_class,), {"_generate_and_score_completions": rollout})


def attend_to_copies(self, query, key, value, mask, dropout, scaling, softcap, sinks):
    """Attend in one call. Each completion has its own copy of its prompt's keys and values.

    It takes the place of `SharedRows.attend`, for models without windows, caps and sinks.
    """
    from liger_trainer.varlen.attention import flat
    from liger_trainer.varlen.shared_rows import Copied
    from liger_triton.shared_attention import shared_attention

    assert mask.window is None and softcap is None and sinks is None and not dropout
    index, call = self.windowed(self.layout.longest_row)  # a window that sees the whole prompt
    keys = Copied.apply(flat(key), index)
    values = Copied.apply(flat(value), index)
    return shared_attention(flat(query), keys, values, [call._replace(window=None)], scale=scaling)


def saved_part(shared):
    """The part of the real tokens that sharing did not compute, from the counts of the report."""
    return shared["tokens_saved"] / (shared["tokens_computed"] + shared["tokens_saved"])


def one_arm(options):
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback

    from liger_trainer.trainers.shared_prompts import shared_prompts_of
    from liger_trainer.varlen import groups
    from liger_trainer.varlen.shared_rows import SharedRows

    before = gib_used()
    stamps, used = [], []

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            stamps.append(stamp())
            used.append(gib_used())

    model = build(Run(options.model, options.completions, options.prompt + options.longest, layers=options.layers))
    trainer_class, args_class = classes_of(options.arm)
    steps = options.batches * options.rounds
    switches = options.arm.split(" ")[1:]
    more = {"cuda_graphs": "false"} if "graphs" in switches else {}
    if "shared" in switches:
        more["share_prompts"] = False
    if "sorted" in switches:
        more["sort_by_prompt"] = True
    if "gathered" in switches:
        SharedRows.attend = attend_to_copies
    if options.always:
        groups.PAYS = groups.ALWAYS
    args = args_class(
        output_dir=tempfile.mkdtemp(),
        max_steps=steps + PROFILED * options.profile,
        per_device_train_batch_size=options.completions,
        gradient_accumulation_steps=options.micro_batches,
        num_generations=options.completions,
        max_completion_length=options.longest,
        logging_steps=4,
        learning_rate=1e-5,
        bf16=DEVICE == "cuda",
        use_cpu=DEVICE == "cpu",
        optim="adamw_torch_fused",
        report_to="none",
        save_strategy="no",
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        disable_tqdm=True,
        lr_scheduler_type="constant",
        **more,
    )
    lora = LoraConfig(r=options.lora, target_modules=ATTENTION) if options.lora else None
    trainer = on_given_completions(trainer_class, options, model.config.vocab_size)(
        model=model,
        args=args,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_list([{"prompt": "a"}] * 4 * options.completions * options.micro_batches),
        processing_class=tokenizer_of(),
        peft_config=lora,
        callbacks=[Clock(), profiler(steps)] if options.profile else [Clock()],
    )
    trainer.train()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    clocked = stamps[steps - options.batches - 1 : steps]
    times = [milliseconds_between(start, end) for start, end in itertools.pairwise(clocked)]
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    row = {"arm": options.arm, "ms": statistics.median(times), "step_ms": times, "losses": losses[:3]}
    if DEVICE == "cuda":
        gib = max(used[steps - options.batches : steps]) - before
        static = static_bytes(trainer.model) / 2**30
        taken = torch.cuda.max_memory_reserved() / 2**30
        row |= {"gib_used": gib, "gib_static": static, "gib_above": taken - static}
    captured = getattr(trainer, "captured_steps", None)
    if captured is not None:
        row["captured"] = captured.to_dict()
    shared = shared_prompts_of(trainer.model)
    if shared is not None:
        row["shared_prompts"] = shared.to_dict()
        row["saved"] = saved_part(row["shared_prompts"])
    emit(row)


def main():
    parser = arguments(__doc__, "--arm")
    parser.add_argument("--model", choices=MODELS, default="Llama-3.2-1B")
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--completions", type=int, default=8, help="of each prompt, and rows of a micro-batch")
    parser.add_argument("--micro_batches", type=int, default=1, help="of a step, and prompts of a step")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of the longest completion")
    parser.add_argument("--lora", type=int, help="rank of adapters on attention")
    parser.add_argument("--batches", type=int, default=8, help="steps on the clock, each with completions of its own")
    parser.add_argument("--rounds", type=int, default=3, help="how often they are trained on, the clock included")
    parser.add_argument("--always", action="store_true", help="share prompts however little that saves")
    parser.add_argument("--profile", action="store_true", help="print where the time of two more steps goes")
    parser.add_argument("--timeout", type=float, default=300, help="seconds after which an arm is given up")
    parser.add_argument("--arms", nargs="+", choices=ARMS, help='all; "+ sorted" only with --micro_batches')
    options = parser.parse_args()
    if options.profile and DEVICE == "cpu":
        parser.error("--profile needs a GPU")
    if options.arms is None:
        options.arms = [arm for arm in ARMS if options.micro_batches > 1 or not arm.endswith("+ sorted")]
    if options.arm:
        return one_arm(options)
    record = Record("completions", options.model, options.json, DEVICE == "cpu")
    rows = []
    for arm in options.arms:
        rows += rows_from(arm, options.timeout, echo=options.profile)
        record.write({"options": vars(options), "rows": rows})
    table(
        rows,
        {
            "arm": ("", ""),
            "ms": ("ms", ".1f"),
            "gib_used": ("GiB used", ".1f"),
            "gib_above": ("above", ".1f"),
            "saved": ("saved", ".0%"),
            "losses": ("losses", ""),
            "note": ("", ""),
        },
    )
    record.say_where()


if __name__ == "__main__":
    main()
