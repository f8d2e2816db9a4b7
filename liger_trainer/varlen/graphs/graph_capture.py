"""Capture one size: run the backbone's code, record it as graphs, and compare their replay with that code."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from liger_trainer._logging import logger
from liger_trainer.varlen.graphs.graph_recorder import GraphRecorder
from liger_trainer.varlen.graphs.input_embeddings import PER_LAYER
from liger_trainer.varlen.graphs.refusals import NotCapturable
from liger_trainer.varlen.graphs.snapshot import Snapshot
from liger_trainer.varlen.graphs.static_batch import CapturedSize, TokenBatch, with_other_rows
from liger_trainer.varlen.graphs.static_gradients import GradientBuffers
from liger_trainer.varlen.rows import Rows, use_rows

WORTHWHILE = 0.95  # a replay that takes a larger fraction of the time of Python's code is not used
# Largest relative difference between a replay and the code it was captured from, in the L2 norm. Both run the same
# kernels on the same numbers. Only kernels that add in any order differ, such as attention's backward, and in 16 bits
# their rounding grows from layer to layer. A replay that reads other rows, weights or random numbers is off by more.
CLOSE = 0.05
SAMPLE = 4096  # elements of each tensor, or up to twice as many, that are compared after a capture


class DoesNotPay(Exception):  # noqa: N818
    """Raised if a replay is not faster than Python's code, or if its graphs leave too little memory."""


class GraphCapture:
    """One capture of a size.

    Args:
        size (`CapturedSize`): The size. It gets the graphs.
        gradients (`GradientBuffers`): The buffers that its backward adds gradients to.
        recorder (`GraphRecorder`): The recorder of the device.
        forward (`Callable`): The forward of the backbone.
        constants (`dict`): The arguments of `forward` that are the same in every replay.
        snapshot (`Snapshot`): The state of the modules that hold the parameters.
        parameters (`list[nn.Parameter]`): The trained parameters of the captured modules.
        trains (`bool`): Whether there is a backward.
        outside (`list[nn.Parameter]`): The trained parameters of modules that run before each replay, such as the input
            embeddings. None of them may get a gradient in the capture.

    Attributes:
        alias_of (`dict`): For each parameter, the one that replaces it while the backbone runs. Both share their
            memory, but an alias has a gradient and autograd nodes of its own. The node that accumulates a parameter's
            gradient belongs to the stream on which it was first made, and users' hooks are attached to it.
    """

    def __init__(
        self,
        size: CapturedSize,
        gradients: GradientBuffers,
        recorder: GraphRecorder,
        forward: Callable[..., Any],
        constants: dict[str, Any],
        snapshot: Snapshot,
        parameters: list[nn.Parameter],
        trains: bool,
        outside: list[nn.Parameter],
    ):
        self.size = size
        self.gradients = gradients
        self.recorder = recorder
        self.trains = trains
        size.gradients, size.snapshot = gradients, snapshot
        self.alias_of = {p: nn.Parameter(p.detach(), requires_grad=True) for p in (*parameters, *outside)}
        self._outside = outside
        self._places = []  # (table, name, parameter): where modules hold the parameters that have an alias
        for module in snapshot.modules:
            for name, p in module._parameters.items():
                if p is not None and p in self.alias_of:
                    self._places.append((module._parameters, name, p))
        self._forward, self._constants = forward, constants
        self._outputs: list[torch.Tensor] = []  # with their autograd graph, between forward and backward
        self._bytes_kept = 0  # what the forward keeps for the backward
        self._samples: list[torch.Tensor] = []  # of the outputs of the last forward
        self._rows: Rows = size.rows

    def forward(self) -> None:
        """Run the backbone on the static inputs, and copy its outputs into the buffers of `exchange`."""
        size = self.size
        call: dict[str, Any] = {
            "inputs_embeds": size.embeds,
            "position_ids": size.positions,
            "attention_mask": size.mask,
            "use_cache": False,
        }
        if size.per_layer is not None:
            call[PER_LAYER] = size.per_layer
        with self._aliases(), torch.set_grad_enabled(self.trains), use_rows(self._rows):
            outputs = self._forward(**call, **self._constants)
            tensors = _tensors_of(outputs)
        if tensors[0].requires_grad != self.trains:
            raise NotCapturable("its output does not depend on what is trained")
        buffers = size.buffers
        if not buffers.exchange:
            buffers.exchange = [x.new_zeros(x.shape[0], buffers.tokens, x.shape[2]) for x in tensors]
        for buffer, output in zip(size.exchange, tensors, strict=True):
            buffer.copy_(output.detach())
        size.output_class = type(outputs)
        self._outputs = tensors if self.trains else []

    def backward(self) -> None:
        """Run the backward from the gradients in `exchange`, and put the gradients of the inputs into their buffers."""
        size = self.size
        assert self._outputs, "the forward comes first"
        size.embeds.grad = None
        device = size.embeds.device.type
        # Logits of routers need no gradient where layers are recomputed by PyTorch's reentrant checkpointing.
        pairs = [(x, gradient) for x, gradient in zip(self._outputs, size.exchange, strict=True) if x.requires_grad]
        # The aliases are needed here too, because checkpointed layers run again. A training step runs its backward
        # outside of autocast.
        with self._aliases(), torch.autocast(device, enabled=False):
            torch.autograd.backward([x for x, _ in pairs], [gradient for _, gradient in pairs])
        if size.embeds.grad is not None:
            size.exchange[0].copy_(size.embeds.grad)
            size.embeds.grad = None
        if size.per_layer_needs_grad:
            self._take_gradient_per_layer()
        self._outputs = []

    def _take_gradient_per_layer(self) -> None:
        """Copy the gradient of the embeddings for each layer to its buffer."""
        size, buffers = self.size, self.size.buffers
        assert size.per_layer is not None, "it needs a gradient"
        if buffers.per_layer_grad is None:
            assert buffers.per_layer is not None, "it has a part of it"
            buffers.per_layer_grad = torch.zeros_like(buffers.per_layer)
        gradient = size.per_layer.grad
        size.per_layer.grad = None
        if gradient is None:
            size.per_layer_grad.zero_()
        else:
            size.per_layer_grad.copy_(gradient)

    @contextlib.contextmanager
    def _aliases(self) -> Iterator[None]:
        """Context manager: the modules have the aliases in place of their parameters."""
        for table, name, p in self._places:
            table[name] = self.alias_of[p]
        try:
            yield
        finally:
            for table, name, p in self._places:
                table[name] = p

    def capture(self, batch: TokenBatch, random_state: Any, timed: bool) -> None:
        """Record forward and backward, and compare their replay with Python's code for `batch`.

        Raises:
            NotCapturable: The backbone returns more than hidden states, or the replay computes something else.
            DoesNotPay: The graphs leave too little memory or, with `timed`, the replay is not faster.
        """
        size, recorder = self.size, self.recorder
        if not size.buffers.zeros_stay_finite:
            with recorder.warm_up():
                self._refuse_zeros_that_overflow(batch)
        size.fill(batch)
        with recorder.warm_up():
            wanted = self._results_of(self._run_python, random_state)
            python_seconds = recorder.seconds_of(self._run_step) if timed else 0.0
            other = with_other_rows(batch) if size.chunks is not None else None
            wanted_of_other = [] if other is None else self._uncaptured_results(other, random_state)
        # A layer's temporary tensors, and gaps between the blocks of the pool, may take as much again.
        if not recorder.make_room(2 * self._bytes_kept):
            raise DoesNotPay(f"{size.tokens} tokens and more: too little memory is left for their graphs")
        size.forward = recorder.record(self.forward)
        if self.trains:
            size.backward = recorder.record(self.backward)
        if other is not None:
            size.fill(other)
            self._compare(self._results_of(self._replay, random_state), wanted_of_other)
        size.fill(batch)
        got = self._results_of(self._replay, random_state)
        self._compare(got, wanted)
        if timed:
            replay_seconds = recorder.seconds_of(self._replay)
            logger.debug("%d tokens: Python %.4f s, replay %.4f s", size.tokens, python_seconds, replay_seconds)
            if replay_seconds > WORTHWHILE * python_seconds:
                raise DoesNotPay(f"{size.tokens} tokens and more: replaying is not faster")
        if recorder.bytes_free() < 0:
            raise DoesNotPay(f"{size.tokens} tokens and more: their graphs leave too little memory")

    def _uncaptured_results(self, batch: TokenBatch, random_state: Any) -> list[torch.Tensor]:
        """Return samples of all results for `batch`, computed without a capture.

        A package may cache what it computed from the offsets of rows. A replay would then use the captured rows for
        every batch, and comparing a replay of the captured rows would not show it.
        """
        size = self.size
        size.fill(batch)
        filling = size.tokens - batch.tokens
        self._rows = Rows([*batch.lengths, *([filling] if filling else [])], size.embeds.device)
        try:
            return self._results_of(self._run_python, random_state)
        finally:
            self._rows = size.rows

    def _refuse_zeros_that_overflow(self, batch: TokenBatch) -> None:
        """Raise `NotCapturable` if the filler row, with embeddings of zero, becomes NaN.

        A norm without an epsilon does that, and the backward of a square root. Then all weights would get gradients of
        NaN.
        """
        size = self.size
        zeros_per_layer = None if batch.per_layer is None else torch.zeros_like(batch.per_layer)
        size.fill(batch._replace(embeds=torch.zeros_like(batch.embeds), per_layer=zeros_per_layer))
        self.forward()
        norms = [buffer.detach().norm() for buffer in size.exchange]
        if self.trains:
            torch._foreach_zero_(size.exchange)  # the gradient of the filler row's output is zero in a replay too
            self._begin_gradients()
            self.backward()
            gradients = [alias.grad for alias in self.alias_of.values() if alias.grad is not None]
            if size.per_layer_needs_grad:
                norms.append(size.per_layer_grad.norm())
            norms += [size.exchange[0].norm(), *(torch._foreach_norm(gradients) if gradients else ())]
            self._begin_gradients()
        if not bool(torch.stack([x.float() for x in norms]).isfinite().all()):
            raise NotCapturable("embeddings of zero, which fill up a size, become NaN in it")
        size.buffers.zeros_stay_finite = True

    def _begin_gradients(self) -> None:
        """Set the gradients of all aliases to their buffers, filled with zeros. Without a buffer they are None."""
        self.gradients.zero(self.alias_of)
        for p, alias in self.alias_of.items():
            alias.grad = self.gradients.buffers.get(p)

    def _run_python(self) -> None:
        """Run the backbone's code once. Note a sample of its outputs, its memory, and which parameters learn."""
        free = self.recorder.bytes_free()
        self.forward()
        self._bytes_kept = max(self._bytes_kept, free - self.recorder.bytes_free())
        self._samples = [_sample(x) for x in self.size.exchange]
        if self.trains:
            # Any upstream gradient will do. `exchange` still holds the outputs, and `_replay` uses them as well.
            self._backward_noting_gradients()

    def _run_step(self) -> None:
        """Run the backbone's code and nothing else, for the clock."""
        self.forward()
        if self.trains:
            self.backward()

    def _backward_noting_gradients(self) -> None:
        """Run the backward, and note the parameters that get a gradient.

        The others get none in a replay either, because an optimizer would decay a weight with a gradient of zero. The
        gradients that the first run leaves become the buffers of all later runs.
        """
        learned: list[nn.Parameter] = []
        hooks = [
            alias.register_post_accumulate_grad_hook(lambda _, p=p: learned.append(p))  # type: ignore[misc]
            for p, alias in self.alias_of.items()
        ]
        try:
            self.backward()
        finally:
            for hook in hooks:
                hook.remove()
        got_gradients = set(map(id, learned))
        if any(id(p) in got_gradients for p in self._outside):
            raise NotCapturable(
                "a weight of modules around its layers, such as the input embeddings, learns in them too"
            )
        for p in learned:
            gradient = self.alias_of[p].grad
            assert gradient is not None, "it has just been added to"
            self.gradients.keep(p, gradient)
        self.size.learned = learned

    def _replay(self) -> None:
        size = self.size
        assert size.forward is not None, "it was recorded"
        size.forward.replay()
        self._samples = [_sample(x) for x in size.exchange]
        if size.backward is not None:
            size.backward.replay()

    def _results_of(self, run: Callable[[], None], random_state: Any) -> list[torch.Tensor]:
        """Run forward and backward from zero gradients. Returns samples of all results."""
        self.recorder.set_random_state(random_state)
        self._begin_gradients()
        run()
        size = self.size
        results = list(self._samples)
        if size.needs_grad:
            results.append(_sample(size.exchange[0]))
        if size.per_layer_needs_grad:
            results.append(_sample(size.per_layer_grad))
        if size.learned:
            # All in one norm: the gradient of some parameters, such as the bias of keys, is nothing but rounding.
            results.append(torch.cat([_sample(self.gradients.buffers[p]) for p in size.learned]))
        self.gradients.zero(self.alias_of)
        return results

    def _compare(self, got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
        """Raise `NotCapturable` if a replay differs from Python's code for the same batch and random numbers."""
        if len(got) != len(wanted):
            raise NotCapturable("the replay gives other gradients than the code that was captured")
        for got_one, wanted_one in zip(got, wanted, strict=True):
            # A batch may overflow in fp16, or hold a NaN. The replay then has to have the same elements not finite.
            same_overflows = torch.equal(got_one.isfinite(), wanted_one.isfinite())
            finite = [torch.where(x.isfinite(), x, 0) for x in (got_one, wanted_one)]
            difference = (finite[0] - finite[1]).norm()
            if not same_overflows or not bool(difference <= CLOSE * finite[1].norm() + 1e-12):
                raise NotCapturable("the replay computes something else than the code that was captured")


def _tensors_of(outputs: Any) -> list[torch.Tensor]:
    """Return the hidden states (1, T, H) of a backbone's outputs and, if there are any, the router logits (layers, T,
    experts).

    Raises:
        NotCapturable: The backbone returns something else.
    """
    filled = [name for name, value in outputs.items() if value is not None]
    if filled == ["last_hidden_state"]:
        return [outputs["last_hidden_state"]]
    if filled == ["last_hidden_state", "router_logits"]:
        hidden, routers = outputs["last_hidden_state"], outputs["router_logits"]
        shapes = {x.shape if isinstance(x, torch.Tensor) else None for x in routers}
        if len(shapes) == 1 and routers[0] is not None and routers[0].shape[:-1] == hidden.shape[1:2]:
            return [hidden, torch.stack(tuple(routers))]
        raise NotCapturable("its routers return other logits than one tensor for each layer")
    raise NotCapturable(f"the backbone returns {', '.join(filled)}")


def _sample(x: torch.Tensor) -> torch.Tensor:
    """Return every k-th element of x in fp32: `SAMPLE` of them to twice as many, or all if x is smaller."""
    flat = x.detach().flatten()
    return flat[:: max(1, flat.numel() // SAMPLE)].float().clone()
