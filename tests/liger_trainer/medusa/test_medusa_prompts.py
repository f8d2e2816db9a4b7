"""The prompts of `medusa-eval`: which ones are read from a file, and how they reach a model."""

import pytest
from tiny_models import tiny_tokenizer

from liger_trainer.data.answers import encode
from liger_trainer.medusa.prompts import prompt_of

USER = {"role": "user", "content": "w3 w4"}
ANSWER = {"role": "assistant", "content": "w5"}
SYSTEM = {"role": "system", "content": "w9"}


PROMPTS = {
    "text": ({"prompt": "w3 w4", "completion": "w5"}, "w3 w4"),
    "messages as prompt": ({"prompt": [USER]}, [USER]),
    "messages": ({"messages": [SYSTEM, USER, ANSWER, USER, ANSWER]}, [SYSTEM, USER]),
    "messages without answer": ({"messages": [USER]}, [USER]),
    "sharegpt": ({"conversations": [{"from": "human", "value": "w3 w4"}, {"from": "gpt", "value": "w5"}]}, [USER]),
    "sharegpt with a system text": (
        {"conversations": [{"from": "human", "value": "w3 w4"}, {"from": "gpt", "value": "w5"}], "system": "w9"},
        [SYSTEM, USER],
    ),
    "alpaca": ({"instruction": "w3 w4", "input": "", "output": "w5"}, [USER]),
    "alpaca with system and history": (
        {"instruction": "w3 w4", "system": "w9", "history": [["w3 w4", "w5"]]},
        [SYSTEM, USER, ANSWER, USER],
    ),
    "alpaca with input": ({"instruction": "w3", "input": "w4"}, [{"role": "user", "content": "w3\n\nw4"}]),
}


@pytest.mark.parametrize("row, prompt", PROMPTS.values(), ids=PROMPTS)
def test_prompt_of_a_row(row, prompt):
    assert prompt_of(row, chat=True) == prompt


def test_alpaca_without_a_chat_template():
    text = prompt_of({"instruction": "say {w3}", "input": "w4"}, chat=False)
    assert text.startswith("Below is an instruction") and text.endswith("### Input:\nw4\n\n### Response:\n")
    assert "### Instruction:\nsay {w3}\n" in text


BAD = {
    "no prompt": ({"text": "w3"}, "Row 4 of the prompts has text; expected one of: prompt; messages"),
    "tools": ({"messages": [USER, ANSWER], "tools": [{"type": "function"}]}, "Row 4 of the prompts has tools, which"),
    "answer first": ({"messages": [ANSWER, USER]}, "Row 4 of the prompts starts with an answer"),
    "speaker": ({"conversations": [{"from": "bing", "value": "w3"}]}, "Row 4 .*'bing'.* expected from"),
}


@pytest.mark.parametrize("row, message", BAD.values(), ids=BAD)
def test_row_without_a_prompt(row, message):
    with pytest.raises(ValueError, match=message):
        prompt_of(row, True, 4)


def test_chat_template_is_applied_with_the_header_of_the_answer():
    tokenizer = tiny_tokenizer()
    assert encode(tokenizer, "w3 w4") == [3, 4]
    with pytest.raises(ValueError, match="chat_template is not set"):
        encode(tokenizer, [USER])
    tokenizer.chat_template = (
        "{% for m in messages %}w10 {{ m['content'] }} </s> {% endfor %}{% if add_generation_prompt %}w11{% endif %}"
    )
    assert encode(tokenizer, [USER]) == [10, 3, 4, 2, 11]
