"""The numbers of `medusa-eval`: against brute force, against a real decode, and by hand."""

import json

import pytest
import torch
from medusa_fixtures import ENDS, model_with_heads, prompts_of
from tiny_models import VOCAB

from liger_trainer.medusa import evaluate as module
from liger_trainer.medusa.decode import Decoded, greedy_decode
from liger_trainer.medusa.evaluate import build_tree, evaluate, ranks_of, walk
from liger_trainer.medusa.prompts import answer, end_tokens


@pytest.fixture(scope="module")
def fitted():
    return model_with_heads()


@pytest.fixture(scope="module")
def texts(fitted):
    prompts = prompts_of(4) + prompts_of(3, seed=9)
    return list(zip(prompts, answer(fitted[0], prompts, ENDS, 24), strict=True))


def test_ranks_are_those_of_full_logits_at_the_right_shift(fitted, texts):
    model, heads = fitted
    for prompt, text in texts:
        ids = torch.tensor([prompt + text])
        hidden = model.model(input_ids=ids).last_hidden_state[0]
        logits = heads.logits(hidden, model.lm_head)
        ranks = ranks_of(model, heads, prompt, text)
        assert ranks.shape == (3, len(text) - 1)
        for k in range(3):
            for i in range(len(text) - 1):
                t = len(prompt) - 1 + i  # the LM head at t writes text[i]
                if t + k + 2 >= ids.shape[1]:
                    assert ranks[k, i] == -1
                    continue
                order = logits[k, t].argsort(descending=True, stable=True).tolist()
                assert ranks[k, i] == order.index(ids[0, t + k + 2])


def test_equal_logits_count_as_argmax_takes_them(fitted):
    """16-bit logits tie often. The first of equals is the argmax, and so has rank 0; the other has rank 1."""
    model, heads = fitted
    prompt = prompts_of(1)[0]
    text = greedy_decode(model, None, prompt, ENDS, 6).tokens
    with torch.no_grad():
        weights = [head.lm_head.weight.clone() for head in heads]
        for head in heads:
            head.lm_head.weight.zero_()
        ranks = ranks_of(model, heads, prompt, text)
        for head, weight in zip(heads, weights, strict=True):
            head.lm_head.weight.copy_(weight)
    assert ranks[0].tolist() == text[1:]


def test_walk_is_what_a_decode_measures(fitted, texts):
    """Passes and tokens of every row, with no forward pass but one."""
    model, heads = fitted
    chain = [[0], [0, 0], [0, 0, 0]]
    rates = set()
    for prompt, text in texts:
        done = greedy_decode(model, heads, prompt, ENDS, 24)
        assert done.tokens == text
        rate, _ = walk([ranks_of(model, heads, prompt, text)], chain)
        assert rate == (len(text) - 1) / done.passes
        rates.add(rate)
    assert len(rates) > 2


def test_walk_by_hand():
    """Two heads, a text of 7 tokens. Chain: (0, 0) all right, on at 3; head 1 wrong, on at 4; past the end at 5."""
    ranks = torch.tensor([[0, 5, 1, 1, 0, -1], [0, 0, 0, 0, -1, -1]])
    assert walk([ranks], [[0], [0, 0]]) == (6 / 3, [2 / 3, 1.0])
    # With [1] in the tree: at 3 head 1 is taken, and head 2's 0 behind it is not.
    assert walk([ranks], [[0], [0, 0], [1]]) == (6 / 3, [3 / 3, 1 / 2])
    # With [1, 0] too both are: the text ends there.
    assert walk([ranks], [[0], [0, 0], [1], [1, 0]]) == (6 / 2, [2 / 2, 2 / 2])
    assert walk([torch.full((2, 4), 7)], [[0], [0, 0]]) == (1.0, [0.0, None])


def test_tree_takes_the_likeliest_paths():
    accuracy = [[0.5, 0.2, 0.1], [0.4, 0.3, 0.0], [0.25, 0.1, 0.05]]
    chances = {}
    for r1, p1 in enumerate(accuracy[0]):
        chances[(r1,)] = p1
        for r2, p2 in enumerate(accuracy[1]):
            chances[(r1, r2)] = p1 * p2
            for r3, p3 in enumerate(accuracy[2]):
                chances[(r1, r2, r3)] = p1 * p2 * p3
    tree = [tuple(path) for path in build_tree(accuracy, 12)]
    assert tree[0] == (0,) and len(tree) == len(set(tree)) == 12
    assert sorted((chances[p] for p in tree), reverse=True) == pytest.approx(sorted(chances.values())[::-1][:12])
    assert all(path[:-1] in tree for path in tree if len(path) > 1), "a path's beginning is in the tree"
    everything = build_tree(accuracy, 1000)
    assert len(everything) == sum(chance > 0 for chance in chances.values()), "paths of chance 0 are left out"


def test_report(fitted):
    model, heads = fitted
    model.train()
    prompts = prompts_of(4)
    try:
        report = evaluate(model, heads, prompts, ENDS, max_new_tokens=24, batch_size=3, decode_rows=4)
        assert model.training
    finally:
        model.eval()
    assert report.tokens == sum(len(text) for text in answer(model, prompts, ENDS, 24))
    assert 1 < report.chain <= report.tree <= 4
    assert report.decoding.tokens_per_pass == report.chain, "the same rows, walked and decoded"
    assert report.decoding.differ == 0
    assert all(0 <= sum(ranks) <= 1 for ranks in report.accuracy) and len(report.accuracy) == 3
    assert json.loads(json.dumps(report.to_dict()))["medusa_choices"] == report.medusa_choices
    printed = str(report)
    assert f"chain  {report.chain:.3f}" in printed and "4 of 4 rows" in printed
    assert f"1      {report.accuracy[0][0]:.3f}" in printed


def test_another_text_is_an_error_and_a_tie_is_counted(fitted, monkeypatch):
    model, heads = fitted
    prompt = prompts_of(1)[0]
    text = greedy_decode(model, None, prompt, ENDS, 6).tokens
    right = text[-1]
    twin = right + 1
    assert twin < VOCAB and twin not in text

    def other_at_the_end(model, heads, prompt, ends, max_new_tokens):
        done = greedy_decode(model, None, prompt, ends, max_new_tokens)
        return done if heads is None else Decoded([*done.tokens[:-1], twin], done.passes)

    monkeypatch.setattr(module, "greedy_decode", other_at_the_end)
    said = rf"wrote token {twin} where greedy decoding writes {right}, 5 tokens into a text; their logits differ"
    with pytest.raises(RuntimeError, match=said):
        evaluate(model, heads, [prompt], ENDS, max_new_tokens=6, decode_rows=1)
    weight = model.lm_head.weight.data[twin].clone()
    try:
        model.lm_head.weight.data[twin] = model.lm_head.weight.data[right]  # equal logits: argmax takes the first
        report = evaluate(model, heads, [prompt], ENDS, max_new_tokens=6, decode_rows=1)
    finally:
        model.lm_head.weight.data[twin] = weight
    assert report.decoding.differ == 1 and "0 of 1 rows; 1 part at a near tie" in str(report)


def test_answers_are_greedy_and_padding_changes_nothing(fitted):
    """A repetition penalty in the model's own generation config is not the argmax that decoders verify."""
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


def test_bad_input(fitted):
    model, heads = fitted
    for keys, message in (
        ({"max_new_tokens": 1}, "max_new_tokens is 1; expected 2 or more"),
        ({"batch_size": 0}, "batch_size is 0; expected 1 or more"),
        ({"decode_rows": -1}, "decode_rows is -1; expected 0 or more"),
        ({"tree_nodes": 0}, "tree_nodes is 0; expected 1 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate(model, heads, prompts_of(1), ENDS, **keys)
    prompt = prompts_of(1)
    first = answer(model, prompt, ENDS, 1)[0][0]
    with pytest.raises(ValueError, match="ends all 1 texts after one token"):
        evaluate(model, heads, prompt, {first})
