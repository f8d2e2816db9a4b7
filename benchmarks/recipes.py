"""Shipped recipes from their first line to the saved, reloaded and (Medusa) exported model: seconds, tokens/s, peak.

    python benchmarks/recipes.py --data DIR --folder /dev/shm/recipes [--only llama3_8b/sft_alpaca_lora ...]
        [--limit SECONDS] [--gpu_memory GIB | --processes 2 --config fsdp2] [--tiny] [-- --max_steps 10]

`liger-trainer train` runs each recipe as it ships, with another model, other rows and the options in `RECIPES`. The
model has the shape of the recipe's model and random weights, written once in the form of the published checkpoint. The
folder `--data` has alpaca_en_demo.json, dpo_en_demo.json and kto_en_demo.json. Medusa recipes train on the answers of
the Alpaca rows, and image models on the same rows with a picture of noise each. Then the other commands of the recipe's
header run. transformers and PEFT, or MedusaHeads, load what was saved; an MTP head is read from the model that `export`
has written. It must have a finite loss on the first rows, and an adapter or an MTP head must change that loss. GRPO is
rewarded for vowels here: a random model solves nothing and ends hardly any completion, so that it would learn nothing.
Arguments after `--` are options of all recipes.

Recipes run in the order of `RECIPES`, short ones first. A model is deleted after the last recipe that needs it. After
`--limit` seconds the running command is ended, and nothing new starts. With `--gpu_memory`, training may take no more
GiB than a smaller card has. `--folder` needs room for one model, or two with medusa_stage2. The first two steps compile
kernels, and the warm tokens/s leave them out. `--tiny` makes each model small, for a trial on a CPU.
"""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import yaml
from _measure import DEVICE, Record, arguments, table
from _models import MODELS, ON_A_DECODER
from _processes import release

from liger_trainer.paths import shipped

# With the recipe's own reward and mask, every advantage of a random model is zero.
REWARDED = ["--reward_funcs", "_rewards.share_of_vowels", "--mask_truncated_completions", "false"]
# The shape of a recipe's model, and options in addition to its keys.
RECIPES = {
    "quickstart": ("SmolLM2-135M", []),
    "quickstart_dpo": ("SmolLM2-135M", []),
    "quickstart_medusa": ("SmolLM2-135M", []),
    "llama3_2_3b/sft_lora_24gb": ("Llama-3.2-3B", []),
    "llama3_2_3b/grpo_lora_24gb": ("Llama-3.2-3B", REWARDED),
    "llama3_8b/sft_alpaca_lora": ("Llama-3-8B", []),
    "llama3_8b/medusa_stage1": ("Llama-3-8B", []),
    "llama3_8b/medusa_stage2": ("Llama-3-8B", []),
    "llama3_8b/eagle3": ("Llama-3-8B", []),
    "llama3_8b/sft_alpaca_qlora": ("Llama-3-8B", []),
    "llama3_8b/sft_qlora_24gb": ("Llama-3-8B", ["--memory_budget", "22"]),  # GiB that such a GPU has for training
    "llama3_8b/sft_qlora_16gb": ("Llama-3-8B", ["--memory_budget", "14.5"]),
    "llama3_8b/sft_alpaca": ("Llama-3-8B", ["--save_strategy", "no"]),  # the optimizer has another 64 GB
    "llama3_8b/dpo_ultrafeedback": ("Llama-3-8B", ["--save_strategy", "no"]),
    "llama3_8b/orpo": ("Llama-3-8B", ["--save_strategy", "no"]),
    "llama3_8b/kto": ("Llama-3-8B", ["--save_strategy", "no"]),
    "llama3_8b/grpo": ("Llama-3-8B", ["--save_strategy", "no", *REWARDED]),
    "llama3_8b/reward": ("Llama-3-8B", []),
    "qwen2_5_vl_3b/sft": ("Qwen2.5-VL-3B", ["--save_strategy", "no"]),
    "gpt_oss_20b/sft_lora": ("gpt-oss-20b", []),
    "gpt_oss_20b/sft_lora_16gb": ("gpt-oss-20b", []),
    "qwen3_30b_a3b/sft_lora": ("Qwen3-30B-A3B", []),
    "qwen3_5_4b/sft_lora_16gb": ("Qwen3.5-4B", ["--memory_budget", "14.5"]),
    "qwen3_5_4b/mtp": ("Qwen3.5-4B", []),
    "qwen3_5_9b/sft_qlora_24gb": ("Qwen3.5-9B", ["--memory_budget", "22"]),
    "gemma4_e4b/sft_lora": ("Gemma-4-E4B", ["--memory_budget", "22", *ON_A_DECODER]),
    "granite4_h_tiny/sft_lora": ("Granite-4.0-H-Tiny", []),
    "qwen3_5_35b_a3b/sft_lora": ("Qwen3.5-35B-A3B", []),
}
# A recipe for 8 GPUs on one, as its header says. Recipes without a line here do not fit on one.
ON_ONE_GPU = {"llama3_8b/sft_alpaca": ["--dtype", "bfloat16", "--gradient_accumulation_steps", "8"]}
SEVERAL_GPUS = ("llama3_8b/dpo_ultrafeedback", "llama3_8b/orpo", "llama3_8b/kto", "llama3_8b/grpo")
# The file of a trainer's rows, and the options that its format takes
ROWS = {
    "sft": ("alpaca_en_demo.json", []),
    "dpo": ("dpo_en_demo.json", ["--prompt_template", "sharegpt"]),
    "orpo": ("pairs.json", ["--prompt_template", "sharegpt"]),
    "kto": ("kto_en_demo.json", ["--prompt_template", "last_turn"]),
    "grpo": ("questions.jsonl", []),
    "reward": ("dpo_en_demo.json", ["--prompt_template", "sharegpt"]),
    "medusa": ("answers.jsonl", []),
    "eagle": ("answers.jsonl", []),
    "mtp": ("answers.jsonl", []),
}
IMAGES = "images.parquet"
WARM = 2  # steps before the clock of tokens/s starts
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 16,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_local_experts": 8,
    "vocab_size": 2048,
    "depth": 2,
    "num_heads": 4,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [1],
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 32,
    "global_head_dim": 32,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 2048,
    "shared_intermediate_size": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
}
QWEN_TOKENS = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
QWEN_TOKENS |= {"vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"}
CHAT = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '</s>\n' }}{% endfor %}"
QWEN_CHAT = """{% for message in messages %}{{ message.role + ': ' }}{% if message.content is string %}
{{- message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}
{{- '</s>\n' }}{% endfor %}"""


class OutOfTime(Exception):
    """Raised when `--limit` is over."""


def out_of_time(*_):
    raise OutOfTime("out of time")


LIMITED = """import runpy, torch
total = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction(min(1.0, {gib} * 2**30 / total))
runpy.run_module("liger_trainer", run_name="__main__")"""


def command(words, log, processes=1, config="fsdp2", steps=None, gpu_memory=None):
    """Run `liger-trainer` with `words`, its output in the file `log`, and return its exit code.

    For each step that it logs, append the time and the tokens so far to `steps`. `gpu_memory` is in GiB.
    """
    start = ["-m", "liger_trainer"] if gpu_memory is None else ["-c", LIMITED.format(gib=gpu_memory)]
    if processes > 1:
        launch = ["--config_file", str(shipped("configs") / f"{config}.yaml"), "--num_processes", str(processes)]
        start = ["-m", "accelerate.commands.launch", *launch, *start]
    # Offline, because it would wait for a lost network. The path has _rewards.py.
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(Path(__file__).parent))))
    env = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
    with open(log, "w", buffering=1) as file:
        child = subprocess.Popen(
            [sys.executable, *start, *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
            start_new_session=True,
        )
        try:
            for line in child.stdout:
                file.write(line)
                found = re.search(r"'num_tokens': '?([\d.e+]+)", line)
                if steps is not None and found:
                    steps.append((time.time(), float(found[1])))
            return child.wait()
        except OutOfTime:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            raise


def write_rows(data, folder, images=256):
    """Write rows that no file in `data` has: Medusa answers, questions with solutions for GRPO, short pairs, images."""
    rows = json.loads((data / "alpaca_en_demo.json").read_text())
    user = [{"role": "user", "content": f"{row['instruction']}\n{row['input']}".strip()} for row in rows]
    answers = [
        {"messages": [question, {"role": "assistant", "content": row["output"]}]}
        for question, row in zip(user, rows, strict=True)
    ]
    questions = [{"prompt": [question], "solution": str(k)} for k, question in enumerate(user)]
    for name, written in ("answers", answers), ("questions", questions):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    # ORPO refuses rows with a prompt that fills max_length
    pairs = json.loads((data / "dpo_en_demo.json").read_text())
    short = []
    for row in pairs:
        prompt = "".join(turn["value"] for turn in row["conversations"])
        if len(prompt.encode()) < 2000:
            short.append(row)
    (folder / "pairs.json").write_text(json.dumps(short))
    # as many as medusa-eval takes here
    (folder / "prompts.json").write_text(json.dumps([{"messages": [question]} for question in user[:4]]))
    write_images(answers[:images], folder / IMAGES)


def write_images(rows, file):
    """`rows` with a column images, each with one picture of 640 x 480 or 480 x 640."""
    import io

    from datasets import Dataset, Features, Image, List, Value
    from PIL import Image as Pillow

    def picture(size):
        buffer = io.BytesIO()
        Pillow.effect_noise(size, 90).convert("RGB").save(buffer, "jpeg")
        return {"bytes": buffer.getvalue(), "path": None}

    images = [[picture((640, 480) if k % 4 else (480, 640))] for k in range(len(rows))]
    features = Features(
        {"images": List(Image()), "messages": List({"role": Value("string"), "content": Value("string")})}
    )
    made = {"images": images, "messages": [row["messages"] for row in rows]}
    Dataset.from_dict(made, features=features).to_parquet(file)


def shape_of(name, tiny=False):
    """The config of the shape `name`."""
    import images
    from transformers import AutoConfig

    def small(shape):
        return shape | {key: value for key, value in SMALL.items() if tiny and key in shape}

    if name in MODELS:
        kind, shape = MODELS[name]
        return AutoConfig.for_model(kind, **small(shape))
    kind, text, vision = images.MODELS[name]
    text, vision = small(text), small(vision)
    if tiny:
        text |= {"rope_parameters": text["rope_parameters"] | {"mrope_section": [2, 3, 3]}}
    return AutoConfig.for_model(kind, text_config=text, vision_config=vision, tie_word_embeddings=True)


def write_model(name, data, folder, tiny=False):
    """Save a random bf16 model of the shape `name` in `folder`, with a tokenizer of the texts in the file `data`."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Qwen2VLImageProcessor

    config, folder = shape_of(name, tiny), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text, sees = config.get_text_config(), hasattr(config, "vision_config")
    tokenizer = tokenizer_of(data, min(text.vocab_size, 16384), QWEN_TOKENS if sees else {})
    text.eos_token_id = tokenizer.eos_token_id
    text.pad_token_id = tokenizer.pad_token_id
    if sees:
        from transformers import Qwen2_5_VLProcessor, Qwen2VLVideoProcessor

        ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in QWEN_TOKENS.items()}
        for key, value in ids.items():
            setattr(config, key, value)
        tokenizer.chat_template = QWEN_CHAT
        pixels = {"size": {"shortest_edge": 56 * 56, "longest_edge": 56 * 84}} if tiny else {}
        parts = {"image_processor": Qwen2VLImageProcessor(**pixels), "video_processor": Qwen2VLVideoProcessor()}
        Qwen2_5_VLProcessor(tokenizer=tokenizer, **parts, chat_template=QWEN_CHAT).save_pretrained(folder)
    else:
        tokenizer.save_pretrained(folder)
    with torch.device("meta"):
        auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        model = auto.from_config(config, dtype=torch.bfloat16)
    tensors = model.state_dict()
    for tied in model.all_tied_weights_keys:
        tensors.pop(tied)
    if config.model_type == "qwen3_5_text":
        tensors |= mtp_head(text, tensors)
    if config.model_type == "gpt_oss":
        tensors = in_mxfp4(tensors)
        kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    config.architectures, config.dtype = [type(model).__name__], torch.bfloat16
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.save_pretrained(folder)
    write_weights(tensors, folder / "model.safetensors")
    config.save_pretrained(folder)  # written last: it says that the model is complete


def mtp_head(text, tensors):
    """Set the count of prediction layers in the config `text`, and return the head's tensors, on the meta device."""
    text.mtp_num_hidden_layers = 1
    layer = f"model.layers.{text.layer_types.index('full_attention')}."
    head = {}
    for name, tensor in tensors.items():
        if name.startswith(layer):
            head[name.replace(layer, "mtp.layers.0.")] = tensor
    size = text.hidden_size
    shapes = {"fc": (size, 2 * size), "pre_fc_norm_embedding": (size,), "pre_fc_norm_hidden": (size,), "norm": (size,)}
    for name, shape in shapes.items():
        head[f"mtp.{name}.weight"] = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    return head


def tokenizer_of(data, vocab, tokens):
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    backend, special = ByteLevelBPETokenizer(), ["<pad>", "</s>", *tokens.values()]
    text = Path(data).read_text()
    rows = json.loads(text) if Path(data).suffix == ".json" else map(json.loads, text.splitlines())
    texts = []
    for row in rows:
        texts += map(str, row.values())
    backend.train_from_iterator(texts, vocab, special_tokens=special, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend._tokenizer, pad_token="<pad>", eos_token="</s>", extra_special_tokens=tokens
    )
    tokenizer.chat_template = CHAT
    return tokenizer


def in_mxfp4(tensors):
    """`tensors` with the experts' products in MXFP4's form: blocks of 32 numbers and their exponents, on meta."""
    made = {}
    for name, x in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            made[name] = x
            continue
        experts, inner, outer = x.shape
        made[f"{name}_blocks"] = torch.empty(experts, outer, inner // 32, 16, dtype=torch.uint8, device="meta")
        made[f"{name}_scales"] = torch.empty(experts, outer, inner // 32, dtype=torch.uint8, device="meta")
    return made


def drawn(name, x):
    """Random values for the meta tensor `x` called `name`, drawn on the GPU."""
    if name.endswith("_scales"):
        return torch.full(x.shape, 120, dtype=x.dtype, device=DEVICE)  # the exponent 2**-7
    if x.dtype == torch.uint8:
        return torch.randint(256, x.shape, dtype=x.dtype, device=DEVICE)
    if x.ndim > 1:
        return torch.empty(x.shape, dtype=x.dtype, device=DEVICE).normal_(0, 0.02)
    ones = name.endswith((".weight", "layer_scalar"))
    return torch.full(x.shape, float(ones), dtype=x.dtype, device=DEVICE)  # norms; biases


def write_weights(tensors, path):
    """Write a safetensors file with the names and shapes of `tensors`, using a few threads."""
    kinds = {torch.bfloat16: "BF16", torch.float32: "F32", torch.uint8: "U8"}
    header = {}
    at = 0
    for name, x in tensors.items():
        header[name] = {"dtype": kinds[x.dtype], "shape": list(x.shape), "data_offsets": [at, at + x.nbytes]}
        at += x.nbytes
    head = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    head += b" " * (-len(head) % 8)
    path.write_bytes(len(head).to_bytes(8, "little") + head)

    def write(name):
        values = drawn(name, tensors[name]).cpu().view(torch.uint8).numpy()
        with open(path, "r+b") as file:
            file.seek(8 + len(head) + header[name]["data_offsets"][0])
            file.write(values.data)

    torch.manual_seed(0)
    with ThreadPoolExecutor(4 if DEVICE == "cuda" else 1) as pool:
        list(pool.map(write, tensors))


def words_of(recipe, given, options, model):
    """The options of `liger-trainer train` for a recipe with the keys `given`."""
    out = options.folder / "outputs" / recipe
    shutil.rmtree(out, ignore_errors=True)  # a run into a folder with another run is refused
    words = ["train", recipe, "--model_name_or_path", str(model)]
    if "/" in recipe:  # the others ship with their rows
        rows, template = ROWS[given.get("trainer", "sft")]
        rows = IMAGES if "_vl_" in recipe else rows
        file = next(path for path in (options.data / rows, options.folder / rows) if path.exists())
        words += ["--dataset_name", str(file), *template]
    stage1 = given.get("medusa_init_heads_from")
    if stage1:
        words += ["--medusa_init_heads_from", str(options.folder / "outputs/llama3_8b" / stage1.rpartition("8b_")[2])]
    words += ["--output_dir", str(out), "--logging_steps", "1", *RECIPES[recipe][1]]
    words += ON_ONE_GPU.get(recipe, []) if options.processes == 1 else []
    return [*words, *(["--bf16", "false"] if DEVICE == "cpu" else []), *options.recipe_options], out


def after(given, out, model, folder):
    """The commands in a recipe's header that follow the training."""
    prompts = ["--prompts", folder / "prompts.json", "--max_new_tokens", 32]
    if given.get("trainer") == "eagle":
        return [["eagle-eval", model, out, *prompts], ["export", out, "--output", f"{out}_servers"]]
    if given.get("trainer") == "mtp":
        return [["mtp-eval", model, out, *prompts], ["export", out, "--output", f"{out}_servers"]]
    if given.get("trainer") != "medusa":
        return []
    merged = given.get("use_peft", False)
    evaluated = out if merged else model
    export = ["export", out, "--output", f"{out}_servers"]
    steps = [["medusa-eval", evaluated, out, *prompts]]
    steps += [["merge", out, f"{out}_merged"], [*export, "--model", f"{out}_merged"]] if merged else [export]
    return steps


def reload(out, texts):
    """{what was reloaded: numbers}: a model's mean loss on `texts`, with and without its adapter; the loss of an MTP
    head, and of the one that its base has; a norm for other heads."""
    from peft import AutoPeftModelForCausalLM, PeftConfig, PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

    from liger_trainer.command.recipe.model_source import dequantize_options
    from liger_trainer.eagle.drafter import EagleDrafter
    from liger_trainer.medusa.heads import MedusaHeads
    from liger_trainer.mtp.export import base_of, is_head_alone

    found, adapter = {}, (out / "adapter_config.json").exists()
    if (out / "eagle_drafter").is_dir():
        drafter = EagleDrafter.from_pretrained(out)
        return {"drafter": [sum(p.float().norm().item() for p in drafter.parameters())]}
    if (out / "medusa_heads").is_dir():
        heads = MedusaHeads.from_pretrained(out / "medusa_heads")
        found["heads"] = [sum(p.float().norm().item() for p in heads.parameters())]
        if not adapter:
            return found
    if is_head_alone(out):  # it is served as `export` has written it: in the files of its model
        served, base = f"{out}_servers", base_of(out)
        return {"mtp head": [head_loss(folder, out, texts) for folder in (served, base)]}
    base = PeftConfig.from_pretrained(out).base_model_name_or_path if adapter else out
    config = AutoConfig.from_pretrained(base)
    init = {"dtype": torch.bfloat16, "device_map": DEVICE} | dequantize_options(config)
    if adapter:
        model = AutoPeftModelForCausalLM.from_pretrained(out, **init)
    else:
        sees = hasattr(config, "vision_config")
        model = (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_pretrained(out, **init)
    tokenizer = AutoTokenizer.from_pretrained(out)
    rows = [tokenizer(text, return_tensors="pt")["input_ids"].to(DEVICE) for text in texts]

    @torch.no_grad()
    def loss():
        return sum(model(row, labels=row).loss.item() for row in rows) / len(rows)

    found["model"] = [loss()]
    if isinstance(model, PeftModel):
        with model.disable_adapter():
            found["model"].append(loss())
    return found


@torch.no_grad()
def head_loss(folder, tokenizer, texts):
    """The mean cross-entropy of the MTP head in the files of the model `folder`, on `texts`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from liger_trainer.base_weights.unloaded import find_checkpoint
    from liger_trainer.head.flat_rows import one_row
    from liger_trainer.mtp.predictor import load_predictor, predict

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map=DEVICE).eval()
    predictor = load_predictor(model, find_checkpoint(str(folder))).eval()
    read = AutoTokenizer.from_pretrained(tokenizer)
    losses = []
    for text in texts:
        ids = read(text, return_tensors="pt")["input_ids"].to(DEVICE)
        if ids.shape[1] < 3:  # nothing to guess
            continue
        hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0]
        guessed = predict(predictor, hidden, model.get_input_embeddings().weight, one_row(ids))
        logits = model.get_output_embeddings()(guessed[:-2]).float()
        losses.append(torch.nn.functional.cross_entropy(logits, ids[0, 2:]).item())
    return sum(losses) / len(losses)


def why_not_trained(again, log):
    """Why the saved files are not a trained model, or None.

    Args:
        again (`dict`): The numbers of `reload`.
        log (`str`): The output of the training.
    """
    numbers = [number for found in again.values() for number in found]
    if not all(map(math.isfinite, numbers)):
        return "what was reloaded has a number that is not finite"
    head = again.get("mtp head")
    if head is not None and head[0] == head[1]:
        return "the MTP head has the loss that it had before"
    losses = again.get("model", [])
    if len(losses) < 2 or losses[0] != losses[1]:
        return None
    equal = [float(part) for part in re.findall(r"'frac_reward_zero_std': '?([\d.e+-]+)", log)]
    if equal and min(equal) == 1:
        return "the adapter changes no loss: in every step, all completions of a prompt had the same reward"
    return "the adapter changes no loss"


def measure(recipe, options, start):
    """The row of a recipe: the figures of its summary, and the seconds of everything that ran."""
    given = yaml.safe_load((shipped("recipes") / f"{recipe}.yaml").read_text())
    shape, logs = RECIPES[recipe][0], options.folder / "logs" / recipe.replace("/", "-")
    model = options.folder / shape
    row = {"recipe": recipe}
    began = time.time()
    words, out = words_of(recipe, given, options, model)
    logs.mkdir(parents=True, exist_ok=True)

    def step(name, run, log=None):
        """True if `run` ended well: it returns None, or 0 if there is a `log`."""
        at = time.time()
        found = None
        tail = ""
        try:
            found = run()
            good, said = not log or not found, f"ended with {found}"
        except OutOfTime as error:
            good, said = False, str(error)
        except Exception as error:  # the table's row says it, and the other recipes run
            good = False
            said = f"{type(error).__name__}: {error}"
            tail = traceback.format_exc()
        row[f"{name}_s"] = round(time.time() - at, 1)
        print(f"[{time.time() - start:6.1f} s] {recipe}: {name} {row[f'{name}_s']} s", flush=True)
        if not good:
            row["note"] = f"{name} {said}"[:160]
            print(
                f"--- {recipe}: {row['note']}\n{(Path(log).read_text() if log else tail)[-options.show :]}", flush=True
            )
        return good and (found if not log else True)

    try:
        if not (model / "config.json").exists():
            data = options.data / "alpaca_en_demo.json"
            if step("model", lambda: write_model(shape, data, model, options.tiny) or True) is not True:
                return row
            release()
        log, seen = logs / "train", []
        given_to_train = (options.processes, options.config, seen, options.gpu_memory)
        if not step("train", lambda: command(words, log, *given_to_train), log):
            return row
        if len(seen) > WARM + 1:
            (first, before), (last, tokens) = seen[WARM - 1], seen[-1]
            row["warm_tokens_per_s"] = (tokens - before) / (last - first)
            row["step_s"] = (last - first) / (len(seen) - WARM)
        training_log = log.read_text()
        said = training_log.rpartition("\nSummary\n")[2]
        found = dict(re.findall(r"^  (\w+) +(.+)$", said, re.MULTILINE))
        row |= {
            key: found.get(key)
            for key in ("steps", "rows", "time", "loss", "reward", "speed", "memory", "layers", "patched")
        }
        for key, text in ("tokens_per_s", row["speed"]), ("gib", row["memory"]):
            row[key] = float(text.split()[0]) if text and text[0].isdigit() else None
        print(f"Summary\n{said.rstrip()}", flush=True)
        for words in after(given, out, model, options.folder):
            log = logs / words[0]
            if step(words[0], lambda words=words, log=log: command(words, log), log):
                print(log.read_text()[-600:].rstrip(), flush=True)
        texts = [row["output"] for row in json.loads((options.data / "alpaca_en_demo.json").read_text())[:8]]
        again = step("reload", lambda: reload(out, texts))
        if again:
            why = why_not_trained(again, training_log)
            row["reloaded"] = again
            row["ok"] = why is None
            if why is not None:
                row.setdefault("note", why)
        release()
        row["saved_gb"] = sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) / 1e9
    finally:
        row["seconds"] = round(time.time() - began, 1)
    return row


COLUMNS = {
    "recipe": ("recipe", ""),
    "steps": ("steps", ""),
    "tokens_per_s": ("tokens/s", ",.0f"),
    "warm_tokens_per_s": ("warm", ",.0f"),
    "step_s": ("s/step", ".2f"),
    "gib": ("GiB", ".2f"),
    "loss": ("loss", ""),
    "ok": ("reloaded", ""),
    "seconds": ("s in all", ""),
    "note": ("", ""),
}


def parsed(argv):
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=RECIPES, metavar="NAME", help="names of shipped recipes")
    parser.add_argument("--data", type=Path, required=True, help="the folder of the rows")
    parser.add_argument("--folder", type=Path, required=True, help="for models, rows and outputs")
    parser.add_argument("--limit", type=int, default=0, help="seconds for all recipes; 0 means no limit")
    parser.add_argument("--processes", type=int, default=1, help="more than one: under accelerate launch")
    parser.add_argument("--config", default="fsdp2", help="of accelerate, for several processes")
    parser.add_argument("--gpu_memory", type=float, help="GiB that PyTorch's allocator may take while a recipe trains")
    parser.add_argument("--tiny", action="store_true", help="small models, for a trial on a CPU")
    parser.add_argument("--show", type=int, default=3000, help="characters of the output of a command that fails")
    end = argv.index("--") if "--" in argv else len(argv)
    options = parser.parse_args(argv[:end])
    options.recipe_options = argv[end + 1 :]
    alone = options.processes == 1 and not options.tiny
    if options.gpu_memory is not None and options.processes > 1:
        parser.error(f"--gpu_memory is for one process; --processes is {options.processes}")
    options.recipes = [name for name in RECIPES if name in (options.only or RECIPES)]
    if not options.only and alone:
        options.recipes = [name for name in options.recipes if name not in SEVERAL_GPUS]
    return options


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    options, start = parsed(argv), time.time()
    signal.signal(signal.SIGALRM, out_of_time)
    signal.alarm(options.limit)
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
    options.folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(options.folder).free / 1e9
    write_rows(options.data, options.folder, 16 if options.tiny else 256)
    print(f"[{time.time() - start:6.1f} s] rows written; {free:.0f} GB free in {options.folder}", flush=True)
    case = f"{options.processes}-gpus" + (f"-of-{options.gpu_memory:g}gib" if options.gpu_memory is not None else "")
    record, rows = Record("recipes", case, options.json, options.tiny, argv), []
    for at, recipe in enumerate(options.recipes):
        if options.limit and time.time() - start > options.limit:
            rows.append({"recipe": recipe, "note": "not begun"})
            continue
        try:
            rows.append(measure(recipe, options, start))
        except OutOfTime as error:  # between two steps
            rows.append({"recipe": recipe, "note": str(error)})
        record.write({"rows": rows})
        shutil.rmtree(options.folder / "outputs" / f"{recipe}_merged", ignore_errors=True)
        shape = RECIPES[recipe][0]
        if all(RECIPES[later][0] != shape for later in options.recipes[at + 1 :]):
            for folder in (shape, "outputs"):
                shutil.rmtree(options.folder / folder, ignore_errors=True)
    signal.alarm(0)
    table(rows, COLUMNS)
    record.say_where()


if __name__ == "__main__":
    main()
