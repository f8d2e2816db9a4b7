"""Inputs of recomputed layers on the host: losses and gradients are bit-equal, and no input stays on the GPU."""

import copy
import functools
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import collate, ragged_rows, tiny_model
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from liger_trainer import apply_liger
from liger_trainer.memory import switches
from liger_trainer.memory.host_inputs import HostInputs, _Input
from liger_trainer.memory.pinned_memory import PinnedMemory

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OPTIONS = {"use_reentrant": False}


def host(room=2**24):
    return PinnedMemory(
        room, pin=lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=DEVICE.type == "cuda"), slab=2**20
    )


def checkpointed(adapters, layers=4, decide=None, **options):
    model = tiny_model("llama", num_hidden_layers=layers).to(DEVICE)
    if adapters:
        torch.manual_seed(3)
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
        model.enable_input_require_grads()
    apply_liger(model, {"rebuild_above_mib": 0})
    model.train().gradient_checkpointing_enable(OPTIONS | options)
    if decide is not None:
        switches.install(model, decide)
    return model


def step(model, seed=1, backward=True):
    model.zero_grad()
    rows = {name: t.to(DEVICE) for name, t in collate(ragged_rows(4)).items()}
    loss = model(**rows).loss
    if backward:
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return loss


@pytest.fixture
def inputs(monkeypatch):
    """All inputs that were moved to the host."""
    made, create = [], _Input.__init__

    def counted(self, *given):
        create(self, *given)
        made.append(weakref.ref(self))

    monkeypatch.setattr(_Input, "__init__", counted)
    return made


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "adapters"])
def test_bits_are_the_same(adapters, inputs):
    want = step(checkpointed(adapters))
    model = checkpointed(adapters, decide=HostInputs(host()))
    for _ in range(2):
        assert all(map(torch.equal, step(model), want))
    assert len(inputs) == 8 and not any(made() for made in inputs), "nothing is left after the backward pass"


@pytest.mark.parametrize("version", ["5.17", "5.24"])
def test_as_transformers_is_told(version, inputs):
    """transformers 5.17 passes the option on to PyTorch's function, and 5.24 wraps that."""
    want = step(checkpointed(True))
    model = checkpointed(True)
    if version == "5.17":
        function = functools.partial(checkpoint, use_reentrant=False, offload=True)
        for module in model.modules():
            if hasattr(module, "_gradient_checkpointing_func"):
                module._gradient_checkpointing_func = function
    elif hasattr(model.base_model.model, "activation_checkpointing_enable"):
        model.base_model.model.activation_checkpointing_enable(OPTIONS, offload=True)
    else:
        pytest.skip("transformers is older")
    switches.install(model, HostInputs(host()))
    assert all(map(torch.equal, step(model), want)) and len(inputs) == 4


def test_all_but_the_last_leave_the_gpu(inputs):
    loss = step(checkpointed(True, decide=HostInputs(host())), backward=False)
    assert [made().x is None for made in inputs] == [True, True, True, False]
    assert loss.requires_grad


def test_tensors_without_room_stay_on_the_device(inputs):
    want = step(checkpointed(True))
    assert all(map(torch.equal, step(checkpointed(True, decide=HostInputs(host(0)))), want))
    assert len(inputs) == 4


def test_two_forwards_before_a_backward_and_a_second_backward(inputs):
    plain, model = checkpointed(True), checkpointed(True, decide=HostInputs(host()))
    results = []
    for one in (plain, model):
        one.zero_grad()
        both = step(one, backward=False) + 2 * step(one, backward=False)
        both.backward(retain_graph=True)
        both.backward()
        results.append([p.grad.clone() for p in one.parameters() if p.grad is not None])
    assert all(map(torch.equal, *results))


def test_an_input_that_is_changed_afterwards(inputs):
    loss = step(checkpointed(True, decide=HostInputs(host())), backward=False)
    with torch.no_grad():
        inputs[-1]().x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_eval_and_copies(inputs):
    model = checkpointed(True, decide=HostInputs(host()))
    with torch.no_grad():
        step(model, backward=False)
    assert not inputs
    want = step(model)
    assert all(map(torch.equal, step(copy.deepcopy(model)), want))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("reentrant", [False, True])
def test_the_option_of_a_trainer(reentrant, tmp_path, inputs):
    """transformers' way: with `use_reentrant`, its own code copies them."""
    from liger_trainer import LigerTrainer, LigerTrainingArguments

    results = []
    for offload in (False, True):
        model = tiny_model("llama", num_hidden_layers=4)
        options = {"use_reentrant": reentrant} | ({"offload": True} if offload else {})
        arguments = LigerTrainingArguments(
            output_dir=str(tmp_path),
            max_steps=2,
            logging_steps=1,
            report_to="none",
            activation_checkpointing=True,
            activation_checkpointing_kwargs=options,
            use_cpu=DEVICE.type == "cpu",
            save_strategy="no",
        )
        rows = [{name: t[0] for name, t in collate([row]).items()} for row in ragged_rows(8)]
        trainer = LigerTrainer(model, arguments, train_dataset=rows, data_collator=_as_they_are)
        trainer.train()
        results.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    assert results[0] == results[1]
    assert bool(inputs) is not reentrant


def _as_they_are(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    batch = {}
    for name, value in (("input_ids", 0), ("attention_mask", 0), ("labels", -100)):
        padded = [torch.nn.functional.pad(row[name], (0, longest - len(row[name])), value=value) for row in rows]
        batch[name] = torch.stack(padded)
    return batch


class ByName(GradientCheckpointingLayer):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, hidden_states):
        return self.linear(hidden_states).relu()


class Encoder(PreTrainedModel):
    config_class = LlamaConfig
    supports_gradient_checkpointing = True

    def __init__(self, config):
        super().__init__(config)
        self.layers = torch.nn.ModuleList([ByName(), ByName()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(hidden_states=x)
        return x


def test_layers_that_get_all_their_inputs_by_name(inputs):
    """Llama 4's vision encoder calls its layers so. Their inputs stay on the GPU."""
    torch.manual_seed(0)
    model = Encoder(LlamaConfig()).to(DEVICE).train()
    x = torch.randn(4, 16, 8, device=DEVICE)
    want = torch.autograd.grad(model(x).sum(), model.layers[0].linear.weight)
    model.gradient_checkpointing_enable(OPTIONS)
    switches.install(model, HostInputs(host()))
    got = torch.autograd.grad(model(x).sum(), model.layers[0].linear.weight)
    assert torch.equal(got[0], want[0])
    assert inputs == []
