"""The numbers of `medusa-eval`, checked by brute force and by hand."""

import pytest
import torch
from medusa_brute_force import ENDS, model_with_fitted_heads, prompts_of

from liger_trainer.data.answers import answer, end_tokens
from liger_trainer.head.acceptance import simulate_decoding
from liger_trainer.medusa.evaluate import evaluate, right_guesses
from liger_trainer.speculative_decoding import MedusaGuesser, decode


@pytest.fixture(scope="module")
def fitted():
    return model_with_fitted_heads()


@pytest.fixture(scope="module")
def texts(fitted):
    prompts = prompts_of(4) + prompts_of(3, seed=9)
    return list(zip(prompts, answer(fitted[0], prompts, ENDS, 24), strict=True))


def test_guesses_equal_full_logits_at_the_right_shift(fitted, texts):
    model, heads = fitted
    for prompt, text in texts:
        ids = torch.tensor([prompt + text])
        hidden = model.model(input_ids=ids).last_hidden_state[0]
        guesses = heads.logits(hidden, model.lm_head).argmax(-1)
        right = right_guesses(model, heads, prompt, text)
        assert right.shape == (3, len(text) - 1)
        for k in range(3):
            for i in range(len(text) - 1):
                t = len(prompt) - 1 + i  # the LM head at t writes text[i]
                ended = t + k + 2 >= ids.shape[1]
                assert right[k, i] == (-1 if ended else int(guesses[k, t] == ids[0, t + k + 2]))


def passes_of(model, heads, prompt, text):
    """Count by hand the forward passes of a decoder that verifies the chain of guesses."""
    passes, done = 0, 1
    while done < len(text):
        ids = torch.tensor([prompt + text[:done]])  # the last one is the model's own token
        hidden = model.model(input_ids=ids).last_hidden_state[0, -2]
        guesses = heads.logits(hidden, model.lm_head).argmax(-1).tolist()
        right = next((k for k, guess in enumerate(guesses) if text[done + k : done + k + 1] != [guess]), len(heads))
        passes, done = passes + 1, done + right + 1
    return passes


def test_walk_counts_the_passes_of_a_decoder(fitted, texts):
    model, heads = fitted
    rates = set()
    guesser = MedusaGuesser(model, heads, 3)
    for prompt, text in texts:
        rate, _ = simulate_decoding([right_guesses(model, heads, prompt, text)])
        passes = passes_of(model, heads, prompt, text)
        assert rate == (len(text) - 1) / passes
        assert decode(model, guesser, prompt, ENDS, 24) == (text, passes)
        rates.add(rate)
    assert len(rates) > 2


def test_walk_by_hand():
    """Two heads on 7 tokens: both right, go on at 3; head 1 wrong, go on at 4; past the end at 5."""
    right = torch.tensor([[1, 0, 0, 0, 1, -1], [1, 1, 1, 1, -1, -1]])
    assert simulate_decoding([right]) == (6 / 3, [2 / 3, 1.0])
    assert simulate_decoding([torch.zeros(2, 4)]) == (1.0, [0.0, None])


def test_report(fitted):
    model, heads = fitted
    model.train()
    prompts = prompts_of(4)
    try:
        report = evaluate(model, heads, prompts, ENDS, max_new_tokens=24, batch_size=3)
        assert model.training
    finally:
        model.eval()
    assert report.tokens == sum(len(text) for text in answer(model, prompts, ENDS, 24))
    assert 1 < report.tokens_per_pass <= 4
    assert all(0 <= right <= 1 for right in report.accuracy) and len(report.accuracy) == 3
    printed = str(report)
    assert (
        f"tokens per forward pass  {report.tokens_per_pass:.3f}" in printed
        and f"1      {report.accuracy[0]:.3f}" in printed
    )


def test_answers_are_greedy_and_padding_changes_nothing(fitted):
    """A repetition penalty in the model's generation config does not change the argmax that decoders verify."""
    model, _ = fitted
    prompts = prompts_of(5)
    alone = [answer(model, [prompt], ENDS, 12)[0] for prompt in prompts]
    model.generation_config.repetition_penalty = 5.0
    try:
        assert answer(model, prompts, ENDS, 12) == alone
        assert model.generation_config.repetition_penalty == 5.0
    finally:
        model.generation_config.repetition_penalty = None
    assert answer(model, prompts[:1], {alone[0][3]}, 12) == [alone[0][: alone[0].index(alone[0][3]) + 1]]


def test_end_tokens(fitted):
    class Tokenizer:
        eos_token_id = 7

    assert end_tokens(fitted[0], Tokenizer) == {2, 7}


def test_nothing_to_guess(fitted):
    model, heads = fitted
    prompt = prompts_of(1)
    first = answer(model, prompt, ENDS, 1)[0][0]
    with pytest.raises(ValueError, match="ends all 1 texts after one token"):
        evaluate(model, heads, prompt, {first})
