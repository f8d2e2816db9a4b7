"""Backbones with embeddings for each layer, and layers that reuse keys and values, are captured: Gemma 4 E2B and E4B.

Compared in float64: in fp32 the filling row changes how products round, by some 3e-5 in these models.
"""

import copy
import types

import pytest
import torch
from gemma4_models import gemma3n_model, images_of, text_model, whole_model
from peft import LoraConfig, get_peft_model
from transformers import CONFIG_MAPPING
from varlen_batches import RerunRecorder, batch, captured_step

from liger_trainer import apply_liger
from liger_trainer.varlen import attention
from liger_trainer.varlen.graphs.graph_capture import GraphCapture
from liger_trainer.varlen.graphs.input_embeddings import InputEmbeddings
from liger_trainer.varlen.graphs.static_batch import CapturedSize
from liger_trainer.varlen.graphs.step_graphs import StepGraphs, use_graphs
from liger_trainer.varlen.rows import StaticRows
from liger_trainer.varlen.unpadded_backbone import BackboneBinding

pytestmark = pytest.mark.skipif("gemma4" not in CONFIG_MAPPING, reason="this transformers has no Gemma 4")
SIZES = ((7, 1, 11, 12), (9, 3, 12, 10), (12, 12, 12, 12), (20, 20, 20, 20), (5, 6, 7, 8))
TABLE = "embed_tokens_per_layer"


def graphs_of():
    graphs = StepGraphs(RerunRecorder)
    graphs.may_capture = True
    return graphs


def assert_same_steps(model, calls, graphs):
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(one.parameters(), lr=1e-2) for one in (model, plain)]
    for count, call in enumerate(calls):
        (loss, grads), (want, want_grads) = captured_step(model, call, graphs), captured_step(plain, call)
        torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)  # the head computes it in fp32
        assert grads.keys() == want_grads.keys(), count
        for name, wanted in want_grads.items():
            assert (grads[name] - wanted).norm() <= 1e-7 * wanted.norm() + 1e-13, (count, name)
        for optimizer in optimizers:
            optimizer.step()
    return want_grads


def unchanged(model):
    return model


def checkpointed(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    return model


def lora(model, *more):
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj", *more]))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.1)
    return model


def lora_of_the_table(model):
    return lora(model, TABLE)


def frozen_table(model):
    """Only the projection of the embeddings for each layer learns, from embeddings that need no gradient."""
    for name, p in model.named_parameters():
        p.requires_grad_(not name.endswith(f"{TABLE}.weight"))
    return model


def lora_checkpointed(model):
    return checkpointed(lora(model))


def patched(model):
    report = apply_liger(model.double())["varlen_attention"]
    assert not report.skipped, report
    return model


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("e2b", unchanged),
        ("e2b", lora_checkpointed),
        pytest.param("e4b", checkpointed, marks=pytest.mark.slow),
        pytest.param("e4b", lora, marks=pytest.mark.slow),
        ("e4b", lora_of_the_table),
        pytest.param("e4b", frozen_table, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_steps_equal_uncaptured_ones(name, change):
    """The table of embeddings for each layer learns too where it is trained, outside of the capture."""
    model, graphs = patched(change(text_model(name))), graphs_of()
    grads = assert_same_steps(model, map(batch, SIZES), graphs)
    assert graphs.summary.replayed == 4, graphs.summary.to_dict()
    of_table = [x for name, x in grads.items() if TABLE in name]
    assert bool(of_table) == (change in (unchanged, checkpointed, lora_of_the_table))
    assert all(x.abs().max() > 0 for x in of_table)


@pytest.mark.parametrize("name", ["e4b", pytest.param("12b", marks=pytest.mark.slow)])
def test_the_model_of_images_on_text(name):
    """It hands its decoder both kinds of embeddings."""
    model, graphs = patched(checkpointed(whole_model(name))), graphs_of()
    assert_same_steps(model, map(batch, SIZES[:3]), graphs)
    assert graphs.summary.replayed == 2, graphs.summary.to_dict()


def test_images_in_the_rows():
    """Tokens of images have no id in the table, and the projection of zeros in its place."""
    model, graphs = patched(whole_model("e4b")), graphs_of()
    call = images_of(model)
    call["pixel_values"] = call["pixel_values"].double()
    assert_same_steps(model, [call, call, batch(SIZES[0])], graphs)
    assert graphs.summary.replayed == 2, graphs.summary.to_dict()


def test_images_that_see_themselves_are_counted():
    """The model around the decoder makes their masks, so that these calls are not replayed."""
    model, graphs = patched(whole_model("12b")), graphs_of()
    call = images_of(model)
    call["pixel_values"] = call["pixel_values"].double()
    assert_same_steps(model, [call, batch(SIZES[0]), batch(SIZES[0]), call], graphs)
    summary = graphs.summary.to_dict()
    made_around = "its mask or other inputs are made by the model around it"
    assert summary["calls_not_captured"] == {made_around: 2, "the first call of its kind": 1}
    assert graphs.summary.replayed == 1


def keep_the_embeddings_of_the_capture(monkeypatch):
    own = CapturedSize.fill

    def fill(self, given):
        before = self.per_layer.detach().clone()
        own(self, given)
        if self.forward is not None:
            with torch.no_grad():
                self.per_layer.copy_(before)

    monkeypatch.setattr(CapturedSize, "fill", fill)


def lose_their_gradient(monkeypatch):
    own = GraphCapture._take_gradient_per_layer

    def take(self):
        own(self)
        self.size.per_layer_grad.zero_()

    monkeypatch.setattr(GraphCapture, "_take_gradient_per_layer", take)


@pytest.mark.parametrize("fault", [keep_the_embeddings_of_the_capture, lose_their_gradient], ids=lambda f: f.__name__)
def test_a_fault_would_show(fault, monkeypatch):
    model = patched(text_model("e4b"))
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        assert_same_steps(model, map(batch, (SIZES[0], *SIZES[:2])), graphs_of())


def test_embeddings_without_ids_are_not_captured():
    """The model would look for the id of each embedding. Its result is stock's."""
    model, graphs = patched(text_model("e4b")), graphs_of()
    model.model.embed_tokens.weight.requires_grad_(False)  # the embeddings have to stay those of the table
    call = batch(SIZES[0])
    embeds = model.model.embed_tokens(call.pop("input_ids"))
    assert_same_steps(model, [call | {"inputs_embeds": embeds}] * 2, graphs)
    summary = graphs.summary.to_dict()
    assert graphs.summary.replayed == 0
    assert any("looks for the id of each embedding" in reason for reason in summary["calls_not_captured"]), summary


@pytest.mark.parametrize("replaces", [pytest.param("instance", marks=pytest.mark.slow), "class"])
def test_a_method_of_the_user_s_runs_as_the_model_calls_it(replaces, monkeypatch):
    """It may name its arguments in another way."""
    model, graphs = patched(text_model("e4b")), graphs_of()
    call = batch(SIZES[0])
    assert_same_steps(model, [call] * 2, graphs)
    assert graphs.summary.replayed == 1
    own = type(model.model).get_per_layer_inputs

    def twice(backbone, ids, embeds):
        return 2 * own(backbone, ids, embeds)

    if replaces == "class":
        monkeypatch.setattr(type(model.model), "get_per_layer_inputs", twice)
    else:
        model.model.get_per_layer_inputs = types.MethodType(twice, model.model)
    assert_same_steps(model, [call] * 3, graphs)
    assert graphs.summary.replayed == 1
    assert any("get_per_layer_inputs" in reason for reason in graphs.summary.to_dict()["calls_not_captured"])


@pytest.mark.parametrize("given", ["inputs_embeds", "per_layer_inputs"])
def test_ids_beside_embeddings_are_the_model_s_error(given):
    """It raises before the first replay, and after it."""
    model, graphs = patched(text_model("e4b")), graphs_of()
    call = batch(SIZES[0])
    with torch.no_grad():
        embeds = model.model.embed_tokens(call["input_ids"])
        per_layer = model.model.get_per_layer_inputs(call["input_ids"], embeds)
    both = call | {given: embeds if given == "inputs_embeds" else per_layer}
    for _ in range(3):
        with use_graphs(graphs), pytest.raises(ValueError, match="You (cannot|must) specify"):
            model(**both, use_cache=False)
        assert_same_steps(model, [call], graphs)
    assert graphs.summary.replayed == 2


def test_a_backbone_that_computes_otherwise_from_embeddings_is_not_captured(monkeypatch):
    """The proof makes the embeddings for each layer as a capture does. Here they are twice as large as the model's."""
    model = text_model("e4b")
    own = InputEmbeddings.of

    def otherwise(self, call):
        embedded = own(self, call)
        return embedded._replace(per_layer=2 * embedded.per_layer)

    monkeypatch.setattr(InputEmbeddings, "of", otherwise)
    apply_liger(model)
    proven = BackboneBinding.of(model.model).proven
    assert proven.padding_reason is None
    assert "given embeddings in place of ids" in proven.no_capture_reason
    graphs = graphs_of()
    assert_same_steps(model.double(), map(batch, SIZES[:2]), graphs)
    assert graphs.summary.replayed == 0


def test_only_models_that_have_them_get_embeddings_for_each_layer():
    for name, found in (("e2b", (TABLE,)), ("e4b", (TABLE,)), ("12b", ()), ("26b_a4b", ())):
        model = text_model(name)
        apply_liger(model)
        proven = BackboneBinding.of(model.model).proven
        assert (proven.per_layer, proven.no_capture_reason) == (found, None), name


def test_gemma_3n_is_not_captured():
    """It takes the square root of the mean square of an embedding, so that a filling row of zeros would give NaN."""
    model, graphs = patched(gemma3n_model()), graphs_of()
    proven = BackboneBinding.of(model.model).proven
    assert (proven.per_layer, proven.padding_reason, proven.no_capture_reason) == ((TABLE,), None, None)
    assert_same_steps(model, map(batch, (SIZES[0], *SIZES[:2])), graphs)
    summary = graphs.summary.to_dict()
    assert graphs.summary.replayed == 0
    assert any("embeddings of zero" in reason for reason in summary["calls_not_captured"]), summary


# Heads of 512


def by_offsets(query, key, value, bias, offsets, key_offsets, most_queries, most_keys, dropout, mask, keeps, *, scale):
    """What PyTorch's memory-efficient kernel computes, for its arguments (1, T, H, D), with what it demands of them."""
    assert query.shape[:3] == key.shape[:3] == value.shape[:3] and query.shape[0] == 1, "it has no groups"
    assert offsets is key_offsets and offsets.dtype == torch.int32
    assert offsets.diff().max() <= most_queries == most_keys <= query.shape[1], "else it leaves tokens out, or raises"
    assert (bias, dropout, mask) == (None, 0.0, 1)
    out = torch.zeros_like(query)
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        q, k, v = (x[:, begin:end].transpose(1, 2) for x in (query, key, value))
        if end > begin:
            attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
            out[:, begin:end] = attended.transpose(1, 2)
    return out, None, None, None, most_queries, most_keys


def stand_in_for_the_kernel(monkeypatch):
    """Attend with heads of 512 as on a GPU. Returns the head sizes and the offsets of each call."""
    seen = []

    def noted(*given, **options):
        seen.append((given[0].shape[-1], given[4].tolist()))
        return by_offsets(*given, **options)

    monkeypatch.setattr(attention, "large_kernel_takes", lambda query, *_: query.shape[-1] > 256)
    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_forward", noted, raising=False)
    return seen


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("static", [False, True])
def test_large_heads_by_offsets(static, groups, monkeypatch):
    """A captured size has empty rows at its end, and room for longer rows than its tokens."""
    seen = stand_in_for_the_kernel(monkeypatch)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 30, 512).requires_grad_() for heads in (4, 4 // groups, 4 // groups))
    offsets = torch.tensor([0, 7, 8, 19, 30, 30, 30], dtype=torch.int32)
    rows = StaticRows(offsets, 30, 64)
    got = attention.by_large_kernel(query, key, value, offsets, rows.longest if static else 11, 0.1)
    want = attention._row_by_row(query, key, value, rows, None, 0.0, 0.1)
    upstream = torch.randn_like(got)
    grads, wanted = (torch.autograd.grad(x, (query, key, value), upstream) for x in (got, want))
    for mine, theirs in zip((got, *grads), (want, *wanted), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert seen == [(512, offsets.tolist())]


def test_steps_with_the_kernel_for_large_heads(monkeypatch):
    """Captured and not: rows of several lengths take it, in layers with heads of 512 alone."""
    seen = stand_in_for_the_kernel(monkeypatch)
    model, graphs = patched(checkpointed(text_model("e4b"))), graphs_of()
    assert_same_steps(model, map(batch, (SIZES[0], *SIZES[:2])), graphs)
    assert graphs.summary.replayed == 2, graphs.summary.to_dict()
    assert {size for size, _ in seen} == {512}
    assert any(offsets[-2:] == [64, 64] for _, offsets in seen), "a captured size fills its table up with empty rows"
    assert any(offsets == [0, 7, 8, 19, 31] for _, offsets in seen), "an uncaptured call"


def twice(*given, **options):
    """The kernel with a fault: its output is doubled."""
    out, *others = by_offsets(*given, **options)
    return (2 * out, *others)


def with_other_arguments(*given):
    """The kernel of a release that has renamed an argument."""


@pytest.mark.parametrize(
    "kernel, reason", [(by_offsets, None), (twice, "gives other numbers"), (with_other_arguments, "fails (")]
)
def test_the_kernel_for_large_heads_is_tried_once(kernel, reason, monkeypatch, caplog):
    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_forward", kernel, raising=False)
    attention.large_kernel_agrees.cache_clear()
    with torch.no_grad(), torch.autocast("cpu"), torch.random.fork_rng():
        state = torch.get_rng_state()
        given = (torch.device("cpu"), torch.float32, (4, 2), (512, 512))
        answers = [attention.large_kernel_agrees(*given) for _ in range(2)]
        assert torch.equal(torch.get_rng_state(), state)
    assert answers == [reason is None] * 2
    told = [record.message for record in caplog.records]
    assert len(told) == (reason is not None) and all(reason in text for text in told)
    attention.large_kernel_agrees.cache_clear()
