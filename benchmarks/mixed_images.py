"""Fine-tuning on rows with images of mixed sizes: useful tokens/s and peak memory, padded and packed.

    python benchmarks/mixed_images.py [--model Qwen2.5-VL-3B] [--batch 16] [--room 8192] [--arms ...]

It is full fine-tuning of random weights in bf16 with fused AdamW and checkpointing. A row has one image of 8 to 48
patches a side, which become 16 to 576 tokens, and 16 to 1,024 words. Rows go through the model's own processor in TRL's
SFT trainer. Most arms pad `--batch` rows; the last packs as many as fit into `--room` tokens. Every arm runs in its own
process. Tokens are counted without padding, over all steps after the first `--warm`, which compile kernels.
"""

import random

import numpy as np
from _measure import DEVICE, Record, table
from _processes import emit, rows_from
from datasets import Dataset
from images import END, IMAGE, MODELS, PAD, START, parser_of, train
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLProcessor, Qwen2VLImageProcessorPil, Qwen3VLProcessor

ARMS = ("SFTTrainer", "SFTTrainer + Liger", "LigerSFTTrainer", "LigerSFTTrainer packed")
NAMES = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
NAMES |= {"vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"}
STEPS, WARM = (30, 10) if DEVICE == "cuda" else (3, 1)


def mixed_rows(count, patch, tiny):
    """Rows of words and one image each, as TRL takes them."""
    source = random.Random(0)
    noise = np.random.default_rng(0)
    found = []
    for _ in range(count):
        width, height = (patch * source.randrange(4 if tiny else 8, 9 if tiny else 49, 2) for _ in range(2))
        words = (f"w{source.randrange(1000)}" for _ in range(source.randint(16, 32 if tiny else 1024)))
        image = Image.fromarray(noise.integers(0, 256, (height, width, 3), dtype=np.uint8))
        found.append({"text": f"<|vision_start|> <|image_pad|> <|vision_end|> {' '.join(words)}", "images": [image]})
    return Dataset.from_list(found)


class NoVideos:
    """Replaces the video processor, which needs torchvision. No row has a video."""

    model_input_names = ()

    def to_dict(self):
        return {}


def processor_of(config):
    """The model's processor around a tokenizer of 1,000 words, without asking the Hub."""
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


def one_arm(options):
    packed, count = options.arm.endswith("packed"), options.batch * options.steps
    ends, row = train(
        options,
        1 if packed else options.batch,
        lambda config: {
            "train_dataset": mixed_rows(count, config.vision_config.patch_size, options.tiny),
            "processing_class": processor_of(config),
        },
        dataloader_num_workers=8 if DEVICE == "cuda" else 0,
        max_length=options.room if packed else None,
        packing=packed,
        include_num_input_tokens_seen="non_padding",
    )
    (start, before), (end, after) = ends[options.warm - 1], ends[-1]
    tokens = after - before
    emit(row | {"tokens_per_s": tokens / (end - start), "tokens": tokens / (len(ends) - options.warm)})


def main():
    parser = parser_of(__doc__, ARMS, 16, STEPS, WARM)
    parser.add_argument("--model", choices=MODELS, default="Qwen2.5-VL-3B")
    parser.add_argument("--room", type=int, default=8192)
    options = parser.parse_args()
    if options.arm:
        return one_arm(options)
    record = Record("mixed_images", options.model.lower(), options.json, DEVICE == "cpu" or options.tiny)
    rows = []
    for arm in options.arms:
        rows += rows_from(arm, 300)
        record.write({"options": vars(options), "rows": rows})
    table(
        rows,
        {
            "arm": ("arm", ""),
            "tokens_per_s": ("useful tokens/s", ",.0f"),
            "tokens": ("tokens a step", ",.0f"),
            "gib": ("GiB", ".1f"),
            "note": ("", ""),
        },
    )
    record.say_where()


if __name__ == "__main__":
    main()
