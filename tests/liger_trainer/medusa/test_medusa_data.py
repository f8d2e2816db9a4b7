"""Self-distillation data: which prompts are read, that the answers are the model's, stopping and going on."""

import json

import pytest
import torch
from tiny_models import tiny_model, tiny_tokenizer

from liger_trainer.medusa import prompts as module
from liger_trainer.medusa.prompts import distill, encode, prompt_of, read_prompts

USER = {"role": "user", "content": "w3 w4"}
ANSWER = {"role": "assistant", "content": "w5"}
SYSTEM = {"role": "system", "content": "w9"}


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama").eval()


PROMPTS = {
    "text": ({"prompt": "w3 w4", "completion": "w5"}, "w3 w4"),
    "messages as prompt": ({"prompt": [USER]}, [USER]),
    "messages": ({"messages": [SYSTEM, USER, ANSWER, USER, ANSWER]}, [SYSTEM, USER]),
    "messages without answer": ({"messages": [USER]}, [USER]),
    "sharegpt": ({"conversations": [{"from": "human", "value": "w3 w4"}, {"from": "gpt", "value": "w5"}]}, [USER]),
    "alpaca": ({"instruction": "w3 w4", "input": "", "output": "w5"}, [USER]),
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
    "no prompt": ({"text": "w3"}, True, "Row 4 of the prompts has text; expected one of: prompt; messages"),
    "answer first": ({"messages": [ANSWER, USER]}, True, "Row 4 of the prompts starts with an answer"),
    "no template": ({"messages": [USER]}, False, "list of messages, and the tokenizer of the model has no chat"),
    "speaker": ({"conversations": [{"from": "bing", "value": "w3"}]}, True, "Row 4 .*'bing'.* expected from"),
}


@pytest.mark.parametrize("row, chat, message", BAD.values(), ids=BAD)
def test_row_without_a_prompt(row, chat, message):
    with pytest.raises(ValueError, match=message):
        prompt_of(row, chat, 4)


def test_files(tmp_path):
    rows = [{"instruction": f"w{i}\u2028w4"} for i in range(3, 6)]
    lines, whole = tmp_path / "rows.jsonl", tmp_path / "rows.json"
    lines.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n", encoding="utf-8")
    whole.write_text(json.dumps(rows))
    assert read_prompts(str(lines), True) == read_prompts(str(whole), True)
    assert [p[0]["content"] for p in read_prompts(str(lines), True, max_rows=2)] == ["w3\u2028w4", "w4\u2028w4"]
    for text, message in (("{", "not valid JSON"), ("[]", "one or more rows"), ('["w3"]', "one or more rows")):
        whole.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_prompts(str(whole), True)
    with pytest.raises(ValueError, match=r"expected a .json or .jsonl file"):
        read_prompts(str(tmp_path / "none.json"), True)


def test_chat_template_is_applied_with_the_header_of_the_answer():
    tokenizer = tiny_tokenizer()
    assert encode(tokenizer, "w3 w4") == [3, 4]
    tokenizer.chat_template = (
        "{% for m in messages %}w10 {{ m['content'] }} </s> {% endfor %}{% if add_generation_prompt %}w11{% endif %}"
    )
    assert encode(tokenizer, [USER]) == [10, 3, 4, 2, 11]


def greedy(model, ids, limit, end=2):
    """By hand, a forward pass a token."""
    new = []
    while len(new) < limit and end not in new:
        with torch.no_grad():
            new.append(model(input_ids=torch.tensor([ids + new])).logits[0, -1].argmax().item())
    return new


def test_rows_are_the_models_own_greedy_text(model, tmp_path):
    """Cut answers are left out, others end at the end token, which is not part of the text."""
    tokenizer = tiny_tokenizer()
    prompts = [f"w{i} w{i + 7}" for i in range(10, 40)]
    texts = [greedy(model, encode(tokenizer, p), 12) for p in prompts]
    end = max({t for text in texts for t in text}, key=lambda t: sum(t in text for text in texts))
    model.generation_config.eos_token_id, tokenizer.eos_token = end, f"w{end}"
    want = [greedy(model, encode(tokenizer, p), 12, end) for p in prompts]
    ended = [i for i, text in enumerate(want) if text[-1] == end and len(text) > 1]
    cut = sum(text[-1] != end for text in want)
    assert ended and cut, "both kinds are there"
    path = str(tmp_path / "new" / "out.jsonl")
    counts = distill(model, tokenizer, prompts, path, 12, batch_size=7)
    rows = [json.loads(line) for line in open(path)]
    assert [row["prompt_index"] for row in rows] == ended
    for row in rows:
        i = row["prompt_index"]
        assert row["prompt"] == prompts[i]
        assert row["completion"] == tokenizer.decode(want[i][:-1])
    assert counts == {"written": len(ended), "cut": cut, "empty": len(prompts) - len(ended) - cut}


def test_a_stopped_run_goes_on(model, tmp_path, monkeypatch):
    tokenizer, prompts = tiny_tokenizer(), [f"w{i}" for i in range(20)]
    model.generation_config.eos_token_id, tokenizer.eos_token = 2, "</s>"
    asked = []

    def echo(model, ids, ends, max_new_tokens, temperature):
        """Answer at once; every third prompt is cut."""
        asked.extend(each[0] for each in ids)
        return [[*each, *each, 9 if each[0] % 3 == 0 else 2] for each in ids]

    def run(path, prompts=prompts, progress=lambda done: None):
        asked.clear()
        return distill(model, tokenizer, prompts, str(path), batch_size=4, progress=progress)

    def stop(done):
        if done == 8:
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "answer", echo)
    whole, path = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    all_of_it, ids = run(whole), list(asked)
    with pytest.raises(KeyboardInterrupt):
        run(path, progress=stop)
    path.write_bytes(path.read_bytes() + b'{"prompt": "w')  # killed while it wrote a line
    rest = run(path)
    assert path.read_bytes() == whole.read_bytes()
    assert asked == ids[8:] and 0 < rest["written"] < all_of_it["written"]
    for others in (["x"] * 20, prompts[:5], prompts[1:]):
        with pytest.raises(ValueError, match="has rows of other prompts"):
            run(path, others)
    path.write_text("no JSON\nnor here")
    with pytest.raises(ValueError, match="has rows of other prompts"):
        run(path)
    assert path.read_text() == "no JSON\nnor here", "a file of something else stays as it was"
    with pytest.raises(ValueError, match="output is '.*out.json'; expected a file ending in .jsonl"):
        run(tmp_path / "out.json")
