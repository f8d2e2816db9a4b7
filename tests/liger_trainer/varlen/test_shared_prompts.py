"""Rows with equal beginnings: what is shared, the same numbers as without sharing, and when nothing is shared."""

import copy

import pytest
import torch
from tiny_models import VOCAB, assert_same_step, step
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel
from varlen_batches import ON, drawn_model, model_of, patched

from liger_trainer.head.calls import install_fused_head
from liger_trainer.head.module import head_options
from liger_trainer.head.outputs import HeadOptions
from liger_trainer.varlen.decide import backbone_of
from liger_trainer.varlen.groups import ALWAYS, PAYS, Group, SharingRule, find_groups, lay_out, saved_by, worthwhile
from liger_trainer.varlen.plan_batch import plan_batch
from liger_trainer.varlen.unpadded_backbone import BackboneBinding

FAMILIES = (
    "llama",
    "qwen3",
    "qwen3_moe",
    "gemma3_text",
    "gemma4_text",
    "granite",
    "cohere2",
    "glm4",
    "phi",
    "deepseek_v3",
)
BY_OWN_ATTENTION = ("mixtral", "gpt_oss")  # windows in all layers; sinks, with windows and without
PROMPTS = (0, 1, 0, 2, 1, 0)  # of each row
OF_PROMPTS = (9, 4, 6)
ANSWERS = (3, 8, 1, 5, 4, 7)
TOKENS = sum(OF_PROMPTS[p] for p in PROMPTS) + sum(ANSWERS)
SAVED = 2 * 8 + 1 * 3


def batch(side="left", answers=ANSWERS):
    """Rows as generation makes them, or padded on the right like pairs: two groups and a lone row."""
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, VOCAB, (n,), generator=draw) for n in OF_PROMPTS]
    rows = [(prompts[p], torch.randint(3, VOCAB, (n,), generator=draw)) for p, n in zip(PROMPTS, answers, strict=True)]
    width = max(OF_PROMPTS) + max(answers)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for i, (prompt, answer) in enumerate(rows):
        start = max(OF_PROMPTS) - len(prompt) if side == "left" else 0
        between, end = start + len(prompt), start + len(prompt) + len(answer)
        ids[i, start:end] = torch.cat((prompt, answer))
        mask[i, start:end] = 1
        labels[i, between:end] = answer
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def sharing(model, rule=ALWAYS):
    patched(model, ON)
    install_fused_head(model, HeadOptions(sharing=rule))
    assert head_options(model).sharing is rule
    return model


def shared_by(model):
    return BackboneBinding.of(backbone_of(model)).sharing


@pytest.mark.diagonal
@pytest.mark.parametrize("name", [*FAMILIES, *BY_OWN_ATTENTION])
@pytest.mark.parametrize("side", ["left", "right"])
def test_loss_and_gradients_equal_the_padded_batch(name, side, tokens):
    model = (drawn_model if name in BY_OWN_ATTENTION else model_of)(name)
    call = batch(side)
    want = step(model, call)
    sharing(model)
    tokens.clear()
    assert_same_step(step(model, call), want)
    assert tokens == [TOKENS - SAVED]
    assert shared_by(model).to_dict() == {
        "calls": 1,
        "tokens_computed": TOKENS - SAVED,
        "tokens_saved": SAVED,
        "calls_not_shared": {},
    }


@pytest.mark.parametrize("reentrant", [False, True])
def test_with_checkpointing(reentrant, tokens):
    model, call = model_of(), batch()
    want = step(model, call)
    sharing(model).gradient_checkpointing_enable({"use_reentrant": reentrant})
    tokens.clear()
    assert_same_step(step(model, call), want)
    assert tokens == [TOKENS - SAVED]


def test_the_auxiliary_loss_counts_each_token_of_each_row():
    model, call = model_of("qwen3_moe"), batch() | {"output_router_logits": True}
    want = step(model, call)
    sharing(model)
    assert_same_step(step(model, call), want)


def test_a_batch_without_padding_is_shared_too(tokens):
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (4, 12), generator=draw)
    ids[:, :7] = ids[0, :7]
    labels = ids.clone()
    labels[:, :7] = -100
    call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    model = model_of()
    want = step(model, call)
    sharing(model)
    tokens.clear()
    assert_same_step(step(model, call), want)
    assert tokens == [4 * 12 - 3 * 6]


def test_a_row_with_a_masked_answer_shares_its_prompt(tokens):
    """TRL masks completions that were cut off, so they are not scored."""
    call = batch()
    call["attention_mask"][0, 9:] = 0
    call["labels"][0] = -100
    model = model_of()
    want = step(model, call)
    sharing(model)
    tokens.clear()
    assert_same_step(step(model, call), want)
    assert tokens == [TOKENS - SAVED - ANSWERS[0]]


def test_scores_and_hidden_states_of_every_position_equal_those_without_sharing():
    model, call = model_of(), batch()
    call |= {"fused_lm_head": True, "token_outputs": ("log_probs", "entropy")}
    own = patched(copy.deepcopy(model))
    sharing(model)
    for ours, theirs in zip(model(**call).values(), own(**call).values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert shared_by(model).calls == 1
    assert shared_by(own).is_empty


def refused(model, call, tokens, **config):
    want_tokens = int(call["attention_mask"].sum())
    tokens.clear()
    model(**call, use_cache=False).loss.backward()
    assert tokens == [want_tokens]
    assert shared_by(model).calls == 0
    return [*shared_by(model).unshared]


def test_dropout_keeps_rows_apart_in_training_alone(tokens):
    model = sharing(model_of(attention_dropout=0.1))
    assert refused(model, batch(), tokens) == ["attention_dropout of its config is 0.1"]
    model.eval()
    with torch.no_grad():
        model(**batch(), fused_lm_head=True)
    assert shared_by(model).calls == 1


def test_a_module_of_dropout_keeps_rows_apart(tokens):
    model = model_of()
    model.model.layers[0].mlp.add_module("late", torch.nn.Dropout(0.2))
    assert refused(sharing(model), batch(), tokens) == ["a Dropout with p=0.2 is on"]


def test_router_jitter_keeps_rows_apart(tokens):
    model = sharing(drawn_model("mixtral"))
    model.config.router_jitter_noise = 0.1
    assert refused(model, batch(), tokens) == ["router_jitter_noise of its config is 0.1"]


@pytest.mark.skipif(Gemma2PreTrainedModel._supports_sdpa, reason="this transformers leaves out the cap under SDPA")
def test_soft_caps_keep_rows_apart(tokens):
    model = sharing(drawn_model("gemma2"))
    assert refused(model, batch(), tokens) == ["its attention has a soft cap"]


def test_layers_with_a_state_keep_rows_apart():
    model = model_of("qwen3_next")
    want = step(model, batch("right"))
    sharing(model)
    got = step(model, batch("right"))
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=0)
    assert [*shared_by(model).unshared] == ["its layers keep a state"]


def test_positions_of_the_caller_are_not_shared(tokens):
    call = batch()
    call["position_ids"] = (call["attention_mask"].cumsum(1) - 1).clamp(min=0)
    model = sharing(model_of())
    assert refused(model, call, tokens) == []


def test_heads_that_cannot_share_are_seen_before_the_first_layer(tokens):
    """Under FSDP and ZeRO-3, a call that is made again would gather weights that other ranks do not gather."""
    model = model_of(head_dim=264)
    want = step(model, batch())
    sharing(model)
    assert BackboneBinding.of(backbone_of(model)).head_widths == {264}
    tokens.clear()
    assert_same_step(step(model, batch()), want)
    assert tokens == [TOKENS]
    assert shared_by(model).unshared == {"its heads are wider than 256": 1}


def test_a_call_that_fails_on_shared_rows_is_made_without(monkeypatch, tokens):
    """A layer finds out. The call is made again, and later calls do not try."""
    monkeypatch.setattr("liger_trainer.varlen.shared_rows.why_not", lambda query: "its heads are odd")
    model = model_of()
    want = step(model, batch())
    model = patched(model, ON)
    install_fused_head(model, HeadOptions(sharing=ALWAYS))
    shared_by(model).never = None
    tokens.clear()
    assert_same_step(step(model, batch()), want)
    assert tokens == [TOKENS - SAVED, TOKENS]
    step(model, batch())
    assert tokens == [TOKENS - SAVED, TOKENS, TOKENS]
    assert shared_by(model).unshared == {"its heads are odd": 2}


def test_nothing_is_shared_by_default_and_with_the_rule_of_short_prompts(tokens):
    call = batch()
    for model in (patched(model_of()), sharing(model_of(), PAYS)):
        tokens.clear()
        step(model, call)
        assert tokens == [TOKENS]
        assert shared_by(model).is_empty


# Finding groups, and where tokens lie


def found(call):
    predicting = torch.nn.functional.pad(call["labels"][:, 1:] != -100, (0, 1))
    return find_groups(call["input_ids"], call["attention_mask"] != 0, predicting)


@pytest.mark.parametrize("side", ["left", "right"])
def test_groups_are_found(side):
    firsts = (0, 5) if side == "left" else (0, 0)
    assert found(batch(side)) == [Group([0, 2, 5], firsts[0], 8), Group([1, 4], firsts[1], 3)]


def test_rows_that_differ_in_one_token_or_one_column_are_no_group():
    call = batch()
    call["input_ids"][2, 3] += 1  # in the prompt of the first group's second row
    assert [group.rows for group in found(call)] == [[0, 5], [1, 4]]
    call["attention_mask"][4, 5] = 0  # a token fewer than the second group's other row
    assert [group.rows for group in found(call)] == [[0, 5]]


def test_a_label_ends_what_is_shared():
    call = batch()
    call["labels"][0, 4] = call["input_ids"][0, 4]
    assert [group.rows for group in found(call)] == [[1, 4], [2, 5]]


def test_the_last_token_of_a_prompt_stays_private():
    call = batch()
    layout = lay_out(call["attention_mask"] != 0, found(call))
    assert layout.prefixes == [8, 3]
    assert layout.lone == [OF_PROMPTS[2] + ANSWERS[3]]
    assert layout.private == [[1 + ANSWERS[0], 1 + ANSWERS[2], 1 + ANSWERS[5]], [1 + ANSWERS[1], 1 + ANSWERS[4]]]
    ids = call["input_ids"].flatten()
    assert torch.equal(ids[layout.places][layout.source], ids[layout.real])
    assert layout.longest_row == 16


class Threads(TorchDispatchMode):
    """Lists how many threads each operation may use."""

    def __init__(self):
        super().__init__()
        self.counts = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts.append(torch.get_num_threads())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("halves", [False, True])
def test_planning_takes_one_thread(halves):
    """Waking all threads of a host takes longer than what they do, and the GPU waits."""
    config, call = model_of().config, batch(side="right") | {"use_cache": False}
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with Threads() as threads:
            plan = plan_batch(config, call, sharing=ALWAYS._replace(halves=halves))
        assert plan.saved
        assert set(threads.counts) == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_rule_asks_for_prefix_saving_and_part():
    groups = [Group([0, 1], 0, 200), Group([2, 3, 4], 0, 100)]
    assert saved_by(groups) == 400
    assert worthwhile(groups, 1000, SharingRule(150, 100, 0.1, 0)) == groups[:1]
    assert worthwhile(groups, 1000, SharingRule(150, 201, 0.1, 0)) == []
    assert worthwhile(groups, 4100, SharingRule(50, 100, 0.1, 0)) == []
    assert worthwhile(groups, 4000, SharingRule(50, 100, 0.1, 0)) == groups
