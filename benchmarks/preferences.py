"""Preference rows as token ids, for `training.py --trainer dpo --data` on a machine without the tokenizer.

    python benchmarks/preferences.py dpo_en_demo.json path/to/tokenizer rows.npz

The rows are JSON objects with `conversations` (turns of `from` and `value`), `chosen` and `rejected` (one turn each).
For each of `prompt`, `chosen` and `rejected`, the .npz has the flat array `<name>_ids` (uint32), and `<name>_offsets`,
with one more entry than there are rows.
"""

import argparse
import json

import numpy as np

PARTS = ("prompt", "chosen", "rejected")
ROLES = {"human": "user", "gpt": "assistant", "system": "system"}
RANDOM_PROMPT = 64  # tokens of the prompt of a pair, if no rows are given


def texts_of(row):
    """The prompt, with its turns joined by blank lines, and the two answers."""
    prompt = "\n\n".join(turn["value"] for turn in row["conversations"]) + "\n\n"
    return prompt, row["chosen"]["value"], row["rejected"]["value"]


def tokenize(path, tokenizer, out):
    """Write the .npz. Prompts go through the chat template if `tokenizer` has one, and answers end with `eos_token`."""
    ids = {part: [] for part in PARTS}
    for row in json.load(open(path)):
        prompt, *answers = texts_of(row)
        if tokenizer.chat_template:
            turns = [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in row["conversations"]]
            prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        ids["prompt"].append(tokenizer(prompt, add_special_tokens=not tokenizer.chat_template)["input_ids"])
        for part, answer in zip(PARTS[1:], answers, strict=True):
            ids[part].append(tokenizer(answer + tokenizer.eos_token, add_special_tokens=False)["input_ids"])
    arrays = {}
    for part, rows in ids.items():
        arrays[f"{part}_ids"] = np.concatenate(rows).astype(np.uint32)
        arrays[f"{part}_offsets"] = np.cumsum([0, *map(len, rows)])
    np.savez_compressed(out, **arrays)


def read(path, vocab, prompt=RANDOM_PROMPT):
    """{name: list of rows of token ids}.

    A .json file comes without its tokenizer, so its rows are random ids, one for four characters. Without a file there
    are 64 rows of random ids with prompts of `prompt` tokens, none like another.
    """
    draw = np.random.default_rng(0)
    if path is None:
        lengths = {"prompt": prompt, "chosen": 4096, "rejected": 4096}
        return {part: list(draw.integers(0, vocab, (64, lengths[part]))) for part in PARTS}
    if path.endswith(".npz"):
        arrays = np.load(path)
        flat = {part: arrays[f"{part}_ids"].astype(np.int64) % vocab for part in PARTS}
        return {part: np.split(flat[part], arrays[f"{part}_offsets"][1:-1]) for part in PARTS}
    texts = zip(*map(texts_of, json.load(open(path))), strict=True)
    rows = {}
    for part, column in zip(PARTS, texts, strict=True):
        rows[part] = [draw.integers(0, vocab, -(-len(text) // 4)) for text in column]
    return rows


def pairs(path, vocab, length, count, prompt=RANDOM_PROMPT):
    """`count` pairs without padding, with two sequences of exactly `length` tokens each.

    Pair i has the prompt of row i. A prompt of a file is cut to half of `length` at most, a random one to three
    quarters. Its answers are the answers of row i and of the rows after it, joined and cut. Every token after the
    prompt is scored. If there are too few rows, they are repeated.
    """
    longest = length * 3 // 4 if path is None else length // 2
    rows = read(path, vocab, prompt)
    total = len(rows["prompt"])
    found = []
    for i in range(count):
        prompt = rows["prompt"][i % total][:longest]
        pair = {"prompt_ids": prompt.tolist()}
        for part in PARTS[1:]:
            ids, j = [], i
            while len(ids) < length - len(prompt):
                ids.extend(rows[part][j % total].tolist())
                j += 1
            pair[f"{part}_ids"] = ids[: length - len(prompt)]
        found.append(pair)
    return found


def real_pairs(path, vocab, length):
    """The pairs of a file as they are, for TRL's collator, which cuts each sequence to `length` and pads.

    Leaves out a pair with a prompt of `length` tokens or more, as TRL does.
    """
    rows = read(path, vocab)
    found = []
    for prompt, chosen, rejected in zip(rows["prompt"], rows["chosen"], rows["rejected"], strict=True):
        if len(prompt) < length:
            ids = {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}
            found.append({name: tokens.tolist() for name, tokens in ids.items()})
    return found


def judged(path, vocab, length):
    """The judged answers of a file, for KTO: `prompt_ids`, `completion_ids` and `label`.

    The file is a .json of objects with `messages`, which end with the answer, and `label`. Of a file of pairs, chosen
    answers have the label True, and rejected ones False. An answer is left out if its prompt alone has `length` tokens.
    """
    rows = [] if path.endswith(".npz") else json.load(open(path))
    if not rows or "label" not in rows[0]:
        return _unpaired(real_pairs(path, vocab, length))
    draw = np.random.default_rng(0)
    found = []
    for row in rows:
        *turns, answer = [turn["content"] for turn in row["messages"]]
        texts = {"prompt_ids": "\n\n".join(turns) + "\n\n", "completion_ids": answer}
        ids = {name: draw.integers(0, vocab, -(-len(text) // 4)).tolist() for name, text in texts.items()}
        found.append(ids | {"label": row["label"]})
    return [row for row in found if len(row["prompt_ids"]) < length]


def _unpaired(pairs):
    found = []
    for pair in pairs:
        for part, label in (("chosen", True), ("rejected", False)):
            found.append({"prompt_ids": pair["prompt_ids"], "completion_ids": pair[f"{part}_ids"], "label": label})
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", help="the .json file")
    parser.add_argument("tokenizer", help="folder or hub name for AutoTokenizer")
    parser.add_argument("out", help="the .npz file")
    options = parser.parse_args()
    from transformers import AutoTokenizer

    tokenize(options.rows, AutoTokenizer.from_pretrained(options.tokenizer), options.out)
