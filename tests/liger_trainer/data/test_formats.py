"""Forms of rows: Alpaca, ShareGPT and the last turn of messages, and an error for each malformed one."""

import pytest

from liger_trainer.data.formats import alpaca_row, last_turn_row, sharegpt_row
from liger_trainer.errors import RecipeError

QUESTION = {"from": "human", "value": "Hi"}
GOOD, BAD = {"from": "gpt", "value": "Hello"}, {"from": "gpt", "value": "What?"}


def test_template_without_input():
    row = alpaca_row({"instruction": "Name a colour.", "input": "", "output": "Red."})
    assert row == {
        "prompt": "Below is an instruction that describes a task. Write a response that appropriately completes the "
        "request.\n\n### Instruction:\nName a colour.\n\n### Response:\n",
        "completion": "Red.",
    }
    assert alpaca_row({"instruction": "Name a colour.", "input": None, "output": "Red."}) == row
    assert alpaca_row({"instruction": "Name a colour.", "output": "Red."}) == row


def test_template_with_input_keeps_braces():
    row = alpaca_row({"instruction": "Explain {x}.", "input": "{instruction}", "output": "{}"})
    assert row == {
        "prompt": "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n### Instruction:\nExplain {x}.\n\n### Input:\n"
        "{instruction}\n\n### Response:\n",
        "completion": "{}",
    }


def test_alpaca_system_and_history():
    """LLaMA-Factory writes such rows. The system prompt replaces the first sentences, and the turns follow."""
    row = {"system": "Answer in Latin.", "instruction": "And two?", "output": "duo", "history": [["One?", "unus"]]}
    assert alpaca_row(row) == {
        "prompt": "Answer in Latin.\n\n### Instruction:\nOne?\n\n### Response:\nunus\n\n### Instruction:\nAnd two?\n\n"
        "### Response:\n",
        "completion": "duo",
    }
    single = {"instruction": "Name {a}.", "input": "b", "output": "c"}
    assert alpaca_row(single | {"system": "", "history": []}) == alpaca_row(single)
    assert alpaca_row(single | {"system": None, "history": None}) == alpaca_row(single)
    with pytest.raises(RecipeError, match="Row 3 of the dataset has system 5; expected text"):
        alpaca_row(single | {"system": 5}, 3)
    for history in ("One?", [["One?"]], [["One?", None]], [{"One?": "unus"}]):
        with pytest.raises(RecipeError, match="Row 3 of the dataset has history .*; expected a list of pairs of texts"):
            alpaca_row(single | {"history": history}, 3)


@pytest.mark.parametrize(
    "row, message",
    [
        ({"conversations": "Hi"}, "Row 3 of the dataset has conversations 'Hi'; expected a list of turns"),
        (
            {"conversations": [{"from": "bot", "value": "Hi"}]},
            r"conversations\[0\] .*'bot'.*expected from, one of human",
        ),
        ({"conversations": [{"from": "human", "value": " "}]}, r"an empty text in conversations\[0\]"),
        ({"conversations": [QUESTION]}, "ends with a turn of 'user', so there is nothing to learn from it"),
        ({"conversations": [QUESTION], "chosen": GOOD}, "rejected None; expected from"),
        ({"conversations": [QUESTION], "chosen": GOOD, "rejected": "What?"}, "rejected 'What\\?'; expected from"),
        ({"conversations": [QUESTION], "chosen": QUESTION, "rejected": BAD}, "chosen from 'human'; expected 'gpt'"),
        ({"conversations": [QUESTION, GOOD], "chosen": GOOD, "rejected": BAD}, "answers to a turn of 'assistant'"),
    ],
    ids=str,
)
def test_malformed_sharegpt_rows(row, message):
    with pytest.raises(RecipeError, match=message):
        sharegpt_row(row, 3)


def test_last_turn():
    turns = [{"role": role, "content": role} for role in ("system", "user", "assistant")]
    assert last_turn_row({"messages": turns, "label": True}) == {"prompt": turns[:2], "completion": turns[2:]}
    called = [turns[1], {"role": "assistant", "content": None, "tool_calls": [{}]}, turns[2]]
    assert last_turn_row({"messages": called})["prompt"] == called[:2]
    for messages in (turns[:2], turns[2:], "text", None, [{"from": "human", "value": "x"}] * 2):
        with pytest.raises(RecipeError, match="Row 7 of the dataset has messages.*expected two or more turns"):
            last_turn_row({"messages": messages}, 7)
