"""Find the card that a shipped recipe fits, by the peak that `liger-trainer fit` computes with `auto`.

    python benchmarks/fits.py [--recipes NAME ...] [--json FILE]

It uses no GPU and reads no weights. Recipes for several GPUs are computed for 8, with FSDP2. Recipes with a 4-bit base
need bitsandbytes.
"""

import argparse
import json
import tempfile

from _measure import RESULTS, Record
from _models import MODELS, ON_A_DECODER

CARDS = (8, 12, 16, 24, 48, 80, 141)
SHAPES = {
    "llama3_8b": "Llama-3-8B",
    "llama3_2_3b": "Llama-3.2-3B",
    "gpt_oss_20b": "gpt-oss-20b",
    "qwen3_30b_a3b": "Qwen3-30B-A3B",
    "gemma4_e4b": "Gemma-4-E4B",
    "granite4_h_tiny": "Granite-4.0-H-Tiny",
    "qwen3_5_4b": "Qwen3.5-4B",
    "qwen3_5_9b": "Qwen3.5-9B",
    "qwen3_5_35b_a3b": "Qwen3.5-35B-A3B",
}
# And on how many GPUs. qwen3_5_4b/mtp is not here: fit does not know its trainer.
RECIPES = {
    "llama3_2_3b/sft_lora_24gb": 1,
    "llama3_8b/sft_qlora_16gb": 1,
    "llama3_8b/sft_qlora_24gb": 1,
    "llama3_8b/sft_alpaca_qlora": 1,
    "llama3_8b/sft_alpaca_lora": 1,
    "gpt_oss_20b/sft_lora": 1,
    "gpt_oss_20b/sft_lora_16gb": 1,
    "qwen3_30b_a3b/sft_lora": 1,
    "gemma4_e4b/sft_lora": 1,
    "granite4_h_tiny/sft_lora": 1,
    "qwen3_5_4b/sft_lora_16gb": 1,
    "qwen3_5_9b/sft_qlora_24gb": 1,
    "qwen3_5_35b_a3b/sft_lora": 1,
    "llama3_8b/sft_alpaca": 8,
    "llama3_8b/orpo": 8,
    "llama3_8b/dpo_ultrafeedback": 8,
    "llama3_8b/kto": 8,
}


def rows_of(name, gpus, folder):
    """A row per card: the peak and the layers that keep their activations, or that it does not fit."""
    from liger_trainer.command.recipe.accelerate_file import preserve_environment
    from liger_trainer.command.recipe.read import parse_recipe
    from liger_trainer.command.tools.fit_spec import size_of, train_spec_of
    from liger_trainer.errors import RecipeError
    from liger_trainer.fitting.step import estimate_memory
    from liger_trainer.memory.device_memory import limit_of

    sharded = ["--accelerate_config", "fsdp2"] if gpus > 1 else []
    targets = ON_A_DECODER if name.startswith("gemma4") else []
    words = ["--model_name_or_path", str(folder), *sharded, *targets, "--use_cpu", "true"]
    case = {"case": f"`{name}`", "gpus": "one" if gpus == 1 else f"{gpus}, FSDP2"}
    with preserve_environment():
        recipe = parse_recipe(name, words, "")
        try:
            job, (rows, length) = train_spec_of(recipe, gpus), size_of(recipe)
        except RecipeError as error:
            return [
                case | {"card": card, "note": "not computed", "reason": str(error).partition(": ")[2]} for card in CARDS
            ]
        found = []
        step = None
        fits = False
        for card in CARDS:
            limit = limit_of(None, card * 2**30)
            # Neither keeping all layers nor recomputing all with a peak above this card could change the result.
            if (
                step is None
                or (fits and step.checkpointing.kept < step.checkpointing.layers)
                or (not fits and step.peak <= limit)
            ):
                step = estimate_memory(job, rows, length, "auto", card * 2**30)
            fits = step.peak <= limit
            if not fits:
                found.append(case | {"card": card, "note": "no", "asked_gib": step.peak / 2**30})
            else:
                kept, layers = step.checkpointing.kept, step.checkpointing.layers
                found.append(case | {"card": card, "gib": step.peak / 2**30, "kept": kept, "layers": layers})
        return found


def main():
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), help="all if unset")
    parser.add_argument("--json", help="file of the record; without it one is named in benchmarks/results")
    options = parser.parse_args()
    record, rows = Record("fits", "recipes", options.json), []
    record.path = record.path or record.free_path(RESULTS / "fits" / "recipes")  # no figure depends on the machine
    with tempfile.TemporaryDirectory() as folder:
        for name in options.recipes:
            kind, shape = MODELS[SHAPES[name.partition("/")[0]]]
            names = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]
            config = AutoConfig.for_model(kind, **shape, architectures=names, dtype="bfloat16")
            if kind == "gpt_oss":
                config.quantization_config = {"quant_method": "mxfp4"}
            config.save_pretrained(folder)
            rows += rows_of(name, RECIPES[name], folder)
            print(json.dumps(rows[-len(CARDS) :]), flush=True)
            record.write({"rows": rows})


if __name__ == "__main__":
    main()
