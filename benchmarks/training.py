"""A training step beside its peers: tokens/s, peak memory, model FLOP utilisation and the losses of the first steps.

    python benchmarks/training.py --model Llama-3.2-1B --batch 16 --length 1024 --data rows.npz
        [--checkpointing] [--lora]

Full fine-tuning in bf16 with fused AdamW (or LoRA r = 16 on every linear layer), random weights, rows without padding:
the token ids of `--data` joined and cut into rows (random ids without it). Every arm runs in a process of its own,
since Liger's patches are process-wide. `--data` is an .npz with a flat array `ids`, or a .json/.jsonl file that
`datasets` reads, with a column `input_ids`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time

import numpy as np
import torch
from _measure import DEVICE, ceilings, environment, table, write

# Shapes of published models, by name: no weights are fetched.
MODELS = {
    "Llama-3-8B": ("llama", dict(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=131072, rms_norm_eps=1e-5)),
    "Llama-3.2-1B": ("llama", dict(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
        head_dim=64, vocab_size=128256, max_position_embeddings=131072, rms_norm_eps=1e-5, tie_word_embeddings=True)),
    "Qwen3-0.6B": ("qwen3", dict(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, vocab_size=151936, max_position_embeddings=40960, tie_word_embeddings=True)),
    "Gemma-3-1B": ("gemma3_text", dict(
        hidden_size=1152, intermediate_size=6912, num_hidden_layers=26, num_attention_heads=4, num_key_value_heads=1,
        head_dim=256, vocab_size=262144, max_position_embeddings=32768, sliding_window=512)),
    "tiny": ("llama", dict(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=1031, max_position_embeddings=512)),
}  # fmt: skip
ARMS = (
    "LigerSFTTrainer",
    "LigerTrainer",
    "Trainer",
    "Trainer + Liger",
    "SFTTrainer",
    "SFTTrainer + Liger",
    "Trainer + compile",
)
SKIP = 4  # steps before the clock starts: allocator, cuBLAS and Triton warm up


def rows_of(path, vocab, length, count):
    if path is None:
        ids = np.random.default_rng(0).integers(0, vocab, count * length)
    elif path.endswith(".npz"):
        ids = np.load(path)["ids"].astype(np.int64)
    else:
        from datasets import load_dataset

        ids = np.concatenate(load_dataset("json", data_files=path, split="train")["input_ids"])
    ids = np.resize(ids, count * length) % vocab  # too few ids are repeated
    return [{"input_ids": row.tolist(), "labels": row.tolist()} for row in ids.reshape(count, length)]


def collate(rows):
    return {name: torch.tensor([row[name] for row in rows]) for name in ("input_ids", "labels")}


def build(name, dtype=torch.bfloat16):
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, shape = MODELS[name]
    config = AutoConfig.for_model(model_type, **shape, use_cache=False)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def tokenizer_of(vocab):
    """SFTTrainer wants one; the rows are token ids already."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(WordLevel({"<pad>": 0, "</s>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>")


def make_trainer(arm, options, model, callback):
    from transformers import Trainer, TrainingArguments
    from trl import SFTConfig, SFTTrainer

    from liger_trainer import LigerSFTConfig, LigerSFTTrainer, LigerTrainer, LigerTrainingArguments

    trainer_class, args_class = {
        "LigerSFTTrainer": (LigerSFTTrainer, LigerSFTConfig),
        "LigerTrainer": (LigerTrainer, LigerTrainingArguments),
        "Trainer": (Trainer, TrainingArguments),
        "SFTTrainer": (SFTTrainer, SFTConfig),
    }[arm.split(" + ")[0]]
    extra = {}
    if arm.endswith("+ Liger"):
        extra["use_liger_kernel"] = True
    if arm.endswith("+ compile"):
        extra["torch_compile"] = True
    sft = issubclass(trainer_class, SFTTrainer)
    if sft:
        extra |= {"max_length": options.length, "dataset_kwargs": {"skip_prepare_dataset": True}}
    args = args_class(
        output_dir=tempfile.mkdtemp(), max_steps=options.steps, per_device_train_batch_size=options.batch,
        logging_steps=5, logging_first_step=True, dataloader_num_workers=DEVICE == "cuda" and 4 or 0,
        learning_rate=1e-5, bf16=DEVICE == "cuda", optim="adamw_torch_fused", report_to="none", save_strategy="no",
        gradient_checkpointing=options.checkpointing, gradient_checkpointing_kwargs={"use_reentrant": False},
        use_cpu=DEVICE == "cpu", disable_tqdm=True, lr_scheduler_type="constant", remove_unused_columns=False,
        dataloader_drop_last=True, **extra,
    )  # fmt: skip
    if options.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
        if options.checkpointing:
            model.enable_input_require_grads()
    vocab = model.config.get_text_config().vocab_size
    rows = rows_of(options.data, vocab, options.length, options.batch * options.steps)
    if sft:
        from datasets import Dataset

        rows, extra_args = Dataset.from_list(rows), {"processing_class": tokenizer_of(vocab)}
    else:
        extra_args = {}
    return trainer_class(
        model=model,
        args=args,
        train_dataset=rows,
        data_collator=None if sft else collate,
        callbacks=[callback],
        **extra_args,
    )


def one_arm(options):
    """Train, and print one line of JSON."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        start = end = None

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == SKIP:
                self.start = self.now()
            self.end = self.now() if state.global_step == state.max_steps else None

        @staticmethod
        def now():
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter()

    clock = Clock()
    trainer = make_trainer(options.arm, options, build(options.model), clock)
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    if options.profile:
        profile(trainer, options)
    trainer.train()
    tokens = (options.steps - SKIP) * options.batch * options.length
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    result = {
        "arm": options.arm,
        "tokens_per_s": tokens / (clock.end - clock.start),
        "gib": torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else None,
        "losses": losses[:3],
        "flop_per_token": flop_per_token(trainer.model, options.length),
    }
    report = getattr(trainer, "liger_report", None)
    if report is not None:
        result["patched"] = report.one_line()
    print("RESULT " + json.dumps(result))


def flop_per_token(model, length):
    """6 per weight that multiplies (4 where it is frozen); causal attention: 6 * layers * length * heads * head_dim."""
    weights = sum(
        (6 if m.weight.requires_grad else 4) * m.weight.numel()
        for m in model.modules()
        if isinstance(m, torch.nn.Linear)
    )
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return weights + 6 * config.num_hidden_layers * length * config.num_attention_heads * head_dim


def profile(trainer, options):
    """Two steps under torch's profiler after three others: the kernels that take the time."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile
    from transformers import TrainerCallback

    def gaps(events, longest=12):
        """Where the GPU waits: the longest times between the end of all earlier kernels and the next one's start."""
        spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in events if e.device_type.name == "CUDA")
        found, end, before = [], spans[0][1], spans[0][2]
        for start, stop, name in spans:
            if start > end:
                found.append((start - end, before[:60], name[:60]))
            if stop > end:
                end, before = stop, name
        total = sum(gap for gap, _, _ in found)
        print(f"GPU idle {total / 2e3:.1f} ms a step of {(end - spans[0][0]) / 2e3:.1f}; the longest, in us:")
        for gap, before, after in sorted(found, reverse=True)[:longest]:
            print(f"  {gap:8.0f}  after {before}  before {after}")

    class Profiler(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == SKIP:
                self.profiler = torch_profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
                self.profiler.__enter__()
            if state.global_step == SKIP + 2:
                torch.cuda.synchronize()
                self.profiler.__exit__(None, None, None)
                gaps(self.profiler.events())
                print(
                    self.profiler.key_averages().table(
                        sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=90
                    )
                )

    trainer.add_callback(Profiler())


COLUMNS = {
    "arm": ("trainer", ""), "tokens_per_s": ("tokens/s", ".0f"), "gib": ("peak GiB", ".1f"), "mfu": ("MFU %", ".1f"),
    "losses": ("loss: step 1, means of 2-5, 6-10", ""), "note": ("", ""),
}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="Llama-3.2-1B")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--data")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=[arm for arm in ARMS if "compile" not in arm])
    parser.add_argument("--json")
    parser.add_argument("--profile", action="store_true", help="print where the GPU time of two steps goes")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps <= SKIP:
        parser.error(f"--steps is {options.steps}; the clock starts after {SKIP}, so take at least {SKIP + 1}")
    if options.arm:
        return one_arm(options)
    rate = ceilings()[1]
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
    rows = []
    for arm in options.arms:
        command = [sys.executable, __file__, *sys.argv[1:], "--arm", arm]
        done = subprocess.run(command, capture_output=True, text=True)
        found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if options.profile:
            print(done.stdout)
        if found:
            row = json.loads(found[0].removeprefix("RESULT "))
            row["mfu"] = 100 * row["tokens_per_s"] * row["flop_per_token"] / rate
        else:
            lines = (done.stderr or done.stdout).strip().splitlines()
            row = {"arm": arm, "note": (lines[-1] if lines else f"exit {done.returncode}")[:150]}
            if arm.startswith("Liger"):
                print(done.stderr[-6000:])
        rows.append(row)
    shape = f"{options.model}, {options.batch}x{options.length}" + (", LoRA" if options.lora else "")
    print(shape + (", checkpointing" if options.checkpointing else ", no checkpointing"))
    for row in rows:
        row["losses"] = row.get("losses") and [round(x, 4) for x in row["losses"]]
    table(rows, COLUMNS)
    for row in rows:
        if row.get("patched"):
            print(row["arm"], row["patched"])
    if options.json:
        write(options.json, environment() | {"options": vars(options), "matmul_flop_per_s": rate, "rows": rows})


if __name__ == "__main__":
    main()
