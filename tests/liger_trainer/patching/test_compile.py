"""`torch.compile(fullgraph=True)` of a patched model: one graph, the same loss and gradients, no unneeded mask."""

import gc
from typing import NamedTuple

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tiny_models import collate, ragged_rows, tiny_model, tiny_tokenizer
from transformers import DataCollatorForSeq2Seq

from liger_trainer import (
    LigerSFTConfig,
    LigerSFTTrainer,
    LigerTrainer,
    LigerTrainingArguments,
    apply_liger,
    remove_liger,
)
from liger_trainer.varlen import registry

CALLS = {"labels": {}, "smoothing": {"label_smoothing": 0.1}, "trl": {"fused_lm_head": True, "uniform_grad": True}}
QUICK = (("llama", "labels"),)  # the others are slow
ONE_LAYER = {"num_hidden_layers": 1}  # two layers take twice as long to trace, and show no more


def loss_and_gradients(model, batch, **kwargs):
    model.zero_grad()
    loss = model(**batch, **kwargs).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize(
    "model_type, call",
    [
        pytest.param(model_type, call, marks=() if (model_type, call) in QUICK else pytest.mark.slow)
        for model_type in ("llama", "qwen3", "gemma2")
        for call in CALLS
    ],
)
def test_traces_without_a_break(model_type, call):
    model, batch = tiny_model(model_type, **ONE_LAYER).train(), collate(ragged_rows(4))
    apply_liger(model)
    want = loss_and_gradients(model, batch, **CALLS[call])
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for got, ref in zip(loss_and_gradients(compiled, batch, **CALLS[call]), want, strict=True):
        torch.testing.assert_close(got, ref, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("modules", [["q_proj", "lm_head"], pytest.param("modules_to_save", marks=pytest.mark.slow)])
def test_an_adapter_on_the_lm_head(modules):
    """A compiled graph binds nothing, so every part of the head must be bound before."""
    own = modules == "modules_to_save"
    config = LoraConfig(
        r=2,
        target_modules=["q_proj"] if own else modules,
        modules_to_save=["lm_head"] if own else None,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(0)
    model = get_peft_model(tiny_model("llama", **ONE_LAYER), config).train()
    batch = collate(ragged_rows(4))
    apply_liger(model)
    parameters = [p for p in model.parameters() if p.requires_grad]

    def step(forward):
        model.zero_grad()
        loss = forward(**batch).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in parameters)]

    torch._dynamo.reset()
    got = step(torch.compile(model, backend="aot_eager"))  # before any uncompiled call
    for compiled, eager in zip(got, step(model), strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "name",
    ["lm_head", *(pytest.param(n, marks=pytest.mark.slow) for n in ("model.layers.0.mlp.act_fn", "model.rotary_emb"))],
)
def test_hooks_that_a_fused_call_would_miss(name):
    """The model's own code runs there, as without compiling."""
    batch, results = collate(ragged_rows(4)), []
    for compiled in (False, True):
        model = tiny_model("llama", **ONE_LAYER).train()
        model.get_submodule(name).register_forward_hook(halved)
        if compiled:
            apply_liger(model)
            torch._dynamo.reset()
        results.append(loss_and_gradients(torch.compile(model, backend="aot_eager") if compiled else model, batch))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def halved(module, args, output):
    return tuple(0.5 * x for x in output) if isinstance(output, tuple) else 0.5 * output


def sdpa_model(model_type, **config):
    model = tiny_model(model_type, **ONE_LAYER | config).train()
    model.set_attn_implementation("sdpa")
    return model


def masked_layers(model, **call):
    """Loss of a compiled call, and whether each attention in its graph gets a mask."""
    masked = []  # with a cache, transformers does not look for packed rows

    def backend(graph, _):
        for node in graph.graph.nodes:
            if getattr(node.target, "__name__", "") == "scaled_dot_product_attention":
                assert node.kwargs["is_causal"] == (node.kwargs["attn_mask"] is None)
                masked.append(node.kwargs["attn_mask"] is not None)
        return graph.forward

    torch._dynamo.reset()
    loss = torch.compile(model, fullgraph=True, backend=backend)(**call, use_cache=False).loss
    return loss, masked


PLAIN = torch.arange(2, 34).view(2, 16)
PACKED = torch.cat([torch.arange(7), torch.arange(9)]).expand(2, 16)
SEEN = torch.ones(2, 16).index_fill(1, torch.tensor([14, 15]), 0).long()


@pytest.mark.parametrize(
    ("model_type", "config", "given", "masked"),
    [
        ("llama", {}, {}, False),
        pytest.param("qwen3", {}, {}, False, marks=pytest.mark.slow),
        ("llama", {}, {"position_ids": PACKED}, True),
        pytest.param("llama", {}, {"attention_mask": SEEN}, True, marks=pytest.mark.slow),
        pytest.param(
            "gemma3_text",
            {"sliding_window": 32, "layer_types": ["sliding_attention"]},
            {},
            False,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "gemma3_text",
            {"sliding_window": 16, "layer_types": ["full_attention"]},
            {},
            False,
            marks=pytest.mark.slow,
        ),
        ("gemma3_text", {"sliding_window": 16, "layer_types": ["sliding_attention"]}, {}, True),
        pytest.param(
            "gemma3_text",
            {"use_bidirectional_attention": True, "layer_types": ["full_attention"]},
            {},
            True,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["llama", "qwen3", "packed", "padded", "wide-window", "no-window", "window", "bidirectional"],
)
def test_only_what_needs_a_mask_has_one(model_type, config, given, masked):
    model = sdpa_model(model_type, **config)
    apply_liger(model)
    batch = {"input_ids": PLAIN, "labels": PLAIN, **given}
    want = model(**batch, use_cache=False).loss
    loss, found = masked_layers(model, **batch)
    assert found == [masked] * len(model.get_decoder().layers)
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=0)


def test_other_models_keep_their_masks():
    """This holds while one model is patched, for a patched one in calls without labels, and after unpatching."""
    patched, other = sdpa_model("llama"), sdpa_model("llama")
    apply_liger(patched)
    assert masked_layers(patched, input_ids=PLAIN, labels=PLAIN)[1] == [False]
    assert masked_layers(other, input_ids=PLAIN, labels=PLAIN)[1] == [True]
    assert not registry._nothing_is_padding
    remove_liger(patched)
    assert masked_layers(patched, input_ids=PLAIN, labels=PLAIN)[1] == [True]


@pytest.mark.parametrize("last", ["freed", "removed"])
def test_the_last_patched_model_goes_while_another_is_compiled(last):
    """Guards compare transformers' registries after the trace with their content before."""
    patched, other = [sdpa_model("llama")], sdpa_model("llama")
    patched[0].itself = patched  # a cycle, which the garbage collector frees at any time
    apply_liger(patched[0])

    def backend(graph, _):
        if last == "removed":
            remove_liger(patched[0])
        patched.clear()
        gc.collect()
        return graph.forward

    torch._dynamo.reset()
    want = other(input_ids=PLAIN, labels=PLAIN).loss
    torch.testing.assert_close(torch.compile(other, backend=backend)(input_ids=PLAIN, labels=PLAIN).loss, want)


class Failing(NamedTuple):
    """A call of a model that raises."""

    model: torch.nn.Module
    args: tuple = ()
    kwargs: dict = {"input_ids": PLAIN}

    def run(self):
        assert registry._nothing_is_padding and self.kwargs["attention_mask"].all()
        raise RuntimeError("broken layer")


def test_the_flag_falls_with_an_error():
    with pytest.raises(RuntimeError, match="broken layer"):
        registry.run_without_masks(Failing(sdpa_model("llama")))
    assert not registry._nothing_is_padding


ONES = torch.ones(2, 16, dtype=torch.long)


@pytest.mark.parametrize(
    ("call", "dropped"),
    [
        ({"attention_mask": ONES}, True),
        ({"attention_mask": SEEN}, False),
        ({"attention_mask": ONES[:, None, None].bool()}, False),
        # With a mask, transformers takes no rows for packed, whatever the positions. Without one, it would.
        ({"attention_mask": ONES, "position_ids": PACKED}, False),
        ({}, True),
    ],
    ids=["ones", "padded", "4d", "positions", "none"],
)
def test_masks_of_ones(call, dropped):
    seen = []
    registry.without_mask_of_ones(lambda **given: seen.append(given), sdpa_model("llama"))(**call, input_ids=PLAIN)
    assert ("attention_mask" in seen[0]) is not dropped
    assert seen[0].keys() | {"attention_mask"} == {*call, "input_ids", "attention_mask"}


def losses(trainer_class, tmp_path, rows, compiled, wrap=lambda model: model, **options):
    torch._dynamo.reset()
    sft = trainer_class is LigerSFTTrainer
    args = (LigerSFTConfig if sft else LigerTrainingArguments)(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        num_train_epochs=1,
        logging_steps=1,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        torch_compile=compiled,
        train_sampling_strategy="sequential",
        **{"gradient_checkpointing": False} | ({"torch_compile_backend": "eager"} if compiled else {}) | options,
    )
    tokenizer = tiny_tokenizer()
    inputs = {"processing_class": tokenizer} if sft else {"data_collator": DataCollatorForSeq2Seq(tokenizer)}
    trainer = trainer_class(wrap(sdpa_model("llama")), args, train_dataset=Dataset.from_list(rows), **inputs)
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


EVEN = [{"input_ids": list(range(k, k + 12)), "labels": list(range(k, k + 12))} for k in range(2, 10)]


BOTH = [LigerTrainer, pytest.param(LigerSFTTrainer, marks=pytest.mark.slow)]


@pytest.mark.parametrize("trainer_class", BOTH)
def test_a_trainer_drops_masks_of_ones(trainer_class, tmp_path, monkeypatch):
    """Rows of one length come first and are attended without a mask; ragged rows follow.

    The losses equal an uncompiled run.
    """
    rows = EVEN[:4] + [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in ragged_rows(4)]
    asked, own = [], registry._is_needless
    monkeypatch.setattr(registry, "_is_needless", lambda **kwargs: asked.append(own(**kwargs)) or asked[-1])
    want = losses(trainer_class, tmp_path, rows, compiled=False)
    assert not asked
    assert losses(trainer_class, tmp_path, rows, compiled=True) == pytest.approx(want, rel=1e-4)
    assert asked and all(asked)  # only rows of one length are asked


def test_checkpointed_layers(tmp_path, caplog):
    """They are checkpointed as by TRL's configs, in one graph: the head stays fused."""
    want = losses(LigerSFTTrainer, tmp_path, EVEN, compiled=False, gradient_checkpointing=True)
    got = losses(LigerSFTTrainer, tmp_path, EVEN, compiled=True, gradient_checkpointing=True)
    assert got == pytest.approx(want, rel=1e-4) and "builds full logits" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_below_an_adapter(reentrant, tmp_path):
    """One graph, except with PyTorch's reentrant checkpointing.

    That needs embeddings that require gradients, which breaks the graph in each layer, so deferred tensors pass from
    one compiled part to the next.
    """
    models = []

    def adapted(model):
        torch.manual_seed(0)
        models.append(get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")))
        return models[-1]

    options = {
        "wrap": adapted,
        "gradient_checkpointing": True,
        "learning_rate": 0.1,
        "optim": "sgd",
        "bf16": False,
        "gradient_checkpointing_kwargs": {"use_reentrant": reentrant},
    }
    want = losses(LigerSFTTrainer, tmp_path, EVEN, compiled=False, **options)
    assert models[0].get_input_embeddings()._forward_hooks, "nothing is removed without torch_compile"
    torch._dynamo.utils.counters.clear()
    got = losses(LigerSFTTrainer, tmp_path, EVEN, compiled=True, **options)
    assert got == pytest.approx(want, rel=1e-4)
    counters = torch._dynamo.utils.counters
    broken = sum(counters["graph_break"].values())
    assert broken > 0 if reentrant else (broken, counters["stats"]["unique_graphs"]) == (0, 1)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    moved = [p.abs().sum() > 0 for name, p in models[1].named_parameters() if "lora_B" in name]
    assert moved and all(moved), "adapters of all layers learn"


@pytest.mark.slow
def test_a_call_that_is_not_compiled_as_a_whole():
    """PEFT and transformers break the graph where layers are checkpointed below an adapter."""
    model, batch = sdpa_model("llama"), {"input_ids": PLAIN, "labels": PLAIN}
    model.get_input_embeddings().register_forward_hook(lambda module, args, out: (torch._dynamo.graph_break(), out)[1])
    apply_liger(model)
    call = {"fused_lm_head": True, "uniform_grad": True}
    want = loss_and_gradients(model, batch, **call)
    torch._dynamo.reset()
    for got, ref in zip(loss_and_gradients(torch.compile(model, backend="eager"), batch, **call), want, strict=True):
        torch.testing.assert_close(got, ref, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("trainer_class", BOTH)
def test_without_liger_masks_stay(trainer_class, tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(registry, "without_mask_of_ones", lambda *args: called.append(args))
    assert len(losses(trainer_class, tmp_path, EVEN, compiled=True, use_liger=False)) == 2
    assert not called
