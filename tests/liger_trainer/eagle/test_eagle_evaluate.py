"""The acceptance length of a drafter, by one pass over the text and by a decoder that drafts and verifies."""

import copy

import pytest
import torch
from eagle_brute_force import eagle_target, eagle_trainer
from medusa_brute_force import ENDS, prompts_of
from tiny_models import VOCAB

from liger_trainer.data.answers import answer
from liger_trainer.eagle.evaluate import evaluate, right_guesses
from liger_trainer.eagle.target import default_layers
from liger_trainer.head.acceptance import simulate_decoding
from liger_trainer.speculative_decoding import EagleGuesser, decode
from liger_trainer.varlen.taps import tapped


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """A tiny model, and a drafter fitted, though not to the end, to its greedy texts after four prompts."""
    model = eagle_target().eval()
    model.generation_config.eos_token_id = 2
    texts = answer(model, prompts_of(4), ENDS, 24)
    rows = [{"input_ids": p + text} for p, text in zip(prompts_of(4), texts, strict=True)]
    trainer = eagle_trainer(
        model, tmp_path_factory.mktemp("fitted"), rows, max_steps=40, learning_rate=5e-3, eagle_draft_vocab_size=VOCAB
    )
    trainer.train()
    return model.eval(), model.eagle_drafter.requires_grad_(False)


def test_a_decoder_accepts_what_the_walk_says(fitted):
    """Prompt by prompt, the decoder's text is the greedy one and takes as many passes as the walk says."""
    model, drafter = fitted
    lengths = []
    for prompt in prompts_of(4) + prompts_of(3, seed=9):
        text = answer(model, [prompt], ENDS, 24)[0]
        decoded = decode(model, EagleGuesser(model, drafter, 3), prompt, ENDS, 24)
        assert decoded.text == text
        if len(text) > 1:
            tokens_per_pass, _ = simulate_decoding([right_guesses(model, drafter, prompt, text, 3)])
            assert decoded.tokens_per_pass == pytest.approx(tokens_per_pass)
            lengths.append(tokens_per_pass)
    assert max(lengths) > 1.5 and min(lengths) < max(lengths)


def test_a_drafter_that_was_trained_in_mixed_precision(tmp_path):
    """It has fp32 weights beside a model in bf16, and guesses as it was trained: in bf16."""
    trainer = eagle_trainer(eagle_target(dtype=torch.bfloat16), tmp_path, bf16=True, max_steps=1)
    trainer.train()
    model = trainer.model.eval()
    drafter = model.eagle_drafter
    assert (drafter.fc.weight.dtype, model.dtype) == (torch.float32, torch.bfloat16)
    reports = []
    for _ in range(2):
        reports.append(evaluate(model, drafter, prompts_of(3), ENDS, steps=2, max_new_tokens=6))
        decoded = decode(model, EagleGuesser(model, drafter, 2), prompts_of(1)[0], ENDS, 6)
        assert decoded.text == answer(model, prompts_of(1), ENDS, 6)[0]
        drafter.bfloat16()
    assert reports[0].tokens == reports[1].tokens
    assert reports[0].accuracy == pytest.approx(reports[1].accuracy, abs=0.15)


def test_the_report(fitted):
    model, drafter = fitted
    model.train()
    report = evaluate(model, drafter, prompts_of(4), ENDS, steps=3, max_new_tokens=24, batch_size=3)
    assert model.training
    model.eval()
    rows = []
    for prompt in prompts_of(4):
        text = answer(model, [prompt], ENDS, 24)[0]
        rows.append(right_guesses(model, drafter, prompt, text, 3))
    assert report.tokens_per_pass == pytest.approx(simulate_decoding(rows)[0]) and report.tokens_per_pass > 1.2
    assert len(report.accuracy) == 3 and 0 < report.accuracy[0] <= 1
    assert f"tokens per forward pass  {report.tokens_per_pass:.3f}" in str(report)


def test_a_drafter_in_fp32_on_a_model_in_16_bits(fitted):
    """So it is after a training with autocast."""
    model, drafter = copy.deepcopy(fitted)
    model.bfloat16()
    drafter.float()
    report = evaluate(model, drafter, prompts_of(4), ENDS, steps=3, max_new_tokens=24)
    assert report.tokens_per_pass > 1.2
    assert decode(model, EagleGuesser(model, drafter, 3), prompts_of(1)[0], ENDS, 24).passes > 0


def test_texts_of_one_token(fitted):
    model, drafter = fitted
    with pytest.raises(ValueError, match="ends all 2 texts after one token"):
        evaluate(model, drafter, prompts_of(2), set(range(VOCAB)), steps=2)


def test_taps_are_the_hidden_states_of_transformers():
    model = eagle_target().eval()
    ids = torch.tensor([[5, 9, 11, 40, 3]])
    want = model(ids, output_hidden_states=True).hidden_states
    with tapped([model.model.layers[i] for i in (0, 2, 3)]) as seen:
        model(ids)
    for i, x in zip((0, 2, 3), seen, strict=True):
        assert torch.equal(x, want[i])
    assert not any(layer._forward_pre_hooks for layer in model.model.layers)


def test_default_layers():
    assert default_layers(32) == (2, 16, 29) and default_layers(36) == (2, 18, 33)
    assert default_layers(7) == (2, 3, 4)
    with pytest.raises(ValueError, match=r"eagle_layers is unset, which means \[2, 3, 3\] for a model of 6 layers"):
        default_layers(6)
