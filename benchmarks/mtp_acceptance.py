"""Acceptance of an MTP head before and after a fine-tuning, with `train_mtp` and without: a small model, on a CPU.

    python benchmarks/mtp_acceptance.py --json benchmarks/results/mtp_acceptance/small/record.json
    python benchmarks/mtp_acceptance.py --tiny

A model with the classes of Qwen3.5, attention in every layer, and its head are trained from random weights on a
made-up language, by `LigerSFTTrainer` with `train_mtp`. That is the base. It is then fine-tuned on a second language of
the same letters, twice: with `train_mtp`, which trains the head too, and without, which keeps the base's. A language is
a list of words, each of three to six letters, and rules which word may follow which. So a head has something to guess,
and the guesses for one language are wrong in the other. The head of the model that was fine-tuned without it is then
trained alone, by `LigerMTPTrainer` on the frozen model, from the labels and from the model's distribution.

Each model then writes greedy text after prompts of the language that it was trained on last, and `mtp.evaluate` tells
how often the head guesses the token after the next one, and how many tokens a pass of a decoder with the head yields: 2
if every guess is right, and 1 without a head. Then the head guesses three tokens for each pass, from its own output
(`by_position` says how often each was accepted after the ones before it). `loss` is the model's own on rows that were
kept back: without clipping of gradients both fine-tunings give the same model.
"""

import random
import tempfile
from pathlib import Path

import torch
from _measure import Record, arguments, table
from _steps import tokenizer_of

LETTERS = 26
FIRST = 2  # id of the first letter, after the two tokens of the tokenizer
SPACE = FIRST + LETTERS
VOCAB = SPACE + 1
GUESSES = 3  # for a pass, in addition to one token
SHAPE = dict(
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=2,
    full_attention_interval=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=VOCAB,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    mtp_num_hidden_layers=1,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=1,
)


class Language:
    """Words of random letters. Two others may follow each letter, the first of them three times out of four."""

    def __init__(self, seed, words=40):
        self.chance = random.Random(seed)
        self.words = []
        for _ in range(words):
            length = self.chance.randint(3, 6)
            self.words.append([FIRST + self.chance.randrange(LETTERS) for _ in range(length)])
        self.followers = [self.chance.sample(range(words), 2) for _ in range(words)]

    def row(self, length):
        """`length` tokens of text, from the beginning of a word."""
        word = self.chance.randrange(len(self.words))
        ids = []
        while len(ids) < length:
            ids += [*self.words[word], SPACE]
            word = self.followers[word][self.chance.random() > 0.75]
        return ids[:length]


def write_base(folder):
    """A checkpoint with random weights, of the model and its MTP head."""
    from mtp import give_head
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_5_text", **SHAPE))
    with tempfile.TemporaryDirectory() as head:
        give_head(model, head)
        extra = load_file(Path(head, "model.safetensors"))
    model.save_pretrained(folder)
    tokenizer_of().save_pretrained(folder)
    file = Path(folder, "model.safetensors")
    save_file(load_file(file) | extra, file, {"format": "pt"})


def make_trainer(base, folder, rows, held_out, options, alone=False, **head):
    """A trainer of the checkpoint `base` into `folder`, or, `alone`, of its head. `head` are fields of its config."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    from liger_trainer import LigerMTPConfig, LigerMTPTrainer, LigerSFTConfig, LigerSFTTrainer

    config_class, trainer_class = (LigerMTPConfig, LigerMTPTrainer) if alone else (LigerSFTConfig, LigerSFTTrainer)
    torch.manual_seed(0)
    args = config_class(
        output_dir=str(folder),
        max_steps=len(rows) // options.batch,
        per_device_train_batch_size=options.batch,
        learning_rate=options.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        max_grad_norm=0.0,
        max_length=options.length,
        dataset_kwargs={"skip_prepare_dataset": True},
        bf16=False,
        activation_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=20,
        disable_tqdm=True,
        use_cpu=True,
        **head,
    )
    return trainer_class(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        args,
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(held_out),
        processing_class=tokenizer_of(),
    )


def trained(base, folder, rows, held_out, options, train_mtp):
    """Train the checkpoint `base` into `folder`. Returns the loss on the rows that were kept back."""
    trainer = make_trainer(base, folder, rows, held_out, options, train_mtp=train_mtp)
    trainer.train()
    trainer.save_model()
    return trainer.evaluate()["eval_loss"]


def train_head(tuned, folder, rows, held_out, options, targets):
    """Train the head of the checkpoint `tuned` on the frozen model. Returns the folder of the model with this head."""
    from liger_trainer.mtp.export import export_head

    trainer = make_trainer(tuned, folder / "head", rows, held_out, options, alone=True, mtp_targets=targets)
    trainer.train()
    trainer.save_model()
    export_head(str(folder / "head"), str(folder / "model"), str(tuned))
    return folder / "model"


def accepted(folder, prompts, options):
    """Accuracy and tokens a pass of the head in `folder`, on the greedy text of the model there."""
    from transformers import AutoModelForCausalLM

    from liger_trainer.base_weights.unloaded import find_checkpoint
    from liger_trainer.mtp.evaluate import evaluate
    from liger_trainer.mtp.predictor import load_predictor

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    predictor = load_predictor(model, find_checkpoint(str(folder))).eval()
    found = evaluate(model, predictor, prompts, set(), max_new_tokens=options.new_tokens)
    further = evaluate(model, predictor, prompts, set(), steps=GUESSES, max_new_tokens=options.new_tokens)
    return {
        "accuracy": found.accuracy[0],
        "tokens_a_pass": found.tokens_per_pass,
        "tokens_a_pass_of_3": further.tokens_per_pass,
        "by_position": further.accepted,
        "tokens": found.tokens,
    }


def rows_in(language, count, length):
    rows = []
    for _ in range(count):
        ids = language.row(length)
        rows.append({"input_ids": ids, "labels": ids})
    return rows


def measure(options, folder):
    """Yield a row for the base, for each of the two fine-tunings, and for each training of the head alone."""
    first = Language(1, options.words)
    second = Language(2, options.words)
    start, base = folder / "start", folder / "base"
    write_base(start)
    batches = options.batch
    loss = trained(
        start,
        base,
        rows_in(first, batches * options.base_steps, options.length),
        rows_in(first, 32, options.length),
        options,
        True,
    )
    prompts = [first.row(12) for _ in range(options.prompts)]
    yield {"head": "the base and its head, on the first language", "loss": loss} | accepted(base, prompts, options)

    rows = rows_in(second, batches * options.steps, options.length)
    held_out = rows_in(second, 32, options.length)
    prompts = [second.row(12) for _ in range(options.prompts)]
    losses = {}
    for train_mtp, name in ((False, "fine-tuned on the second, without `train_mtp`"), (True, "with `train_mtp`")):
        tuned = folder / str(train_mtp)
        loss = losses[train_mtp] = trained(base, tuned, rows, held_out, options, train_mtp)
        yield {"head": name, "train_mtp": train_mtp, "loss": loss} | accepted(tuned, prompts, options)
    for targets, name in (("hard", "labels"), ("soft", "the model's distribution")):
        served = train_head(folder / "False", folder / targets, rows, held_out, options, targets)
        row = {"head": f"without, then the head alone, from {name}", "mtp_targets": targets, "loss": losses[False]}
        yield row | accepted(served, prompts, options)


COLUMNS = {
    "head": ("", ""),
    "loss": ("loss", ".4f"),
    "accuracy": ("accuracy", ".3f"),
    "tokens_a_pass": ("tokens a pass", ".3f"),
    "tokens_a_pass_of_3": ("of 3 guesses", ".3f"),
}


def parsed(argv=None):
    parser = arguments(__doc__)
    parser.add_argument("--words", type=int, default=40, help="words of each language")
    parser.add_argument("--base-steps", type=int, default=160)
    parser.add_argument("--steps", type=int, default=160, help="steps of the fine-tunings")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--tiny", action="store_true", help="too few steps to learn anything")
    options = parser.parse_args(argv)
    if options.tiny:
        options.base_steps, options.steps, options.prompts, options.new_tokens = 2, 2, 2, 8
    return options


def main(argv=None):
    options = parsed(argv)
    record = Record("mtp_acceptance", "small", options.json, options.tiny, argv)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for row in measure(options, Path(folder)):
            rows.append(row)
            record.write({"options": vars(options), "rows": rows})
    table(rows, COLUMNS)
    record.say_where()


if __name__ == "__main__":
    main()
