"""The command names what a chat template leaves out, with the first such row, and answers that become empty."""

import json

import pytest
from datasets import Dataset, Features, Json, List
from recipe_fixtures import command, write_recipe
from tiny_models import tiny_tokenizer

from liger_trainer.command.rows.template_keys import check_template_keys
from liger_trainer.errors import RecipeError
from liger_trainer.paths import PACKAGE

USER, ANSWER = {"role": "user", "content": "w4"}, {"role": "assistant", "content": "w5"}
SYSTEM = {"role": "system", "content": "w3"}
REASONED = ANSWER | {"reasoning_content": "w6"}
FUNCTION = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
CALL = {"role": "assistant", "content": "", "tool_calls": [FUNCTION]}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
PLAIN = "{% for m in messages %}{{ m['role'] + ' ' + (m['content'] or '') + ' ' }}{% endfor %}"
WITHOUT_SYSTEM = PLAIN.replace("{{", "{% if m['role'] != 'system' %}{{").replace("}}", "}}{% endif %}")
IN_PARTS = (
    "{% for m in messages %}{{ m['role'] + ' ' }}"
    "{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endfor %}"
)
QWEN = (PACKAGE / "data" / "chat_templates" / "qwen.jinja").read_text()


def check(template, rows):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    names = [name for name in rows[0] if name != "tools"]
    features = Features({name: List(Json()) for name in rows[0]}) if names == ["messages"] else None
    check_template_keys(tokenizer, "model 'x'", Dataset.from_list(rows, features=features))


UNREAD = {
    "reasoning": (PLAIN, [[USER, ANSWER], [USER, REASONED]], "reasoning_content of messages of the role assistant"),
    "a weight": (PLAIN, [[USER, ANSWER], [USER, ANSWER | {"name": "w9"}]], "name of messages of the role assistant"),
    "a role": (WITHOUT_SYSTEM, [[USER, ANSWER], [SYSTEM, USER, ANSWER]], "content of messages of the role system"),
}


@pytest.mark.parametrize("template, conversations, said", UNREAD.values(), ids=UNREAD)
def test_keys_that_a_template_does_not_read_are_named_with_their_first_row(template, conversations, said, capsys):
    check(template, [{"messages": messages} for messages in conversations])
    (line,) = capsys.readouterr().err.splitlines()
    assert f"the chat template of model 'x' does not read {said} (first in row 1), so the model" in line
    assert "Set chat_template_path to a template that reads it, or remove it from the rows." in line


READ = {
    "reasoning of the last answer": (QWEN, [{"messages": [USER, REASONED, USER, REASONED]}]),
    "reasoning in one row": (QWEN, [{"messages": [USER, REASONED, USER, ANSWER]}, {"messages": [USER, REASONED]}]),
    "tool calls": (QWEN, [{"messages": [USER, CALL], "tools": [TOOL]}]),
    "parts": (IN_PARTS, [{"messages": [USER, ANSWER]}]),
    "nulls of Arrow": (PLAIN, [{"messages": [USER, ANSWER | {"reasoning_content": None}]}]),
    "a template that refuses": ("{{ raise_exception('no') }}", [{"messages": [USER, REASONED]}]),
    "pairs": (QWEN, [{"prompt": [USER], "chosen": [REASONED], "rejected": [ANSWER]}]),
    "texts": (PLAIN, [{"prompt": "w3", "completion": "w4"}]),
}


@pytest.mark.parametrize("template, rows", READ.values(), ids=READ)
def test_a_column_that_is_read_is_not_reported(template, rows, capsys):
    check(template, rows)
    assert capsys.readouterr().err == ""


def test_tools_and_pairs_are_told(capsys):
    check(PLAIN, [{"messages": [USER, ANSWER], "tools": [TOOL]}])
    assert "does not read the column tools (first in row 0)" in capsys.readouterr().err
    check(PLAIN, [{"prompt": [USER], "chosen": [REASONED], "rejected": [ANSWER]}])
    assert "does not read reasoning_content of messages of the role assistant (first in" in capsys.readouterr().err


def test_an_answer_that_is_empty_after_rendering_counts_as_empty(capsys):
    check(PLAIN, [{"messages": [USER, ANSWER]}, {"messages": [USER, CALL]}])
    told = capsys.readouterr().err.splitlines()
    assert "tool_calls of messages of the role assistant (first in row 1)" in told[0]
    assert "in row 1 of the dataset is an empty answer" in told[1] and "as in 1 of 2 rows, which teaches" in told[1]
    with pytest.raises(RecipeError, match="in row 0 of the dataset is an empty answer.*every row. Set chat_"):
        check(PLAIN, [{"messages": [USER, CALL | {"weight": 1}]}, {"messages": [USER, CALL, ANSWER]}])


def test_a_recipe_tells_it_before_a_model_is_loaded(folder, capsys):
    (folder / "model" / "chat_template.jinja").write_text(PLAIN)
    (folder / "rows.jsonl").write_text(json.dumps({"messages": [USER, REASONED]}) + "\n")
    code, _, err = command(capsys, "train", write_recipe(folder, prompt_template=None), "--dry_run")
    assert code == 0 and "does not read reasoning_content of messages of the role assistant (first in row 0)" in err
