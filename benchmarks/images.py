"""Training steps of models of images and text: rows/s and peak memory.

    python benchmarks/images.py [--models Qwen2.5-VL-3B Qwen3-VL-4B] [--batch 8] [--arms Trainer LigerTrainer]

It is full fine-tuning in bf16 with fused AdamW and checkpointing, of random weights. A row has one image of 32 x 32
patches, which become 256 tokens, and 64 to 512 random tokens of text; labels are on the text. A batch is padded to its
longest row. Every arm runs in a process of its own. rows/s is of the median step, of those after `--warm`, in which
kernels are compiled. "+ auto" is activation_checkpointing: auto, which recomputes what does not fit on the GPU.
"""

import argparse
import statistics
import tempfile
import time

import torch
from _measure import DEVICE, Record, synchronize, table
from _processes import emit, rows_from
from transformers import AutoConfig, AutoModelForImageTextToText, Trainer, TrainerCallback, TrainingArguments

IMAGE, START, END, PAD = 151655, 151652, 151653, 151643
_TEXT = {"vocab_size": 151936, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "num_hidden_layers": 36}
_VISION = {"in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_heads": 16}
MODELS = {  # model type, config of text, config of vision
    "Qwen2.5-VL-3B": (
        "qwen2_5_vl",
        _TEXT | {
            "hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16, "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        _VISION | {
            "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 2048, "patch_size": 14,
            "fullatt_block_indexes": [7, 15, 23, 31], "window_size": 112,
        },
    ),
    "Qwen3-VL-4B": (
        "qwen3_vl",
        _TEXT | {
            "hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32, "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True,
            },
        },
        _VISION | {
            "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2560, "patch_size": 16,
            "deepstack_visual_indexes": [5, 11, 17], "num_position_embeddings": 2304,
        },
    ),
}  # fmt: skip
ARMS = ("Trainer", "Trainer + Liger", "LigerTrainer", "LigerTrainer + auto")
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
    """Pixels are there already: what is measured is training, and not the reading of images."""

    def __init__(self, vision, batch):
        width = 3 * vision.temporal_patch_size * vision.patch_size**2
        self.pixels = torch.randn(batch * GRID * GRID, width, generator=torch.Generator().manual_seed(0))

    def __call__(self, rows):
        width = max(len(row["input_ids"]) for row in rows)
        ids = torch.tensor([row["input_ids"] + [PAD] * (width - len(row["input_ids"])) for row in rows])
        real, images = ids != PAD, ids == IMAGE
        return {
            "input_ids": ids, "attention_mask": real.long(), "labels": ids.masked_fill(~real | images, -100),
            "pixel_values": self.pixels, "image_grid_thw": torch.tensor([[1, GRID, GRID]] * len(rows)),
            "mm_token_type_ids": images.int(),
        }  # fmt: skip


class Clock(TrainerCallback):
    def __init__(self):
        self.ends = []

    def on_step_end(self, args, state, control, **kwargs):
        synchronize()
        self.ends.append(time.perf_counter())


def one_arm(options):
    arm, name, batch, steps, warm = options.arm, options.model, options.batch, options.steps, options.warm
    if arm == "Trainer + Liger":
        from liger_kernel.transformers import apply_liger_kernel_to_qwen2_5_vl, apply_liger_kernel_to_qwen3_vl

        (apply_liger_kernel_to_qwen3_vl if "Qwen3" in name else apply_liger_kernel_to_qwen2_5_vl)()
    trainer_class, args_class = Trainer, TrainingArguments
    if arm.startswith("LigerTrainer"):
        from liger_trainer import LigerTrainer as trainer_class
        from liger_trainer import LigerTrainingArguments as args_class
    model, clock = build(name, options.tiny), Clock()
    args = args_class(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=batch, max_steps=steps,
        logging_steps=1, save_strategy="no",
        report_to="none", bf16=DEVICE == "cuda", gradient_checkpointing=True, remove_unused_columns=False,
        gradient_checkpointing_kwargs={"use_reentrant": False}, optim="adamw_torch_fused", learning_rate=1e-5,
        lr_scheduler_type="constant", disable_tqdm=True, dataloader_num_workers=2 if DEVICE == "cuda" else 0,
        use_cpu=DEVICE == "cpu",
        **({"activation_checkpointing": "auto"} if arm.endswith("auto") else {}),
    )  # fmt: skip
    trainer = trainer_class(
        model=model, args=args, train_dataset=rows_of(batch * steps), callbacks=[clock],
        data_collator=Collate(model.config.vision_config, batch),
    )  # fmt: skip
    trainer.train()
    took = statistics.median(b - a for a, b in zip(clock.ends[warm - 1 :], clock.ends[warm:], strict=False))
    peak = torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else None
    if peak is not None and (chosen := getattr(trainer, "checkpointing", None)) is not None:  # it has reset the counter
        peak = max(peak, chosen.highest / 2**30)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    emit({"arm": arm, "model": name, "batch": batch, "rows_s": batch / took, "ms": 1e3 * took, "gib": peak,
          "loss": losses[-1], "losses": losses[:5]})  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=ARMS)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--warm", type=int, default=WARM, help="steps before the clock starts")
    parser.add_argument("--tiny", action="store_true", help="a model of a few layers, for a trial on a CPU")
    parser.add_argument("--json", help="file of the record; without it a run on a GPU names one in benchmarks/results")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        return one_arm(options)
    record, rows = Record("images", "8-rows", options.json, DEVICE == "cpu"), []
    for model in options.models:
        for arm in options.arms:
            rows += rows_from(arm, 300, more=["--model", model])
            record.write({"options": vars(options), "rows": rows})
    table(rows, {"model": ("model", ""), "arm": ("", ""), "rows_s": ("rows/s", ".2f"), "ms": ("ms", ".0f"),
                 "gib": ("GiB", ".1f"), "loss": ("loss", ".4f"), "note": ("", "")})  # fmt: skip
    record.say_where()


if __name__ == "__main__":
    main()
