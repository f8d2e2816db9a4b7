"""`optimizer_in_backward` gives the bits of the ordinary step, with one weight's gradient at a time."""

import copy
import pickle

import pytest
import torch
from medusa_brute_force import medusa_trainer
from memory_runs import LAYERS, At, CountedMemory, logs_of, make, same_bits, same_training, train
from tiny_models import tiny_model
from trainer_parity import build_dpo, run, with_lora
from transformers import TrainerCallback

from liger_trainer import LigerDPOTrainer, LigerSFTTrainer, LigerTrainer
from liger_trainer.memory.device_memory import GIB
from liger_trainer.trainers.optimizer_in_backward import step_alone

SHORT = {"max_steps": 3}
PATCHED = SHORT | {"use_liger": True, "liger_config": {"rebuild_above_mib": 0}}


def model_of(family="llama", dtype=None, **changes):
    return lambda: tiny_model(family, **({"num_hidden_layers": 3} | changes)).to(dtype or torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("checkpointing", [None, {"use_reentrant": False}, {"use_reentrant": True}], ids=str)
def test_every_step_has_the_same_bits(checkpointing, dtype, tmp_path):
    options = {"activation_checkpointing_kwargs": checkpointing} if checkpointing else {}
    model = model_of(dtype=dtype, attention_dropout=0.1)
    same_training(tmp_path, checkpointing=checkpointing is not None, model=model, **options)


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch", "sgd", "rmsprop", "adagrad", "adafactor"])
def test_optimizers(optim, tmp_path):
    args = {"optim_args": "momentum=0.9"} if optim == "sgd" else {}
    same_training(tmp_path, optim=optim, learning_rate=1e-3, lr_scheduler_type="cosine", warmup_steps=2, **args)


@pytest.mark.parametrize("optim", ["adamw_bnb_8bit", "lion_8bit", "paged_adamw_32bit"])
def test_optimizers_of_bitsandbytes(optim, tmp_path):
    """They look up by position that the embedding has 32-bit states."""
    pytest.importorskip("bitsandbytes")
    model = model_of(intermediate_size=256)
    _, (_, _, states) = same_training(tmp_path, optim=optim, learning_rate=1e-3, model=model, max_steps=4)
    assert states["model.embed_tokens.weight", "state1"].dtype == torch.float32
    of_mlp = states["model.layers.0.mlp.up_proj.weight", "state1"]
    assert of_mlp.dtype == (torch.uint8 if "8bit" in optim else torch.float32)


@pytest.mark.parametrize(("family", "checkpointing"), [("llama", False), ("gemma2", True), ("qwen3_moe", True)])
def test_patched_models(family, checkpointing, tmp_path):
    model = model_of(family, tie_word_embeddings=family != "llama", num_hidden_layers=2)
    same_training(tmp_path, checkpointing=checkpointing, model=model, **PATCHED)


def test_lora_on_a_patched_model(tmp_path):
    model = lambda: with_lora(tiny_model("llama"), ["q_proj", "v_proj", "down_proj", "lm_head"])  # noqa: E731
    same_training(tmp_path, checkpointing=True, model=model, **PATCHED)


class UnevenlyUsed(torch.nn.Module):
    """A llama with a frozen norm, and a weight that counts only for batches with an even sum."""

    def __init__(self):
        super().__init__()
        self.llama = tiny_model("llama")
        self.llama.model.norm.weight.requires_grad_(False)
        self.sometimes = torch.nn.Parameter(torch.ones(1))
        self.used = []

    def forward(self, input_ids, **inputs):
        outputs = self.llama(input_ids=input_ids, **inputs)
        self.used.append(input_ids.sum().item() % 2 == 0)
        if self.used[-1]:
            outputs.loss = outputs.loss * self.sometimes.sum()
        return outputs


def test_weights_without_a_gradient_are_passed_over_and_frozen_ones_stay(tmp_path):
    models = []

    def model():
        models.append(UnevenlyUsed())
        return models[-1]

    _, (_, weights, states) = same_training(tmp_path, model=model)
    used = models[1].used
    assert 0 < sum(used) < len(used) == 8
    assert torch.equal(weights["llama.model.norm.weight"], tiny_model("llama").state_dict()["model.norm.weight"])
    assert min(step.item() for (_, name), step in states.items() if name == "step") == sum(used)


def test_gradients_never_exist_together(tmp_path):
    highest = {}
    for in_backward in (False, True):
        memory = CountedMemory()
        trainer = make(tmp_path, in_backward, True, memory=memory, **SHORT)
        train(trainer)
        highest[in_backward] = memory.highest
    of_all = sum(p.numel() * 4 for p in trainer.model.parameters())
    assert highest[False] - highest[True] > 0.4 * of_all


def test_resumed_with_it_and_without(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 2}
    found = {on: train(make(tmp_path / str(on), on, **options)) for on in (False, True)}
    assert same_bits(found[True], found[False])
    for first, then in ((False, True), (True, False), (True, True)):
        checkpoint = str(tmp_path / str(first) / "checkpoint-4")
        again = make(tmp_path / "again", then, **options | {"save_strategy": "no"})
        assert same_bits(train(again, resume_from_checkpoint=checkpoint), found[False]), (first, then)


def test_auto_within_a_budget(tmp_path):
    """The budget lies between the peaks with all layers checkpointed and with none."""
    peaks = []
    for checkpointing in (True, False):
        memory = CountedMemory()
        train(make(tmp_path, True, checkpointing, memory=memory))
        peaks.append(memory.highest)
    budget = peaks[0] + 0.5 * (peaks[1] - peaks[0])
    want = train(make(tmp_path, False))
    memory = CountedMemory()
    trainer = make(tmp_path, True, "auto", memory=memory, memory_budget=budget / GIB)
    assert same_bits(train(trainer), want)
    assert 0 < trainer.checkpointing.least < LAYERS
    assert memory.highest <= budget * 1.02


def test_the_plan_of_auto_knows_that_gradients_do_not_gather(tmp_path):
    """There are few tokens and large weights, so gradients are the peak of the ordinary step."""
    found = {}
    for in_backward in (False, True):
        model = tiny_model("llama", num_hidden_layers=LAYERS, hidden_size=128, intermediate_size=384)
        options = SHORT | {"model": model, "per_device_train_batch_size": 1, "max_steps": 6}
        memory = CountedMemory()
        trainer = make(tmp_path, in_backward, "auto", memory=memory, **options)
        got = train(trainer)
        found[in_backward] = (got, trainer.checkpointing)
        assert trainer.checkpointing.most == LAYERS
        assert memory.highest == pytest.approx(trainer.checkpointing.peak, rel=0.02)
    gradients = sum(p.numel() * 4 for p in trainer.model.parameters())
    assert same_bits(found[True][0], found[False][0])
    assert found[False][1].peak - found[True][1].peak > 0.4 * gradients


# Hooks, callbacks, copies


def test_hooks_and_callbacks_are_called_once_a_step(tmp_path):
    calls = []

    class Counting(TrainerCallback):
        def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
            optimizer.optimizer.register_step_post_hook(lambda *_: calls.append("hook"))

        def on_optimizer_step(self, args, state, control, model=None, **kwargs):
            calls.append("callback")
            assert all(p.grad is None for p in model.parameters())

    train(make(tmp_path, True, callbacks=[Counting()], **SHORT))
    assert calls == ["hook", "callback"] * 3


def test_hooks_of_a_weight_see_and_change_its_gradient(tmp_path):
    def model():
        model = tiny_model("llama")
        for p in model.parameters():
            p.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return model

    ordinary, _ = same_training(tmp_path, model=model, **SHORT)
    without = make(tmp_path, True, **SHORT)
    train(without)
    assert logs_of(without) != ordinary[0], "or the hooks would show nothing"


class Between(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        raise AssertionError("is called when weights have changed")


def test_a_callback_that_looks_at_weights_before_the_step_is_an_error(tmp_path):
    class Looking(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            [p.grad.norm() for p in model.parameters()]

    with pytest.raises(RuntimeError, match="a weight is used .* after its optimizer step.*weight.register_hook"):
        train(make(tmp_path, True, callbacks=[Looking()]))


def has_our_hooks(model):
    return any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_nothing_is_left_between_steps_and_after(tmp_path):
    seen, copies = [], []

    class Looking(LigerTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            seen.append(has_our_hooks(model))
            copies.extend((copy.deepcopy(model), pickle.loads(pickle.dumps(model))))
            return super().compute_loss(model, inputs, *args, **kwargs)

    trainer = make(
        tmp_path,
        True,
        callbacks=[At(1, lambda: seen.append(has_our_hooks(trainer.model)))],
        trainer_class=Looking,
        **SHORT,
    )
    train(trainer)
    assert seen == [True, False, True, True]
    assert not any(has_our_hooks(model) for model in (trainer.model, *copies))
    inner = trainer.optimizer.optimizer
    assert not inner._optimizer_step_pre_hooks
    # A user's loop on the same model and optimizer, and another trainer
    before = copy.deepcopy(trainer.model.state_dict())
    ids = torch.tensor([[3, 4, 5]])
    trainer.model.train()(input_ids=ids, labels=ids).loss.backward()
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    inner.param_groups[0]["lr"] = 0.1
    inner.step()
    assert not torch.equal(trainer.model.lm_head.weight, before["lm_head.weight"])
    trainer.model.zero_grad()
    twin = copy.deepcopy(trainer.model)
    assert same_bits(train(make(tmp_path, True, model=trainer.model)), train(make(tmp_path, False, model=twin)))


def test_a_second_training_of_the_same_trainer(tmp_path):
    found = []
    for in_backward in (False, True):
        trainer = make(tmp_path, in_backward, **SHORT)
        train(trainer)
        found.append(train(trainer))
    assert same_bits(*found)


# Other orders of passes and steps


def backward_of(trainer, model, inputs):
    trainer.accelerator.backward(0.5 * model(**inputs).loss)


class BackwardBefore(LigerTrainer):
    def training_step(self, model, inputs, *args, **kwargs):
        backward_of(self, model, inputs)
        return super().training_step(model, inputs, *args, **kwargs)


class BackwardAfter(LigerTrainer):
    def training_step(self, model, inputs, *args, **kwargs):
        loss = super().training_step(model, inputs, *args, **kwargs)
        backward_of(self, model, inputs)
        return loss


class BackwardInLoss(LigerTrainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        backward_of(self, model, inputs)
        return super().compute_loss(model, inputs, *args, **kwargs)


class NoBackward(LigerTrainer):
    def training_step(self, *args, **kwargs):
        if self.state.global_step == 1:
            return torch.zeros(())
        return super().training_step(*args, **kwargs)


@pytest.mark.parametrize("trainer_class", [BackwardBefore, NoBackward])
def test_earlier_gradients_and_steps_without_gradients_are_unchanged(trainer_class, tmp_path):
    found = [train(make(tmp_path, in_backward, trainer_class=trainer_class, **SHORT)) for in_backward in (False, True)]
    assert same_bits(*found)


class ForwardsBefore(LigerTrainer):
    """Two losses with one backward pass after the other, and no forward pass in between."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss, other = (super(ForwardsBefore, self).compute_loss(model, inputs, *args, **kwargs) for _ in range(2))
        self.accelerator.backward(other)
        return loss


@pytest.mark.parametrize("trainer_class", [BackwardAfter, BackwardInLoss, ForwardsBefore])
def test_two_backward_passes_are_an_error(trainer_class, tmp_path):
    trainer = make(tmp_path, True, trainer_class=trainer_class, **SHORT)
    by_autograd = "needed for gradient computation has been modified by an inplace operation"
    with pytest.raises(RuntimeError, match=f"a weight is used .* after its optimizer step|{by_autograd}") as error:
        train(trainer)
    assert "Resume from the last checkpoint" in error.value.__notes__[0]
    assert not has_our_hooks(trainer.model) and {type(p) for p in trainer.model.parameters()} == {torch.nn.Parameter}


def test_a_weight_of_several_layers(tmp_path):
    """Reentrant checkpointing has a backward pass for each of them."""

    def model():
        model = tiny_model("llama")
        first, second = model.model.layers
        second.mlp.up_proj.weight = first.mlp.up_proj.weight
        return model

    same_training(tmp_path, model=model, checkpointing=True, **SHORT)
    options = {"activation_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(RuntimeError, match=r"a weight is used .* after its optimizer step.*use_reentrant"):
        train(make(tmp_path, True, True, model=model(), **options, **SHORT))


@pytest.mark.parametrize("use_liger", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_that_reads_a_weight_of_others_when_it_runs_again(reentrant, use_liger, tmp_path):
    """An early exit asks the head how sure it is. The head has been stepped when the layer runs again."""

    def model():
        model = tiny_model("llama", num_hidden_layers=3)
        mlp, head = model.model.layers[1].mlp, model.lm_head
        of_class = mlp.forward

        def forward(x):
            with torch.no_grad():
                sure = head(x).softmax(-1).amax(-1, keepdim=True)
            return of_class(x) * sure

        mlp.forward = forward
        return model

    options = SHORT | {"use_liger": use_liger}
    again = {"activation_checkpointing_kwargs": {"use_reentrant": reentrant}}
    with pytest.raises(RuntimeError, match=r"a weight is used .* after its optimizer step.*recomputes a layer"):
        train(make(tmp_path, True, True, model=model(), **again, **options))
    same_training(tmp_path, model=model, **options)


def test_a_step_that_catches_an_error_is_unchanged(tmp_path):
    class Forgiving(LigerTrainer):
        def training_step(self, *args, **kwargs):
            handle = None
            if self.state.global_step == 1:
                handle = self.model.model.layers[0].mlp.up_proj.weight.register_hook(fail)
            try:
                return super().training_step(*args, **kwargs)
            except ArithmeticError:
                return torch.zeros(())
            finally:
                if handle is not None:
                    handle.remove()

    def fail(gradient):
        raise ArithmeticError

    same_training(tmp_path, trainer_class=Forgiving, **SHORT)


# Changes between the backward pass and the optimizer step


def of_gradients(trainer):
    for p in trainer.model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.1)


def of_weights(trainer):
    with torch.no_grad():
        trainer.model.lm_head.weight.mul_(0.9)


def of_the_optimizer(trainer):
    sgd = torch.optim.SGD(trainer.model.parameters(), lr=0.5, momentum=0.9)
    trainer.optimizer = trainer.accelerator.prepare(sgd)


@pytest.mark.parametrize("change", [of_gradients, of_weights, of_the_optimizer], ids=lambda change: change.__name__)
def test_changes_after_the_backward_pass_are_not_lost_silently(change, tmp_path):
    class Altering(LigerTrainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            if self.state.global_step == 1:
                change(self)
            return loss

    trainer = make(tmp_path, True, trainer_class=Altering, **SHORT)
    with pytest.raises(RuntimeError, match="a weight is used"):
        train(trainer)
    assert trainer.state.global_step == 1


class Changing(TrainerCallback):
    """Calls `change` with the trainer before its second step."""

    def __init__(self, change):
        self.change, self.trainer = change, None

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.change(self.trainer)


def changing(tmp_path, on, change):
    callback = Changing(change)
    trainer = make(tmp_path, on, callbacks=[callback], **SHORT)
    callback.trainer = trainer
    return trainer


def test_an_optimizer_that_a_callback_puts_in_place_of_another(tmp_path):
    found = []
    for on in (False, True):
        trainer = changing(tmp_path, on, of_the_optimizer)
        found.append((*train(trainer), logs_of(trainer)))
    assert same_bits(*found) and found[0][2] == found[1][2]


@pytest.mark.slow
def test_compiled(tmp_path):
    same_training(tmp_path, model=model_of(), torch_compile=True, torch_compile_backend="aot_eager", **SHORT)


# Other trainers


def of_sft(model, out, **options):
    options |= {"activation_checkpointing": True, "max_grad_norm": 0.0}
    return run(LigerSFTTrainer, model, out, train=False, **options)[1]


def of_dpo(model, out, **options):
    return build_dpo(LigerDPOTrainer, model, out, **options)


def of_medusa(model, out, **options):
    return medusa_trainer(copy.deepcopy(model), out, medusa_stage=2, **options)


@pytest.mark.parametrize("make", [of_sft, of_dpo, of_medusa])
def test_trl_s_trainers(make, tmp_path):
    """Medusa has groups with other learning rates, and its own heads."""
    found = []
    for in_backward in (False, True):
        trainer = make(
            tiny_model("llama", num_hidden_layers=1), tmp_path, optim="adamw_torch", optimizer_in_backward=in_backward
        )
        found.append((*train(trainer), logs_of(trainer)))
    assert same_bits(*found) and found[0][2] == found[1][2]
    assert any("grad_norm" in log for log in found[0][2])


@pytest.mark.parametrize("fused", [False, True])
def test_autograd_sees_that_a_weight_was_stepped(fused):
    """Fused optimizers do not tell autograd, and a graph that still needs the old values would use the new ones."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], fused=fused)
    late = (weight**2).sum()
    weight.grad = torch.ones(3)
    step_alone(optimizer, optimizer.param_groups[0], weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.backward()


@pytest.mark.parametrize("name", ["clip_grad_value_", "clip_grad_norm_"])
def test_clipping_in_a_callback_is_refused_by_name(name, tmp_path):
    class Clipping(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            getattr(torch.nn.utils, name)(model.parameters(), 1.0)

    with pytest.raises(ValueError, match=f"optimizer_in_backward is true and {name} was called"):
        train(make(tmp_path, True, callbacks=[Clipping()]))
