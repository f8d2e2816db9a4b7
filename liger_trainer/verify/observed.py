"""Records a training: after each step, in each evaluation, and when the model is saved."""

import copy
import functools
import hashlib
import os
import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState

Tensors = dict[str, torch.Tensor]
# Parts of the names of logged numbers that differ between any two runs
_OF_TIME = ("runtime", "per_second", "time", "memory")


def copies(model: nn.Module, buffers: bool = False) -> Tensors:
    """Copy all parameters of `model` to the CPU, and its `buffers` too."""
    tensors = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    if buffers:
        tensors |= {name: b.detach().cpu().clone() for name, b in model.named_buffers()}
    return tensors


def optimizer_states(optimizer: Any, model: nn.Module) -> Tensors:
    """Copy the optimizer's states, named by parameter and state: `"lm_head.weight, exp_avg"`."""
    names = {id(p): name for name, p in model.named_parameters()}
    states = {}
    for parameter, state in optimizer.state.items():
        for what, value in state.items():
            if isinstance(value, torch.Tensor):
                states[f"{names.get(id(parameter), 'no parameter')}, {what}"] = value.detach().cpu().clone()
    return states


def group_options(optimizer: Any, model: nn.Module) -> dict[str, Any]:
    """Return the optimizer's options for each parameter: learning rate, weight decay, betas and so on."""
    names = {id(p): name for name, p in model.named_parameters()}
    options_of: dict[str, Any] = {}
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        for parameter in group["params"]:
            name = names.get(id(parameter), "a tensor that is not a parameter of the model")
            options_of[name] = "two groups" if name in options_of else options
    return options_of


def numbers(log: dict[str, Any]) -> dict[str, float]:
    """Return the numbers in a log record that must agree between two equal trainings."""
    values = {}
    for name, value in log.items():
        if isinstance(value, int | float) and not any(part in name for part in _OF_TIME):
            values[name] = float(value)
    return values


def random_states() -> dict[str, str]:
    """Return a hash of the state of each random number generator."""
    states = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": pickle.dumps(numpy.random.get_state()),
        "random": pickle.dumps(random.getstate()),
    }
    return {f"random numbers of {name}": hashlib.sha256(state).hexdigest()[:12] for name, state in states.items()}


def surroundings(model: nn.Module, state: TrainerState, control: TrainerControl) -> dict[str, Any]:
    """Return what a callback sees apart from numbers: the trainer's state and control, modes, and trained weights."""
    seen: dict[str, Any] = {f"state.{name}": value for name, value in vars(state).items() if _is_plain(value)}
    seen |= {f"control.{name}": value for name, value in vars(control).items() if _is_plain(value)}
    del seen["state.total_flos"]  # rounded differently, since we add in another order
    seen["parameters that require gradients"] = sorted(n for n, p in model.named_parameters() if p.requires_grad)
    seen["modules in training mode"] = sorted(name for name, module in model.named_modules() if module.training)
    seen["names of one tensor"] = tied(model)
    return seen | random_states()


def tied(model: nn.Module) -> list[list[str]]:
    """Return groups of parameter names that share one tensor."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(sorted(group) for group in names.values() if len(group) > 1)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


class KeepGradients(TrainerCallback):
    """Keeps the gradients that the optimizer gets in each step.

    Args:
        instead (`list`, *optional*): Gradients of another run. The optimizer gets these in place of this run's own,
            which are kept. So both runs have the same weights at every step, and rounding errors do not grow.
    """

    def __init__(self, instead: list[Tensors] | None = None) -> None:
        self.instead = instead
        self.steps: list[Tensors] = []

    def on_pre_optimizer_step(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        gradients = {n: p.grad.detach().cpu().clone() for n, p in model.named_parameters() if p.grad is not None}
        self.steps.append(gradients)
        if self.instead is None or len(self.steps) > len(self.instead):
            return
        replacements = self.instead[len(self.steps) - 1]
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.grad = replacements[name].to(parameter, copy=True) if name in replacements else None


class RecordedTrainer(Protocol):
    """The trainer attributes that a recorder reads. It wraps `training_step` and methods of the model.

    Some trainers also have `ref_model` or `teacher_model`.
    """

    model: nn.Module
    training_step: Callable[..., Any]

    def add_callback(self, callback: TrainerCallback) -> None:
        """Call `callback` at the events of the training."""


class Recorder(KeepGradients):
    """Records everything visible about a training in each step.

    Attributes:
        weights (`list`): All parameters and buffers after each step.
        states (`list`): The optimizer's states after each step.
        options (`list`): The optimizer's options for each parameter, before each step.
        around (`list`): What a callback sees, after each step and each evaluation.
        changed (`set[str]`): What an evaluation has changed but should not.
        batches (`list`): The inputs of each micro-batch.
        calls (`set`): The states of model, reference and teacher when they were called: mode, gradients, autocast.
    """

    def __init__(self, instead: list[Tensors] | None = None) -> None:
        super().__init__(instead)
        self.weights: list[Tensors] = []
        self.states: list[Tensors] = []
        self.options: list[dict[str, Any]] = []
        self.around: list[dict[str, Any]] = []
        self.changed: set[str] = set()
        self.batches: list[dict[str, Any]] = []
        self.calls: set[tuple[str, ...]] = set()

    def attach(self, trainer: RecordedTrainer) -> None:
        """Record the batches of `trainer`, and the calls of its models."""
        trainer.add_callback(self)
        stock = trainer.training_step

        def training_step(model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self.batches.append(dict(_leaves("", copy.deepcopy(inputs))))
            return stock(model, inputs, *args, **kwargs)

        trainer.training_step = training_step
        for role in ("model", "ref_model", "teacher_model"):
            model = getattr(trainer, role, None)
            if isinstance(model, nn.Module):  # DPO has no second model where its reference is precomputed or an adapter
                model.get_input_embeddings().register_forward_pre_hook(functools.partial(self._called, role))  # type: ignore[operator]

    def _called(self, role: str, module: nn.Module, args: tuple) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        autocast = (
            f"autocast to {torch.get_autocast_dtype(device)}" if torch.is_autocast_enabled(device) else "no autocast"
        )
        mode = f"{role} in {'training' if module.training else 'evaluation'}"
        self.calls.add((mode, "gradients" if torch.is_grad_enabled() else "no gradients", autocast))

    def on_pre_optimizer_step(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        super().on_pre_optimizer_step(args, state, control, model)
        self.options.append(copy.deepcopy(group_options(optimizer, model)))

    def on_step_end(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        self.weights.append(copies(model, buffers=True))
        self.states.append(optimizer_states(optimizer, model))
        self.around.append(surroundings(model, state, control))

    def on_evaluate(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        after = copies(model, buffers=True) | optimizer_states(optimizer, model)
        before = self.weights[-1] | self.states[-1]
        self.changed |= {name for name in before.keys() | after.keys() if not _same(before.get(name), after.get(name))}
        self.changed |= {
            f"gradient of {name}" for name, p in model.named_parameters() if p.grad is not None and p.grad.any()
        }
        now = surroundings(model, state, control)
        trains, shared = "parameters that require gradients", "names of one tensor"
        self.changed |= {what for what in (trains, shared) if now[what] != self.around[-1][what]}
        self.around.append(now)


def _same(one: Any, other: Any, rtol: float = 0.0) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if (one.dtype, one.shape) != (other.dtype, other.shape) or not rtol:
            return one.dtype == other.dtype and torch.equal(one, other)
        return torch.allclose(one.double(), other.double(), rtol, 0.0, equal_nan=True)
    return bool(one == other) if type(one) is type(other) else False


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(f"{name}.{key}" if name else str(key), part)
    elif isinstance(value, list | tuple) and not all(_is_plain(part) for part in value):
        for i, part in enumerate(value):
            yield from _leaves(f"{name}[{i}]", part)
    else:
        yield name, value


def differences(got: list[dict[str, Any]], want: list[dict[str, Any]], rtol: float = 0.0) -> list[str]:
    """Return a message for each value that differs between two lists that should be equal, with its first index.

    Numbers in tensors may differ by `rtol`, relative to each number.
    """
    messages: dict[str, str] = {}
    if len(got) != len(want):
        messages[""] = f"{len(got)} in place of {len(want)}"
    for place, (one, other) in enumerate(zip(got, want, strict=False), 1):
        for name in sorted(one.keys() | other.keys()):
            if name not in messages and not _same(one.get(name), other.get(name), rtol):
                messages[name] = f"{name} (first in {place}: {_short(one, name)}, stock {_short(other, name)})"
    return list(messages.values())


def _short(values: dict[str, Any], name: str) -> str:
    text = repr(values[name]) if name in values else "nothing"
    return text if len(text) <= 60 else f"{text[:57]}..."


def saved_tensors(save: Callable[[str], None], folder: str) -> tuple[Tensors, list[str]]:
    """Call `save` for an empty `folder`. Return the tensors in its safetensors files, and the names of all files."""
    save(folder)
    files = sorted(
        os.path.relpath(os.path.join(at, name), folder) for at, _, names in os.walk(folder) for name in names
    )
    tensors: Tensors = {}
    for name in files:
        if name.endswith(".safetensors"):
            tensors |= load_file(os.path.join(folder, name))
    return tensors, sorted(files)
