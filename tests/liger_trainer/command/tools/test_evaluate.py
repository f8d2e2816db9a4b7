"""`liger-trainer evaluate`: losses of held-out rows equal those by hand and the trainer's; exact answers; lm-eval."""

import json
import math
import re
import sys
import types

import pytest
import torch
import torch.nn.functional as F
import transformers
from packaging.version import Version
from recipe_fixtures import command, write_recipe
from safetensors.torch import load_file
from tiny_models import tiny_tokenizer
from transformers import AutoModelForCausalLM

TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + ' ' + m['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a ' }}{% endif %}"
)


@pytest.fixture
def chats(folder):
    """A folder with a model that has a chat template."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    return folder


def write(folder, rows):
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "held_out.jsonl"


def by_hand(model, rows):
    """The loss of (ids, number of tokens that are not learned), and how many tokens are the first choice."""
    total = 0.0
    count = 0
    right = 0
    for ids, hidden in rows:
        ids = torch.tensor([ids])
        logits = model(input_ids=ids).logits[0, hidden - 1 : -1].double()
        target = ids[0, hidden:]
        total += float(F.cross_entropy(logits, target, reduction="sum"))
        right += int((logits.argmax(-1) == target).sum())
        count += len(target)
    return total / count, count, right / count


PROMPTS = [{"prompt": f"w{i} w4 ", "completion": f"w{i + 20} w8"} for i in range(5, 9)]
TURNS = [
    [("user", "w5"), ("assistant", "w6"), ("user", "w7"), ("assistant", "w8 w9")],
    [("user", "w5"), ("assistant", "w9")],
]
FORMS = {
    "prompts": (PROMPTS, [([i, 4, i + 20, 8, 2], 2) for i in range(5, 9)], 4),
    "text": ([{"text": "w5 w6 w7"}], [([5, 6, 7, 2], 1)], 0),
    "tokens": ([{"input_ids": [5, 6, 7, 8]}], [([5, 6, 7, 8], 1)], 0),
}


@pytest.mark.parametrize("rows, tokens, asked", FORMS.values(), ids=FORMS)
def test_losses_equal_those_computed_from_logits(rows, tokens, asked, folder, capsys):
    out = folder / "figures.json"
    words = ("--dataset_name", write(folder, rows), "--json", out)
    code, text, err = command(capsys, "evaluate", folder / "model", *words)
    assert code == 0, err
    found = json.loads(out.read_text())
    loss, count, share = by_hand(AutoModelForCausalLM.from_pretrained(folder / "model"), tokens)
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert (found["tokens"], found["rows"], found["answered"]) == (count, len(rows), asked)
    assert found["first_choice"] == pytest.approx(share)
    assert f"loss     {loss:.4f} a token" in text
    assert "Reading the rows: 100%" in err and ("Answering: 100%" in err) == bool(asked), "neither part is silent"


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"), reason="transformers 5.17 marks more than these answers"
)
def test_only_answers_of_messages_count(chats, capsys):
    rows = [{"messages": [{"role": role, "content": text} for role, text in turns]} for turns in TURNS]
    code, text, err = command(
        capsys, "evaluate", chats / "model", "--dataset_name", write(chats, rows), "--json", chats / "f.json"
    )
    assert code == 0, err
    found = json.loads((chats / "f.json").read_text())
    assert (found["tokens"], found["rows"], found["answered"]) == (2 + 3 + 2, 2, 2), text


def test_the_loss_is_the_trainer_s(folder, capsys):
    """The rows have one length, so the trainer's mean over batches is the mean over tokens."""
    rows = write(folder, PROMPTS)
    keys = {"dataset_name": str(rows), "prompt_template": None, "eval_dataset_name": str(rows), "max_steps": 4}
    code, _, err = command(capsys, "train", write_recipe(folder, **keys, eval_strategy="steps", eval_steps=4))
    assert code == 0, err
    history = json.loads((folder / "out" / "trainer_state.json").read_text())["log_history"]
    (want,) = [log["eval_loss"] for log in history if "eval_loss" in log]
    code, _, err = command(capsys, "evaluate", folder / "out", "--dataset_name", rows, "--json", folder / "f.json")
    assert code == 0, err
    assert json.loads((folder / "f.json").read_text())["loss"] == pytest.approx(want, rel=1e-5)


def test_answers_of_a_trained_adapter_are_exact(chats, capsys):
    rows = write(chats, [{"q": "w5", "a": "w6 w7"}, {"q": "w15", "a": "w16"}])
    keys = {
        "dataset_name": str(rows),
        "prompt_template": None,
        "columns": {"question": "q", "answer": "a"},
        "system_prompt": "w9",
        "use_peft": True,
        "lora_target_modules": "all-linear",
        "learning_rate": 0.02,
        "max_steps": 60,
    }
    code, _, err = command(capsys, "train", write_recipe(chats, **keys))
    assert code == 0, err
    columns = ("--columns", "{question: q, answer: a}")
    code, text, err = command(capsys, "evaluate", chats / "out", "--dataset_name", rows, *columns)
    assert code == 0, err
    assert "answers  2 of 2 are the row's to the letter" in text
    assert "the rows get the system prompt of the training, 'w9'" in err
    code, text, err = command(capsys, "evaluate", chats / "model", "--dataset_name", rows, *columns)
    assert code == 0 and "answers  0 of 2" in text, err


def test_an_adapter_has_the_names_that_servers_look_for(folder, capsys):
    """vLLM and SGLang look for `base_model.model.<layer of the base>.lora_A.weight` and `lora_B.weight`."""
    keys = {"use_peft": True, "lora_target_modules": "all-linear", "max_steps": 1}
    code, _, err = command(capsys, "train", write_recipe(folder, **keys))
    assert code == 0, err
    layers = {name for name, _ in AutoModelForCausalLM.from_pretrained(folder / "model").named_modules()}
    names = load_file(folder / "out" / "adapter_model.safetensors")
    found = [re.fullmatch(r"base_model\.model\.(.+)\.lora_[AB]\.weight", name) for name in names]
    assert found and all(found)
    assert {match[1] for match in found} <= layers


def test_tasks_go_through_lm_eval(folder, capsys, monkeypatch):
    """lm-eval gets the loaded model. Its own code does not run here."""
    called = {}

    class HFLM:
        def __init__(self, pretrained, tokenizer):
            called["model"] = type(pretrained).__name__

    def simple_evaluate(model, tasks, limit):
        called["tasks"], called["limit"] = tasks, limit
        return {"results": {"arc_easy": {"acc,none": 0.25, "acc_stderr,none": 0.1, "alias": "arc_easy"}}}

    modules = {
        "lm_eval": {"simple_evaluate": simple_evaluate},
        "lm_eval.models": {},
        "lm_eval.models.huggingface": {"HFLM": HFLM},
    }
    for name, members in modules.items():
        module = types.ModuleType(name)
        module.__spec__ = types.SimpleNamespace(name=name)
        module.__path__ = []
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    words = ("--tasks", "arc_easy", "--limit", "5", "--json", folder / "f.json")
    code, text, err = command(capsys, "evaluate", folder / "model", *words)
    assert code == 0, err
    assert called == {"model": "LlamaForCausalLM", "tasks": ["arc_easy"], "limit": 5}
    assert text == "  arc_easy  acc  0.2500\n"
    assert json.loads((folder / "f.json").read_text())["tasks"]["arc_easy"]["acc,none"] == 0.25


MISTAKES = {
    "nothing": ((), "Nothing to evaluate on. Pass --dataset_name FILE, --tasks TASK, or both."),
    "no package": (("--tasks", "gsm8k"), '--tasks needs the package lm_eval. Run `pip install "lm_eval[hf]"`'),
    "no folder": (("--tasks", "gsm8k", "--json", "none/f.json"), "but the folder none does not exist. Make it."),
    "no file": (("--dataset_name", "nothing.jsonl"), "dataset_name is 'nothing.jsonl', but that file does not exist"),
    "answers": (("--dataset_name", "rows.jsonl", "--answers", "-1"), "--answers is -1; expected 0 or more"),
    "length": (("--dataset_name", "held_out.jsonl", "--max_length", "2"), "No token of the 1 rows counts within"),
}


@pytest.mark.parametrize("words, said", MISTAKES.values(), ids=MISTAKES)
def test_mistakes(words, said, folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    write(folder, [{"prompt": "w4 w5 ", "completion": "w6"}])
    code, _, err = command(capsys, "evaluate", folder / "model", *words)
    assert code == 2 and said in err, err
    assert said.startswith("No token") or "Reading the rows" not in err, "it is told before anything is measured"


def test_rows_that_it_does_not_read(chats, capsys):
    turns = [{"role": "user", "content": "w4"}, {"role": "assistant", "content": "w5"}]
    rows = write(chats, [{"messages": turns, "tools": '[{"name": "f"}]'}])
    code, _, err = command(capsys, "evaluate", chats / "model", "--dataset_name", rows)
    assert code == 2 and "Row 0 of the dataset has tools, which evaluate does not read" in err
