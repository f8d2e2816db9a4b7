"""Decoding with each kind of speculative head on a real model: tokens a pass, tokens/s, and where a pass spends time.

    python benchmarks/decoding.py --json FILE
    python benchmarks/decoding.py --heads_folder FOLDER
    python benchmarks/decoding.py --tiny

An EAGLE-3 drafter, an MTP head and Medusa heads are trained on the frozen model, on the same rows: the model's own
greedy answers, which ship with the recipe `quickstart_medusa`. The model has no MTP head, so it gets a fresh one with
the weights of its last layer. Every eighth row is left out, and the model answers its prompt again, greedily, by the
loop of `liger_trainer.speculative_decoding`: without a head and with each of them, one text at a time, all in fp32.

The clock runs from the end of the pass over a prompt to the end of the answer. `ms` is the time of a pass and
`head_ms` the part of it in which the head guesses. `times` compares tokens/s with the loop without a head. All ways to
decode take turns, prompt by prompt, so a slow minute of the machine meets all of them. On a CPU, decoding runs in one
thread, and its time is the processor time of this process: what a core takes alone, whatever else the machine does.
`changed` counts answers that differ from the ones without a head. In exact arithmetic there are none.

`--heads_folder` keeps the trained heads, and takes them from there if they exist. `--tiny` only tries the script.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from _measure import DEVICE, Record, arguments, synchronize, table
from _models import trained
from medusa_real import trainer_of

from liger_trainer.base_weights.unloaded import find_checkpoint
from liger_trainer.data.answers import encode, end_tokens
from liger_trainer.eagle.drafter import EagleDrafter
from liger_trainer.medusa.heads import MedusaHeads
from liger_trainer.mtp.predictor import load_predictor, load_saved_head
from liger_trainer.paths import shipped
from liger_trainer.speculative_decoding import EagleGuesser, MedusaGuesser, MTPGuesser, decode_by_pass

WITHOUT = "no head"
TRAINING = "training.json"  # in the folder of a trained head
KINDS = {"eagle": "EAGLE-3", "mtp": "MTP", "medusa": "Medusa"}
CLOCK = time.perf_counter if DEVICE == "cuda" else time.process_time
LEARNING_RATES = {"eagle": 2e-3, "mtp": 1e-3, "medusa": 3e-3}  # the drafter begins with random weights


def split(path):
    """The rows to train on, and every eighth row, which is left out, of a file or of SmolLM2's shipped answers."""
    path = Path(path) if path else shipped("recipes") / "data" / "smollm2_answers.jsonl"
    rows = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        rows.append({"prompt": row["prompt"], "completion": row["completion"]})
    return [row for number, row in enumerate(rows) if number % 8], rows[::8]


def give_mtp_head(model, folder):
    """Write a checkpoint of the config and a fresh MTP head of `model`, and name it as the model's base.

    The layer starts as the model's last one, and reads the hidden state more than the embedding.
    """
    from safetensors.torch import save_file

    size = model.config.hidden_size
    torch.manual_seed(1)
    tensors = {}
    for name, tensor in model.model.layers[-1].state_dict().items():
        tensors[f"mtp.layers.0.{name}"] = tensor.detach().cpu().contiguous()
    tensors["mtp.fc.weight"] = torch.cat([0.02 * torch.randn(size, size), torch.eye(size)], 1)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"mtp.{name}.weight"] = torch.ones(size)
    tensors["mtp.norm.weight"] = model.model.norm.weight.detach().cpu().clone()
    model.config.mtp_num_hidden_layers = 1
    model.config.save_pretrained(folder)
    save_file(tensors, Path(folder, "model.safetensors"), {"format": "pt"})
    model.name_or_path = str(folder)
    model.config._name_or_path = str(folder)


def train(kind, rows, folder, options):
    """Train a head of one kind into `folder`, with a file of its time and logged losses."""
    start = time.perf_counter()
    model, tokenizer = trained(options.model, torch.float32)
    model.to(DEVICE)
    if kind == "mtp":
        folder.mkdir(parents=True, exist_ok=True)
        give_mtp_head(model, folder / "base")
    own = {"kind": kind, "learning_rate": LEARNING_RATES[kind], "targets": "soft", "projection": "tied"}
    trainer = trainer_of(model, tokenizer, rows, argparse.Namespace(**vars(options) | own))
    trainer.train()
    trainer.save_model(str(folder))
    losses = {log["step"]: log["loss"] for log in trainer.state.log_history if "loss" in log}
    how = {"seconds": time.perf_counter() - start, "steps": trainer.state.global_step, "losses": losses}
    (folder / TRAINING).write_text(json.dumps(how))


def load_head(kind, model, folder):
    """What was trained into `folder`, for `model`."""
    if kind == "eagle":
        return EagleDrafter.from_pretrained(str(folder)).to(DEVICE).eval()
    if kind == "medusa":
        return MedusaHeads.from_pretrained(str(folder), torch.float32, DEVICE).eval()
    predictor = load_predictor(model, find_checkpoint(str(folder / "base")))
    load_saved_head(predictor, str(folder))
    return predictor.eval()


class Clocked:
    """A guesser, and the seconds of its guesses."""

    def __init__(self, guesser):
        self.guesser = guesser
        self.reads = guesser.reads
        self.start = guesser.start
        self.seconds = 0.0

    def guess(self, states, following):
        synchronize()
        start = CLOCK()
        guesses = self.guesser.guess(states, following)
        synchronize()
        self.seconds += CLOCK() - start
        return guesses


def ways_to_decode(model, heads, counts):
    """(fields of a row, guesser) of each way: without a head, and with each head and number of guesses."""
    classes = {"eagle": EagleGuesser, "mtp": MTPGuesser, "medusa": MedusaGuesser}
    ways = [({"head": WITHOUT, "guesses": 0}, None)]
    for kind, head in heads.items():
        for count in counts:
            ways.append(({"head": KINDS[kind], "guesses": count}, Clocked(classes[kind](model, head, count))))
    return ways


def clock(model, guesser, prompt, ends, options):
    """(the answer, its passes after the one over the prompt, their seconds)."""
    passes = decode_by_pass(model, guesser, prompt, ends, options.max_new_tokens)
    text = next(passes)
    synchronize()
    start = CLOCK()
    count = 0
    for tokens in passes:
        text = text + tokens
        count += 1
    synchronize()
    return text, count, CLOCK() - start


def measure(model, heads, prompts, ends, options):
    """A row for each way to decode."""
    ways = ways_to_decode(model, heads, options.guesses)
    rows = [fields | {"tokens": 0, "passes": 0, "seconds": 0.0, "changed": 0} for fields, _ in ways]
    for _, guesser in ways:  # the first calls choose kernels and take memory
        clock(model, guesser, prompts[0], ends, options)
        if guesser is not None:
            guesser.seconds = 0.0
    for turn in range(options.rounds):
        for number, prompt in enumerate(prompts, 1):
            texts = []
            for row, (_, guesser) in zip(rows, ways, strict=True):
                text, passes, seconds = clock(model, guesser, prompt, ends, options)
                texts.append(text)
                row["tokens"] += len(text) - 1
                row["passes"] += passes
                row["seconds"] += seconds
                row["changed"] += text != texts[0]
            print(f"round {turn + 1}, prompt {number} of {len(prompts)}: {len(texts[0])} tokens", flush=True)
    for row, (_, guesser) in zip(rows, ways, strict=True):
        passes = max(row["passes"], 1)
        row["tokens_a_pass"] = row["tokens"] / passes
        row["tokens_per_s"] = row["tokens"] / max(row["seconds"], 1e-9)
        row["ms"] = 1000 * row["seconds"] / passes
        row["head_ms"] = 0.0 if guesser is None else 1000 * guesser.seconds / passes
        row["times"] = row["tokens_per_s"] / max(rows[0]["tokens_per_s"], 1e-9)
    return rows


COLUMNS = {
    "head": ("", ""),
    "guesses": ("guesses", ""),
    "tokens_a_pass": ("tokens a pass", ".2f"),
    "tokens_per_s": ("tokens/s", ".1f"),
    "times": ("times no head", ".2f"),
    "ms": ("ms a pass", ".1f"),
    "head_ms": ("of it the head", ".1f"),
    "changed": ("changed answers", ""),
}


def parsed(argv=None):
    parser = arguments(__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--data", help=".jsonl of prompt and completion; unset: the rows of quickstart_medusa")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--guesses", nargs="+", type=int, default=[1, 3], help="tokens that are guessed for a pass")
    parser.add_argument("--heads_folder", help="keep trained heads here, and take them from here")
    parser.add_argument("--draft-vocab", type=int, default=16384, help="of the drafter")
    parser.add_argument("--epochs", type=float, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=12, help="held-out prompts that are answered")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=2, help="how often each prompt is answered")
    parser.add_argument("--tiny", action="store_true", help="too few steps and tokens to tell anything")
    options = parser.parse_args(argv)
    options.heads = max(options.guesses)
    if options.tiny:
        options.epochs, options.prompts, options.max_new_tokens, options.rounds = 0.5, 2, 12, 1
    return options


def main(argv=None):
    options = parsed(argv)
    record = Record("decoding", Path(options.model).name, options.json, options.tiny, argv)
    to_train, held_out = split(options.data)
    held_out = held_out[: options.prompts]
    print(f"{len(to_train)} rows to train on, {len(held_out)} prompts held out")
    found = {"options": vars(options), "training": {}}
    with tempfile.TemporaryDirectory() as temporary:
        folders = {kind: Path(options.heads_folder or temporary, kind) for kind in options.kinds}
        for kind, folder in folders.items():
            if not (folder / TRAINING).exists():
                train(kind, to_train, folder, options)
            found["training"][kind] = json.loads((folder / TRAINING).read_text())
            print(f"{KINDS[kind]}: trained in {found['training'][kind]['seconds']:.0f} s", flush=True)
        model, tokenizer = trained(options.model, torch.float32)
        model.to(DEVICE).eval()
        heads = {kind: load_head(kind, model, folder) for kind, folder in folders.items()}
        prompts = [encode(tokenizer, row["prompt"]) for row in held_out]
        if DEVICE == "cpu":
            torch.set_num_threads(1)
        found["rows"] = measure(model, heads, prompts, end_tokens(model, tokenizer), options)
    record.write(found)
    table(found["rows"], COLUMNS)
    record.say_where()


if __name__ == "__main__":
    main()
