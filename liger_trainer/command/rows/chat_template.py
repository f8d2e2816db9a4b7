"""The chat template of a recipe: its name or file, and where it has the answers that `assistant_only_loss` learns."""

import contextlib
import os
import re
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from liger_trainer.command.recipe.model_source import ModelSource
from liger_trainer.command.recipe.read import Recipe
from liger_trainer.command.rows.turn_weights import has_turn_weights
from liger_trainer.errors import RecipeError
from liger_trainer.paths import PACKAGE

# The tokens that a named template needs in the vocabulary. The last one ends a turn.
_NAMED: dict[str, tuple[str, ...]] = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "qwen": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "mistral": (),
}

# Renders the template that stands in it for each learned message: up to its text, and with it. The second text must
# continue the first one, and the whole conversation must continue both, so what is emitted is the whole, part by part.
# An answer begins after the generation prompt. Other messages, and an answer that nothing comes before, begin where
# another text would stand in their place.
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
# The marks of a template, and what keeps the spaces around them as they are
_MARKS = (
    (re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}"), r"{%\1 if true \2%}"),
    (re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}"), r"{%\1 endif \2%}"),
)
_REFUSAL = (
    "the chat template renders turns in another way than where they are the last ones, so that assistant_only_loss "
    "cannot tell the answers apart. Write {% generation %}{{ message['content'] }}{% endgeneration %} where a copy of "
    "the template has an answer, and set chat_template_path to the copy. Or remove assistant_only_loss, and set "
    "prompt_template: last_turn to learn the last answer of each row"
)


def mark_answers(template: str, roles: Sequence[str] = ("assistant",)) -> str:
    """A template with the texts of `template` and `{% generation %}` around each learned message.

    A message is learned if its role is one of `roles`, or as its own `train` or `weight` says. It ends with its turn.
    The marked template raises an error of jinja2's for a conversation whose parts, rendered one by one, do not add up
    to the whole.
    """
    for mark, instead in _MARKS:
        template = mark.sub(instead, template)
    marking = _MARKING.replace("REFUSAL", _REFUSAL).replace("ROLES", str(list(roles)))
    return marking.replace("TEMPLATE", template.removesuffix("\n"))


def _check_answers(tokenizer: Any, marked: str) -> None:
    """RecipeError if transformers marks what lies between two answers too.

    Earlier versions, 5.17 among them, mark all of a row after an answer whose last character is part of no token.
    """
    import transformers
    from jinja2 import TemplateError

    if not isinstance(tokenizer, transformers.PreTrainedTokenizerBase):
        return  # a processor's rows come to TRL with their masks
    turns = [{"role": role, "content": role} for role in ("user", "assistant")] * 2
    try:
        mask = tokenizer.apply_chat_template(
            turns, chat_template=marked, return_dict=True, return_assistant_tokens_mask=True
        )["assistant_masks"]
    except (TemplateError, ValueError):
        return  # rows of another kind than these turns get the library's own error
    if sum(now > before for before, now in zip([0, *mask], mask, strict=False)) == 1:
        raise RecipeError(
            f"assistant_only_loss would learn what lies between two answers too: the last character of an answer is "
            f"part of no token, which transformers {transformers.__version__} does not expect. Install a later one, "
            f"such as 5.24, or set prompt_template: last_turn to learn the last answer of each row."
        )


def resolve_named_template(recipe: Recipe, source: ModelSource) -> None:
    """Let `chat_template_path: chatml` mean the template of that name, and its end of a turn the end of a text."""
    from transformers import AutoTokenizer

    training, name = recipe.training, getattr(recipe.training, "chat_template_path", None)
    if name not in _NAMED or os.path.exists(name):
        return
    vocabulary = source.load(AutoTokenizer).get_vocab()
    missing = [token for token in _NAMED[name] if token not in vocabulary]
    if missing:
        fitting = " or ".join(other for other, tokens in _NAMED.items() if vocabulary.keys() >= set(tokens))
        raise RecipeError(
            f"chat_template_path is {name!r}, whose token {missing[0]} the vocabulary does not have. Set {fitting}, "
            "whose tokens it has, or leave it out if the model has a template of its own."
        )
    training.chat_template_path = str(PACKAGE / "data" / "chat_templates" / f"{name}.jinja")
    if _NAMED[name] and training.eos_token is None:
        training.eos_token = _NAMED[name][-1]


def find_template(recipe: Recipe, source: ModelSource) -> tuple[Any, str]:
    """The tokenizer or processor with the chat template that the recipe trains with, and where it is from."""
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
        tokenizer = source.load(AutoProcessor)  # of a model of images, which may have the template alone
    return tokenizer, where


def raised_by_template(error: Exception) -> bool:
    """Tell whether an error is jinja's, or of what a template does with a row, such as adding a list to a text."""
    from jinja2 import TemplateError

    frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return isinstance(error, TemplateError) or frames[-1:] == ["<template>"]


@contextlib.contextmanager
def answers_marked(recipe: Recipe, source: ModelSource, *datasets: Any) -> Iterator[Callable[[Any], None]]:
    """While this is open, `assistant_only_loss` finds the answers in any template that renders them one after another.

    Call what it yields with the trainer once that is built, so that the template is saved as it was. Templates with
    marks, and those for which TRL has such a template, are left to TRL; but not where `train_on` or the messages of
    `datasets`, of which some may be None, say what is learned.
    """
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    training, roles = recipe.training, recipe.args.train_on or ["assistant"]
    template_path = getattr(training, "chat_template_path", None)
    tokenizer: Any = find_template(recipe, source)[0] if getattr(training, "assistant_only_loss", False) else None
    template = getattr(tokenizer, "chat_template", None)
    text = template["default"] if isinstance(template, dict) else template
    by_trl = None  # the text with marks
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
        else:  # TRL adds the tokens of this tokenizer to the model's
            tokenizer.chat_template, training.chat_template_path = marked, folder
            tokenizer.save_pretrained(folder)

        def restore_template(trainer: Any) -> None:
            trainer.processing_class.chat_template, trainer.chat_template = template, marked
            if hasattr(trainer.data_collator, "chat_template"):  # of images, which it tokenises itself
                trainer.data_collator.chat_template = marked

        try:
            yield restore_template
        finally:
            training.chat_template_path = template_path
