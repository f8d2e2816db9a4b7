"""Self-distillation data: which prompts are read, that the answers are the model's, stopping and going on, a server."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from tiny_models import tiny_model, tiny_tokenizer

from liger_trainer.medusa.distill_data import distill, local_answerer, server_answerer
from liger_trainer.medusa.prompts import encode, prompt_of, read_prompts

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
    with pytest.raises(ValueError, match="max_rows is 0"):
        read_prompts(str(lines), True, 0)


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
    report = distill(prompts, path, local_answerer(model, tokenizer, 12), batch_size=7)
    rows = [json.loads(line) for line in open(path)]
    assert [row["prompt_index"] for row in rows] == ended
    for row in rows:
        i = row["prompt_index"]
        assert row["prompt"] == prompts[i]
        assert row["completion"] == tokenizer.decode(want[i][:-1])
    assert (report.written, report.found, report.cut) == (len(ended), 0, cut)
    assert report.empty == len(prompts) - len(ended) - cut
    assert str(report).startswith(f"{len(ended)} rows written; left out: {cut} cut at max_new_tokens")


def echo(prompts):
    """Answers at once; every third prompt is cut."""
    return [(f"to {p}", int(p[1:]) % 3 != 0) for p in prompts]


def test_a_stopped_run_goes_on(tmp_path):
    prompts = [f"w{i}" for i in range(20)]
    whole, path = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    distill(prompts, str(whole), echo, batch_size=4)
    asked = []

    def fails_late(batch):
        asked.extend(batch)
        if len(asked) > 8:
            raise KeyboardInterrupt
        return echo(batch)

    with pytest.raises(KeyboardInterrupt):
        distill(prompts, str(path), fails_late, batch_size=4)
    content = path.read_bytes()
    path.write_bytes(content + b'{"prompt": "w')  # killed while it wrote a line
    asked.clear()

    def counted(batch):
        asked.extend(batch)
        return echo(batch)

    report = distill(prompts, str(path), counted, batch_size=4)
    assert path.read_bytes() == whole.read_bytes()
    assert asked == prompts[8:] and report.found == 5 and report.written == 8
    assert "8 rows written, after 5 that were there; left out: 4 cut" in str(report)
    asked.clear()
    assert distill(prompts, str(path), counted).written == 0 and asked == []
    for others in (["x"] * 20, prompts[:5], prompts[1:]):
        with pytest.raises(ValueError, match=r"its line \d does not answer one of these prompts"):
            distill(others, str(path), counted)
    path.write_text("no JSON\nnor here")
    with pytest.raises(ValueError, match="its line 1 does not answer"):
        distill(prompts, str(path), counted)
    assert path.read_text() == "no JSON\nnor here", "a file of something else stays as it was"


def test_bad_numbers(model, tmp_path):
    """Those of the answers are refused by transformers or by the server."""
    for keys, name in (({"max_new_tokens": 0}, "max_new_tokens"), ({"temperature": -1.0}, "temperature")):
        with pytest.raises(ValueError, match=name):
            local_answerer(model, tiny_tokenizer(), **keys)(["w1"])
    with pytest.raises(ValueError, match="batch_size is 0"):
        distill(["w1"], str(tmp_path / "out.jsonl"), echo, batch_size=0)
    with pytest.raises(ValueError, match="output is '.*out.json'; expected a file ending in .jsonl"):
        distill(["w1"], str(tmp_path / "out.json"), echo)
    with pytest.raises(ValueError, match="server is 'localhost:8000'; expected a URL such as"):
        server_answerer("localhost:8000", "m")


class Handler(BaseHTTPRequestHandler):
    """Answers like an OpenAI-compatible server; `seen` holds the requests."""

    seen = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append((self.path, body))
        if body["model"] != "tiny":
            return self.reply(404, {"error": "no such model"})
        if self.path == "/v1/chat/completions":
            said = body["messages"][-1]["content"]
            reason = "length" if said == "long" else "stop"
            choice = {"message": {"role": "assistant", "content": f"to {said}"}, "finish_reason": reason}
        else:
            choice = {"text": f"after {body['prompt']}", "finish_reason": "stop"}
        self.reply(200, {"choices": [choice]} if body["max_tokens"] > 1 else {"result": "?"})

    def reply(self, code, content):
        content = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    Handler.seen = []
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    httpd.server_close()


def test_server(server, tmp_path):
    prompts = [[SYSTEM, {"role": "user", "content": said}] for said in ("one", "long", "three")]
    path = tmp_path / "out.jsonl"
    report = distill(prompts, str(path), server_answerer(server + "/v1/", "tiny", 99, 0.5), batch_size=2)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["completion"] for row in rows] == [
        [{"role": "assistant", "content": "to one"}],
        [{"role": "assistant", "content": "to three"}],
    ]
    assert rows[1]["prompt"] == prompts[2] and report.cut == 1
    body = {"model": "tiny", "messages": prompts[2], "max_tokens": 99, "temperature": 0.5}
    assert Handler.seen[-1] == ("/v1/chat/completions", body)
    assert server_answerer(server, "tiny")(["w3"]) == [("after w3", True)]
    assert Handler.seen[-1][0] == "/v1/completions" and Handler.seen[-1][1]["prompt"] == "w3"


def test_server_errors(server):
    with pytest.raises(ValueError, match="answered 404 for model 'big': .*no such model"):
        server_answerer(server, "big")(["w3"])
    with pytest.raises(ValueError, match="answered what is not an OpenAI completion"):
        server_answerer(server, "tiny", max_new_tokens=1)(["w3"])
    with pytest.raises(ValueError, match="cannot be reached"):
        server_answerer("http://127.0.0.1:1", "tiny")(["w3"])
