"""`liger-trainer chat`: the answers of a model and of its base, from a pipe and in a terminal."""

import io
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest
import torch
from peft import LoraConfig, get_peft_model
from recipe_fixtures import ROOT, command, write_model
from tiny_models import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

from liger_trainer.data.formats import alpaca_row

TEMPLATE = "{% for m in messages %}{{ m['role'][0] }} {{ m['content'] }} {% endfor %}"
GREEDY = ("--temperature", "0", "--max_new_tokens", "6")


@pytest.fixture
def folder(tmp_path):
    """A model, and an adapter that changes its answers."""
    write_model(tmp_path / "model")
    torch.manual_seed(1)
    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path / "model"), LoraConfig(r=4, target_modules="all-linear")
    )
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    adapted.save_pretrained(tmp_path / "adapter")
    return tmp_path


def says(model, prompt, length=6):
    ids = tiny_tokenizer()(prompt, return_tensors="pt")["input_ids"]
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False)
    return tiny_tokenizer().decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def chat(monkeypatch, capsys, lines, *argv):
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    return command(capsys, "chat", *argv)


def test_lines_of_a_pipe_are_answered(folder, monkeypatch, capsys):
    """Without a chat template, lines reach the model unchanged; empty lines are skipped."""
    code, out, err = chat(monkeypatch, capsys, "w3 w4\n\nw9\n", folder / "model", *GREEDY)
    assert code == 0, err
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert out.splitlines() == [says(model, "w3 w4"), says(model, "w9")]


def test_a_line_that_is_not_text_is_refused(folder, monkeypatch, capsys):
    code, _, err = chat(monkeypatch, capsys, b"caf\xe9".decode(errors="surrogateescape"), folder / "model", *GREEDY)
    assert code == 2 and r"The line 'caf\udce9' is not UTF-8" in err


def test_the_base_answers_first(folder, monkeypatch, capsys):
    code, out, err = chat(monkeypatch, capsys, "w3 w4", folder / "adapter", "--base", *GREEDY)
    assert code == 0, err
    base = says(AutoModelForCausalLM.from_pretrained(folder / "model"), "w3 w4")
    lines = out.splitlines()
    assert lines[:3] == ["base:", base, "adapter:"] and lines[3] not in ("", base)
    assert chat(monkeypatch, capsys, "w3 w4", folder / "adapter", *GREEDY)[1].splitlines() == lines[3:]


def test_the_template_sees_the_conversation(folder, monkeypatch, capsys):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    first = says(model, "s w7 u w3 ")
    second = says(model, f"s w7 u w3 a {first} u w9 ")
    lines = "w3\nw9\n/new\nw3\n"
    code, out, err = chat(monkeypatch, capsys, lines, folder / "model", "--system", "w7", *GREEDY)
    assert code == 0, err
    assert out.splitlines() == [first, second, first]


def test_alpaca_s_prompt(folder, monkeypatch, capsys):
    prompt = alpaca_row({"instruction": "w3", "output": ""})["prompt"]
    out = chat(monkeypatch, capsys, "w3", folder / "model", "--prompt_template", "alpaca", *GREEDY)[1]
    assert out.splitlines() == [says(AutoModelForCausalLM.from_pretrained(folder / "model"), prompt)]


@pytest.mark.parametrize(
    "words, said",
    [
        (("--base",), "--base is only for adapters"),
        (("--model", "other"), "--model is only for adapters"),
        (("--system", "w3"), "--system needs a chat template, but lines reach the model by prompt_template none."),
        (("--prompt_template", "chat"), "has no chat template"),
        (("--system", "w3"), "--system needs a chat template, but lines reach the model by prompt_template none"),
        (("--max_new_tokens", "0"), "`max_new_tokens` must be greater than 0, but is 0."),
        (("--temperature", "-1"), "`temperature` (=-1.0) has to be a strictly positive float"),
        (("--temperature", "nan"), "`temperature` (=nan) has to be a strictly positive float"),
        (("--images", "nothing.png"), "--images names 'nothing.png', but that file does not exist."),
        (("--images", __file__), "--images needs a model of images with a chat template, unlike"),
    ],
)
def test_mistakes(words, said, folder, monkeypatch, capsys):
    code, _, err = chat(monkeypatch, capsys, "w3", folder / "model", *words)
    assert code == 2 and said in err


def test_a_model_that_is_not_there(folder, monkeypatch, capsys):
    code, _, err = chat(monkeypatch, capsys, "", folder / "nothing" / "here")
    assert code == 2 and "that folder does not exist" in err
    code, _, err = chat(monkeypatch, capsys, "", folder / "adapter", "--model", folder / "else" / "where")
    assert code == 2 and "that folder does not exist" in err


@pytest.mark.skipif(sys.platform == "win32", reason="no pty")
def test_keys_of_a_terminal(folder):
    """Ctrl-C ends an answer but not the chat. Ctrl-D ends the chat."""
    tiny_model("llama").save_pretrained(folder / "model")
    ours, theirs = pty.openpty()
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]), "CUDA_VISIBLE_DEVICES": ""}
    words = ["chat", str(folder / "model"), "--max_new_tokens", "1000000", "--temperature", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "liger_trainer", *words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=env,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(theirs)
    shown = b""

    def read_until(mark, interrupt=False, seconds=120):
        """Read; with `interrupt`, press Ctrl-C whenever all is quiet: readline misses one just after its prompt."""
        nonlocal shown
        end, shown = time.monotonic() + seconds, b""
        while mark not in shown:
            assert time.monotonic() < end, shown
            if select.select([ours], [], [], 1)[0]:
                shown += os.read(ours, 1000)
            elif interrupt:
                process.send_signal(signal.SIGINT)

    try:
        read_until(b"\n> ")
        os.write(ours, b"w3 w4\n")
        read_until(b"w1")  # the answer has begun
        process.send_signal(signal.SIGINT)
        read_until(b"\n> ")
        assert b" ..." in shown
        read_until(b"Ctrl-D ends the chat.", interrupt=True)
        time.sleep(1)  # until there is a prompt again
        os.write(ours, b"\x04")
        assert process.wait(60) == 0
    finally:
        process.kill()
        os.close(ours)
