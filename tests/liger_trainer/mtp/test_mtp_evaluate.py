"""`mtp.evaluate` against the plain loop of decoding, which writes the model's greedy text in as many passes."""

import copy
import re
from functools import partial

import pytest
import torch
from mtp_bases import mtp_trainer, write_base, write_layer_base
from recipe_fixtures import command, write_rows
from tiny_models import tiny_model, tiny_tokenizer

from liger_trainer.data.answers import answer
from liger_trainer.head.acceptance import simulate_decoding
from liger_trainer.head.flat_rows import one_row
from liger_trainer.mtp.evaluate import evaluate, right_guesses
from liger_trainer.mtp.predictor import predict
from liger_trainer.mtp.rollout import roll_out
from liger_trainer.speculative_decoding import MTPGuesser, decode

PROMPTS = [[5, 9, 5], [7, 30, 2, 8], [40], [11, 12, 13, 14]]


IDS = [*range(20, 32)] * 3
ROWS = [{"input_ids": IDS[k : k + 20], "labels": IDS[k : k + 20]} for k in range(16)]
BASES = {
    "mtp": partial(write_base, layer_types=["full_attention"] * 2),
    "layer": partial(write_layer_base, kind="glm4_moe"),
}


def trained_on(folder, kind):
    """A model that repeats a pattern, and a head that guesses a part of it."""
    BASES[kind](folder / "base")
    trainer = mtp_trainer(folder / "base", folder / "out", rows=ROWS, max_steps=12, learning_rate=5e-3)
    trainer.train()
    return trainer.model.eval(), trainer.model.mtp


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return trained_on(tmp_path_factory.mktemp("mtp"), "mtp")


@pytest.mark.diagonal
@pytest.mark.parametrize("kind", BASES)
@pytest.mark.parametrize("steps", [1, 3])
def test_a_decoder_accepts_what_the_walk_says(steps, kind, tmp_path):
    model, head = trained_on(tmp_path, kind)
    rights = []
    for prompt in PROMPTS:
        (want,) = answer(model, [prompt], set(), 12)
        decoded = decode(model, MTPGuesser(model, head, steps), prompt, set(), 12)
        assert decoded.text == want
        rights.append(right_guesses(model, head, prompt, want, steps))
        tokens_per_pass, _ = simulate_decoding(rights[-1:])
        assert tokens_per_pass == pytest.approx(decoded.tokens_per_pass)
    report = evaluate(model, head, PROMPTS, set(), steps=steps, max_new_tokens=12)
    assert report.tokens_per_pass == pytest.approx(simulate_decoding(rights)[0])
    assert 1 < report.tokens_per_pass <= steps + 1
    assert report.tokens == 48 and report.rows == 4 and len(report.accuracy) == steps
    assert f"MTP head: {'one guess' if steps == 1 else '3 guesses'}, on 48 tokens" in str(report)


def test_later_guesses_read_the_heads_own_output(trained):
    """Guess 3 at one place, from a row of its own that ends there: no other rollout and no later token is seen."""
    model, head = trained
    ids = torch.tensor(IDS[:14])
    embedding = model.get_input_embeddings().weight
    with torch.no_grad():
        hidden = model(input_ids=ids[None], output_hidden_states=True).hidden_states[-1][0]
    outputs = roll_out(head, hidden, embedding, ids, 4, 3)
    assert [x.shape for x in outputs] == [(10, 32)] * 3
    short = roll_out(head, hidden[:10], embedding, ids[:10], 6, 3)  # the places 6 and 4 + 2
    for k in range(3):
        torch.testing.assert_close(outputs[k][2], short[k][0])
    torch.testing.assert_close(outputs[0], predict(head, hidden, embedding, one_row(ids[None]))[4:])
    with pytest.raises(ValueError, match="guesses is 0; expected 1 or more"):
        roll_out(head, hidden, embedding, ids, 4, 0)


@torch.no_grad()
def test_guesses_equal_those_of_one_row(trained):
    """All guesses for one token, by the head on a row of its own: of the model's states first, then of its outputs."""
    model, head = trained
    ids, place = torch.tensor(IDS[:14]), 6
    embedding = model.get_input_embeddings().weight
    hidden = model(input_ids=ids[None], output_hidden_states=True).hidden_states[-1][0]
    outputs = roll_out(head, hidden, embedding, ids, 4, 3)
    states = hidden[: place + 1]
    for k in range(3):
        following = embedding[ids[1 : len(states) + 1]]
        x = torch.cat([head.pre_fc_norm_embedding(following), head.pre_fc_norm_hidden(states)], -1)
        row = {"inputs_embeds": head.fc(x)[None], "position_ids": torch.arange(len(x))[None], "use_cache": False}
        want = head(**row).last_hidden_state[0, -1:]
        torch.testing.assert_close(outputs[k][place - 4][None], want)
        states = torch.cat([states, want])


def test_attention_without_masks(trained, monkeypatch):
    model, head = trained
    monkeypatch.setattr(head.config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(ValueError, match="attn_implementation is 'flash_attention_2', .* attn_implementation='sdpa'"):
        evaluate(model, head, PROMPTS, set(), max_new_tokens=4)


def test_a_head_in_fp32_on_a_model_in_16_bits(trained):
    """So it is after a training with autocast."""
    model, head = copy.deepcopy(trained)
    report = evaluate(model.bfloat16(), head.float(), PROMPTS, set(), steps=2, max_new_tokens=12)
    assert report.tokens_per_pass > 1


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
    code, out, err = command(capsys, "mtp-eval", tmp_path / "model", *options, "--steps", 3)
    assert code == 0, err
    assert "MTP head: 3 guesses" in out and re.search(r"^  3 +\d\.\d+ ", out, re.MULTILINE)
    code, _, err = command(capsys, "mtp-eval", tmp_path / "model", *options, "--steps", 0)
    assert code == 2 and "--steps is 0; expected 1 or more" in err

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
