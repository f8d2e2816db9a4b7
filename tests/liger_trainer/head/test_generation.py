"""A patched model generates by its modules' own code, and trains by ours as before."""

import threading

import pytest
import torch
from accelerate import cpu_offload
from peft import get_peft_model
from tiny_models import tiny_model
from torch import nn
from transformers import DynamicCache
from verify_setups import lora

from liger_trainer import apply_liger
from liger_trainer.patching.core.binding import Binding, bind, own_code
from liger_triton import reference

ADAPTER = lora(init_lora_weights=False)
ON_THE_HEAD = lora("q_proj", "lm_head", init_lora_weights=False)
PROMPT = {
    "input_ids": torch.randint(5, 60, (2, 6), generator=torch.Generator().manual_seed(0)),
    "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]),
}


def model_of(model_type="llama", adapter=None):
    model = tiny_model(model_type)
    return (get_peft_model(model, adapter) if adapter else model).eval()


def generated(model):
    found = model.generate(
        **PROMPT, max_new_tokens=5, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    return found.sequences, torch.stack(found.logits)


def count_norms(monkeypatch):
    """A list that gets an entry for each RMSNorm that ours computes."""
    seen = []
    stock = reference.rms_norm

    def counted(x, *args, **kwargs):
        seen.append(x.shape)
        return stock(x, *args, **kwargs)

    monkeypatch.setattr(reference, "rms_norm", counted)
    return seen


@pytest.mark.diagonal
@pytest.mark.parametrize("adapter", [None, ADAPTER, ON_THE_HEAD], ids=["plain", "adapter", "on the head"])
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3_moe"])
def test_generation_is_the_models_own_bit_for_bit(model_type, adapter, monkeypatch):
    want = generated(model_of(model_type, adapter))
    model = model_of(model_type, adapter)
    apply_liger(model)
    seen = count_norms(monkeypatch)
    got = generated(model)
    assert seen == []
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_a_model_whose_weights_wait_elsewhere_generates_by_its_own_code(monkeypatch):
    """accelerate's hooks are around each module's forward, and bring its weights."""
    want = generated(model_of())
    model = model_of()
    apply_liger(model)
    cpu_offload(model, execution_device=torch.device("cpu"))
    seen = count_norms(monkeypatch)
    got = generated(model)
    assert seen == []
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def cached(**given):
    return {"input_ids": PROMPT["input_ids"], "past_key_values": DynamicCache()} | given


@pytest.mark.parametrize(
    "call_of",
    [
        pytest.param(lambda model: {"input_ids": PROMPT["input_ids"]}, id="no cache, as in a checkpointed layer"),
        pytest.param(lambda model: cached(labels=PROMPT["input_ids"]), id="labels"),
        pytest.param(lambda model: cached(labels=PROMPT["input_ids"], fused_lm_head=True), id="scores"),
    ],
)
def test_other_calls_without_gradients_run_as_in_training(call_of, monkeypatch):
    model = model_of()
    apply_liger(model)
    seen = count_norms(monkeypatch)
    with torch.no_grad():
        model(**call_of(model))
    assert len(seen) > 0


def test_a_cached_call_with_gradients_runs_as_in_training(monkeypatch):
    model = model_of()
    apply_liger(model)
    seen = count_norms(monkeypatch)
    model(**cached())
    assert len(seen) > 0


@pytest.mark.parametrize("with_gradients", [True, False])
def test_a_call_that_scores_within_a_generation_is_ours(with_gradients, monkeypatch):
    """A hook scores the prompt in the middle of a call that generates, then the call goes on by its own code."""
    scored = []

    def score(module, inputs):
        if scored:
            return
        scored.append(None)
        with torch.set_grad_enabled(with_gradients):
            scored[0] = model(**PROMPT, labels=PROMPT["input_ids"], fused_lm_head=True).log_probs
        assert len(seen) > 0
        seen.clear()

    want = generated(model_of())
    model = model_of()
    apply_liger(model)
    expected = model(**PROMPT, labels=PROMPT["input_ids"], fused_lm_head=True).log_probs
    model.model.layers[1].register_forward_pre_hook(score)
    seen = count_norms(monkeypatch)
    got = generated(model)
    assert seen == []
    assert torch.equal(got[0], want[0])
    assert scored[0].requires_grad == with_gradients
    assert torch.allclose(scored[0], expected)


def test_a_generation_within_a_training_has_real_logits(monkeypatch):
    """The call around it has stand-ins for its logits, which are not meant for this one."""
    found = []

    def generate(module, inputs):
        if not found:
            found.append(None)
            with torch.no_grad():
                found[0] = generated(model)

    want = generated(model_of())
    model = model_of().train()
    apply_liger(model)
    labels = {"labels": PROMPT["input_ids"]}
    loss = model(**PROMPT, **labels).loss
    model.model.layers[1].register_forward_pre_hook(generate)
    outputs = model(**PROMPT, **labels)
    assert torch.equal(found[0][0], want[0])
    assert outputs.logits is None
    assert torch.allclose(outputs.loss, loss)


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def forward(self, x):
    return 3 * x


def doubled():
    module = Doubled()
    bind(module, Binding(forward))
    return module


def test_own_code_is_of_one_thread_and_ends_with_an_error():
    module = doubled()
    found = []
    with torch.no_grad():
        with pytest.raises(KeyError), own_code():
            thread = threading.Thread(target=lambda: found.append(torch.no_grad()(module)(1)))
            thread.start()
            thread.join()
            found.append(module(1))
            raise KeyError
        found.append(module(1))
    assert found == [3, 2, 3]


def test_own_code_leaves_calls_with_gradients_alone():
    with own_code():
        assert doubled()(1) == 3
        with torch.no_grad(), own_code(False):
            assert doubled()(1) == 3


def test_a_layer_that_is_compiled_alone_can_be_traced_within_own_code():
    module = doubled()
    module.compile(backend="eager", fullgraph=True)
    with torch.no_grad(), own_code():
        assert module(torch.ones(1)).item() == 3
