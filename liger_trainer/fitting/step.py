"""Runs a few training steps of a model without values, and counts their memory.

The model, its patches and autograd run their real code on tensors that only have sizes. So everything that they save,
recompute and allocate is counted. Four things have stand-ins: attention (`attention.py`), layers that keep a state
(`states.py`), communication (`sharding.py`), and the states of 8-bit optimizers (`optimizers.py`).
"""

import copy
import functools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from transformers.modeling_layers import GradientCheckpointingLayer

from liger_trainer.fitting.images import RowImages, known_numbers
from liger_trainer.fitting.losses import sequences, without_adapter
from liger_trainer.fitting.meta_model import ModelSpec, freed_by_fp8, on_meta, without_values
from liger_trainer.fitting.sharding import Sharding, Units
from liger_trainer.fitting.simulated_memory import SimulatedMemory
from liger_trainer.fitting.states import layers_by_package, layers_side_by_side, run_as_on_gpu
from liger_trainer.fp8.quantize_base import prepare_for_shards
from liger_trainer.memory import switches
from liger_trainer.memory.feature import AUTO
from liger_trainer.memory.host_inputs import OPTION, HostInputs
from liger_trainer.memory.pinned_memory import GIB, PinnedMemory
from liger_trainer.memory.planner import ActivationPlanner
from liger_trainer.memory.summary import CheckpointingSummary
from liger_trainer.trainers.optimizer_in_backward import step_alone
from liger_triton.sizes import sizes_only

WORKSPACE = 32 << 20  # bytes, of cuBLAS, on one stream
_ENDLESS = 1 << 50  # bytes of the host, for the count of pinned memory: more than any machine has
_WITHOUT_RANDOM_STATES = {"preserve_rng_state": False}  # nothing random is computed


@dataclass
class TrainSpec:
    """The settings of a training that decide its memory."""

    shape: ModelSpec
    loss: Callable[..., torch.Tensor]  # a function of `losses.py`
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer | int]  # int: the bytes of its states
    autocast: torch.dtype | None = None
    sharding: Sharding = Sharding()
    accumulates: bool = False  # whether a step has several micro-batches
    checkpointing: dict[str, Any] = field(default_factory=dict)  # options of activation_checkpointing
    reference: bool = False  # whether a reference model also scores the rows
    budget: float | None = None  # memory_budget, in GiB
    in_backward: bool = False  # optimizer_in_backward
    images: RowImages | None = None  # of each row
    # Returns the tokens of each document, for (rows, length) of packed rows
    documents: Callable[[int, int], list[int]] | None = None
    fla: bool = True  # whether flash-linear-attention is installed where the model is trained
    built: dict[bool, nn.Module] = field(default_factory=dict, repr=False)

    def inputs(self, rows: int, length: int) -> dict[str, torch.Tensor]:
        """Return the model's arguments for a micro-batch."""
        rows *= sequences(self.loss)
        if self.images is not None:
            return self.images.batch(rows, length)
        return {"input_ids": torch.zeros(rows, length, dtype=torch.long)}

    def model(self, adapter: bool = True) -> nn.Module:
        """Return a copy of the model on the meta device. It is built once, since building takes longer than a step."""
        return copy.deepcopy(self._built(adapter))

    def _built(self, adapter: bool = True) -> nn.Module:
        if adapter not in self.built:
            self.built[adapter] = on_meta(self.shape, adapter)
        return self.built[adapter]

    def count_state_layers(self) -> tuple[int, int]:
        """Return the number of layers that `fla` is about, and of those that get packed documents side by side."""
        model = self._built()
        side_by_side = [] if self.documents is None else layers_side_by_side(model, self.fla)
        return len(layers_by_package(model)), len(side_by_side)


@dataclass
class MemoryEstimate:
    """The memory of a step, in bytes."""

    weights: int = 0
    gradients: int = 0  # of all weights; with optimizer_in_backward, of the largest one
    states: int = 0  # of the optimizer
    reference: int = 0  # weights of the reference model
    others: int = 0  # cuBLAS' workspace and DDP's buckets
    micro_batch: int = 0  # the peak of forward and backward
    step: int = 0  # the peak of the optimizer's step
    host: int = 0  # pinned memory of the host
    loaded: int = 0  # the weights as loaded, before the frozen base is quantized to FP8
    checkpointing: CheckpointingSummary | None = None  # by `auto`

    @property
    def peak(self) -> int:
        return max(self.micro_batch, self.step, self.loaded)


def estimate_memory(
    job: TrainSpec,
    rows: int,
    length: int,
    checkpointing: bool | str,
    memory_bytes: int,
    like: MemoryEstimate | None = None,
) -> MemoryEstimate:
    """Estimate the memory of steps with micro-batches of `rows` x `length` tokens.

    Args:
        job (`TrainSpec`): The training.
        rows (`int`), length (`int`): Size of a micro-batch. A row of pairs has two sequences of `length`.
        checkpointing (`bool` or `"auto"`): The option `activation_checkpointing`.
        memory_bytes (`int`): Memory of the GPU, for the choice of `auto`.
        like (`MemoryEstimate`, *optional*): The estimate of another size. The parts that do not depend on the size are
            taken from it.
    """
    model = job.model()
    if checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({name: value for name, value in job.checkpointing.items() if name != OPTION} | _WITHOUT_RANDOM_STATES)
        if job.shape.peft_config is not None:
            model.enable_input_require_grads()
    reference = job.model(adapter=False) if job.reference and job.shape.peft_config is None else None
    lengths = None if job.documents is None else job.documents(rows, length)
    for each in (model, reference):
        if each is not None:
            run_as_on_gpu(each, job.fla, lengths, rows)
    with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True), sizes_only():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        host = None
        if checkpointing is True and job.checkpointing.get(OPTION):
            host = PinnedMemory(_ENDLESS, lambda size: torch.empty(size, dtype=torch.uint8, device="meta"), slab=GIB)
            switches.install(model, HostInputs(host))
        simulation = _Simulation(job, model, reference, SimulatedMemory(memory_bytes))
        estimate = simulation.steps(rows, length, checkpointing, like)
        estimate.host = 0 if host is None else host.taken
        return estimate


class _Simulation:
    """Runs the steps of a training, with its model, reference and optimizer. `memory` counts their tensors.

    Attributes:
        need (`MemoryEstimate`): The estimate, filled in as the steps run.
        weights, trained: All weights of the model, and the ones that are trained.
        masters (`list[nn.Parameter]`): What the optimizer steps: the trained weights, or this GPU's shares of them.
        existing (`list[nn.Parameter]`): Tensors that exist before the first step and take memory until the end.
        units (`Units` or `None`): The modules that FSDP2 gathers and shards again, one after the other.
        called, reference: The model and its reference as the loss calls them, within autocast.
    """

    def __init__(self, job: TrainSpec, model: nn.Module, reference: nn.Module | None, memory: SimulatedMemory):
        self.job = job
        self.model = model
        self.memory = memory
        sharding = job.sharding
        compute = sharding.compute if sharding.kind == "fsdp2" else None
        if sharding.kind == "fsdp2":
            prepare_for_shards(model)
        self.weights = without_values(model, compute)
        self.trained = [weight for weight in self.weights if weight.trained]
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        self.need = MemoryEstimate(
            weights=sharding.stored(self.weights),
            gradients=sharding.stored(self.trained),
            others=WORKSPACE + (sharding.stored(self.trained) if sharding.kind == "ddp" else 0),
        )
        freed = freed_by_fp8(model)
        if freed and sharding.kind != "fsdp2":  # FSDP2 shards after quantizing, so it never holds the 16-bit weights
            self.need.loaded = self.need.weights + freed
        self.units = None
        self.masters = [weight.fake for weight in self.trained]
        if sharding.kind == "fsdp2":
            self.units = Units(sharding, model, layers, self.weights, memory)
            shares = [(sharding.share(weight), sharding.stored_dtype(weight)) for weight in self.trained]
            self.masters = [nn.Parameter(torch.empty(size, dtype=dtype)) for size, dtype in shares]
        self.existing = [weight.fake for weight in self.weights] + self.masters
        self.reference: Callable[..., Any] | None = None
        if reference is not None:
            weights = without_values(reference, compute)
            self.existing += [weight.fake for weight in weights]
            self.need.reference = sharding.stored(weights)
            self.reference = self._autocast(reference)
        elif job.reference:
            self.reference = self._autocast(without_adapter(model))
        self.called = self._autocast(model)
        self.optimizer = job.optimizer(self.masters)
        self.all_gradients = self.need.gradients
        if job.in_backward:
            self.need.gradients = max(weight.bytes() for weight in self.trained)
            for weight in self.trained:
                weight.first.register_post_accumulate_grad_hook(functools.partial(self._step_alone, weight.fake))

    def _autocast(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """Return `model` with autocast around each call, like accelerate."""

        def call(**inputs: Any) -> Any:
            with torch.autocast("cpu", dtype=self.job.autocast, enabled=self.job.autocast is not None):
                return model(**inputs)

        return call

    def steps(self, rows: int, length: int, checkpointing: bool | str, like: MemoryEstimate | None) -> MemoryEstimate:
        """Run the steps and return the estimate. With `like`, run one micro-batch without an optimizer step."""
        need = self.need
        memory = self.memory
        planner = None
        if checkpointing == AUTO:
            planner = ActivationPlanner(memory, self.job.budget, warm=True)
            need.checkpointing = planner.summary
        with memory:
            memory.count(self.existing)
            # Add memory that has no tensor here, such as workspaces or the padding of shards.
            memory.add(need.weights + need.others + need.reference - memory.allocated())
            if self.job.in_backward:
                for weight in self.masters:
                    weight.grad = torch.empty_like(weight)
                self._optimize()  # creates the states now; in backward they would come one by one
            elif like is not None:
                need.states = like.states
                memory.add(need.states)
            if like is not None:
                need.step = like.step
                self._micro_batches(rows, length, planner)
                steps = 0
            else:
                # The first step creates the optimizer states. auto measures in the second and chooses in the third.
                steps = 3 if planner else 2
            for _ in range(steps):
                self._micro_batches(rows, length, planner)
                self.memory.highest = self.memory.allocated()
                self._optimize()
                need.step = self.memory.highest
        if planner is not None:
            planner.end()
        return need

    def _micro_batches(self, rows: int, length: int, planner: ActivationPlanner | None) -> None:
        """Run forward and backward pass: twice if gradients are accumulated, since the second adds to the first's."""
        for _ in range(2 if self.job.accumulates else 1):
            self.memory.highest = 0
            if self.units is not None:
                self.units.begin()
            inputs = self.job.inputs(rows, length)
            self.memory.count(inputs.values())
            if planner is None:
                self._micro_batch(inputs)
            else:
                planner.run(self.model, self._micro_batch, (inputs,), {})
            del inputs
            if self.units is not None:
                self.units.end()
            self.need.micro_batch = self.memory.highest

    def _micro_batch(self, inputs: dict[str, torch.Tensor]) -> None:
        with nullcontext() if self.job.images is None else known_numbers():
            self.job.loss(self.called, self.reference, inputs).backward()

    def _step_alone(self, weight: nn.Parameter, _: torch.Tensor) -> None:
        """Step `weight` in the backward pass, as `optimizer_in_backward` does. `_` is what the hook is on."""
        if isinstance(self.optimizer, int):
            weight.grad = None
        else:
            step_alone(self.optimizer, self.optimizer.param_groups[0], weight)

    def _optimize(self) -> None:
        """Run the optimizer's step, and free the gradients. The first call counts the states that it creates."""
        if self.job.shape.has_tower:  # rows of text give the tower no gradient
            for master in self.masters:
                if master.grad is None:
                    master.grad = torch.empty_like(master)
        before = self.memory.allocated()
        if isinstance(self.optimizer, int):
            if not self.need.states:
                self.need.states = self.optimizer
                self.memory.add(self.optimizer)
        else:
            if self.units is not None:
                self.units.forget_gradients()
                for master in self.masters:
                    master.grad = torch.empty_like(master)
            self.optimizer.step()
        for parameter in self.masters:
            parameter.grad = None
        if self.units is not None:
            self.units.forget_gradients()
        if not self.need.states:
            self.need.states = self.memory.allocated() - before + self.all_gradients
