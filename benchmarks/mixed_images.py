"""Fine-tuning on rows with images of mixed sizes: useful tokens/s and peak memory, padded and packed.

    python benchmarks/mixed_images.py [--model Qwen2.5-VL-3B] [--batch 16] [--room 8192] [--arms ...]

It is full fine-tuning in bf16 with fused AdamW and checkpointing, of random weights. A row has one image of 8 to 48
patches a side, which become 16 to 576 tokens, and 16 to 1,024 words. Rows go through the model's own processor in TRL's
SFT trainer. Most arms pad `--batch` rows; the last packs as many as have room in `--room` tokens. Every arm runs in a
process of its own. Tokens are those without padding, of all steps after `--warm`, in which kernels are compiled.
"""

import argparse
import random
import tempfile
import time

import numpy as np
import torch
from _measure import DEVICE, Record, synchronize, table
from _processes import emit, rows_from
from datasets import Dataset
from images import END, IMAGE, MODELS, PAD, START, build
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessorPil,
    Qwen3VLProcessor,
    TrainerCallback,
)
from trl import SFTConfig, SFTTrainer

ARMS = ("SFTTrainer", "SFTTrainer + Liger", "LigerSFTTrainer", "LigerSFTTrainer packed")
NAMES = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
NAMES |= {"vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"}
STEPS, WARM = (30, 10) if DEVICE == "cuda" else (3, 1)


def mixed_rows(count, patch, tiny):
    """Rows of words and one image each, as TRL takes them."""
    source, noise, found = random.Random(0), np.random.default_rng(0), []
    for _ in range(count):
        width, height = (patch * source.randrange(4 if tiny else 8, 9 if tiny else 49, 2) for _ in range(2))
        words = (f"w{source.randrange(1000)}" for _ in range(source.randint(16, 32 if tiny else 1024)))
        image = Image.fromarray(noise.integers(0, 256, (height, width, 3), dtype=np.uint8))
        found.append({"text": f"<|vision_start|> <|image_pad|> <|vision_end|> {' '.join(words)}", "images": [image]})
    return Dataset.from_list(found)


class NoVideos:
    """In the place of a processor of videos, which needs torchvision. No row has one."""

    model_input_names = ()

    def to_dict(self):
        return {}


def processor_of(config):
    """The processor of the model, around a tokenizer of 1,000 words: nothing is asked of the Hub."""
    words = {f"w{i}": i for i in range(1000)} | {"<|pad|>": PAD, "<|image_pad|>": IMAGE, "<|video_pad|>": IMAGE + 1}
    words |= {"<|vision_start|>": START, "<|vision_end|>": END}
    backend = Tokenizer(WordLevel(words, unk_token="<|pad|>"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<|pad|>", eos_token="<|pad|>", extra_special_tokens=NAMES
    )
    patch = config.vision_config.patch_size
    pixels = Qwen2VLImageProcessorPil(
        patch_size=patch, size={"shortest_edge": 16 * patch**2, "longest_edge": 48 * 48 * patch**2}
    )
    stock = Qwen3VLProcessor if config.model_type == "qwen3_vl" else Qwen2_5_VLProcessor
    made = type(stock.__name__, (stock,), {"check_argument_for_proper_class": lambda self, name, part: None})
    return made(image_processor=pixels, tokenizer=tokenizer, video_processor=NoVideos())


class Clock(TrainerCallback):
    """The time and the tokens that were seen, at the end of each step."""

    def __init__(self):
        self.ends = []

    def on_step_end(self, args, state, control, **kwargs):
        synchronize()
        self.ends.append((time.perf_counter(), int(state.num_input_tokens_seen)))


def one_arm(options):
    arm, name, batch, room, tiny = options.arm, options.model, options.batch, options.room, options.tiny
    steps, warm = options.steps, options.warm
    if arm == "SFTTrainer + Liger":
        from liger_kernel.transformers import apply_liger_kernel_to_qwen2_5_vl, apply_liger_kernel_to_qwen3_vl

        (apply_liger_kernel_to_qwen3_vl if "Qwen3" in name else apply_liger_kernel_to_qwen2_5_vl)()
    trainer_class, args_class = SFTTrainer, SFTConfig
    if arm.startswith("LigerSFTTrainer"):
        from liger_trainer import LigerSFTConfig as args_class
        from liger_trainer import LigerSFTTrainer as trainer_class
    model, clock, packed = build(name, tiny), Clock(), arm.endswith("packed")
    args = args_class(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=1 if packed else batch, max_steps=steps,
        logging_steps=1, save_strategy="no", report_to="none", bf16=DEVICE == "cuda", gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False}, optim="adamw_torch_fused", learning_rate=1e-5,
        lr_scheduler_type="constant", disable_tqdm=True, dataloader_num_workers=8 if DEVICE == "cuda" else 0,
        use_cpu=DEVICE == "cpu", max_length=room if packed else None, packing=packed,
        include_num_input_tokens_seen="non_padding", remove_unused_columns=False,
    )  # fmt: skip
    trainer = trainer_class(
        model=model, args=args, train_dataset=mixed_rows(batch * steps, model.config.vision_config.patch_size, tiny),
        processing_class=processor_of(model.config), callbacks=[clock],
    )  # fmt: skip
    trainer.train()
    (start, before), (end, after) = clock.ends[warm - 1], clock.ends[-1]
    peak = torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else None
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    emit({"arm": arm, "model": name, "batch": batch, "tokens_per_s": (after - before) / (end - start), "gib": peak,
          "tokens": (after - before) / (len(clock.ends) - warm), "losses": losses[:5]})  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="Qwen2.5-VL-3B")
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=ARMS)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--room", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--warm", type=int, default=WARM, help="steps before the clock starts")
    parser.add_argument("--tiny", action="store_true", help="a model of a few layers, for a trial on a CPU")
    parser.add_argument("--json", help="file of the record; without it a run on a GPU names one in benchmarks/results")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        return one_arm(options)
    record, rows = Record("mixed_images", options.model.lower(), options.json, DEVICE == "cpu" or options.tiny), []
    for arm in options.arms:
        rows += rows_from(arm, 300)
        record.write({"options": vars(options), "rows": rows})
    table(rows, {"arm": ("arm", ""), "tokens_per_s": ("useful tokens/s", ",.0f"), "tokens": ("tokens a step", ",.0f"),
                 "gib": ("GiB", ".1f"), "note": ("", "")})  # fmt: skip
    record.say_where()


if __name__ == "__main__":
    main()
