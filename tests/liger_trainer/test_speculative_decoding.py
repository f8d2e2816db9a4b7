"""Decoding with speculative heads writes the model's greedy text, whatever is guessed, and reads each token once.

That trained heads take as many passes as `eagle-eval`, `mtp-eval` and `medusa-eval` say is in their own test files.
"""

from functools import partial

import pytest
import torch
from eagle_brute_force import eagle_target, with_random_drafter
from medusa_brute_force import model_with_heads, prompts_of
from mtp_bases import write_base, write_layer_base
from tiny_models import VOCAB, tiny_model
from transformers import AutoModelForCausalLM, MambaConfig, MambaForCausalLM

from liger_trainer.base_weights.unloaded import find_checkpoint
from liger_trainer.head.flat_rows import one_row
from liger_trainer.mtp.predictor import joined, load_predictor
from liger_trainer.speculative_decoding import (
    EagleGuesser,
    MedusaGuesser,
    MTPGuesser,
    decode,
    decode_by_pass,
)

PROMPTS = [[5], *prompts_of(3)]
LENGTH = 14
STEPS = 3


def eagle(_):
    model = with_random_drafter(eagle_target()).eval()
    return model, EagleGuesser(model, model.eagle_drafter, STEPS)


def mtp(folder, write=write_base, **options):
    write(folder, **options)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, MTPGuesser(model, load_predictor(model, find_checkpoint(str(folder))).eval(), STEPS)


def medusa(_, **options):
    model = model_with_heads(num_heads=STEPS, **options).eval()
    return model, MedusaGuesser(model, model.medusa_head, STEPS)


def without(_):
    return eagle_target().eval(), None


KINDS = {
    "eagle": eagle,
    "mtp": partial(mtp, layer_types=["full_attention"] * 2),
    "mtp layer": partial(mtp, write=write_layer_base, kind="glm4_moe"),
    "mtp, latent attention": partial(mtp, write=write_layer_base, kind="deepseek_v3"),
    "medusa": medusa,
    "medusa, untied": partial(medusa, tied=False),
    "without": without,
}


@pytest.fixture(scope="module", params=KINDS)
def decoder(request, tmp_path_factory):
    """A tiny model in fp32, and a guesser with random weights."""
    return KINDS[request.param](tmp_path_factory.mktemp("decoder"))


class Listed:
    """Guesses `STEPS` tokens of a text that it knows, but in each pass one wrongly: after `right` tokens."""

    reads = ()

    def __init__(self, prompt, text, right):
        self.prompt = prompt
        self.text = text
        self.right = right

    def start(self):
        self.written = 0
        self.passes = iter(self.right)

    def guess(self, states, following):
        assert states.shape == (len(following), 0)
        # The first pass reads the prompt and writes one token.
        self.written += len(following) if self.written else len(following) - len(self.prompt) + 1
        right = next(self.passes)
        guesses = [*self.text, *[0] * STEPS][self.written : self.written + STEPS]
        return torch.tensor([(token + 1) % VOCAB if k == right else token for k, token in enumerate(guesses)])


def generated(model, prompt, ends, length):
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": length, "eos_token_id": sorted(ends) or None, "pad_token_id": 0}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


def rows_read(model, run):
    """How many tokens each pass of the model reads in `run()`, and the result."""
    lengths = []

    def note(_, args, kwargs):
        lengths.append(kwargs["input_ids"].shape[1])

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        return lengths, run()
    finally:
        hook.remove()


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_the_text_is_the_greedy_one(decoder, prompt):
    """Random guesses, nearly all of them wrong: cut at any length, and at an end token wherever it is."""
    model, guesser = decoder
    whole = generated(model, prompt, set(), LENGTH)
    decoded = decode(model, guesser, prompt, set(), LENGTH)
    assert decoded.text == whole and len(whole) == LENGTH
    assert 1 <= decoded.tokens_per_pass <= (1 if guesser is None else STEPS + 1)
    for length in (1, 2, 5):
        assert decode(model, guesser, prompt, set(), length).text == whole[:length]
    for end in (whole[0], whole[6]):
        text = whole[: whole.index(end) + 1]
        assert decode(model, guesser, prompt, {end}, LENGTH).text == text == generated(model, prompt, {end}, LENGTH)


def test_a_pass_reads_only_what_is_new(decoder):
    """With the cache: the prompt, and then the last token and the guesses."""
    model, guesser = decoder
    prompt = PROMPTS[1]
    lengths, decoded = rows_read(model, lambda: decode(model, guesser, prompt, set(), LENGTH))
    new = 1 if guesser is None else STEPS + 1
    assert lengths == [len(prompt)] + [new] * decoded.passes


@pytest.mark.parametrize("right", [[0] * 20, [3] * 5, [1, 0, 3, 2, 3, 0, 1]], ids=str)
def test_right_guesses_are_accepted_up_to_the_first_wrong_one(right):
    model = eagle_target().eval()
    prompt = PROMPTS[2]
    text = generated(model, prompt, set(), 17)
    passes = list(decode_by_pass(model, Listed(prompt, text, right), prompt, set(), 17))
    assert sum(passes, []) == text
    assert [len(tokens) for tokens in passes[1:-1]] == [count + 1 for count in right[: len(passes) - 2]]
    # A text ends within accepted guesses, too.
    end = text[9]
    passes = list(decode_by_pass(model, Listed(prompt, text, right), prompt, {end}, 17))
    assert sum(passes, []) == text[: text.index(end) + 1]


STATES = {"layer_types": ["linear_attention", "full_attention"]}
WINDOWS = {"sliding_window": 4}


@pytest.mark.parametrize(("kind", "config"), [("qwen3_5_text", STATES), ("mistral", WINDOWS)], ids=["states", "window"])
def test_a_model_whose_cache_cannot_be_cropped(kind, config):
    """It reads the whole text in each pass, and writes the same text as `generate` does with its cache."""
    model, guesser = medusa(None, model_type=kind, **config)
    prompt = PROMPTS[3]
    text = generated(model, prompt, set(), LENGTH)
    lengths, decoded = rows_read(model, lambda: decode(model, guesser, prompt, set(), LENGTH))
    assert decoded.text == text
    assert lengths[1] == len(prompt) + 1 + STEPS and lengths == sorted(lengths)
    assert decode(model, Listed(prompt, text, [2, 0, 3, 1, 3, 3]), prompt, set(), LENGTH).text == text
    assert decode(model, None, prompt, set(), LENGTH) == (text, LENGTH - 1)


def test_a_model_whose_config_does_not_name_its_layers():
    """It keeps a state all the same, as its class says."""
    torch.manual_seed(0)
    shape = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "initializer_range": 0.5}
    model = MambaForCausalLM(MambaConfig(**shape, bos_token_id=None, eos_token_id=None, pad_token_id=None)).eval()
    assert model.config.get_text_config().to_dict().get("layer_types") is None
    prompt = PROMPTS[3]
    text = generated(model, prompt, set(), LENGTH)
    decoded = decode(model, Listed(prompt, text, [2, 0, 3, 1, 3, 3]), prompt, set(), LENGTH)
    assert decoded == (text, 5)


@torch.no_grad()
def states_of(model, guesser, ids):
    seen = []
    hooks = [module.register_forward_pre_hook(lambda _, args: seen.append(args[0][0])) for module in guesser.reads]
    model(input_ids=ids[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.cat(seen, -1)


def by_drafter(model, states, ids):
    """The guesses after ids (n + 1,), from the states of the first n, by the drafter's own `forward` and no cache."""
    drafter = model.eagle_drafter
    # Attention is causal, so no row that counts sees those that make room for the guesses.
    padded = torch.cat([states, states.new_zeros(STEPS, states.shape[1])])
    row = ids.tolist()
    for k in range(1, STEPS + 1):
        filled = torch.tensor([row + [0] * (len(padded) - len(row))])
        output = drafter(padded, model.get_input_embeddings().weight, one_row(filled), k)[-1]
        row.append(int(drafter.target_ids[drafter.lm_head(output[len(states) - 1]).argmax()]))
    return row[len(ids) :]


def by_mtp_head(model, states, ids):
    """The same by a pass of the head over all rows for each guess."""
    head = model.mtp
    norm_sees = []
    hook = head.norm.register_forward_pre_hook(lambda _, args: norm_sees.append(args[0][0]))
    row = ids.tolist()
    for _ in range(STEPS):
        x = joined(head, states, model.get_input_embeddings()(torch.tensor(row[1:])))
        call = {"inputs_embeds": x[None], "position_ids": torch.arange(len(x))[None], "use_cache": False}
        normed = head(**call).last_hidden_state[0]
        state = norm_sees[-1] if head.names_in_files.is_layer else normed
        states = torch.cat([states, state[-1:]])
        row.append(int(model.lm_head(normed[-1]).argmax()))
    hook.remove()
    return row[len(ids) :]


@torch.no_grad()
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith(("eagle", "mtp"))])
def test_cached_guesses_are_those_without_a_cache(kind, tmp_path):
    """However many tokens come at once, and for a second text."""
    model, guesser = KINDS[kind](tmp_path)
    reference = by_drafter if kind == "eagle" else by_mtp_head
    chosen = set()
    for seed in range(3):
        ids = torch.randint(3, VOCAB, (19,), generator=torch.Generator().manual_seed(seed))
        states = states_of(model, guesser, ids)
        guesser.start()
        read = 0
        for count in (6, 1, 4, 2, 1, 3, 1):
            known = slice(read, read + count)
            read += count
            guesses = guesser.guess(states[known], ids[1:][known]).tolist()
            assert guesses == reference(model, states[:read], ids[: read + 1])
            chosen.update(guesses)
    assert len(chosen) > 10


def test_options_are_checked(decoder, tmp_path):
    model, guesser = decoder
    with pytest.raises(ValueError, match="The prompt has 0 tokens and max_new_tokens is 4; expected 1 or more"):
        decode(model, guesser, [], set(), 4)
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        decode(model, guesser, [5], set(), 0)


def test_steps_are_checked():
    model = with_random_drafter(eagle_target())
    with pytest.raises(ValueError, match="steps is 0; expected 1 or more"):
        EagleGuesser(model, model.eagle_drafter, 0)
    with pytest.raises(ValueError, match="steps is -1; expected 1 or more"):
        MTPGuesser(model, None, -1)
    model = model_with_heads(num_heads=2)
    with pytest.raises(ValueError, match="steps is 0; expected 1 or more"):
        MedusaGuesser(model, model.medusa_head, 0)
    with pytest.raises(ValueError, match="steps is 3, but each of the 2 Medusa heads guesses one token"):
        MedusaGuesser(model, model.medusa_head, 3)


def test_bfloat16(decoder):
    model, guesser = decoder
    if guesser is not None:
        assert decode(model, guesser, PROMPTS[1], set(), LENGTH).passes < LENGTH
    tiny = tiny_model("llama").bfloat16().eval()
    assert decode(tiny, None, PROMPTS[1], set(), 6).text == generated(tiny, PROMPTS[1], set(), 6)
