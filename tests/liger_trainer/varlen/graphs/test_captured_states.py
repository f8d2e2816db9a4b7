"""Captured backbones with layers that keep a state: the steps of uncaptured ones, for rows of any lengths.

On a CPU, recorded Python runs again (`RerunRecorder`), and rules run in PyTorch, row by row.
"""

import copy
import inspect
import sys

import pytest
import torch
from image_models import image_batch, image_model
from installed_packages import install_packages
from peft import LoraConfig, get_peft_model
from varlen_batches import Rerun, RerunRecorder, assert_same_with_states, batch, captured_step, drawn_model

from liger_trainer import apply_liger
from liger_trainer.varlen import state_layers
from liger_trainer.varlen.graphs.static_batch import (
    CHUNK,
    TokenBatch,
    bounds_of,
    numbered_chunks,
    round_up,
    rounded_bounds,
    with_other_rows,
)
from liger_trainer.varlen.graphs.step_graphs import StepGraphs
from liger_trainer.varlen.proof import backbone, convolutions, rules
from liger_trainer.varlen.proof.packed_rows import kernel_behind
from liger_trainer.varlen.rows import Chunks, NotForRows, Rows, StaticRows

RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "chunk_kimi_delta_attention")
SIZES = ((7, 1, 11, 12), (9, 3, 12, 10), (5, 6, 7, 8, 9), (12, 12, 12), (20, 20, 20))


@pytest.fixture
def patched(monkeypatch):
    """`patched(model)` patches a model as on a GPU with flash-linear-attention."""
    monkeypatch.setattr(backbone, "_has_gpu", lambda: True)
    monkeypatch.setattr(rules, "_version_of", lambda package: "0.6.0")

    def patch(model):
        decoder = model.get_decoder()
        install_packages(monkeypatch, type(decoder).__module__, RULES)
        apply_liger(model)
        for module in model.modules():
            binding = state_layers.StateBinding.of(module)
            if binding is not None:
                binding.on_cpu = True
        return model.train()

    return patch


def graphs_of(recorder=RerunRecorder):
    graphs = StepGraphs(lambda device: recorder())
    graphs.may_capture = True
    return graphs


def checkpointed(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    return model


@pytest.mark.diagonal
@pytest.mark.parametrize("change", [lambda model: model, checkpointed], ids=["full", "checkpointed"])
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5_text"])
def test_steps_equal_uncaptured_ones(name, change, patched, monkeypatch):
    """Compared in float64: in fp32 the filling row changes how products round, and gradients of a decay cancel."""
    monkeypatch.setattr(convolutions, "_DTYPES", (torch.float64, torch.float32))
    model = change(patched(drawn_model(name).double()))
    plain, graphs = copy.deepcopy(model), graphs_of()
    for lengths in (*SIZES, *SIZES):
        call = batch(lengths)
        (loss, grads), (want, want_grads) = captured_step(model, call, graphs), captured_step(plain, call)
        torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)  # the head computes it in fp32
        assert grads.keys() == want_grads.keys()
        for one, other in want_grads.items():
            assert (grads[one] - other).norm() <= 1e-10 * other.norm(), one
    assert graphs.summary.replayed == 9, graphs.summary.to_dict()


def test_adapters_in_the_projections(patched):
    names = ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", "q_proj", "down_proj"]
    model = get_peft_model(drawn_model("qwen3_5_text"), LoraConfig(r=4, target_modules=names))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    assert_replayed_steps_equal(patched(model), map(batch, SIZES))


def test_images(patched):
    """The decoder gets embeddings, and positions in three dimensions."""
    model = patched(image_model("qwen3_5"))
    assert_replayed_steps_equal(model, [image_batch(model, seed=seed) for seed in (1, 1, 2)])


def assert_replayed_steps_equal(model, calls):
    plain, graphs = copy.deepcopy(model), graphs_of()
    for count, call in enumerate(calls):
        assert_same_with_states(captured_step(model, call, graphs), captured_step(plain, call))
        assert graphs.summary.replayed == count, graphs.summary.to_dict()


class Stale(Rerun):
    """Runs again with the rows of the first run, as a package that keeps what it has made of their offsets."""

    offsets: torch.Tensor | None = None

    def replay(self):
        capture = self.function.__self__
        rows = capture.size.rows
        if Stale.offsets is None:
            Stale.offsets = rows.offsets.clone()
        now = rows.offsets.clone()
        rows.offsets.copy_(Stale.offsets)
        super().replay()
        rows.offsets.copy_(now)


class StaleRecorder(RerunRecorder):
    def record(self, function):
        return Stale(function)


def test_a_replay_that_keeps_the_rows_of_its_capture_is_not_used(patched, monkeypatch):
    """It gives the right results for the batch that was captured, and wrong ones for each later one."""
    monkeypatch.setattr(Stale, "offsets", None)
    model, graphs = patched(drawn_model("qwen3_5_text")), graphs_of(StaleRecorder)
    plain = copy.deepcopy(model)
    for _ in range(2):
        assert_same_with_states(captured_step(model, batch(), graphs), captured_step(plain, batch()))
    assert graphs.summary.replayed == 0
    assert any(
        "the replay computes something else" in reason for reason in graphs.summary.to_dict()["calls_not_captured"]
    )


@pytest.mark.parametrize(
    "version, backend, reason",
    [
        ("0.7.0", None, "were tried with fla-core 0.6.0, not with 0.7.0"),
        ("0.6.0", "tilelang", "were not tried with tilelang"),
    ],
)
def test_other_versions_of_the_package_are_not_captured(version, backend, reason, patched, monkeypatch):
    monkeypatch.setattr(rules, "_version_of", lambda package: version)
    monkeypatch.setattr(rules, "_BACKENDS", () if backend is None else ("json",))
    model, graphs = patched(drawn_model("qwen3_5_text")), graphs_of()
    for _ in range(2):
        captured_step(model, batch(), graphs)
    (text,) = graphs.summary.to_dict()["calls_not_captured"]
    assert "its layers keep a state" in text and reason.replace("tilelang", "json") in text


def test_a_rule_that_counts_its_chunks_is_not_captured(monkeypatch):
    modeling = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear", exc_type=ImportError)
    install_packages(monkeypatch, modeling.__name__, RULES)
    forward = inspect.unwrap(modeling.KimiLinearDeltaAttention.forward)
    assert rules.why_not_captured(forward) == "chunk_kda counts the chunks of rows on the host"
    assert rules.why_not_captured(inspect.unwrap(modeling.KimiLinearMLP.forward)) is None


def test_a_rule_without_its_package_is_not_captured(monkeypatch):
    monkeypatch.setattr(backbone, "_has_gpu", lambda: True)
    model, graphs = drawn_model("qwen3_5_text"), graphs_of()
    apply_liger(model)
    captured_step(model.train(), batch(), graphs)
    assert [*graphs.summary.to_dict()["calls_not_captured"]] == [
        "its layers keep a state, and run on as many rows as a batch has"
    ]


class OnGPU(torch.Tensor):
    is_cuda = True


def test_the_rule_gets_static_chunks_and_new_offsets_each_time(patched):
    """flash-linear-attention keeps what it makes of a tensor of offsets until it gets another object."""
    model = patched(drawn_model("qwen3_5_text"))
    own = vars(__import__(type(model).__module__, fromlist=["_"]))[RULES[0]]
    given = []
    rule = rules._with_rows(lambda *args, **kwargs: given.append(kwargs), kernel_behind(own))
    chunks = Chunks(torch.tensor([0, 3, 5, 5], dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32))
    static = StaticRows(torch.tensor([0, 3, 5], dtype=torch.int32), 5, 64, chunks)
    q = torch.ones(1, 5, 2, 4).as_subclass(OnGPU)
    for rows in (static, static, Rows([3, 2], torch.device("cpu"))):
        with state_layers.use_layer_rows(rows):
            rule(q, q, q, cu_seqlens=None)
    one, two, plain = given
    assert one["chunk_indices"] is two["chunk_indices"] is chunks.indices
    assert one["cu_seqlens"] is not two["cu_seqlens"]
    assert one["cu_seqlens"].data_ptr() == two["cu_seqlens"].data_ptr() == chunks.offsets.data_ptr()
    assert "chunk_indices" not in plain and plain["cu_seqlens_cpu"].tolist() == [0, 3, 5]
    with state_layers.use_layer_rows(StaticRows(static.offsets, 5, 64)), pytest.raises(NotForRows, match="on the host"):
        rule(q, q, q, cu_seqlens=None)


@pytest.mark.parametrize(
    "lengths, filling, want",
    [
        ([65, 64, 1], 62, [(0, 0), (0, 1), (1, 0), (2, 0), (3, 0)]),
        ([CHUNK], 0, [(0, 0)]),
        ([1, 300], 83, [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3), (1, 4), (2, 0), (2, 1)]),
    ],
)
def test_chunks_are_numbered_and_filled_up(lengths, filling, want):
    assert numbered_chunks(lengths, filling, len(want) + 3, 7) == [*want, (7, 0), (7, 0), (7, 0)]


@pytest.mark.parametrize("rows", range(1, 9))
def test_there_is_room_for_the_chunks_of_any_rows(rows):
    lengths = [CHUNK * (i % 2) + 1 for i in range(rows - 1)]
    tokens = -(-max(1, sum(lengths)) // CHUNK) * CHUNK
    entries = tokens // CHUNK + rows
    assert len(numbered_chunks(lengths, tokens - sum(lengths), entries, rows)) == entries


def test_other_rows_have_the_same_tokens():
    def other(lengths):
        tokens = sum(lengths)
        return with_other_rows(TokenBatch(torch.zeros(1, tokens, 2), torch.zeros(1, tokens), lengths)).lengths

    assert other([3, 130, 7]) == [1, 67, 68, 4]
    assert other([2]) == [1, 1] and other([1, 1, 1]) == [2, 1] and other([1, 2, 1]) == [2, 1, 1]


@pytest.mark.parametrize("lengths", [[1] * 106, [1] * 150 + [64], [65] * 30, [1, 300], [128, 127], [3]])
def test_a_capture_has_room_for_other_rows(lengths):
    """Attention ignores what exceeds the bounds, so the comparison would fail, and turn captures off."""
    tokens = sum(lengths)
    first = TokenBatch(torch.zeros(1, tokens, 2), torch.zeros(1, 1, tokens, dtype=torch.long), lengths)
    size = round_up(tokens)
    needed = bounds_of(first, size)
    bounds = rounded_bounds(needed._replace(rows=needed.rows + 1), [], size)
    other = with_other_rows(first)
    assert sum(other.lengths) == tokens and other.lengths != lengths
    assert bounds.cover(bounds_of(other, size))


def test_a_convolution_that_is_replaced_after_the_capture(patched, monkeypatch):
    """The layer then runs the code of its class, with the new function, and so must the step."""
    model, graphs = patched(drawn_model("lfm2")), graphs_of()
    plain = copy.deepcopy(model)
    for _ in range(2):
        captured_step(model, batch(), graphs)
    assert graphs.summary.replayed == 1
    scope = vars(sys.modules[type(model).__module__])
    own = scope[convolutions.NAME]
    monkeypatch.setitem(scope, convolutions.NAME, lambda *args, **kwargs: 2 * own(*args, **kwargs))
    assert_same_with_states(captured_step(model, batch(), graphs), captured_step(plain, batch()))
    assert graphs.summary.replayed == 1
