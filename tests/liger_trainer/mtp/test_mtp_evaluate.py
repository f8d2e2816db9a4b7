"""`mtp.evaluate` against a plain decoder with the head, which writes the model's greedy text in as many passes."""

import re

import pytest
import torch
from mtp_bases import mtp_trainer, write_base
from recipe_fixtures import command, write_rows
from tiny_models import tiny_model, tiny_tokenizer

from liger_trainer.data.answers import answer
from liger_trainer.head.acceptance import simulate_decoding
from liger_trainer.head.flat_rows import one_row
from liger_trainer.mtp.evaluate import evaluate, right_guesses
from liger_trainer.mtp.predictor import predict

PROMPTS = [[5, 9, 5], [7, 30, 2, 8], [40], [11, 12, 13, 14]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model that repeats a pattern, and a head that guesses a part of it."""
    folder = tmp_path_factory.mktemp("mtp")
    write_base(folder / "base", layer_types=["full_attention"] * 2)
    ids = [*range(20, 32)] * 3
    rows = [{"input_ids": ids[k : k + 20], "labels": ids[k : k + 20]} for k in range(16)]
    trainer = mtp_trainer(folder / "base", folder / "out", rows=rows, max_steps=12, learning_rate=5e-3)
    trainer.train()
    return trainer.model.eval(), trainer.model.mtp


@torch.no_grad()
def decode(model, head, prompt, max_new_tokens):
    """The text after a prompt, and the passes of the model after the one over the prompt."""

    def model_pass(ids):
        out = model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False)
        return out.hidden_states[-1][0], out.logits[0].argmax(-1).tolist()

    def guess(hidden, ids):
        """The token after the one that follows `ids`, from the states (n, H) of all but the last of them."""
        seen = predict(head, hidden, model.get_input_embeddings().weight, one_row(torch.tensor([ids])))
        return int(model.lm_head(seen[-2]).argmax())

    ids = list(prompt)
    hidden, choices = model_pass(ids)
    text = [choices[-1]]
    passes = 0
    while len(text) < max_new_tokens:
        ids = prompt + text
        padded = torch.cat([hidden[: len(ids) - 1], hidden[-1:]])  # the head's last row is not used
        draft = guess(padded, ids)
        hidden, choices = model_pass([*ids, draft])
        passes += 1
        text.append(choices[-2])
        if choices[-2] == draft and len(text) < max_new_tokens:
            text.append(choices[-1])
    return text, passes


def test_a_decoder_accepts_what_the_walk_says(trained):
    model, head = trained
    rights = []
    for prompt in PROMPTS:
        (want,) = answer(model, [prompt], set(), 12)
        text, passes = decode(model, head, prompt, 12)
        assert text == want
        rights.append(right_guesses(model, head, prompt, want))
        tokens_per_pass, _ = simulate_decoding(rights[-1:])
        assert tokens_per_pass == pytest.approx((len(text) - 1) / passes)
    report = evaluate(model, head, PROMPTS, set(), max_new_tokens=12)
    assert report.tokens_per_pass == pytest.approx(simulate_decoding(rights)[0]) and 1 < report.tokens_per_pass <= 2
    assert report.tokens == 48 and report.rows == 4
    assert "MTP head: one guess, on 48 tokens" in str(report)


def test_a_head_that_was_trained_in_mixed_precision(tmp_path):
    """It has fp32 weights beside a model in bf16, and guesses as it was trained: in bf16."""
    write_base(tmp_path / "base")
    trainer = mtp_trainer(tmp_path / "base", tmp_path / "out", alone=True, bf16=True, dtype=torch.bfloat16)
    trainer.train()
    model = trainer.model
    assert (model.mtp.fc.weight.dtype, model.dtype) == (torch.float32, torch.bfloat16)
    report = evaluate(model, model.mtp, PROMPTS, set(), max_new_tokens=6)
    for parameter in model.mtp.parameters():  # not the frequencies of its rotary embeddings
        parameter.data = parameter.data.bfloat16()
    rounded = evaluate(model, model.mtp, PROMPTS, set(), max_new_tokens=6)
    assert report.tokens == rounded.tokens == 24
    assert report.accuracy == pytest.approx(rounded.accuracy, abs=0.11)  # two of its twenty guesses


def test_nothing_to_guess(trained):
    model, head = trained
    with pytest.raises(ValueError, match="there is nothing to guess"):
        evaluate(model, head, PROMPTS, set(), max_new_tokens=1)


def test_mtp_eval(trained, tmp_path, capsys, monkeypatch):
    """The command, on a model that was saved with its head, and on folders that it cannot measure."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    model, _ = trained
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl")
    options = ("--prompts", tmp_path / "rows.jsonl", "--max_new_tokens", 12, "--max_rows", 3)
    code, out, err = command(capsys, "mtp-eval", tmp_path / "model", *options)
    assert code == 0, err
    assert "MTP head: one guess" in out and "after 3 prompts" in out
    assert 1 <= float(re.search(r"tokens per forward pass +(\d\.\d+)", out)[1]) <= 2

    tiny_model("llama").save_pretrained(tmp_path / "llama")
    tiny_tokenizer().save_pretrained(tmp_path / "llama")
    code, _, err = command(capsys, "mtp-eval", tmp_path / "llama", *options)
    assert code == 2 and "only these two forms of MTP heads are supported" in err
    (tmp_path / "model" / "adapter_config.json").write_text("{}")
    code, _, err = command(capsys, "mtp-eval", tmp_path / "model", *options)
    assert code == 2 and "Merge it with its base first" in err


@pytest.mark.parametrize("silent_for", [0.0, 60.0])
def test_progress(silent_for, trained, tmp_path, capsys, monkeypatch):
    """After some silence it says how far it is: each token and each text here, and nothing if it is fast."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("liger_trainer.command.tools.heads._SILENT_FOR", silent_for)
    model, _ = trained
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl")
    options = ("--prompts", tmp_path / "rows.jsonl", "--max_new_tokens", 4, "--max_rows", 3, "--batch_size", 2)
    code, _, err = command(capsys, "mtp-eval", tmp_path / "model", *options)
    assert code == 0, err
    for line in ("answers to prompts 1 to 2 of 3: 4 of at most 4 tokens", "prompts 3 to 3 of 3", "text 3 of 3"):
        assert (line in err) == (silent_for == 0.0)
