"""`liger-trainer merge`: merges an adapter into its base, and saves an ordinary model."""

import dataclasses
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from liger_trainer.command.processes import Heartbeat, importing, print_status
from liger_trainer.command.recipe.model_source import dequantize_options, find_model
from liger_trainer.command.rows.prompt_form import read_prompt_form, read_system_prompt, write_prompt_form
from liger_trainer.command.tools.loading import add_command, find_base, load_adapter, tokenizer_of
from liger_trainer.errors import RecipeError


def add_merge_command(commands) -> None:
    """Add `merge` to the subparsers of `liger-trainer`."""
    about = "merge a LoRA into its base model, and save model and tokenizer"
    parser = add_command(commands, "merge", _merge, about)
    parser.add_argument(
        "adapter", metavar="ADAPTER_DIR", help="the output_dir of a training with use_peft, or one of its checkpoints"
    )
    parser.add_argument("output", metavar="OUTPUT_DIR", help="a new folder, or an empty one")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="the dtype of the merged model; auto, the default, means the base's dtype. The sum is computed in "
        "float32, which needs 4 bytes of memory for each parameter",
    )
    parser.add_argument("--model", help="the base model, if it is not where the adapter says")
    parser.add_argument(
        "--without_unloaded_weights",
        action="store_true",
        help="leave out the weights of the base that transformers does not load, such as prediction layers (MTP); "
        "config.json then counts 0 of them",
    )
    parser.add_argument("--trust_remote_code", action="store_true", help="run model code that comes with the base")


def _merge(args) -> None:
    import torch
    from transformers import AutoConfig, AutoProcessor, AutoTokenizer

    with importing():
        from liger_trainer.base_weights.unloaded import find_checkpoint, keep_unloaded_weights
        from liger_trainer.fitting.meta_model import auto_class_of
        from liger_trainer.lora.merge import merge
        from liger_trainer.mtp.predictor import saved_head_as_in

    config = _adapter_config(args)
    name = args.model or find_base(config.base_model_name_or_path, args.adapter)
    try:
        source = find_model(name, revision=config.revision, trust_remote_code=args.trust_remote_code)
        base = source.load(AutoConfig)
        dtype = getattr(torch, args.dtype) if args.dtype != "auto" else base.dtype or torch.float32
        in_16_bits = dequantize_options(base)
        print_status(f"loading {name}")
        with Heartbeat(lambda time: f"still loading {name}, {time}."):  # in fp32: nothing is rounded before the sum
            model = source.load(auto_class_of(base), dtype=torch.float32, **in_16_bits)
        if in_16_bits:  # transformers 5.17 returns bf16 anyway, and would save experts under the names of packed blocks
            model.float()
            vars(model).pop("_weight_conversions", None)
    except RecipeError as error:
        raise RecipeError(f"{error} It is the base of {args.adapter}. Say where the base is with --model.") from error
    tokenizer = tokenizer_of(args.adapter, args.trust_remote_code) or source.load(
        AutoProcessor if getattr(base, "vision_config", None) is not None else AutoTokenizer
    )
    print_status("merging")
    try:
        with Heartbeat(lambda time: f"still merging, {time}."):
            merged = merge(load_adapter(model, args.adapter))
    except (ValueError, RuntimeError, OSError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300]  # torch lists every weight that does not fit, each on a line
        raise RecipeError(f"{args.adapter} cannot be merged into {model.name_or_path!r}: {reason}") from error
    _round(merged, dtype)
    with Heartbeat(lambda time: f"still writing {args.output}, {time}."):
        merged.save_pretrained(args.output)
    checkpoint = find_checkpoint(source.path, config.revision)
    with tempfile.TemporaryDirectory() as folder:
        trained = saved_head_as_in(checkpoint.tensors, args.adapter, folder)
        checkpoint = dataclasses.replace(checkpoint, tensors=checkpoint.tensors | trained)
        kept_weights = keep_unloaded_weights(merged, checkpoint, Path(args.output), not args.without_unloaded_weights)
    tokenizer.save_pretrained(args.output)
    form = read_prompt_form(args.adapter)
    if form is not None:
        write_prompt_form(args.output, form, read_system_prompt(args.adapter))
    print(
        f"{args.output}: {model.name_or_path} with {args.adapter} merged into it, in "
        f"{str(dtype).removeprefix('torch.')}"
    )
    if trained and kept_weights.reason is None and not args.without_unloaded_weights:
        kept_weights = dataclasses.replace(
            kept_weights,
            tensors=kept_weights.tensors - len(trained),
            parameters=kept_weights.parameters - sum(tensor.num_elements for tensor in trained.values()),
        )
        print(f"{len(trained)} tensors are the MTP head that was trained with the adapter, in place of the base's")
    if str(kept_weights):
        print(kept_weights)


def _adapter_config(args: Any) -> Any:
    """Return the `PeftConfig` of ADAPTER_DIR. RecipeError if it cannot be merged, or OUTPUT_DIR is not empty."""
    with importing():
        from peft import PeftConfig

    from liger_trainer.mtp.export import is_head_alone

    if os.path.exists(args.output) and (not os.path.isdir(args.output) or any(Path(args.output).iterdir())):
        raise RecipeError(f"OUTPUT_DIR is {args.output!r}, which is not empty. Give the path of a new folder.")
    if is_head_alone(args.adapter):
        raise RecipeError(
            f"ADAPTER_DIR is {args.adapter!r}, an MTP head for a model that did not change. Write that model with it: "
            f"liger-trainer export {args.adapter} --output FOLDER."
        )
    if os.path.isdir(args.adapter) and not os.path.isfile(os.path.join(args.adapter, "adapter_config.json")):
        raise RecipeError(
            f"ADAPTER_DIR is {args.adapter!r}, which has no adapter_config.json. Give the output_dir of a training "
            "with use_peft: true, or a checkpoint in it. A whole model needs no merging."
        )
    try:
        config = PeftConfig.from_pretrained(args.adapter)
    except ValueError as error:  # PEFT's error for a missing folder and for a name that the Hub does not have
        if "adapter_config.json" not in str(error):
            raise
        raise RecipeError(
            f"ADAPTER_DIR is {args.adapter!r}, but there is neither such a folder nor such an adapter on the Hub. "
            "Give the output_dir of a training with use_peft: true, or a checkpoint in it."
        ) from error
    if config.is_prompt_learning:
        kind = config.peft_type.value
        raise RecipeError(f"ADAPTER_DIR is a {kind} adapter. It puts tokens before the text, so it cannot be merged.")
    return config


def _round(model, dtype) -> None:
    """Round `model` to `dtype`, except the tensors that transformers keeps in another dtype when loading in `dtype`.

    Many mixtures of experts keep their router in fp32, for example.
    """
    import torch

    with torch.device("meta"):
        empty_model = type(model)._from_config(model.config, dtype=dtype)
    dtypes = {name: t.dtype for name, t in (*empty_model.named_parameters(), *empty_model.named_buffers())}
    in_another = empty_model._get_dtype_plan(dtype)  # by parts of names
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point():
            planned = (kind for part, kind in in_another.items() if re.search(part.replace("*", ".*"), name))
            tensor.data = tensor.data.to(next(planned, dtypes.get(name, dtype)))
