"""Finds the chat template of a recipe, and marks the answers in it that `assistant_only_loss` learns."""

import contextlib
import os
import re
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from liger_trainer.command.recipe.model_source import ModelSource
from liger_trainer.command.recipe.read import Recipe
from liger_trainer.command.rows.turn_weights import has_turn_weights
from liger_trainer.errors import RecipeError
from liger_trainer.paths import PACKAGE

# For each named template, the tokens that it needs in the vocabulary. The last one ends a turn.
_NAMED: dict[str, tuple[str, ...]] = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "qwen": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "mistral": (),
}

# Renders TEMPLATE twice for each learned message: up to the message, and including it. The second text must continue
# the first one, and the whole conversation must continue both, so the emitted parts add up to the whole. An answer
# begins after the generation prompt. The beginning of any other message, and of an answer without a prompt, is found by
# rendering the message with another text.
_MARKING = """\
{%- macro rendered_(messages, add_generation_prompt) +%}TEMPLATE{%+ endmacro -%}
{%- set so_far_ = namespace(text='') -%}
{%- for message in messages -%}
    {%- set flags_ = [message['train'], message['weight']] | select('defined') | reject('none') | list -%}
    {%- if (flags_[0] if flags_ else message['role'] in ROLES) -%}
        {%- set after_ = rendered_(messages[:loop.index], false) -%}
        {%- if message['role'] == 'assistant' and not loop.first -%}
            {%- set before_ = rendered_(messages[:loop.index0], true) -%}
        {%- else -%}
            {%- set other_ = dict(message, content='OTHER_TEXT') -%}
            {%- set before_ = rendered_(messages[:loop.index0] + [other_], false).split('OTHER_TEXT')[0] -%}
        {%- endif -%}
        {%- if not (before_.startswith(so_far_.text) and after_.startswith(before_)) -%}
            {%- set named_ = loop.index0 ~ " (" ~ (message['content'] | string)[:60] ~ ")" -%}
            {{- raise_exception("before message " ~ named_ ~ ", REFUSAL") -}}
        {%- endif -%}
        {{- before_[so_far_.text | length:] -}}
        {%- generation -%}{{- after_[before_ | length:] -}}{%- endgeneration -%}
        {%- set so_far_.text = after_ -%}
    {%- endif -%}
{%- endfor -%}
{%- set whole_ = rendered_(messages, add_generation_prompt) -%}
{%- if not whole_.startswith(so_far_.text) -%}
    {{- raise_exception("after the last answer, REFUSAL") -}}
{%- endif -%}
{{- whole_[so_far_.text | length:] -}}
"""
# The marks of a template, and replacements that leave the whitespace around them as it is
_MARKS = (
    (re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}"), r"{%\1 if true \2%}"),
    (re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}"), r"{%\1 endif \2%}"),
)
_REFUSAL = (
    "the chat template renders a turn differently when further turns follow, so assistant_only_loss cannot tell where "
    "answers are. In a copy of the template, write {% generation %}{{ message['content'] }}{% endgeneration %} where "
    "it has an answer, and set chat_template_path to the copy. Or remove assistant_only_loss, and set prompt_template: "
    "last_turn to learn the last answer of each row"
)


def mark_answers(template: str, roles: Sequence[str] = ("assistant",)) -> str:
    """Return a template that renders like `template`, with `{% generation %}` around each learned message.

    A message is learned if its role is one of `roles`, unless its own `train` or `weight` says otherwise. The mark ends
    with the turn. The marked template raises a jinja2 error if the parts of a conversation, rendered one by one, do not
    add up to the whole.
    """
    for mark, instead in _MARKS:
        template = mark.sub(instead, template)
    marking = _MARKING.replace("REFUSAL", _REFUSAL).replace("ROLES", str(list(roles)))
    return marking.replace("TEMPLATE", template.removesuffix("\n"))


def _check_answers(tokenizer: Any, marked: str) -> None:
    """RecipeError if transformers also marks the tokens between two answers.

    Older versions, such as 5.17, do so after an answer that ends with a character without a token of its own.
    """
    import transformers
    from jinja2 import TemplateError

    if not isinstance(tokenizer, transformers.PreTrainedTokenizerBase):
        return  # a processor's rows already have masks when TRL gets them
    turns = [{"role": role, "content": role} for role in ("user", "assistant")] * 2
    try:
        mask = tokenizer.apply_chat_template(
            turns, chat_template=marked, return_dict=True, return_assistant_tokens_mask=True
        )["assistant_masks"]
    except (TemplateError, ValueError):
        return  # the template does not take these turns; real rows get the library's own error
    if sum(now > before for before, now in zip([0, *mask], mask, strict=False)) == 1:
        raise RecipeError(
            f"assistant_only_loss would also learn the tokens between two answers: the last character of an answer has "
            f"no token of its own, which transformers {transformers.__version__} does not handle. Install a later "
            f"version, such as 5.24, or set prompt_template: last_turn to learn the last answer of each row."
        )


def resolve_named_template(recipe: Recipe, source: ModelSource) -> None:
    """Resolve a named template such as `chat_template_path: chatml`, and make its end-of-turn token the eos_token."""
    from transformers import AutoTokenizer

    training, name = recipe.training, getattr(recipe.training, "chat_template_path", None)
    if name not in _NAMED or os.path.exists(name):
        return
    vocabulary = source.load(AutoTokenizer).get_vocab()
    missing = [token for token in _NAMED[name] if token not in vocabulary]
    if missing:
        fitting = " or ".join(other for other, tokens in _NAMED.items() if vocabulary.keys() >= set(tokens))
        raise RecipeError(
            f"chat_template_path is {name!r}, but the vocabulary lacks its token {missing[0]}. Set {fitting} instead, "
            "or leave the key out if the model has its own template."
        )
    training.chat_template_path = str(PACKAGE / "data" / "chat_templates" / f"{name}.jinja")
    if _NAMED[name] and training.eos_token is None:
        training.eos_token = _NAMED[name][-1]


def find_template(recipe: Recipe, source: ModelSource) -> tuple[Any, str]:
    """Return the tokenizer or processor with the chat template that the recipe trains with, and its origin as text."""
    from transformers import AutoProcessor, AutoTokenizer

    template_path = getattr(recipe.training, "chat_template_path", None)
    if template_path is not None and not os.path.isfile(template_path):
        try:
            return AutoTokenizer.from_pretrained(template_path), f"chat_template_path {template_path!r}"
        except (OSError, ValueError) as error:
            named = ", ".join(_NAMED)
            raise RecipeError(
                f"chat_template_path is {template_path!r}, neither {named}, nor a file or a model."
            ) from error
    tokenizer, where = source.load(AutoTokenizer), f"model_name_or_path {recipe.model.model_name_or_path!r}"
    if template_path is not None:
        tokenizer.chat_template = Path(template_path).read_text(encoding="utf-8")
        where = f"chat_template_path {Path(template_path).name!r}"
    elif tokenizer.chat_template is None and not source.is_gguf:
        tokenizer = source.load(AutoProcessor)  # for an image model, only the processor may have the template
    return tokenizer, where


def raised_by_template(error: Exception) -> bool:
    """Return whether an error comes from a chat template: from jinja2, or from code in the template."""
    from jinja2 import TemplateError

    frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return isinstance(error, TemplateError) or frames[-1:] == ["<template>"]


class TemplatedTrainer(Protocol):
    """The trainer attributes that have a chat template. It is written on the trainer and on the two objects."""

    processing_class: Any  # a tokenizer or a processor of images
    data_collator: Any
    chat_template: str


@contextlib.contextmanager
def answers_marked(recipe: Recipe, source: ModelSource, *datasets: Any) -> Iterator[Callable[[TemplatedTrainer], None]]:
    """Context manager: `assistant_only_loss` finds the answers in any template that renders them one after another.

    It yields a function. Call that with the trainer once it is built, so that the original template is saved. TRL
    handles templates with marks, and templates that it has a marked version of, unless `train_on` or the messages of
    `datasets` (None is skipped) say what is learned.
    """
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    training, roles = recipe.training, recipe.args.train_on or ["assistant"]
    template_path = getattr(training, "chat_template_path", None)
    tokenizer: Any = find_template(recipe, source)[0] if getattr(training, "assistant_only_loss", False) else None
    template = getattr(tokenizer, "chat_template", None)
    text = template["default"] if isinstance(template, dict) else template
    by_trl = None  # the template with TRL's marks
    with contextlib.suppress(ValueError):  # TRL has no template with marks for this one
        if template is not None:
            by_trl = text if has_generation_markers(template) else get_training_chat_template(tokenizer)
    chooses = roles != ["assistant"] or any(has_turn_weights(rows) for rows in datasets)
    if text is None or (by_trl is not None and not chooses):
        yield lambda trainer: None
        return
    template = text
    marked = mark_answers(by_trl or text, roles)
    if roles == ["assistant"]:
        _check_answers(tokenizer, marked)
    with tempfile.TemporaryDirectory() as folder:
        if template_path is None or os.path.isfile(template_path):
            training.chat_template_path = os.path.join(folder, "marked.jinja")
            Path(training.chat_template_path).write_text(marked, encoding="utf-8")
        else:  # TRL adds this tokenizer's tokens to the model
            tokenizer.chat_template, training.chat_template_path = marked, folder
            tokenizer.save_pretrained(folder)

        def restore_template(trainer: TemplatedTrainer) -> None:
            trainer.processing_class.chat_template, trainer.chat_template = template, marked
            if hasattr(trainer.data_collator, "chat_template"):  # the collator for images tokenizes rows itself
                trainer.data_collator.chat_template = marked

        try:
            yield restore_template
        finally:
            training.chat_template_path = template_path
