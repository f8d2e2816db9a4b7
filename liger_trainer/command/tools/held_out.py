"""Measures a model on held-out rows: the loss of their answers, and how many answers it reproduces exactly."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from liger_trainer.command.rows.chat_template import mark_answers
from liger_trainer.data.answers import Prompt, answer, encode, end_tokens
from liger_trainer.errors import RecipeError
from liger_trainer.head.module import base_model_of
from liger_trainer.patching import apply_liger

if TYPE_CHECKING:
    from datasets import Dataset

_UNREAD = ("image", "images", "tools", "chat_template_kwargs")


@dataclass
class HeldOutMetrics:
    """The metrics of one evaluation.

    Attributes:
        rows (`int`): Number of rows that count in the loss.
        tokens (`int`): Number of tokens that count in the loss.
        loss (`float`): Mean negative log-probability of these tokens, in nats.
        first_choice (`float`): Share of these tokens that the model finds most likely.
        answered (`int`): Number of rows that the model answered.
        exact (`int`): Number of answers equal to the row's, except for spaces at both ends.
    """

    rows: int = 0
    tokens: int = 0
    loss: float = 0.0
    first_choice: float = 0.0
    answered: int = 0
    exact: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"perplexity": math.exp(self.loss)}

    def __str__(self) -> str:
        lines = [
            f"  loss     {self.loss:.4f} a token (perplexity {math.exp(self.loss):.2f}), {self.tokens} tokens of "
            f"{self.rows} rows",
            f"  tokens   {self.first_choice:.1%} are the model's first choice",
        ]
        if self.answered:
            lines.append(f"  answers  {self.exact} of {self.answered} are the row's to the letter")
        return "\n".join(lines)


@torch.no_grad()
def measure(
    model: Any, tokenizer: Any, rows: "Dataset", max_length: int, answers: int, max_new_tokens: int
) -> HeldOutMetrics:
    """Measure a model on rows in a form that the `sft` trainer takes.

    In messages, the assistant's turns count in the loss; after a prompt, the completion; in plain text, every token.
    One row runs at a time, so that padding cannot change a number.

    Args:
        model (`PreTrainedModel` or `PeftModel`): In evaluation mode. It gets patched.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        rows (`Dataset`): Rows after a `prompt_template`.
        max_length (`int`): Number of tokens at which rows are cut.
        answers (`int`): Number of rows that the model answers greedily, the first ones; 0 for none.
        max_new_tokens (`int`): Number of tokens at which answers are cut.

    Raises:
        RecipeError: A row cannot be read, or no token counts.
    """
    apply_liger(model)
    model = base_model_of(model)  # an adapter's layers stay in it; it has the generation config
    measured = HeldOutMetrics()
    total = 0.0
    right = 0
    for index, row in enumerate(tqdm(rows, desc="Reading the rows")):
        ids, learned = tokens_of(row, index, tokenizer)
        labels = [token if counts else -100 for token, counts in zip(ids, learned, strict=True)]
        input_ids = torch.tensor([ids[:max_length]], device=model.device)
        targets = torch.tensor([labels[:max_length]], device=model.device)
        if not bool((targets[:, 1:] != -100).any()):
            continue
        outputs = model(input_ids=input_ids, labels=targets, fused_lm_head=True, token_outputs=("log_probs", "is_top1"))
        counted = outputs.label_mask
        total -= float(outputs.log_probs[counted].double().sum())
        right += int(outputs.is_top1[counted].sum())
        measured.tokens += int(counted.sum())
        measured.rows += 1
    if not measured.tokens:
        raise RecipeError(f"No token of the {len(rows)} rows counts within --max_length {max_length}. Raise it.")
    measured.loss = total / measured.tokens
    measured.first_choice = right / measured.tokens
    asked = list(_questions(rows.select(range(min(answers, len(rows))))))
    for prompt, expected in tqdm(asked, desc="Answering", disable=not asked):
        new = answer(model, [encode(tokenizer, prompt)], end_tokens(model, tokenizer), max_new_tokens)[0]
        measured.answered += 1
        measured.exact += tokenizer.decode(new, skip_special_tokens=True).strip() == expected.strip()
    return measured


def tokens_of(row: dict[str, Any], index: int, tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Return the tokens of a row, and for each whether it counts in the loss: as in SFT with assistant_only_loss."""
    unread = [name for name in _UNREAD if row.get(name) not in (None, "", "[]", [], {})]
    if unread:
        raise RecipeError(f"Row {index} of the dataset has {unread[0]}, which evaluate does not read. Remove it.")
    if row.get("input_ids"):
        ids = list(row["input_ids"])
        labels = row.get("labels") or ids
        return ids, [label != -100 for label in labels]
    if row.get("messages"):
        return _marked(row["messages"], index, tokenizer)
    if row.get("prompt"):
        end = tokenizer.eos_token or ""
        if isinstance(row["prompt"], list):
            before = encode(tokenizer, row["prompt"])
            whole = [*row["prompt"], *row["completion"]]
            ids = list(tokenizer.apply_chat_template(whole, return_dict=True)["input_ids"])
        else:
            before = tokenizer(row["prompt"])["input_ids"]
            text = row["completion"]
            ids = tokenizer(row["prompt"] + text + ("" if text.endswith(end) else end))["input_ids"]
        common = 0
        while common < min(len(before), len(ids)) and before[common] == ids[common]:
            common += 1
        return ids, [position >= common for position in range(len(ids))]
    text = row["text"]
    end = tokenizer.eos_token or ""
    ids = tokenizer(text if text.endswith(end) else text + end)["input_ids"]
    return ids, [True] * len(ids)


def _marked(messages: list[dict[str, Any]], index: int, tokenizer: Any) -> tuple[list[int], list[bool]]:
    from jinja2 import TemplateError

    template = tokenizer.chat_template
    if template is None:
        raise RecipeError("The rows are messages, but the model's tokenizer has no chat template.")
    text = template["default"] if isinstance(template, dict) else template
    try:
        encoded = tokenizer.apply_chat_template(
            messages, chat_template=mark_answers(text), return_dict=True, return_assistant_tokens_mask=True
        )
    except TemplateError as error:
        raise RecipeError(f"Row {index} of the dataset: {error}") from error
    return list(encoded["input_ids"]), [bool(marked) for marked in encoded["assistant_masks"]]


def _questions(rows: "Dataset") -> Iterator[tuple[Prompt, str]]:
    """Yield the prompt and the last answer of each row that has both as text."""
    for row in rows:
        if row.get("messages"):
            prompt, last = row["messages"][:-1], row["messages"][-1]
        elif row.get("prompt"):
            prompt, last = row["prompt"], row["completion"]
            if isinstance(last, list):
                prompt, last = [*prompt, *last[:-1]], last[-1]
        else:
            continue
        if isinstance(last, dict) and last["role"] != "assistant":
            continue
        expected = last["content"] if isinstance(last, dict) else last
        if prompt and isinstance(expected, str):
            yield prompt, expected
