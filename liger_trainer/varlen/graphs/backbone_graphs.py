"""Captures the backbone of a model as two CUDA graphs for each size of batch: its forward and its backward pass.

In a step of few tokens the GPU waits for Python. Replaying a graph launches a few thousand kernels with one call. The
tokens of a batch are copied into one row of a static buffer. A filler row of zeros, which no token attends to, pads it
to the size. The head, the loss and the optimizer stay outside.

    embeddings -> copy into the static buffer -> replay the forward -> clone of the real tokens -> head, loss
    gradients of parameters <- add to static buffers <- replay the backward <- copy of the upstream gradient

Four rules keep this exact:

- A size is captured from the model's own Python code, after that code has run once with the same state (`Snapshot`). It
  is used only after its replay gave the results of that code for the same batch.
- A graph is replayed only if `Snapshot` finds nothing changed. Otherwise the model's own code runs in that call.
- No tensor of a graph leaves it: outputs are clones, and a gradient is added into a buffer that `.grad` refers to only
  until it is None again.
- If another replay has overwritten the activations of a forward, that forward is replayed again before its backward.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from liger_trainer._logging import logger
from liger_trainer.varlen.graphs.capture_summary import CaptureSummary
from liger_trainer.varlen.graphs.graph_capture import DoesNotPay, GraphCapture
from liger_trainer.varlen.graphs.graph_recorder import GraphRecorder
from liger_trainer.varlen.graphs.input_embeddings import PER_LAYER, Embedded, InputEmbeddings
from liger_trainer.varlen.graphs.refusals import NotCapturable, refuse_hooks, refuse_process
from liger_trainer.varlen.graphs.replay import Replayed
from liger_trainer.varlen.graphs.side_effects import SideEffects
from liger_trainer.varlen.graphs.snapshot import Snapshot
from liger_trainer.varlen.graphs.static_batch import (
    Bounds,
    CapturedSize,
    SharedBuffers,
    TokenBatch,
    bounds_of,
    round_up,
    rounded_bounds,
)
from liger_trainer.varlen.graphs.static_gradients import GradientBuffers
from liger_trainer.varlen.rows import NotForRows, Rows

MOST_MODES = 4  # modes that have captures at the same time; the least recently used is dropped
MOST_SIZES = 16  # captured sizes of each mode; the least recently used is dropped

# transformers passes these on to a backbone, but no layer in a proof reads them.
_UNREAD = ("num_items_in_batch", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
_ROUTERS = "output_router_logits"  # the only output of graphs other than hidden states
_STATIC_INPUTS = ("input_ids", "inputs_embeds", PER_LAYER, "position_ids", "attention_mask", "use_cache")


@dataclass
class CapturedMode:
    """The captures of one state of the model, such as adapters on or off.

    Attributes:
        key (`tuple`): The properties that its calls have in common: gradients, dtypes, arguments.
        snapshot (`Snapshot`): The state that must not have changed.
        trains (`bool`): Whether there is a backward.
        draws (`bool`): Whether a layer draws random numbers, found in the first call.
        why_not (`str` or None): Why this mode is not captured, found in the first call.
        sizes (`dict[tuple[int, bool], CapturedSize]`): By their tokens, and by whether rows share prompts.
        seen (`dict[tuple[int, bool], Bounds]`): The capacity that uncaptured calls needed, by the same keys.
        buffers (`SharedBuffers` or None): The buffers of all sizes, allocated by the first capture.
        last_used (`int`): `BackboneGraphs.clock` at the last replay.
    """

    key: tuple
    snapshot: Snapshot
    trains: bool
    draws: bool = True
    why_not: str | None = "its first call has not come to its end"
    sizes: dict[tuple[int, bool], CapturedSize] = field(default_factory=dict)
    seen: dict[tuple[int, bool], Bounds] = field(default_factory=dict)
    buffers: SharedBuffers | None = None
    last_used: int = 0


class BackboneGraphs:
    """The captures of one backbone in one training.

    Args:
        backbone (`nn.Module`): The backbone. Its input embeddings are not captured.
        around (`Callable`): Lists the current modules that affect calls of the backbone.
        recorder (`GraphRecorder`): The recorder of the device.
        summary (`CaptureSummary`): The summary for the training report.
        keeps_state (`bool`, *optional*, defaults to `False`): Whether layers of the backbone keep a state.
        per_layer (`tuple[str, ...]`, *optional*): See `InputEmbeddings`.
    """

    def __init__(
        self,
        backbone: nn.Module,
        around: Callable[[], list[nn.Module]],
        recorder: GraphRecorder,
        summary: CaptureSummary,
        keeps_state: bool = False,
        per_layer: tuple[str, ...] = (),
    ):
        self.backbone = backbone
        self.inputs = InputEmbeddings(backbone, per_layer)
        self.keeps_state = keeps_state
        self.around = around
        self.recorder = recorder
        self.summary = summary
        self.gradients = GradientBuffers()
        self.modes: list[CapturedMode] = []
        self.off: str | None = None  # why nothing is captured from now on
        self.generation = 0  # of the activations in the pool, which every replay overwrites
        self.clock = 0  # counts replays and new modes, to find the least recently used mode and size
        self.may_capture = False  # True once the optimizer has its states
        self.largest = 0  # the tokens that the pool has room for
        self.worthwhile = 0  # the tokens of the largest size with a replay faster than the model's code
        self.too_large: int | None = None  # the tokens of the smallest size that was slower, or lacked memory
        self.why_too_large = ""
        # An input of `Replayed` that requires a gradient, so its outputs do too, even if the embeddings are frozen.
        self.carrier = torch.zeros((), requires_grad=True)
        self._unmatched = 0  # modes that were dropped before any replay
        self._snapshot: Snapshot | None = None  # the one that holds for the running call
        self._begun: CapturedMode | None = None  # the mode that the running call has begun
        self._difference: str | None = None  # why no snapshot holds for the running call

    def find_snapshot(self) -> bool:
        """Find the snapshot that holds for the call that starts now. Return whether there is one.

        If so, everything that was checked before its capture still holds.
        """
        self._snapshot = self._difference = None
        snapshots = [mode.snapshot for mode in sorted(self.modes, key=lambda mode: -mode.last_used)]
        for snapshot in dict.fromkeys(snapshots):
            if snapshot.holds():
                self._snapshot = snapshot
                return True
        if snapshots:
            self._difference = snapshots[0].difference()
        return False

    def run(
        self, forward: Callable[..., Any], run_uncaptured: Callable[..., Any], rows: Rows, call: dict[str, Any]
    ) -> Any:
        """Replay a call of the backbone, or run its own code and count the reason in the summary.

        Args:
            forward (`Callable`): The forward of the backbone.
            run_uncaptured (`Callable`): Runs the backbone's own code for this call, from `Embedded` if it gets them.
            rows (`Rows`): The rows of the call.
            call (`dict`): Its arguments: `input_ids` (B, S) or `inputs_embeds` (B, S, H), in one row of real tokens or
                in rows without padding.
        """
        try:
            self._refuse_now()
            constants = constants_of(call)
            embedded = self.inputs.of(call)
        except NotCapturable as reason:
            self.summary.count(str(reason))
            return run_uncaptured()
        batch, shape = _batch_of(rows, embedded, call)
        self._begun = None
        if self._snapshot is None:  # the call may have put the model into evaluation mode since, as Medusa's does
            self.find_snapshot()
        size = None
        try:
            mode = self._mode_for(batch, constants)
            size = self._size_for(mode, batch, forward, dict(constants))
        except NotCapturable as reason:
            self.summary.count(str(reason))
        if size is None:
            # Not within the `except`. In torch 2.11 a checkpointed layer that raises, in a capture, leaves its hooks on
            # saved tensors in place until its frames are gone.
            if self._begun is not None:  # the first call of a mode shows whether a replay would leave something out
                return self._run_first(self._begun, embedded, run_uncaptured)
            # The ids have been embedded already. Embedding them again would run hooks and draw random numbers twice.
            return run_uncaptured(embedded)
        self.summary.replayed += 1
        self.clock += 1
        mode.last_used = size.last_used = self.clock
        hidden, *routers = self._replay(mode, size, batch)
        outputs = {"last_hidden_state": hidden.view(*shape, -1)}
        if routers:
            outputs["router_logits"] = routers[0].unbind()
        return size.output_class(**outputs)

    def release(self) -> None:
        """Free all graphs and their memory. Gradients keep their values."""
        self.modes.clear()
        self.gradients = GradientBuffers()

    # The call

    def _refuse_now(self) -> None:
        """Raise `NotCapturable` if captures are off, or if a mode or hook of the process forbids a replay."""
        if self.off is not None:
            raise NotCapturable(self.off)
        refuse_process()

    def _run_first(self, mode: CapturedMode, embedded: Embedded, run_uncaptured: Callable[..., Any]) -> Any:
        """Run the first call of a mode, and record its side effects."""
        effects = SideEffects(mode.snapshot.modules, self.recorder, embedded.embeds.device)
        try:
            outputs = run_uncaptured(embedded)
        except NotForRows:
            # The caller computes rows that share prompts again without sharing. That call begins its own mode.
            self.modes.remove(mode)
            raise
        mode.draws, mode.why_not = effects.draws(), effects.why_not()
        return outputs

    def _mode_for(self, batch: TokenBatch, constants: tuple) -> CapturedMode:
        """Return the mode for the current state of the model, or begin one and raise `NotCapturable`."""
        grad = torch.is_grad_enabled()
        input_kinds = [_kind_of(x, grad) for x in (batch.embeds, batch.per_layer)]
        key = (grad, *input_kinds, batch.positions.shape[:-2], constants)
        for mode in self.modes:
            if mode.key == key and mode.snapshot is self._snapshot:
                return mode
        self._begin_mode(key)
        if self._begun is not None:
            self._note_rows(self._begun, batch)
        raise NotCapturable(self._difference or "the first call of its kind")

    def _begin_mode(self, key: tuple) -> None:
        """Begin a mode for calls with `key`, and drop the least recently used one if there are too many."""
        # A model that changes from call to call would capture again and again, and never replay.
        if len(self.modes) == MOST_MODES:
            oldest = min(self.modes, key=lambda mode: mode.last_used)
            self.modes.remove(oldest)
            self._unmatched += not any(size.last_used for size in oldest.sizes.values())
            if self._unmatched > MOST_MODES:
                self._turn_off(f"the model changes from call to call: {self._difference}")
                return
        if self._snapshot is None:
            refuse_hooks(self.backbone, self.inputs.modules)
        # The modules are listed again, because an adapter or a layer may have been added since the last snapshot.
        snapshot = self._snapshot or Snapshot(self.around(), self.inputs.of_tokens)
        grad, *input_kinds = key[:3]
        an_input_trains = any(kind is not None and kind.requires_grad for kind in input_kinds)
        trains = grad and (an_input_trains or any(True for _ in self._captured_parameters(snapshot)))
        self.clock += 1
        self._begun = CapturedMode(key, snapshot, trains, last_used=self.clock)
        self.modes.append(self._begun)

    def _captured_parameters(self, snapshot: Snapshot) -> Iterator[nn.Parameter]:
        """Yield the trained parameters inside the capture: the backbone's, without its input embeddings."""
        outside = set(map(id, self.inputs.parameters))
        inside = {id(p) for p in self.backbone.parameters()} - outside
        for p in snapshot.trained:
            if id(p) in inside:
                yield p

    def _turn_off(self, reason: str) -> None:
        """Capture nothing more in this training, free all graphs, and warn."""
        self.off = reason
        self.release()
        logger.warning(f"cuda_graphs: steps are not captured from now on, because {reason}.")

    # Captures

    def _size_for(
        self, mode: CapturedMode, batch: TokenBatch, forward: Callable[..., Any], constants: dict[str, Any]
    ) -> CapturedSize:
        """Return the graphs for a batch, or capture them. Raises `NotCapturable`."""
        if mode.why_not is not None:  # its first call had side effects
            raise NotCapturable(mode.why_not)
        tokens = round_up(batch.tokens)
        size = mode.sizes.get((tokens, batch.layout is not None))
        if size is not None and size.takes(batch):
            return size
        if self.too_large is not None and tokens >= self.too_large:
            raise NotCapturable(self.why_too_large)
        if not self.may_capture:
            self._note_rows(mode, batch)
            raise NotCapturable("captures begin after the first step of the optimizer")
        holds_gradients = mode.trains and self.gradients.in_use()
        if holds_gradients and not self.recorder.may_set_aside(self.gradients.size):
            raise NotCapturable("captures wait until no gradient of the user's lies in a buffer")
        if self.keeps_state and batch.tokens == 1:
            raise NotCapturable("a batch of one token has no other rows to compare a replay with")
        if tokens > self.largest:
            self._begin_pool(tokens)
        with self.gradients.set_aside() if holds_gradients else contextlib.nullcontext():
            return self._capture_size(mode, batch, tokens, forward, constants)

    def _note_rows(self, mode: CapturedMode, batch: TokenBatch) -> None:
        """Remember what an uncaptured batch needs, so that no size is captured again when such a batch comes back."""
        tokens = round_up(batch.tokens)
        key = (tokens, batch.layout is not None)
        bounds = bounds_of(batch, tokens)
        before = mode.seen.get(key, bounds)
        mode.seen[key] = Bounds(*(max(pair) for pair in zip(before, bounds, strict=True)))

    def _bounds_alike(self, mode: CapturedMode, shares: bool) -> list[Bounds]:
        """Return the capacity of the mode's sizes, and the capacity that its uncaptured calls needed.

        Sizes that are too large to be captured are left out. Their calls may have many rows, and in every replay
        attention launches work for each row of the capacity, used or not.
        """
        alike = [size.bounds for (_, shared), size in mode.sizes.items() if shared == shares]
        for (tokens, shared), bounds in mode.seen.items():
            if shared == shares and (self.too_large is None or tokens < self.too_large):
                alike.append(bounds)
        return alike

    def _begin_pool(self, tokens: int) -> None:
        """Drop all captures, so that a new largest size is captured first.

        In a pool, smaller sizes reuse the memory of a larger one that was captured before them. Captured in ascending
        order, each size would take memory of its own: 61 % more memory for a 1B model on Alpaca rows, instead of 15 %.
        Training reaches its largest size within a few steps, because sizes are an eighth apart.
        """
        for mode in self.modes:
            mode.sizes.clear()
            mode.buffers = None
        self.recorder.begin_pool()
        self.largest = tokens

    def _capture_size(
        self, mode: CapturedMode, batch: TokenBatch, tokens: int, forward: Callable[..., Any], constants: dict[str, Any]
    ) -> CapturedSize:
        """Capture the graphs for a batch, and add them to the mode."""
        shares = batch.layout is not None
        key = (tokens, shares)
        if len(mode.sizes) == MOST_SIZES and key not in mode.sizes:
            del mode.sizes[min(mode.sizes, key=lambda key: mode.sizes[key].last_used)]
        alike = self._bounds_alike(mode, shares)
        needed = bounds_of(batch, tokens)
        if self.keeps_state:
            needed = needed._replace(rows=needed.rows + 1)  # a capture is compared with other rows too
        bounds = rounded_bounds(needed, alike, tokens)
        begin = time.perf_counter()
        if mode.buffers is None:
            mode.buffers = SharedBuffers(batch.embeds, self.largest, batch.per_layer)
        _, embeds_kind, per_layer_kind, *_ = mode.key
        needs_grad = mode.trains and embeds_kind.requires_grad
        per_layer_needs_grad = mode.trains and per_layer_kind is not None and per_layer_kind.requires_grad
        size = CapturedSize(batch, tokens, bounds, mode.buffers, needs_grad, self.keeps_state, per_layer_needs_grad)
        self._capture(mode, size, batch, forward, constants)
        mode.sizes[key] = size
        self.summary.sizes.append(tokens)
        self.summary.seconds += time.perf_counter() - begin
        return size

    def _capture(
        self,
        mode: CapturedMode,
        size: CapturedSize,
        batch: TokenBatch,
        forward: Callable[..., Any],
        constants: dict[str, Any],
    ) -> None:
        """Record the graphs of `size`, and compare their replay with the code that they were recorded from.

        Raises:
            NotCapturable: The capture failed, and `off` is set. Or its replay does not pay, and `too_large` is set.
        """
        state = self.recorder.random_state()
        trained = mode.snapshot.trained if mode.trains else []
        parameters = list(self._captured_parameters(mode.snapshot)) if mode.trains else []
        captured = set(map(id, parameters))
        outside = [p for p in trained if id(p) not in captured]
        timed = size.tokens > self.worthwhile  # a smaller size gains more from a replay, so it needs no timing
        try:
            with self._capture_conditions():
                run = GraphCapture(
                    size,
                    self.gradients,
                    self.recorder,
                    forward,
                    constants,
                    mode.snapshot,
                    parameters,
                    mode.trains,
                    outside,
                )
                run.capture(batch, state, timed)
            self.gradients.count_holders()
            self.worthwhile = max(self.worthwhile, size.tokens)
        except NotForRows as error:
            self._turn_off(str(error))
            raise NotCapturable(str(error)) from error
        except DoesNotPay as error:
            self.too_large, self.why_too_large = size.tokens, str(error)
            self.gradients.drop_new()
            size.forward = size.backward = None
            if not any(mode.sizes for mode in self.modes):
                self._begin_pool(0)  # gives back the memory of this attempt
            raise NotCapturable(str(error)) from error
        except (RuntimeError, NotCapturable) as error:  # also torch.OutOfMemoryError and torch.AcceleratorError
            text = str(error).split("\n")[0]
            error.__traceback__ = None  # its frames hold tensors of the pool
            del error
            self.recorder.after_failure()
            self._turn_off(f"a capture has failed: {text}")
            raise NotCapturable(f"a capture has failed: {text}") from None
        except BaseException:  # Ctrl-C: the run ends, with random numbers and gradients as they were
            self.recorder.after_failure()
            self.release()
            raise
        finally:
            self.recorder.set_random_state(state)
            self.generation += 1  # the capture has replayed, so it has overwritten activations in the pool

    @contextlib.contextmanager
    def _capture_conditions(self) -> Iterator[None]:
        """Context manager: disable autocast's weight cache, which would keep tensors of the capture."""
        cached = torch.is_autocast_cache_enabled()
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(False)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(cached)

    # Replays

    def _replay(self, mode: CapturedMode, size: CapturedSize, batch: TokenBatch) -> tuple[torch.Tensor, ...]:
        """Return the hidden states (1, N, H) of a batch, and router logits (layers, N, experts) if it asks for them."""
        if not mode.trains:
            return self.replay_forward(size, batch)
        return Replayed.apply(batch.embeds, batch.per_layer, self.carrier, self, mode.draws, size, batch)

    def replay_forward(self, size: CapturedSize, batch: TokenBatch) -> tuple[torch.Tensor, ...]:
        """Copy a batch into the static buffers, replay the forward, and return clones of its outputs."""
        assert size.forward is not None, "it was captured"
        size.fill(batch)
        size.forward.replay()
        self.generation += 1
        return tuple(buffer[:, : batch.tokens].clone() for buffer in size.exchange)


def constants_of(call: dict[str, Any]) -> tuple:
    """Return the arguments of a call that are constant in its graphs, as sorted (name, value).

    Raises:
        NotCapturable: One of them is not a number or a string, such as the visual embeddings of Qwen3-VL.
    """
    constants = []
    for name, value in sorted(call.items()):
        if name in _STATIC_INPUTS or name in _UNREAD or value is None:
            continue
        if name.startswith("output_") and name != _ROUTERS and value:
            raise NotCapturable(f"the call asks for {name}")
        if not isinstance(value, bool | int | float | str):
            raise NotCapturable(f"its argument {name} is a {type(value).__name__}")
        constants.append((name, value))
    return tuple(constants)


class _KindOfInput(NamedTuple):
    """The properties of an input that are the same in all calls of a mode."""

    requires_grad: bool
    dtype: torch.dtype
    shape: torch.Size  # without the tokens


def _kind_of(x: torch.Tensor | None, grad: bool) -> _KindOfInput | None:
    return None if x is None else _KindOfInput(grad and x.requires_grad, x.dtype, x.shape[2:])


def _batch_of(rows: Rows, embedded: Embedded, call: dict[str, Any]) -> tuple[TokenBatch, tuple[int, int]]:
    """Return the batch of a call as one row, and its shape (B, S)."""
    embeds, per_layer = embedded
    batch, length = embeds.shape[:2]
    positions = call.get("position_ids")
    if positions is None:
        positions = torch.arange(length, device=embeds.device)[None]
    positions = positions.expand(*positions.shape[:-2], batch, length)
    positions = positions.reshape(*positions.shape[:-2], 1, batch * length)
    embeds = embeds.reshape(1, batch * length, -1)
    if per_layer is not None:
        per_layer = per_layer.reshape(1, batch * length, *per_layer.shape[2:])
    return TokenBatch(embeds, positions, rows.lengths, rows.layout, per_layer), (batch, length)
