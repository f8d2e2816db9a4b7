"""Captured backbones give the same steps as uncaptured ones, or are not captured.

On a CPU, recorded Python runs again (`RerunRecorder`). On a GPU it is a CUDA graph.
"""

import contextlib
import copy
import gc
import itertools
import random
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from image_models import image_batch, image_model
from peft import LoraConfig, get_peft_model
from tiny_models import VOCAB
from transformers.models.llama import modeling_llama
from varlen_batches import RerunRecorder, batch, checkpointed_as_in_torch_2_11, model_of

from liger_trainer import apply_liger, remove_liger
from liger_trainer.varlen import decide
from liger_trainer.varlen.graphs.backbone_graphs import MOST_MODES
from liger_trainer.varlen.graphs.graph_recorder import CudaGraphRecorder
from liger_trainer.varlen.graphs.snapshot import Snapshot
from liger_trainer.varlen.graphs.static_batch import TokenBatch, round_up
from liger_trainer.varlen.graphs.step_graphs import StepGraphs, use_graphs
from liger_trainer.varlen.rows import NotForRows, StaticRows

SIZES = ((7, 1, 11, 12), (9, 3, 12, 10), (5, 6, 7, 8), (12, 12, 12, 12))
BIG = (20, 20, 20, 20)  # tokens of another size
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def assert_close(got, want, device, what):
    """fp32 on a CPU. On a GPU fp16, where products round by the number of tokens and attention sums in any order;
    `test_captured_gpu.py` compares there bit for bit."""
    apart = (got.double() - want.double()).norm()
    limit = 1e-5 if device == "cpu" else 2e-2
    assert apart <= limit * want.double().norm() + (1e-6 if device == "cpu" else 1e-4), (what, float(apart))


class Pair:
    """A captured model and an uncaptured copy, each with an optimizer."""

    def __init__(self, model, device, may_capture=True):
        self.device = device
        if device == "cuda":
            model = model.to("cuda", torch.float16)
        self.captured, self.plain = model, copy.deepcopy(model)
        self.recorder = RerunRecorder() if device == "cpu" else TimelessRecorder(torch.device("cuda", 0))
        self.graphs = StepGraphs(lambda device: self.recorder)
        self.graphs.may_capture = may_capture
        for one in (self.captured, self.plain):
            apply_liger(one)
            one.train()
        self.optimizers = [torch.optim.SGD(one.parameters(), lr=1e-2) for one in (self.captured, self.plain)]

    def batch(self, lengths):
        return {name: x.to(self.device) for name, x in batch(lengths).items()}

    def run(self, function):
        """Call `function` with each model, the captured one within its graphs. Return both results."""
        with use_graphs(self.graphs):
            got = function(self.captured)
        return got, function(self.plain)

    def losses(self, lengths):
        call = self.batch(lengths)
        return self.run(lambda model: model(**call, use_cache=False).loss)

    def step(self, *micro_batches, set_to_none=True):
        """One optimizer step over micro-batches."""
        for lengths in micro_batches:
            got, want = self.losses(lengths)
            assert_close(got, want, self.device, "loss")
            got.backward()
            want.backward()
        self.assert_same_gradients()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none)
        if self.device == "cuda":
            self.align()

    def align(self):
        """Give both models the same weights. In fp16, rounding drives gradients apart within a few steps."""
        with torch.no_grad():
            for got, want in zip(self.captured.parameters(), self.plain.parameters(), strict=True):
                got.copy_(want)

    def warm(self, lengths=SIZES[0]):
        """Run steps until the size of `lengths` is replayed."""
        self.step(lengths)
        self.step(lengths)
        assert self.replayed == 1, self.summary

    def assert_same_gradients(self):
        for (name, got), want in zip(self.captured.named_parameters(), self.plain.parameters(), strict=True):
            assert (got.grad is None) == (want.grad is None), name
            if want.grad is not None:
                assert_close(got.grad, want.grad, self.device, name)

    @property
    def summary(self):
        return self.graphs.summary.to_dict()

    @property
    def replayed(self):
        return self.graphs.summary.replayed

    def assert_falls_back(self, lengths=SIZES[0]):
        """Assert that the next step runs Python's code and is right."""
        before = self.replayed
        self.step(lengths)
        assert self.replayed == before, self.summary


class TimelessRecorder(CudaGraphRecorder):
    """Reports that a replay is twice as fast as Python, as it is for models of useful size."""

    def __init__(self, device):
        super().__init__(device)
        self.seconds = itertools.cycle([1.0, 0.5])

    def seconds_of(self, run):
        run()
        return next(self.seconds)


def with_router_losses(pair, lengths, **more):
    """The loss with the routers' auxiliary loss, as TRL asks for it, for both models."""
    call = pair.batch(lengths) | {"use_cache": False, "output_router_logits": True, "fused_lm_head": True} | more
    return pair.run(lambda model: model(**call))


def lora(model, **options):
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], **options)
    model = get_peft_model(model, config)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    return model


def checkpointed(model):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    return model


@pytest.mark.parametrize("kind", ["full", "lora", "checkpointed", "lora-checkpointed", "experts", "windows", "tied"])
def test_steps_equal_uncaptured_ones(kind, device):
    model = model_of(
        {"experts": "qwen3_moe", "windows": "gemma3_text"}.get(kind, "llama"), tie_word_embeddings=kind == "tied"
    )
    model = lora(model) if "lora" in kind else model
    model = checkpointed(model) if "checkpointed" in kind else model
    pair = Pair(model, device)
    for step in range(6):
        pair.step(SIZES[step % len(SIZES)])
    assert pair.replayed == 5, pair.summary


def test_micro_batches_add_up(device):
    pair = Pair(model_of(), device)
    pair.warm()
    pair.step(SIZES[0], SIZES[1], SIZES[2])
    assert pair.replayed == 4, pair.summary
    # The second micro-batch has a new size, which is captured between gradients; the third adds to its gradients
    pair.step(SIZES[0], BIG, SIZES[1])
    assert pair.replayed == 7, pair.summary
    pair.step((18, 20, 20, 20), SIZES[0])
    pair.step(SIZES[0], SIZES[1], set_to_none=False)
    pair.step(SIZES[0], SIZES[1])
    assert pair.replayed == 13, pair.summary


def test_large_gradients_are_not_set_aside(device, monkeypatch):
    """A new size in a later micro-batch runs Python's code until it comes first in a step."""
    pair = Pair(model_of(), device)
    pair.warm()
    asked = []
    monkeypatch.setattr(pair.recorder, "may_set_aside", lambda size: asked.append(size))
    pair.step(SIZES[0], BIG, SIZES[1])
    assert pair.replayed == 3, pair.summary
    assert pair.summary["calls_not_captured"]["captures wait until no gradient of the user's lies in a buffer"] == 1
    inside = [p for name, p in pair.plain.named_parameters() if "embed_tokens" not in name and "lm_head" not in name]
    assert asked == [sum(p.nbytes for p in inside)]
    pair.step(BIG, SIZES[0])  # a new largest size drops the other captures
    assert pair.replayed == 4, pair.summary
    pair.step(SIZES[0], BIG)
    assert pair.replayed == 6, pair.summary


@pytest.mark.parametrize(
    ("size", "free", "may"), [(20, 500, True), (21, 500, False), (20, 80, True), (20, 79, False)], ids=str
)
def test_what_may_be_set_aside_on_a_gpu(size, free, may, monkeypatch):
    """At most 2 % of the memory, of what is free beside the reserve of 6 %."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1000))
    unused = dict.fromkeys(("reserved_bytes.all.current", "allocated_bytes.all.current"), 0)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: unused)
    recorder = object.__new__(CudaGraphRecorder)
    recorder.device = "cuda:0"
    assert recorder.may_set_aside(size) == may


@pytest.mark.parametrize(
    ("trouble", "replayed"), [("a failure", 2), ("a slow replay", 3), ("too little memory", 2), ("no trouble", 4)]
)
def test_gradients_survive_a_capture_between_micro_batches(trouble, replayed, device):
    pair = Pair(model_of(), device)
    pair.warm()
    own = pair.recorder.record

    def fail(function):
        own(function)
        raise RuntimeError("operation not permitted when stream is capturing")

    for number, lengths in enumerate((SIZES[0], BIG, SIZES[1])):
        if number == 1 and trouble == "a failure":
            pair.recorder.record = fail
        elif number == 1 and trouble == "a slow replay":
            pair.recorder.seconds = iter([1.0, 0.99])
        elif number == 1 and trouble == "too little memory":
            pair.recorder.make_room = lambda size: False
        got, want = pair.losses(lengths)
        got.backward()
        want.backward()
    pair.assert_same_gradients()
    assert pair.replayed == replayed, pair.summary


def test_rows_come_in_every_number_and_length(device):
    pair = Pair(model_of(), device)
    pair.step(SIZES[0])
    batches = [(1, 4), (20,) * 3, (2,) * 20 + (3,), (20,) * 9, (19, 20), (1,) * 60 + (3,), (3, 20), (20, 20, 20, 4)]
    for lengths in batches:
        pair.step(lengths)
    assert pair.replayed == 8, pair.summary


def test_batches_without_padding_and_packed_rows(device):
    pair = Pair(model_of(), device)
    ids = pair.batch((20,) * 4)["input_ids"]
    packed = {
        "input_ids": ids.reshape(1, -1),
        "labels": ids.reshape(1, -1),
        "position_ids": torch.arange(20, device=device).repeat(4)[None],
    }
    full = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    for call in (packed, packed, full, packed):
        got, want = pair.run(lambda model, call=call: model(**call, use_cache=False).loss)
        assert_close(got, want, device, "loss")
        got.backward()
        want.backward()
        pair.assert_same_gradients()
        for one in (pair.captured, pair.plain):
            one.zero_grad()
    assert pair.replayed == 3, pair.summary


def test_the_first_batch_fits_the_capture_that_follows_it(device):
    """It is not captured itself. Capturing its size again when it comes back would take seconds of the training."""
    pair = Pair(model_of(), device)
    many, few = (5,) * 12, (15,) * 4
    for lengths in (many, few, many, few):
        pair.step(lengths)
    assert pair.replayed == 3, pair.summary
    assert len(pair.summary["sizes"]) == 1, pair.summary


def rows_of_captures(pair):
    """The room for rows of each captured size, by its tokens."""
    (graphs,) = pair.graphs._of.values()
    sizes = [size for mode in graphs.modes for size in mode.sizes.values()]
    return {size.tokens: size.bounds.rows for size in sizes}


def test_a_capture_has_no_room_for_rows_of_another_mode(device):
    """Attention asks for each row that there is room for, and an evaluation may have many more than a step."""
    pair = Pair(model_of(), device)
    many = (2,) * 30
    with torch.no_grad():
        pair.losses(many)
    for _ in range(3):
        pair.step((15,) * 4)
    assert pair.replayed == 2, pair.summary
    assert rows_of_captures(pair) == {64: 8}


def test_a_capture_has_no_room_for_batches_that_are_too_large_to_be_captured(device):
    pair = Pair(model_of(), device)
    many = (3,) * 40
    pair.step(many)
    pair.recorder.seconds = iter([1.0, 0.99, 1.0, 0.5])
    pair.step(many)
    assert "128 tokens and more: replaying is not faster" in pair.summary["calls_not_captured"]
    pair.step((15,) * 4)
    assert rows_of_captures(pair) == {64: 8}


@pytest.mark.parametrize("change", [lambda model: model, checkpointed, lora], ids=["full", "checkpointed", "lora"])
def test_losses_of_routers(change, device):
    pair = Pair(change(model_of("qwen3_moe")), device)
    for count, lengths in enumerate((SIZES[0], SIZES[0], SIZES[0], SIZES[1], SIZES[1])):
        got, want = with_router_losses(pair, lengths)
        assert want.aux_loss.item() > 0
        assert_close(got.aux_loss, want.aux_loss, device, f"auxiliary loss {count}")
        assert_close(got.loss, want.loss, device, f"loss {count}")
        got.loss.backward()
        want.loss.backward()
        pair.assert_same_gradients()
        for optimizer in pair.optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert pair.replayed >= 2, pair.summary


def test_a_loss_without_that_of_routers_after_one_with_it(device):
    """Each kind of call has its own captures, and router logits outside the loss get zero gradients."""
    pair = Pair(model_of("qwen3_moe"), device)
    for _ in range(3):
        got, want = with_router_losses(pair, SIZES[0])
        got.loss.backward()
        want.loss.backward()
        pair.assert_same_gradients()
        pair.step(SIZES[0])
        got, want = with_router_losses(pair, SIZES[0])
        (got.loss - got.aux_loss.detach()).backward()
        (want.loss - want.aux_loss.detach()).backward()
        pair.assert_same_gradients()
        for optimizer in pair.optimizers:
            optimizer.zero_grad()
    assert pair.replayed >= 4, pair.summary


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "gemma3"])
def test_decoders_of_images_and_text(model_type):
    """The tower stays outside and passes embeddings to the decoder. Only proven decoders are captured."""
    pair = Pair(image_model(model_type), "cpu")
    for seed in (1, 1, 2, 1, 2):
        call = image_batch(pair.plain, seed=seed) | {"use_cache": False}
        got, want = pair.run(lambda model: model(**call).loss)  # noqa: B023 - called in this round
        assert_close(got, want, "cpu", "loss")
        got.backward()
        want.backward()
        pair.assert_same_gradients()
        for optimizer in pair.optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert (pair.replayed == 4) == (model_type == "qwen2_5_vl"), pair.summary


def test_captures_wait_for_the_optimizer(device):
    pair = Pair(model_of(), device, may_capture=False)
    pair.step(SIZES[0])
    pair.step(SIZES[0])
    assert pair.replayed == 0
    assert "captures begin after the first step of the optimizer" in pair.summary["calls_not_captured"]


# Code that relies on Python running


def change_nothing(model):
    pass


def add_hook(model):
    decoder_layers(model)[0].mlp.register_forward_hook(lambda *seen: None)


def add_hook_by_dict(model):
    decoder_layers(model)[0].mlp.__dict__["_forward_hooks"][7] = lambda *seen: None


def freeze_one(model):
    name, weight = trained_in_layers(model)[0]
    weight.requires_grad_(False)


def move_weight(model):
    name, weight = trained_in_layers(model)[0]
    weight.data = weight.data.clone()


def replace_weight(model):
    norm = decoder_layers(model)[0].input_layernorm
    norm.weight = torch.nn.Parameter(2 * norm.weight.detach())


def hook_gradient(model):
    name, weight = trained_in_layers(model)[0]
    weight.register_hook(lambda grad: 3 * grad)


def triple(p):
    p.grad.mul_(3)


def hook_accumulation(model):
    name, weight = trained_in_layers(model)[0]
    weight.register_post_accumulate_grad_hook(triple)


def replace_forward(model):
    layer = decoder_layers(model)[0]
    own = layer.mlp.forward
    layer.mlp.forward = lambda x: 2 * own(x)


def change_epsilon(model):
    decoder_layers(model)[0].input_layernorm.variance_epsilon = 0.5


def to_eval(model):
    model.eval()


def unpatch(model):
    remove_liger(model)


def replace_layer(model):
    layers = decoder_layers(model)
    layers[0] = layers[1]


def change_scaling(model):
    for layer in decoder_layers(model):
        layer.self_attn.scaling *= 2


def replace_class(model):
    layer = decoder_layers(model)[0].mlp

    class Doubled(type(layer)):
        def forward(self, x):
            return 2 * super().forward(x)

    layer.__class__ = Doubled


def replace_hook_dict(model):
    decoder_layers(model)[0].mlp.down_proj._forward_hooks = OrderedDict({1: lambda *seen: None})


def hook_of_accelerate(model):
    add_hook_to_module(decoder_layers(model)[0].mlp, ModelHook())


def transpose_square_weight(model):
    weight = decoder_layers(model)[0].self_attn.o_proj.weight
    weight.data = weight.detach().t()


def change_theta_in_config(model):
    model.model.config.rope_parameters["rope_theta"] = 5.0


CHANGES = (
    add_hook,
    add_hook_by_dict,
    freeze_one,
    move_weight,
    replace_weight,
    hook_gradient,
    hook_accumulation,
    replace_forward,
    change_epsilon,
    to_eval,
    unpatch,
    replace_layer,
    change_scaling,
    replace_class,
    replace_hook_dict,
    hook_of_accelerate,
    transpose_square_weight,
    change_theta_in_config,
)


def decoder_layers(model):
    return (model.get_base_model() if hasattr(model, "get_base_model") else model).model.layers


def trained_in_layers(model):
    return [(name, p) for name, p in model.named_parameters() if ".layers.0." in name and p.requires_grad]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_takes_effect_in_the_next_call(change, device):
    pair = Pair(model_of(), device)
    pair.warm()
    for one in (pair.captured, pair.plain):
        change(one)
    pair.assert_falls_back()


def test_a_hook_of_accelerate_is_called_in_each_step(device):
    """It sits in a forward, not among the hooks. FSDP's hook would sit there too, and misses no uncaptured call."""
    pair = Pair(model_of(), device)
    for one in (pair.captured, pair.plain):
        hook_of_accelerate(one)
    for _ in range(3):
        pair.step(SIZES[0])
    assert pair.replayed == 0
    assert "a LlamaMLP has a forward of its own" in pair.summary["calls_not_captured"]


CODE = ((modeling_llama.LlamaMLP, "__call__"), (modeling_llama, "create_causal_mask"), (torch, "rsqrt"))


@pytest.mark.parametrize(("owner", "name"), CODE, ids=[name for _, name in CODE])
def test_code_that_is_replaced_runs_in_the_next_call(owner, name, device, monkeypatch):
    pair = Pair(model_of(), device)
    pair.warm()
    own = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: own(*args, **kwargs))
    pair.assert_falls_back()


def test_a_scalar_weight_in_place_of_an_equal_one(device):
    """`==` on one-element tensors compares their values, not their identity."""
    model = model_of()
    model.model.layers[0].mlp.gain = torch.nn.Parameter(torch.ones(1))
    pair = Pair(model, device)
    pair.warm()
    for one in (pair.captured, pair.plain):
        one.model.layers[0].mlp.gain = torch.nn.Parameter(torch.ones(1, device=device))
    pair.assert_falls_back()


def test_layer_types_that_change_in_place(device):
    pair = Pair(model_of("gemma3_text", layer_types=["sliding_attention", "full_attention"]), device)
    pair.warm()
    for one in (pair.captured, pair.plain):
        one.model.config.layer_types.reverse()
    pair.assert_falls_back()


def disable_adapters(model):
    model.base_model.disable_adapter_layers()


def scale_adapter(model):
    for module in model.modules():
        if hasattr(module, "scaling") and isinstance(module.scaling, dict):
            module.scaling["default"] *= 3


def merge(model):
    model.merge_adapter()


def add_adapter(model):
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])


@pytest.mark.parametrize("change", [disable_adapters, scale_adapter, merge], ids=lambda change: change.__name__)
def test_a_change_of_adapters_takes_effect_in_the_next_call(change, device):
    pair = Pair(checkpointed(lora(model_of())), device)
    pair.warm()
    for one in (pair.captured, pair.plain):
        change(one)
    pair.assert_falls_back()


def test_an_adapter_that_is_added_is_captured_too(device):
    """No earlier capture knows its modules."""
    pair = Pair(checkpointed(lora(model_of())), device)
    pair.warm()
    for one in (pair.captured, pair.plain):
        torch.manual_seed(3)
        add_adapter(one)
    pair.assert_falls_back()
    before = pair.replayed
    pair.step(SIZES[1])
    pair.step(SIZES[0])
    assert pair.replayed == before + 2, pair.summary
    for one in (pair.captured, pair.plain):
        for name, p in one.named_parameters():
            if ".second." in name:
                p.requires_grad_(False)
    pair.assert_falls_back()


def count_tokens(layer, hidden):
    layer.input_layernorm.seen += hidden.shape[1]


def draw_on_host(layer, hidden):
    random.random()


EFFECTS = ((count_tokens, "it writes to seen of a LlamaRMSNorm"), (draw_on_host, "it draws random numbers on the host"))


@pytest.mark.parametrize(("effect", "reason"), EFFECTS, ids=[effect.__name__ for effect, _ in EFFECTS])
def test_code_with_side_effects_is_not_captured(effect, reason, device, monkeypatch):
    own = modeling_llama.LlamaDecoderLayer.forward

    def forward(self, hidden_states, *args, **kwargs):
        effect(self, hidden_states)
        return own(self, hidden_states, *args, **kwargs)

    model = model_of()
    for layer in model.model.layers:
        layer.input_layernorm.register_buffer("seen", torch.zeros(1))
    pair = Pair(model, device)
    pair.warm()
    monkeypatch.setattr(decide, "why_forward_is_unknown", lambda *given: None)  # as if a library had such a layer
    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", forward)
    for _ in range(3):
        pair.assert_falls_back()
    assert reason in pair.summary["calls_not_captured"]


def test_precision_that_is_set_by_the_names_of_pytorch_2_9(device):
    """transformers sets it so for `tf32=True`. `torch.get_float32_matmul_precision` raises from then on."""
    before = torch.backends.fp32_precision
    torch.backends.fp32_precision = "tf32"
    try:
        pair = Pair(model_of(), device)
        pair.warm()
        torch.backends.fp32_precision = "ieee"
        pair.assert_falls_back()
    finally:
        torch.backends.fp32_precision = before


def test_modes_of_the_process(device):
    pair = Pair(model_of(), device)
    pair.warm()
    before = pair.replayed
    with torch.autograd.detect_anomaly(check_nan=False):
        pair.step(SIZES[0])
    kind = torch.bfloat16
    with torch.autocast(device, kind):
        got, want = pair.losses(SIZES[0])
    assert_close(got, want, "cuda", "loss under autocast")
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        pair.step(SIZES[0])
    assert pair.replayed == before, pair.summary
    pair.step(SIZES[0])
    assert pair.replayed == before + 1, pair.summary


def test_under_autocast(device):
    pair = Pair(model_of(), device)
    for step in range(4):
        with torch.autocast(device, torch.bfloat16):
            got, want = pair.losses(SIZES[step])
        assert_close(got, want, "cuda", "loss")
        got.backward()
        want.backward()
        for (name, x), y in zip(pair.captured.named_parameters(), pair.plain.parameters(), strict=True):
            apart = (x.grad - y.grad).norm()
            assert apart <= 0.05 * y.grad.norm() + 1e-5, name
            x.grad = y.grad = None
    assert pair.replayed == 3, pair.summary


def test_a_model_that_changes_all_the_time_is_left_alone(device):
    pair = Pair(model_of(), device)
    weights = []  # kept, so that no memory is reused
    for _ in range(3 * MOST_MODES):
        weights.append(trained_in_layers(pair.captured)[0][1].data)
        move_weight(pair.captured)
        pair.step(SIZES[0])
    assert pair.replayed == 0
    reasons = " ".join(pair.summary["calls_not_captured"])
    assert "the model changes from call to call: a weight" in reasons


def test_a_reference_without_adapters_has_captures_of_its_own(device):
    pair = Pair(checkpointed(lora(model_of())), device)

    def both(model):
        call = pair.batch(SIZES[0])
        with torch.no_grad(), model.disable_adapter():
            reference = model(**call, use_cache=False).loss
        return model(**call, use_cache=False).loss, reference

    for step in range(4):
        (got, got_reference), (want, want_reference) = pair.run(both)
        assert_close(got, want, device, f"loss {step}")
        assert_close(got_reference, want_reference, device, f"reference {step}")
        got.backward()
        want.backward()
        pair.assert_same_gradients()
        for optimizer in pair.optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert pair.replayed == 6, pair.summary


def test_modes_in_turn_look_for_no_names_of_differences(monkeypatch):
    """That would take some milliseconds in each call."""
    pair = Pair(checkpointed(lora(model_of())), "cpu")

    def both(model):
        call = pair.batch(SIZES[0])
        with torch.no_grad(), model.disable_adapter():
            model(**call, use_cache=False)
        return model(**call, use_cache=False).loss

    pair.run(both)
    pair.run(both)
    monkeypatch.delattr(Snapshot, "difference")
    for _ in range(2):
        pair.run(both)
    assert pair.replayed == 6, pair.summary


# Backward passes


@pytest.mark.parametrize("with_adapters", [True, False])
def test_checkpointing_that_is_switched_off_for_a_reference_and_on_again(with_adapters, device):
    """TRL does this around each call of a reference. transformers then makes hooks and functions again."""
    pair = Pair(checkpointed(lora(model_of()) if with_adapters else model_of()), device)

    def reference_then_loss(model):
        call = pair.batch(SIZES[0])
        options = {"use_reentrant": False}
        with torch.no_grad(), model.disable_adapter() if with_adapters else contextlib.nullcontext():
            model.gradient_checkpointing_disable()
            reference = model(**call, use_cache=False).loss
            model.gradient_checkpointing_enable(options)
        return reference, model(**call, use_cache=False).loss

    for _ in range(5):
        (got_reference, got), (want_reference, want) = pair.run(reference_then_loss)
        assert_close(got_reference, want_reference, device, "reference")
        assert_close(got, want, device, "loss")
        got.backward()
        want.backward()
        pair.assert_same_gradients()
        for optimizer in pair.optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert pair.replayed >= 6, pair.summary


def test_two_forwards_before_a_backward(device):
    pair = Pair(model_of(), device)
    pair.warm()

    def both(model):
        return sum(model(**pair.batch(lengths), use_cache=False).loss for lengths in (SIZES[0], SIZES[1], SIZES[0]))

    got, want = pair.run(both)
    got.backward()
    want.backward()
    assert pair.replayed == 4, pair.summary
    pair.assert_same_gradients()


def test_a_second_backward(device):
    pair = Pair(model_of(), device)
    pair.warm()
    for loss in pair.losses(SIZES[0]):
        loss.backward(retain_graph=True)
        loss.backward()
    assert pair.replayed == 2
    pair.assert_same_gradients()


def test_no_backward_then_another_step(device):
    pair = Pair(model_of(), device)
    pair.warm()
    pair.losses(SIZES[1])
    pair.step(SIZES[0])


def test_other_ways_to_gradients_are_refused(device):
    pair = Pair(model_of(), device)
    pair.warm()
    loss, _ = pair.losses(SIZES[0])
    head = pair.captured.lm_head.weight
    with pytest.raises(RuntimeError, match="cuda_graphs: false"):
        loss.backward(inputs=[head, pair.captured.model.embed_tokens.weight])
    loss, _ = pair.losses(SIZES[0])
    with pytest.raises(RuntimeError):
        torch.autograd.grad(loss, [pair.captured.model.layers[0].mlp.down_proj.weight])


def test_a_weight_that_was_stepped_between_forward_and_backward_raises_as_in_stock(device):
    pair = Pair(model_of(), device)
    pair.warm()
    for loss, optimizer in zip(pair.losses(SIZES[0]), pair.optimizers, strict=True):
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_outputs_that_are_kept_do_not_change(device):
    pair = Pair(model_of(), device)
    pair.warm()

    def hidden(model):
        return model(
            **pair.batch(SIZES[0]), use_cache=False, fused_lm_head=True, token_outputs=("log_probs",)
        ).log_probs

    first, want = pair.run(hidden)
    kept = first.detach().clone()
    pair.losses(SIZES[1])
    pair.losses(SIZES[2])
    assert torch.equal(first, kept)


def test_a_second_capture_that_fails_leaves_the_backward_of_the_first(device):
    """The failure releases all captures between another capture's forward and backward."""
    pair = Pair(model_of(), device)
    pair.warm()

    def both(model):
        first = model(**pair.batch(SIZES[0]), use_cache=False).loss
        if model is pair.captured:
            pair.graphs._of[id(model.model)]._turn_off("a capture has failed")
        return first + model(**pair.batch(SIZES[1]), use_cache=False).loss

    for loss in pair.run(both):
        loss.backward()
    pair.assert_same_gradients()


def move_all(model):
    for p in model.parameters():
        p.data = p.data.clone()


def freeze_all(model):
    model.model.layers.requires_grad_(False)


def write_to_one(model):
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(2)


@pytest.mark.parametrize("change", [move_all, freeze_all, write_to_one], ids=lambda change: change.__name__)
def test_weights_that_change_between_forward_and_backward_are_an_error(change, device):
    """A replay would read their old addresses, or give a gradient to a frozen weight."""
    pair = Pair(model_of(), device)
    pair.warm()
    loss, _ = pair.losses(SIZES[0])
    change(pair.captured)
    with pytest.raises(RuntimeError, match="between its forward and its backward"):
        loss.backward()


def test_frozen_weights_that_change_between_forward_and_backward_are_an_error(device):
    pair = Pair(checkpointed(lora(model_of())), device)
    pair.warm()
    loss, _ = pair.losses(SIZES[0])
    with torch.no_grad():
        decoder_layers(pair.captured)[0].mlp.down_proj.base_layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="between its forward and its backward"):
        loss.backward()


def test_a_second_derivative_is_refused(device):
    """Otherwise only weights outside the capture would contribute to it. Our heads refuse it too."""
    pair = Pair(model_of(), device)
    pair.warm()
    (graphs,) = pair.graphs._of.values()
    (mode,) = graphs.modes
    (size,) = mode.sizes.values()
    positions = torch.arange(20, device=device)[None]
    batch = TokenBatch(
        torch.ones(1, 20, 32, device=device, dtype=size.embeds.dtype, requires_grad=True), positions, [20]
    )
    (hidden,) = graphs._replay(mode, size, batch)
    with pytest.raises(RuntimeError, match=r"cuda_graphs.*create_graph=True"):
        hidden.sum().backward(create_graph=True)


# Gradients that the user sets


@pytest.mark.parametrize("lengths", [SIZES[1], BIG], ids=["replayed", "captured"])
@pytest.mark.parametrize("part", [lambda grad: grad, lambda grad: grad[:2]], ids=["itself", "view"])
def test_what_the_user_keeps_of_a_gradient_stays(part, lengths, device):
    pair = Pair(model_of(), device)
    pair.warm()
    for loss in pair.losses(SIZES[0]):
        loss.backward()
    kept = part(pair.captured.model.layers[0].mlp.down_proj.weight.grad)
    before = kept.clone()
    pair.captured.zero_grad()
    pair.plain.zero_grad()
    gc.collect()
    for _ in range(3):
        pair.step(lengths)
    assert torch.equal(kept, before)


def test_a_kept_gradient_stays_where_another_one_was_set(device):
    pair = Pair(model_of(), device)
    pair.warm()
    for loss in pair.losses(SIZES[0]):
        loss.backward()
    kept = pair.captured.model.layers[0].mlp.down_proj.weight.grad
    before = kept.clone()
    for one in (pair.captured, pair.plain):
        for p in one.parameters():
            p.grad = torch.zeros_like(p)
    pair.step(SIZES[1])
    assert torch.equal(kept, before)


def test_gradients_that_the_user_exchanges(device):
    """Two weights of one shape, and a square one."""
    pair = Pair(model_of(), device)
    pair.warm()
    for loss in pair.losses(SIZES[0]):
        loss.backward()
    for one in (pair.captured, pair.plain):
        layer = one.model.layers[0]
        up = layer.mlp.up_proj.weight
        gate = layer.mlp.gate_proj.weight
        square = layer.self_attn.o_proj.weight
        up.grad, gate.grad = gate.grad, up.grad
        square.grad = square.grad.t()
    pair.step(SIZES[1])


def test_a_kept_gradient_that_is_set_again_takes_its_views_along(device):
    pair = Pair(model_of(), device)
    pair.warm()
    for loss in pair.losses(SIZES[0]):
        loss.backward()
    weights = [one.model.layers[0].mlp.down_proj.weight for one in (pair.captured, pair.plain)]
    kept = [weight.grad for weight in weights]
    views = [gradient[:2] for gradient in kept]
    for weight in weights:
        weight.grad = None
    pair.step(SIZES[1])
    for weight, gradient in zip(weights, kept, strict=True):
        weight.grad = gradient
    pair.step(SIZES[1])
    for gradient, view in zip(kept, views, strict=True):
        assert torch.equal(gradient[:2], view)
    assert_close(kept[0], kept[1], device, "the kept gradient")


@pytest.mark.parametrize("set_to_a_view", ["gate_proj", "up_proj"])
def test_a_view_of_another_weight_s_gradient_is_added_to(set_to_a_view, device):
    """The other one has none any more."""
    pair = Pair(model_of(), device)
    pair.warm()
    for loss in pair.losses(SIZES[0]):
        loss.backward()
    kept = []
    for one in (pair.captured, pair.plain):
        weights = [one.model.layers[0].mlp.gate_proj.weight, one.model.layers[0].mlp.up_proj.weight]
        if set_to_a_view == "up_proj":
            weights.reverse()
        weights[0].grad = weights[1].grad[:]
        kept.append(weights[1].grad[:])
        weights[1].grad = None
    pair.step(SIZES[1])
    assert_close(*kept, device, "the kept view")


def test_memory_that_the_user_gave_a_gradient_stays_its_own(device):
    pair = Pair(model_of(), device)
    pair.warm()
    for loss in pair.losses(SIZES[0]):
        loss.backward()
    gradients = []
    for one in (pair.captured, pair.plain):
        gradients.append(one.model.layers[0].mlp.up_proj.weight.grad)
        gradients[-1].data = 2 * gradients[-1].data
    views = [gradient[:2] for gradient in gradients]
    pair.step(SIZES[1])
    for gradient, view in zip(gradients, views, strict=True):
        assert torch.equal(gradient[:2], view)


def test_a_gradient_set_by_hand_is_added_to(device):
    pair = Pair(model_of(), device)
    pair.warm()
    for one in (pair.captured, pair.plain):
        weight = one.model.layers[1].mlp.up_proj.weight
        weight.grad = torch.ones_like(weight)
    pair.step(SIZES[0])


def test_a_weight_without_a_gradient_gets_none(device):
    """AdamW would decay it. The layer's MLP is not called, so its weights do not learn."""
    model = model_of()
    model.unused = torch.nn.Parameter(torch.ones(3))
    model.model.unused = torch.nn.Parameter(torch.ones(3))
    pair = Pair(model, device)
    pair.warm()
    pair.step(SIZES[1])
    assert pair.captured.model.unused.grad is None


def test_gradients_outlive_the_graphs(device):
    pair = Pair(model_of(), device)
    pair.warm()
    for loss in pair.losses(SIZES[0]):
        loss.backward()
    pair.graphs.release()
    pair.assert_same_gradients()
    pair.step(SIZES[1])


# Captures that fail


def test_a_capture_that_fails_loses_nothing(device):
    pair = Pair(model_of(), device)
    pair.step(SIZES[0])
    if device == "cpu":
        pair.recorder.fails = RuntimeError("operation not permitted when stream is capturing")
    else:
        own = pair.recorder.record
        pair.recorder.record = lambda function: own(lambda: (function(), torch.ones(3, device="cuda").sum().item()))
    state = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    pair.step(SIZES[0])
    now = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    assert torch.equal(state, now)
    assert pair.replayed == 0
    assert "a capture has failed" in " ".join(pair.summary["calls_not_captured"])
    assert torch.rand(4, device=device).std() > 0
    pair.step(SIZES[1])
    pair.step(SIZES[2])


def test_a_checkpointed_layer_that_raises_in_a_capture(monkeypatch):
    """In fp32 on a GPU, rows attend one after the other. That needs their lengths on the host."""

    def unknown(rows):
        raise NotForRows("its attention needs lengths on the host")

    monkeypatch.setattr(StaticRows, "lengths", property(unknown))
    pair = Pair(checkpointed_as_in_torch_2_11(model_of()), "cpu")
    for lengths in SIZES:
        pair.step(lengths)
    assert pair.summary["calls_not_captured"]["its attention needs lengths on the host"] == 3


def test_the_stream_of_a_capture_is_waited_for_after_an_exception(monkeypatch):
    """What was launched there still reads memory that the current stream may use again."""
    waited = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(wait_stream=waited.append))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    recorder = CudaGraphRecorder.__new__(CudaGraphRecorder)
    recorder.device, recorder.stream = torch.device("cuda"), SimpleNamespace(wait_stream=lambda stream: None)
    with pytest.raises(NotForRows), recorder.warm_up():
        raise NotForRows("a layer attends in chunks")
    assert waited == [recorder.stream]


def test_rope_deltas_are_not_compared(monkeypatch):
    """A model of images sets them in each call. `==` of two tensors of one element would wait for the GPU."""
    model = model_of()
    model.rope_deltas = torch.ones(1, 1)
    snapshot = Snapshot(list(model.modules()))
    compared = []
    own = torch.Tensor.__eq__
    monkeypatch.setattr(torch.Tensor, "__eq__", lambda x, other: compared.append(x) or own(x, other))
    for value in (torch.ones(1, 1), torch.zeros(1, 1), None):
        model.rope_deltas = value
        assert snapshot.holds()
    assert compared == []
    model.rope_base = 1
    assert not snapshot.holds()


def test_no_capture_where_memory_is_short():
    pair = Pair(model_of(), "cpu")
    pair.step(SIZES[0])
    pair.recorder.free = -1
    pair.step(SIZES[0])
    assert pair.replayed == 0
    assert "too little memory" in " ".join(pair.summary["calls_not_captured"])


def test_nothing_is_captured_that_is_not_faster():
    pair = Pair(model_of(), "cpu")
    pair.recorder.seconds = iter([1.0, 0.99])
    for lengths in (SIZES[0], SIZES[0], SIZES[1]):
        pair.step(lengths)
    assert pair.replayed == 0
    assert "64 tokens and more: replaying is not faster" in pair.summary["calls_not_captured"]


def by_square_root(self, x):
    return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6)


@pytest.mark.parametrize("epsilon", ["no epsilon", "by a square root"])
def test_a_norm_that_makes_nan_of_zeros_is_not_captured(epsilon, device, monkeypatch):
    """Sizes are filled up with zeros, and all weights' gradients would be NaN. The first batch is full."""
    pair = Pair(model_of(rms_norm_eps=0.0 if epsilon == "no epsilon" else 1e-6), device)
    if epsilon == "by a square root":
        # Finite in the forward pass, and 0 * inf in the backward pass, as a library's norm might be.
        monkeypatch.setattr(decide, "why_forward_is_unknown", lambda *given: None)
        monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", by_square_root)
    pair.step((20, 20, 20, 4))
    pair.step((20, 20, 20, 4))
    pair.step(SIZES[0])
    assert pair.replayed == 0
    assert all(p.isfinite().all() for p in pair.captured.parameters())
    assert "become NaN" in " ".join(pair.summary["calls_not_captured"])


@pytest.mark.parametrize("learns", [True, False])
def test_embeddings_that_share_their_weight_with_a_layer(learns, device):
    """The embeddings run outside: in a replay, nobody would hand out the layer's part of the gradient."""
    model = model_of(intermediate_size=VOCAB)
    weight = model.model.embed_tokens.weight.requires_grad_(learns)
    model.model.layers[0].mlp.gate_proj.weight = weight
    pair = Pair(model, device)
    for lengths in (SIZES[0], *SIZES):
        pair.step(lengths)
    assert pair.replayed == (0 if learns else len(SIZES)), pair.summary
    reason = "the input embeddings, learns in them too"
    assert (reason in " ".join(pair.summary["calls_not_captured"])) == learns


def test_a_smaller_size_is_captured_after_one_that_does_not_pay(device):
    pair = Pair(model_of(), device)
    pair.step(BIG)
    pair.recorder.seconds = iter([1.0, 0.99, 1.0, 0.5])
    pair.step(BIG)
    assert "128 tokens and more: replaying is not faster" in pair.summary["calls_not_captured"]
    for loss in pair.losses(SIZES[0]):
        loss.backward()
    kept = pair.captured.model.layers[0].mlp.down_proj.weight.grad[:2]
    before = kept.clone()
    for one in (pair.captured, pair.plain):
        one.zero_grad()
    pair.step(SIZES[1])
    assert pair.replayed == 2, pair.summary
    assert torch.equal(kept, before)


def test_other_calls_are_not_captured(device):
    pair = Pair(model_of(), device)
    pair.warm()
    call = pair.batch(SIZES[0])
    before = pair.replayed
    got, want = pair.run(lambda model: model(**call, use_cache=False, output_hidden_states=True))
    assert len(got.hidden_states) == len(want.hidden_states) == 3
    got, want = pair.run(lambda model: model(input_ids=call["input_ids"], use_cache=False).logits)
    assert_close(got, want, device, "logits")
    assert pair.replayed == before


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 511, 512, 513, 1000, 1025, 1531, 2049, 100_000])
def test_filling_up_costs_an_eighth_at_most(tokens):
    size = round_up(tokens)
    assert size % 64 == 0
    assert tokens <= size < tokens + max(64, tokens / 8 + 1)
