"""Training steps of image-text models: rows/s and peak memory.

    python benchmarks/images.py [--models Qwen2.5-VL-3B Qwen3-VL-4B] [--batch 8] [--arms Trainer LigerTrainer]

It is full fine-tuning of random weights in bf16 with fused AdamW and checkpointing. A row has one image of 32 x 32
patches, which become 256 tokens, and 64 to 512 random text tokens; the text has labels. A batch is padded to its
longest row. Every arm runs in its own process. rows/s is of the median step after the first `--warm` steps, which
compile kernels. "- graphs" is cuda_graphs="false". "+ auto" is activation_checkpointing: auto, which recomputes what
does not fit on the GPU.
"""

import itertools
import statistics
import tempfile
import time

import torch
from _measure import DEVICE, Record, arguments, synchronize, table
from _processes import emit, rows_from
from _steps import classes_of
from transformers import AutoConfig, AutoModelForImageTextToText, TrainerCallback

IMAGE = 151655
START = 151652
END = 151653
PAD = 151643
_TEXT = {"vocab_size": 151936, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "num_hidden_layers": 36}
_VISION = {"in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_heads": 16}
MODELS = {  # model type, config of text, config of vision
    "Qwen2.5-VL-3B": (
        "qwen2_5_vl",
        _TEXT
        | {
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        _VISION
        | {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "out_hidden_size": 2048,
            "patch_size": 14,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "window_size": 112,
        },
    ),
    "Qwen3-VL-4B": (
        "qwen3_vl",
        _TEXT
        | {
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "mrope_section": [24, 20, 20],
                "mrope_interleaved": True,
            },
        },
        _VISION
        | {
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "out_hidden_size": 2560,
            "patch_size": 16,
            "deepstack_visual_indexes": [5, 11, 17],
            "num_position_embeddings": 2304,
        },
    ),
}
ARMS = ("Trainer", "Trainer + Liger", "LigerTrainer", "LigerTrainer - graphs", "LigerTrainer + auto")
GRID = 32
STEPS, WARM = (24, 10) if DEVICE == "cuda" else (3, 1)


def config_of(name, tiny=False):
    kind, text, vision = MODELS[name]
    if tiny:
        text = text | {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 256}
        text |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128}
        vision = vision | {"depth": 4, "hidden_size": 64, "intermediate_size": 64, "out_hidden_size": 256}
        vision |= {"fullatt_block_indexes": [1], "deepstack_visual_indexes": [0, 1, 2]}
    tokens = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END}
    return AutoConfig.for_model(kind, text_config=text, vision_config=vision, tie_word_embeddings=True, **tokens)


def build(name, tiny):
    config = config_of(name, tiny)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")


def rows_of(count):
    source = torch.Generator().manual_seed(0)
    image = [START, *[IMAGE] * (GRID * GRID // 4), END]
    lengths = torch.randint(64, 513, (count,), generator=source).tolist()
    return [{"input_ids": image + torch.randint(1000, 100000, (n,), generator=source).tolist()} for n in lengths]


class Collate:
    """Adds ready pixels, so that training is measured and reading images is not."""

    def __init__(self, vision, batch):
        width = 3 * vision.temporal_patch_size * vision.patch_size**2
        self.pixels = torch.randn(batch * GRID * GRID, width, generator=torch.Generator().manual_seed(0))

    def __call__(self, rows):
        width = max(len(row["input_ids"]) for row in rows)
        ids = torch.tensor([row["input_ids"] + [PAD] * (width - len(row["input_ids"])) for row in rows])
        real, images = ids != PAD, ids == IMAGE
        return {
            "input_ids": ids,
            "attention_mask": real.long(),
            "labels": ids.masked_fill(~real | images, -100),
            "pixel_values": self.pixels,
            "image_grid_thw": torch.tensor([[1, GRID, GRID]] * len(rows)),
            "mm_token_type_ids": images.int(),
        }


class Clock(TrainerCallback):
    """Records the time and the tokens seen, at the end of each step."""

    def __init__(self):
        self.ends = []

    def on_step_end(self, args, state, control, **kwargs):
        synchronize()
        self.ends.append((time.perf_counter(), int(state.num_input_tokens_seen)))


def train(options, batch, inputs, **more):
    """Train the arm. Return the ends of its steps, and the fields of its row that all arms have.

    `inputs` are the trainer's inputs, made from the model; `more` are arguments in addition to the common ones.
    """
    if "+ Liger" in options.arm:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen2_5_vl, apply_liger_kernel_to_qwen3_vl

        (apply_liger_kernel_to_qwen3_vl if "Qwen3" in options.model else apply_liger_kernel_to_qwen2_5_vl)()
    trainer_class, args_class = classes_of(options.arm)
    model, clock = build(options.model, options.tiny), Clock()
    args = args_class(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=batch,
        max_steps=options.steps,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=DEVICE == "cuda",
        use_cpu=DEVICE == "cpu",
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        learning_rate=1e-5,
        optim="adamw_torch_fused",
        lr_scheduler_type="constant",
        disable_tqdm=True,
        remove_unused_columns=False,
        **more,
    )
    trainer = trainer_class(model=model, args=args, callbacks=[clock], **inputs(model.config))
    trainer.train()
    peak = torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else None
    chosen = getattr(trainer, "checkpointing", None)
    if peak is not None and chosen is not None:  # it has reset the counter
        peak = max(peak, chosen.highest / 2**30)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    captured = getattr(trainer, "captured_steps", None)
    row = {"arm": options.arm, "model": options.model, "batch": options.batch, "gib": peak, "losses": losses[:5]}
    if captured is not None:
        row["captured"] = captured.to_dict()
    return clock.ends, row | {"loss": losses[-1]}


def one_arm(options):
    ends, row = train(
        options,
        options.batch,
        lambda config: {
            "train_dataset": rows_of(options.batch * options.steps),
            "data_collator": Collate(config.vision_config, options.batch),
        },
        dataloader_num_workers=2 if DEVICE == "cuda" else 0,
        **({"activation_checkpointing": "auto"} if options.arm.endswith("auto") else {}),
        **({"cuda_graphs": "false"} if options.arm.endswith("- graphs") else {}),
    )
    timed = itertools.pairwise(time for time, _ in ends[options.warm - 1 :])
    took = statistics.median(end - start for start, end in timed)
    emit(row | {"rows_s": options.batch / took, "ms": 1e3 * took})


def parser_of(doc, arms, batch, steps, warm, *own):
    """The options of this script and of `mixed_images.py`, without the choice of models."""
    parser = arguments(doc, "--arm", *own)
    parser.add_argument("--arms", nargs="*", choices=arms, default=arms)
    parser.add_argument("--batch", type=int, default=batch)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--warm", type=int, default=warm, help="steps before the clock starts")
    parser.add_argument("--tiny", action="store_true", help="a model of a few layers, for a trial on a CPU")
    return parser


def main():
    parser = parser_of(__doc__, ARMS, 8, STEPS, WARM, "--model")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    if options.arm:
        return one_arm(options)
    record, rows = Record("images", "8-rows", options.json, DEVICE == "cpu"), []
    for model in options.models:
        for arm in options.arms:
            rows += rows_from(arm, 300, more=["--model", model])
            record.write({"options": vars(options), "rows": rows})
    table(
        rows,
        {
            "model": ("model", ""),
            "arm": ("", ""),
            "rows_s": ("rows/s", ".2f"),
            "ms": ("ms", ".0f"),
            "gib": ("GiB", ".1f"),
            "loss": ("loss", ".4f"),
            "note": ("", ""),
        },
    )
    record.say_where()


if __name__ == "__main__":
    main()
