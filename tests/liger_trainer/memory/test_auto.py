"""`activation_checkpointing: auto` in a trainer on a counted memory gives the same bits within every budget."""

import copy
import gc
import json
import pickle
import weakref
from types import SimpleNamespace

import pytest
import torch
from memory_runs import LAYERS, At, CountedMemory, build, same_bits, train
from tiny_models import tiny_model
from torch.utils.checkpoint import checkpoint

from liger_trainer import LigerTrainer
from liger_trainer.memory import feature
from liger_trainer.memory.device_memory import GIB, RESERVE
from liger_trainer.memory.switches import Switch


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Losses, weights and peak bytes without checkpointing, and with all layers checkpointed."""
    found = {}
    for checkpointing in (False, True):
        memory = CountedMemory()
        trainer = build(tmp_path_factory.mktemp("run"), checkpointing, memory)
        found[checkpointing] = (*train(trainer), memory.highest)
    return found


def test_a_model_on_several_devices_checkpoints_every_layer(caplog):
    """`auto` would count the memory of the first GPU alone, and keep every layer on the others."""
    model = tiny_model("llama")
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    args = SimpleNamespace(activation_checkpointing="auto", device=torch.device("cuda"), process_index=0)
    assert feature._memory_of(SimpleNamespace(args=args, device_memory=None, model=model)) is None
    assert "device_map has spread the model over several devices, so every layer is checkpointed" in caplog.text


def switches_in(model):
    return [m for m in model.modules() if isinstance(vars(m).get("_gradient_checkpointing_func"), Switch)]


def test_none_and_full_differ_in_memory_alone(runs):
    assert same_bits(runs[True], runs[False])
    assert runs[True][2] < 0.75 * runs[False][2], "or the tests below would show nothing"


def test_the_same_bits_within_the_budget(runs, tmp_path):
    full, none = runs[True][2], runs[False][2]
    kept = []
    for share in (0.3, 0.6, 1.5):
        budget = full + share * (none - full)
        memory = CountedMemory()
        trainer = build(tmp_path, "auto", memory, memory_budget=budget / GIB)
        assert same_bits(train(trainer), runs[False]), share
        chosen = trainer.checkpointing
        assert memory.highest <= budget * 1.02, share
        assert chosen.layers == LAYERS and chosen.most > 0
        if share > 1:
            assert chosen.least == chosen.most == LAYERS
        else:
            assert chosen.least < LAYERS
            assert memory.highest > full + 0.4 * (budget - full), "or the budget is left unused"
        kept.append(chosen.kept)
    assert kept[0] < kept[1] < kept[2], "a larger budget keeps more"


@pytest.mark.parametrize("share", [0.1, 0.4])
def test_less_memory_from_one_step_to_the_next(share, runs, tmp_path):
    """Another process takes device memory. Fewer layers are kept, before an allocation fails."""
    full, none = runs[True][2], runs[False][2]
    memory = CountedMemory()
    size = int((full + share * (none - full)) / (1 - RESERVE))
    trainer = build(tmp_path, "auto", memory, [At(4, lambda: setattr(memory, "size", size))])
    assert same_bits(train(trainer), runs[False])
    assert memory.failures == 0
    assert trainer.checkpointing.least < trainer.checkpointing.most == LAYERS


def test_an_allocator_that_is_short_of_memory_is_left_more(runs, tmp_path):
    """It frees its cache before an allocation fails, because its memory is fragmented."""

    memory, times = CountedMemory(), []
    memory.retries = lambda: len(times)
    trainer = build(tmp_path, "auto", memory, [At(5, lambda: times.append("short"))])
    assert same_bits(train(trainer), runs[False])
    assert 0 < trainer.checkpointing.least < LAYERS


class Counting(LigerTrainer):
    """Counts where nothing can see it: in a buffer, its state, a list, a generator and steps of weights by hooks."""

    calls = 0

    def compute_loss(self, model, *args, **kwargs):
        if not self.calls:
            model.register_buffer("seen", torch.zeros(()))
            self.drawn = torch.Generator().manual_seed(0)
            self._noted = []
            self.stepped = 0
            self.state.num_tokens = 0
            model.lm_head.weight.register_post_accumulate_grad_hook(self._step)
        self.calls += 1
        model.seen.add_(1)
        self._noted.append(torch.rand((), generator=self.drawn))
        self.state.num_tokens += 1
        return super().compute_loss(model, *args, **kwargs)

    def _step(self, weight):
        self.stepped += 1
        weight.data.add_(weight.grad, alpha=-1e-3)


@pytest.mark.parametrize("kept", [True, False])
def test_out_of_memory_is_an_error_that_says_what_to_set(kept, runs, tmp_path):
    """A step's counts and changes cannot all be found and undone, so the step does not run again."""
    memory = CountedMemory()
    memory.claims = 1 << 40 if kept else None
    shrink = At(4, lambda: setattr(memory, "size", int(runs[True][2]) if kept else 1_000_000))
    trainer = build(tmp_path, "auto", memory, [shrink], trainer_class=Counting)
    says = (
        r"6 layers were not checkpointed.*memory_budget: 0.0 or less.* activation_checkpointing: true.*last checkpoint"
        if kept
        else r"though every layer is checkpointed.*rows of at most \d+ tokens"
    )
    with pytest.raises(torch.OutOfMemoryError, match=says):
        train(trainer)
    calls = 10 if kept else 9
    assert (memory.failures, trainer.calls, trainer.state.num_tokens, len(trainer._noted)) == (1, calls, calls, calls)
    assert trainer.model.seen == calls and trainer.stepped in (calls - 1, calls)
    assert not switches_in(trainer.model), "the model is as it was before"


def test_a_model_that_is_made_when_training_begins(tmp_path):
    """`model_init` makes it. The model that the trainer was built with is gone."""
    made = []

    def init():
        model = tiny_model("llama", num_hidden_layers=LAYERS)
        made.append(weakref.ref(model))
        return model

    def look():
        gc.collect()
        looked.append([model() is not None for model in made] + [len(switches_in(trainer.model)) >= LAYERS])

    looked = []
    args = {"max_steps": 4, "gradient_accumulation_steps": 1, "use_liger": False}
    trainer = build(tmp_path, "auto", CountedMemory(), [At(3, look)], model_init=init, **args)
    train(trainer)
    assert looked == [[False, True, True]]


def test_another_error_is_not_run_again(tmp_path):
    class Broken(LigerTrainer):
        calls = 0

        def compute_loss(self, *args, **kwargs):
            self.calls += 1
            raise RuntimeError("something else")

    trainer = build(tmp_path, "auto", CountedMemory(), trainer_class=Broken)
    with pytest.raises(RuntimeError, match="^something else$"):
        train(trainer)
    assert trainer.calls == 1


def test_a_budget_below_full_checkpointing_is_said_once(runs, tmp_path, caplog):
    trainer = build(tmp_path, "auto", CountedMemory(), memory_budget=runs[True][2] / 2 / GIB)
    assert same_bits(train(trainer), runs[False])
    (line,) = [record.message for record in caplog.records if "memory_budget is" in record.message]
    assert "so it is exceeded" in line and "tokens" in line


def test_measuring_takes_no_more_than_full_checkpointing(tmp_path):
    """Gradients take most of the memory: what is kept for measuring is freed before all gradients exist."""
    highest = {}
    for checkpointing in (True, "auto"):
        model = tiny_model("llama", num_hidden_layers=LAYERS, hidden_size=96, intermediate_size=288, vocab_size=132)
        options = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 1, "max_steps": 8}
        if checkpointing == "auto":
            options["memory_budget"] = highest[True] / GIB
        memory = CountedMemory()
        trainer = build(tmp_path, checkpointing, memory, model=model, **options)
        train(trainer)
        highest[checkpointing] = memory.highest
    assert trainer.checkpointing.most > 0
    assert highest["auto"] <= 1.001 * highest[True]


def test_resumed_under_another_plan(runs, tmp_path):
    first = build(tmp_path, "auto", CountedMemory(), save_strategy="steps", save_steps=4)
    train(first)
    for checkpointing, memory in ((False, None), (True, None), ("auto", CountedMemory(3_000_000))):
        again = build(tmp_path, checkpointing, memory, save_strategy="no")
        got = train(again, resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
        assert same_bits(got, runs[False])


def test_evaluation_in_between(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 2}
    want = train(build(tmp_path, False, **options))
    trainer = build(tmp_path, "auto", CountedMemory(), **options)
    assert same_bits(train(trainer), want)
    assert len(want[0]) == 9


def test_a_second_training_of_the_same_trainer_and_model(runs, tmp_path):
    trainer = build(tmp_path, "auto", CountedMemory())
    train(trainer)
    assert not switches_in(trainer.model)
    train(trainer)
    model = tiny_model("llama", attention_dropout=0.1, num_hidden_layers=LAYERS)
    assert same_bits(train(build(tmp_path, "auto", CountedMemory(), model=model)), runs[False])


def test_copies_of_a_model_in_training_are_plain(tmp_path):
    copies = []

    def look():
        assert len(switches_in(trainer.model)) >= LAYERS
        copies.append(copy.deepcopy(trainer.model))
        trainer.model.disable_input_require_grads()  # by a hook that pickle does not know
        copies.append(pickle.loads(pickle.dumps(trainer.model)))
        trainer.model.enable_input_require_grads()

    trainer = build(tmp_path, "auto", CountedMemory(), [At(3, look)])
    train(trainer)
    for twin in copies:
        assert not switches_in(twin)
        layer = twin.model.layers[0]
        assert layer._gradient_checkpointing_func.func is checkpoint
        twin.gradient_checkpointing_disable()
        twin.gradient_checkpointing_enable()
        assert not switches_in(twin)
        twin.train()(input_ids=torch.tensor([[3, 4, 5]]), labels=torch.tensor([[3, 4, 5]])).loss.backward()


def test_checkpointing_turned_off_and_on_in_a_step(runs, tmp_path):
    """TRL does this around passes without gradients."""

    class Toggling(LigerTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            base = self.accelerator.unwrap_model(model)
            base.gradient_checkpointing_disable()
            with torch.no_grad():
                base(input_ids=inputs["input_ids"])
            base.gradient_checkpointing_enable()
            return super().compute_loss(model, inputs, *args, **kwargs)

    want = train(build(tmp_path, False, trainer_class=Toggling))
    trainer = build(tmp_path, "auto", CountedMemory(), trainer_class=Toggling)
    assert same_bits(train(trainer), want)
    assert trainer.checkpointing.most == LAYERS


@pytest.mark.parametrize("kwargs", [{"use_reentrant": True}, {"every_n_layers": 2}], ids=str)
def test_options_of_checkpointing_are_kept(kwargs, runs, tmp_path):
    trainer = build(tmp_path, "auto", CountedMemory(), activation_checkpointing_kwargs=kwargs)
    assert same_bits(train(trainer), runs[False])
    assert trainer.checkpointing.layers == (LAYERS // 2 if "every_n_layers" in kwargs else LAYERS)


PATCHED = {
    "use_liger": True,
    "liger_config": {"rebuild_above_mib": 0},
    "max_steps": 4,
    "gradient_accumulation_steps": 1,
    "seed": 4,
}


def test_patched_models_and_what_they_rebuild(tmp_path):
    """Kept layers rebuild results of norms and gates. Checkpointed layers do not."""

    def run(checkpointing, memory=None):
        model = tiny_model("llama", attention_dropout=0.1)
        trainer = build(tmp_path, checkpointing, memory, model=model, **PATCHED)
        return train(trainer), trainer.checkpointing

    want, _ = run(False)
    full, _ = run(True)
    auto, chosen = run("auto", CountedMemory())
    assert same_bits(full, want) and same_bits(auto, want)
    assert chosen.most == 2


def test_report(tmp_path):
    trainer = build(tmp_path, "auto", CountedMemory(), model=tiny_model("llama"), **PATCHED)
    train(trainer)
    chosen = json.loads((tmp_path / "liger_report.json").read_text())["activation_checkpointing"]
    assert chosen == trainer.checkpointing.to_dict()
    assert chosen["layers"] == chosen["kept_most"] == chosen["largest"]["kept"] == 2
    assert chosen["memory_budget_gib"] is None


def test_without_a_gpu_every_layer_is_checkpointed(runs, tmp_path, caplog):
    trainer = build(tmp_path, "auto")
    assert same_bits(train(trainer), runs[False])
    assert trainer.checkpointing is None
    assert "Without one, every layer is checkpointed" in caplog.text
