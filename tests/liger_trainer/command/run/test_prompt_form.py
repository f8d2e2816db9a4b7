"""Summary and card name the training's prompt form, and chat, merge and medusa-eval follow it."""

import io
import json

import pytest
import torch
from recipe_fixtures import SAVING, command, write_recipe
from tiny_models import tiny_tokenizer
from transformers import AutoModelForCausalLM

from liger_trainer.command.rows.prompt_form import read_prompt_form
from liger_trainer.data.formats import alpaca_row

TEMPLATE = "{% for m in messages %}{{ m['role'][0] + ' ' + m['content'] + ' ' }}{% endfor %}"
USER, ANSWER = {"role": "user", "content": "w4"}, {"role": "assistant", "content": "w5"}
ALPACA = {"instruction": "w3", "output": "w4"}
FORMS = {
    "chat": ({"messages": [USER, ANSWER]}, None, "messages, through the chat template", "u w3 "),
    "text": ({"prompt": "w4 ", "completion": "w5"}, None, "texts as they are, without a chat template", "w3"),
    "alpaca": (
        ALPACA,
        "alpaca",
        "prompt_template: alpaca, without a chat template",
        alpaca_row(ALPACA)["prompt"],
    ),
    "tokens": ({"input_ids": [4, 5, 6]}, None, "token ids as they are", "w3"),
}


@pytest.fixture
def with_template(folder):
    """A folder with a model that has a chat template."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    return folder


def says(model, prompt):
    ids = tiny_tokenizer()(prompt, return_tensors="pt")["input_ids"]
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    return tiny_tokenizer().decode(out[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("form", FORMS)
def test_summary_card_and_chat_follow_the_form(form, with_template, capsys, monkeypatch):
    row, template, words, prompt = FORMS[form]
    out = with_template / "out"
    (with_template / "rows.jsonl").write_text((json.dumps(row) + "\n") * 8)
    code, text, err = command(capsys, "train", write_recipe(with_template, prompt_template=template, **SAVING))
    assert code == 0 and f"\n  form     {words}\n" in text, text + err
    assert ("the prompts are texts, so the model learns them without its chat template" in err) == (form == "text")
    card = (out / "README.md").read_text()
    assert f"- Form of the prompts: {words}\n" in card and ("## Quick start" in card) == (form == "chat")
    assert read_prompt_form(out) == read_prompt_form(out / "checkpoint-2") == form
    monkeypatch.setattr("sys.stdin", io.StringIO("w3"))
    code, said, err = command(capsys, "chat", out, "--temperature", "0", "--max_new_tokens", "6")
    assert code == 0, err
    assert said.splitlines() == [says(AutoModelForCausalLM.from_pretrained(out), prompt)]
    assert (f"was trained on {words}, and your lines" in err) == (form != "chat")


def test_questions_with_a_system_prompt_are_asked_with_it(with_template, capsys, monkeypatch):
    (with_template / "rows.jsonl").write_text('{"q": "w4", "a": "w5"}\n' * 8)
    keys = {"prompt_template": None, "columns": {"question": "q", "answer": "a"}, "system_prompt": "w9"}
    lora = {"use_peft": True, "lora_target_modules": ["q_proj"]}
    code, _, err = command(capsys, "train", write_recipe(with_template, **keys, **lora))
    assert code == 0, err
    code, _, err = command(capsys, "merge", with_template / "out", with_template / "merged")
    assert code == 0, err
    model = AutoModelForCausalLM.from_pretrained(with_template / "merged")
    for words, prompt in (((), "s w9 u w3 "), (("--system", ""), "u w3 "), (("--system", "w8"), "s w8 u w3 ")):
        monkeypatch.setattr("sys.stdin", io.StringIO("w3"))
        options = ("--temperature", "0", "--max_new_tokens", "6")
        code, said, err = command(capsys, "chat", with_template / "merged", *options, *words)
        assert code == 0, err
        assert said.splitlines() == [says(model, prompt)]
        assert ("was trained with the system prompt 'w9'" in err) == (not words)


def test_another_form_may_be_asked_for_and_merge_keeps_it(with_template, capsys, monkeypatch):
    (with_template / "rows.jsonl").write_text('{"prompt": "w4 ", "completion": "w5"}\n' * 8)
    keys = {"prompt_template": None, "use_peft": True, "lora_target_modules": ["q_proj"]}
    code, _, err = command(capsys, "train", write_recipe(with_template, **keys))
    assert code == 0, err
    code, _, err = command(capsys, "merge", with_template / "out", with_template / "merged")
    assert code == 0 and read_prompt_form(with_template / "merged") == "text", err
    monkeypatch.setattr("sys.stdin", io.StringIO("w3"))
    words = ("--prompt_template", "chat", "--temperature", "0", "--max_new_tokens", "6")
    code, said, err = command(capsys, "chat", with_template / "merged", *words)
    assert code == 0 and "was trained on" not in err
    assert said.splitlines() == [says(AutoModelForCausalLM.from_pretrained(with_template / "merged"), "u w3 ")]


def test_a_folder_without_a_form(tmp_path):
    assert read_prompt_form(tmp_path) is None
    for text in ("{", "[]", '{"prompt_form": "song"}'):
        (tmp_path / "prompt_form.json").write_text(text)
        assert read_prompt_form(tmp_path) is None


@pytest.mark.parametrize("form, chats", [("chat", True), ("alpaca", False), (None, True)])
def test_medusa_eval_asks_in_the_form(form, chats, with_template, capsys, monkeypatch):
    heads = with_template / "heads"
    heads.mkdir()
    if form is not None:
        (heads / "prompt_form.json").write_text(json.dumps({"prompt_form": form}))
    asked = []
    read_prompts = "liger_trainer.command.tools.heads.read_prompts"
    monkeypatch.setattr(read_prompts, lambda path, chat, most: asked.append(chat) or [])
    monkeypatch.setattr("liger_trainer.medusa.export.load_heads", lambda path: None)
    monkeypatch.setattr("liger_trainer.medusa.heads.attach_heads", lambda model, heads: None)
    monkeypatch.setattr("liger_trainer.medusa.evaluate.evaluate", lambda *args, **options: "report")
    code, out, err = command(capsys, "medusa-eval", with_template / "model", heads, "--prompts", "rows.jsonl")
    assert code == 0 and asked == [chats], out + err
