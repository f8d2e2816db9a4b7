"""Captured backbones: the same steps as without, or no capture.

On a CPU what is recorded runs again as Python (`RerunRecorder`), on a GPU it is a CUDA graph.
"""

import contextlib
import copy
import gc
import itertools

import pytest
import torch
from image_models import image_batch, image_model
from peft import LoraConfig, get_peft_model
from rerun_recorder import RerunRecorder
from varlen_batches import batch, model_of

from liger_trainer import apply_liger, remove_liger
from liger_trainer.varlen.captured import MOST_MODES
from liger_trainer.varlen.recorder import CudaRecorder
from liger_trainer.varlen.static_batch import round_up
from liger_trainer.varlen.step_graphs import StepGraphs, step_graphs

SIZES = ((7, 1, 11, 12), (9, 3, 12, 10), (5, 6, 7, 8), (12, 12, 12, 12))
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def assert_close(got, want, device, what):
    """fp32 on a CPU. On a GPU fp16, whose products round by the number of tokens, and attention adds in any order. What
    is compared to the bit there is in `test_captured_gpu.py`."""
    apart = (got.double() - want.double()).norm()
    limit = 1e-5 if device == "cpu" else 2e-2
    assert apart <= limit * want.double().norm() + (1e-6 if device == "cpu" else 1e-4), (what, float(apart))


class Pair:
    """One model that is captured, and a copy of it that is not, each with an optimizer."""

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
        """Call `function` with each model, the captured one within its graphs. Returns both results."""
        with step_graphs(self.graphs):
            got = function(self.captured)
        return got, function(self.plain)

    def losses(self, lengths):
        call = self.batch(lengths)
        return self.run(lambda model: model(**call, use_cache=False).loss)

    def step(self, *micro_batches, set_to_none=True):
        """A step of the optimizer over micro-batches."""
        for lengths in micro_batches:
            got, want = self.losses(lengths)
            assert_close(got, want, self.device, "loss")
            got.backward()
            want.backward()
        self.assert_same_gradients()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none)

    def warm(self, lengths=SIZES[0]):
        """Until the size of `lengths` is replayed."""
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
        """The next step runs Python's code, and is right."""
        before = self.replayed
        self.step(lengths)
        assert self.replayed == before, self.summary


class TimelessRecorder(CudaRecorder):
    """Says that a replay is twice as fast as Python, as it is for models of a useful size."""

    def __init__(self, device):
        super().__init__(device)
        self.seconds = itertools.cycle([1.0, 0.5])

    def seconds_of(self, run):
        run()
        return next(self.seconds)


def with_router_losses(pair, lengths, **more):
    """The loss with the auxiliary one of routers, as TRL asks for it, of both models."""
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
    # The second micro-batch is of a size that is not captured, the third adds to what it left
    pair.step(SIZES[0], (20, 20, 20, 20), SIZES[1])
    assert pair.replayed == 6, pair.summary
    # The first is not, so its gradients are tensors of autograd's, to which replays add
    pair.step((18, 20, 20, 20), SIZES[0])
    pair.step(SIZES[0], SIZES[1], set_to_none=False)
    pair.step(SIZES[0], SIZES[1])


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
    """Each kind of call has captures of its own, and logits of routers that nobody learns from get zeros."""
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
    """The tower stays outside, and hands embeddings to the decoder. Only decoders that are proven are captured."""
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


# Whoever relies on Python running


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


CHANGES = (
    add_hook, add_hook_by_dict, freeze_one, move_weight, replace_weight, hook_gradient, hook_accumulation,
    replace_forward, change_epsilon, to_eval, unpatch, replace_layer, change_scaling,
)  # fmt: skip


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
    weights = []  # kept, so that no memory is used twice
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


# Backward passes


@pytest.mark.parametrize("with_adapters", [True, False])
def test_checkpointing_that_is_switched_off_for_a_reference_and_on_again(with_adapters, device):
    """As TRL does around each call of a reference. transformers then makes hooks and functions anew."""
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


# Gradients of the user's


def test_a_gradient_that_the_user_keeps_stays(device):
    pair = Pair(model_of(), device)
    pair.warm()
    got, want = pair.losses(SIZES[0])
    got.backward()
    weight = pair.captured.model.layers[0].mlp.down_proj.weight
    kept = weight.grad
    before = kept.clone()
    pair.captured.zero_grad()
    pair.plain.zero_grad()
    pair.step(SIZES[1])
    assert torch.equal(kept, before)


def test_a_view_of_a_gradient_that_the_user_keeps_is_an_error(device):
    pair = Pair(model_of(), device)
    pair.warm()
    pair.losses(SIZES[0])[0].backward()
    view = pair.captured.model.layers[0].mlp.down_proj.weight.grad[:2]
    pair.captured.zero_grad()
    gc.collect()
    with pytest.raises(RuntimeError, match="Keep a clone"):
        pair.losses(SIZES[1])[0].backward()
    del view


def test_a_gradient_set_by_hand_is_added_to(device):
    pair = Pair(model_of(), device)
    pair.warm()
    for one in (pair.captured, pair.plain):
        weight = one.model.layers[1].mlp.up_proj.weight
        weight.grad = torch.ones_like(weight)
    pair.step(SIZES[0])


def test_a_weight_without_a_gradient_gets_none(device):
    """AdamW would decay it. The layer's MLP is not called, so its weights learn nothing."""
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
