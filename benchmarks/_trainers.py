"""Make TRL's trainers other than SFTTrainer and DPOTrainer train on rows of token ids.

The rows are pairs: a prompt and two answers, cut to the run's `length` together with their prompt. A trainer of pairs
takes them as they are. KTO takes a row for each text that has been judged, and distillation and the online trainers
take prompts. The answers then stand in the place of what they would generate, and all else of a rollout is TRL's: old
and reference log-probabilities, rewards and advantages. The first answer of a prompt is given the reward 1, and the
second 0.
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import preferences
from _rows import taken, tokens_of

CLASSES = {
    "sft": "SFTTrainer",
    "dpo": "DPOTrainer",
    "kto": "KTOTrainer",
    "orpo": "ORPOTrainer",
    "cpo": "CPOTrainer",
    "reward": "RewardTrainer",
    "grpo": "GRPOTrainer",
    "rloo": "RLOOTrainer",
    "distillation": "DistillationTrainer",
}
ANSWERS = 2  # of each prompt, for trainers that compare completions


@dataclass(frozen=True)
class Kind:
    """How a trainer is built.

    Args:
        rows (`Callable`): Makes the rows of its data set, of a run and of pairs (KTO: of judged answers).
        methods (`Callable`): Returns methods of the trainer to replace, of its class and of what its rows are made of.
        options (`Callable`): Returns fields of its arguments, of a run.
        frozen (`str`, *optional*): The argument that takes a second, frozen model.
        loads_reference (`bool`): It loads its reference itself, by the name of the model.
        is_classifier (`bool`): Its model has a head of one score.
        online (`bool`): It makes its batches from prompts.
        answers (`int`): How many rows of a batch have one prompt, if it is online.
        compared (`str`): What it logs that shows whether two trainers do the same.
    """

    rows: Callable
    methods: Callable
    options: Callable = lambda run: {}
    frozen: str | None = None
    loads_reference: bool = False
    is_classifier: bool = False
    online: bool = False
    answers: int = 1
    compared: str = "loss"


def cut(row, length):
    """`row` with answers that end where prompt and answer have `length` tokens together."""
    room = length - len(row["prompt_ids"])
    answers = ("chosen_ids", "rejected_ids", "completion_ids")
    return {name: value[:room] if name in answers else value for name, value in row.items()}


def as_they_are(stock_class, rows):
    """Take rows that are token ids already. TRL has no option for that."""
    return {"_prepare_dataset": lambda self, dataset, *args: dataset}


def judged_rows(run, pairs):
    """KTO's rows, each with the answer of the row before it in its batch. TRL estimates the KL term from it."""
    found = []
    for start in range(0, len(pairs), run.batch):
        batch = pairs[start : start + run.batch]
        answers = [row["completion_ids"] for row in batch]
        others = [answers[-1], *answers[:-1]]
        found += [row | {"KL_completion_ids": other} for row, other in zip(batch, others, strict=True)]
    return found


def scored_rows(run, pairs):
    """The rows of CPO and ORPO, as their `tokenize_row` makes them."""
    found = []
    for pair in pairs:
        prompt = pair["prompt_ids"]
        row = {"prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)}
        for name in ("chosen", "rejected"):
            answer = pair[f"{name}_ids"]
            row[f"{name}_input_ids"] = prompt + answer
            row[f"{name}_attention_mask"] = [1] * (len(prompt) + len(answer))
            row[f"{name}_labels"] = [-100] * len(prompt) + answer
        found.append(row)
    return found


def tokenized(stock_class, rows):
    """Take rows that `tokenize_row` has nothing to do for."""
    return {"tokenize_row": staticmethod(lambda row: row)}


def whole_texts(run, pairs):
    """The rows of the reward trainer, each two texts of prompt and answer."""
    texts = []
    for pair in pairs:
        prompt = pair["prompt_ids"]
        texts.append({name: prompt + pair[name] for name in ("chosen_ids", "rejected_ids")})
    return texts


def numbers(run, pairs):
    """Prompts that are the numbers of their pairs, to find their ids and answers."""
    return [{"prompt": str(number)} for number in range(len(pairs))]


def given_answers(stock_class, pairs, count):
    """Methods that give `count` answers of each prompt in the place of generated ones, and count their tokens."""
    stock_rollout = stock_class._generate_and_score_completions
    gives_logprobs = "num_generations" in inspect.signature(stock_class._generate_single_turn).parameters

    def tokenize_prompts(self, prompts):
        self.chosen_pairs = [pairs[int(prompt)] for prompt in prompts]
        return [pair["prompt_ids"] for pair in self.chosen_pairs], None, {}

    def generate(self, prompt_ids, *args, **kwargs):
        names = ("chosen_ids", "rejected_ids")
        answers = [pair[names[k % count]] for k, pair in enumerate(self.chosen_pairs)]
        return (answers, None) if gives_logprobs else answers

    def rollout(self, inputs):
        group = stock_rollout(self, inputs)
        self.counted.append(tokens_of(group))
        return group

    return {
        "_tokenize_prompts": tokenize_prompts,
        "_generate_single_turn": generate,
        "_generate_and_score_completions": rollout,
    }


def prefer_the_first(completions, **_):
    """The rewards of `completions`, which come in pairs."""
    return [1.0, 0.0] * (len(completions) // ANSWERS)


def two_answers_each(stock_class, pairs):
    return given_answers(stock_class, pairs, ANSWERS)


def one_answer_each(stock_class, pairs):
    return given_answers(stock_class, pairs, 1)


def compares_answers(run):
    return one_answer(run) | {"num_generations": ANSWERS}


def one_answer(run):
    return {"max_completion_length": run.length, "shuffle_dataset": False}


SCORED = Kind(scored_rows, tokenized)
COMPARED = Kind(numbers, two_answers_each, compares_answers, online=True, answers=ANSWERS, compared="grad_norm")
KINDS = {
    "kto": Kind(judged_rows, as_they_are, frozen="ref_model"),
    "orpo": SCORED,
    "cpo": SCORED,
    "reward": Kind(whole_texts, as_they_are, is_classifier=True),
    "grpo": COMPARED,
    "rloo": replace(COMPARED, loads_reference=True),
    "distillation": Kind(numbers, one_answer_each, one_answer, frozen="teacher_model", online=True),
}


def rows_of(run, vocab):
    """The rows of all steps of `run` for its trainer, one of `KINDS`: (rows of the data set, what they are made of)."""
    if run.trainer == "kto":
        found = preferences.judged(run.data, vocab, run.length)
    else:
        found = preferences.real_pairs(run.data, vocab, run.length)
    kind = KINDS[run.trainer]
    in_a_step = replace(run, batch=run.batch // kind.answers)
    made_of = taken(in_a_step, [cut(row, run.length) for row in found])
    return kind.rows(run, made_of), made_of


def load_reference(stock_class, build):
    """Have TRL's trainer in `stock_class` load its reference by calling `build`, since the model has no name."""
    trl_class = next(base for base in stock_class.__mro__ if base.__module__.startswith("trl."))
    sys.modules[trl_class.__module__].create_model_from_path = lambda *args, **kwargs: build()
