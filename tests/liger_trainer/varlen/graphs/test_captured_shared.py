"""Rows that share their prompts, captured: the same steps as the padded batch.

On a CPU what is recorded runs again as Python (`RerunRecorder`), on a GPU it is a CUDA graph.
"""

import copy
import itertools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import VOCAB
from varlen_batches import ON, RerunRecorder, drawn_model, model_of, patched

from liger_trainer.head.calls import install_fused_head
from liger_trainer.head.outputs import HeadOptions
from liger_trainer.varlen.decide import backbone_of
from liger_trainer.varlen.graphs.graph_recorder import CudaGraphRecorder
from liger_trainer.varlen.graphs.step_graphs import StepGraphs, use_graphs
from liger_trainer.varlen.groups import ALWAYS, SharingRule
from liger_trainer.varlen.unpadded_backbone import BackboneBinding

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])]
# For each batch: tokens of the prompts, which prompt each row has, tokens of the answers. All are filled up to 64.
TWO_GROUPS = ((9, 4, 6), (0, 1, 0, 2, 1, 0), (3, 6, 1, 5, 4, 7))
ONE_GROUP = ((12,), (0, 0, 0, 0), (3, 8, 1, 5))
ALL_ALONE = ((5, 9, 7), (0, 1, 2), (3, 8, 1))
PAIRS = ((7, 3, 11), (0, 1, 2, 0, 1, 2), (4, 4, 1, 2, 6, 1))
FIVE_GROUPS = ((2, 3, 2, 3, 2), (0, 1, 2, 3, 4, 0, 1, 2, 3, 4), (1, 2, 1, 2, 1, 2, 3, 1, 2, 1))


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def batch(prompts, of_rows, answers, seed=0):
    """Rows as generation gives them: prompts padded on the left, answers on the right."""
    draw = torch.Generator().manual_seed(seed)
    beginnings = [torch.randint(3, VOCAB, (n,), generator=draw) for n in prompts]
    before, width = max(prompts), max(prompts) + max(answers)
    ids = torch.zeros(len(of_rows), width, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, (prompt, length) in enumerate(zip(of_rows, answers, strict=True)):
        answer = torch.randint(3, VOCAB, (length,), generator=draw)
        begin, end = before - prompts[prompt], before + length
        ids[row, begin:end] = torch.cat((beginnings[prompt], answer))
        mask[row, begin:end] = 1
        labels[row, before:end] = answer
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class TimelessRecorder(CudaGraphRecorder):
    """Says that a replay is twice as fast as Python, as it is for models of a useful size."""

    def __init__(self, device):
        super().__init__(device)
        self.seconds = itertools.cycle([1.0, 0.5])

    def seconds_of(self, run):
        run()
        return next(self.seconds)


class Pair:
    """One model that shares prompts and is captured, and a copy of it that does neither."""

    def __init__(self, model, device, rule=ALWAYS):
        if device == "cuda":
            model = model.to("cuda", torch.float16)
        self.captured = model
        self.plain = copy.deepcopy(model)
        self.device = device
        self.graphs = StepGraphs(lambda device: RerunRecorder() if device.type == "cpu" else TimelessRecorder(device))
        self.graphs.may_capture = True
        for one in (self.captured, self.plain):
            patched(one, ON)
        install_fused_head(self.captured, HeadOptions(sharing=rule))

    def step(self, kind, seed=0, **options):
        """One step of both models, with the same loss and gradients. Returns what the summary counts."""
        call = {name: x.to(self.device) for name, x in batch(*kind, seed).items()} | options
        limit = 1e-5 if self.device == "cpu" else 2e-2
        with use_graphs(self.graphs):
            got = self.captured(**call, use_cache=False).loss
        want = self.plain(**call, use_cache=False).loss
        torch.testing.assert_close(got, want, rtol=limit, atol=limit)
        got.backward()
        want.backward()
        wanted = dict(self.plain.named_parameters())
        for name, p in self.captured.named_parameters():
            assert (p.grad is None) == (wanted[name].grad is None), name
            if p.grad is not None:
                apart = (p.grad.double() - wanted[name].grad.double()).norm()
                assert apart <= limit * wanted[name].grad.double().norm() + limit / 10, (name, float(apart))
        for one in (self.captured, self.plain):
            one.zero_grad()
        return self.graphs.summary

    @property
    def sharing(self):
        return BackboneBinding.of(backbone_of(self.captured)).sharing


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "phi", "deepseek_v3"])
def test_every_layout_of_a_size_is_replayed(name, device):
    pair = Pair(model_of(name), device)
    pair.step(TWO_GROUPS)
    assert pair.graphs.summary.uncaptured == {"the first call of its kind": 1}
    for seed, kind in enumerate((TWO_GROUPS, ONE_GROUP, PAIRS, TWO_GROUPS), 1):
        summary = pair.step(kind, seed)
        assert summary.replayed == seed, summary.to_dict()
    assert pair.sharing.calls == 5
    # The first capture has room for two groups, and pairs are three.
    assert summary.sizes == [64, 64]


def test_rows_that_share_nothing_have_graphs_of_their_own(device):
    pair = Pair(model_of(), device)
    pair.step(TWO_GROUPS)
    for seed, kind in enumerate((TWO_GROUPS, ALL_ALONE, ONE_GROUP, ALL_ALONE), 1):
        summary = pair.step(kind, seed)
        assert summary.replayed == seed, summary.to_dict()
    assert summary.sizes == [64, 64]
    assert pair.sharing.calls == 3


def test_more_groups_than_the_tables_have_room_for_are_captured_anew(device):
    pair = Pair(model_of(), device)
    for seed, kind in enumerate((ONE_GROUP, ONE_GROUP, FIVE_GROUPS, ONE_GROUP)):
        summary = pair.step(kind, seed)
    assert summary.replayed == 3
    assert summary.sizes == [64, 64]


def test_adapters_and_checkpointing(device):
    model = get_peft_model(model_of(), LoraConfig(r=4, target_modules="all-linear"))
    torch.manual_seed(0)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.05)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    pair = Pair(model, device)
    for seed, kind in enumerate((TWO_GROUPS, PAIRS, ONE_GROUP)):
        summary = pair.step(kind, seed)
    assert summary.replayed == 2, summary.to_dict()


def test_the_auxiliary_loss_of_routers_counts_each_token_of_each_row(device):
    """Transformers adds attributes to the model in the first call, so that captures begin in the third."""
    pair = Pair(model_of("qwen3_moe"), device)
    for seed, kind in enumerate((TWO_GROUPS, TWO_GROUPS, TWO_GROUPS, ONE_GROUP)):
        summary = pair.step(kind, seed, output_router_logits=True, fused_lm_head=True)
    assert summary.replayed == 2, summary.to_dict()
    assert pair.sharing.calls == 4


def test_windows_share_and_are_not_captured(device):
    pair = Pair(drawn_model("mixtral"), device)
    for seed in range(2):
        summary = pair.step(TWO_GROUPS, seed)
    assert summary.replayed == 0
    (reason,) = summary.uncaptured
    assert "windows see of them change with each batch" in reason
    assert pair.sharing.calls == 2


def test_windows_of_few_tokens_are_captured_unshared():
    """Few before it shares: what would be left may be fewer."""
    tokens = sum(TWO_GROUPS[0][prompt] for prompt in TWO_GROUPS[1]) + sum(TWO_GROUPS[2])
    for least, shares in ((tokens, True), (tokens + 1, False)):
        pair = Pair(drawn_model("mixtral"), "cpu", SharingRule(1, 1, 0.0, least))
        for seed in range(2):
            pair.step(TWO_GROUPS, seed)
        assert (pair.sharing.calls == 2) is shares
        assert (pair.graphs.summary.replayed == 1) is not shares
    (reason,) = pair.sharing.unshared
    assert reason.startswith("steps of few tokens are faster as CUDA graphs")


def test_a_call_that_fails_on_shared_rows_is_captured_unshared(monkeypatch):
    monkeypatch.setattr("liger_trainer.varlen.shared_rows.why_not", lambda query: "its heads are odd")
    pair = Pair(model_of(), "cpu")
    pair.sharing.never = None  # the proof has met the odd heads too
    for seed in range(4):
        summary = pair.step(TWO_GROUPS, seed)
    assert pair.sharing.calls == 0
    assert summary.replayed >= 2, summary.to_dict()
