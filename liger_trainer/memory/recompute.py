"""Activation checkpointing as by `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`, with less for the host.

PyTorch's function runs some forty calls of Python for each tensor that a layer keeps, about thirty a layer, so the GPU
waits for it in a step of few tokens. Here a tensor costs a few calls, and a parameter none. The states of random
generators are not put back where the layer has drawn no number. What is computed is the same: the layer runs again when
its backward pass asks for the first tensor, under the same autocast and with the same random numbers, and stops at the
last tensor that was kept.

PyTorch's function runs in all other cases: traced code, saved-tensor hooks of others (offloading, an outer checkpoint),
`torch.device` as a context, other devices than CPUs and one CUDA GPU.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter
from torch.utils.checkpoint import CheckpointError

from liger_trainer.instance.kept import hooks_in_force
from liger_trainer.memory.switches import options_of

Around = Callable[[], contextlib.AbstractContextManager]
_Autocast = tuple[str, bool, torch.dtype]


class _AllMade(Exception):  # noqa: N818 - no error
    """Raised when a recomputed layer has made the last tensor that was kept."""


class _Placeholder:
    """Stands for a tensor in the graph: where its value will be, and what it must be like."""

    __slots__ = ("__weakref__", "call", "like", "value")

    call: "_Call"
    like: tuple[torch.Size, torch.dtype, torch.device]
    value: torch.Tensor | None


class _Call:
    """One call of a layer, and what it takes to run it again."""

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], device: torch.device, draws: bool,
        around: Around | None, as_kept: bool,
    ):  # fmt: skip
        self.function, self.args = function, args
        self.around = around  # makes a context in which the layer runs again
        self.as_kept = as_kept  # whether it keeps what it would keep without checkpointing, see `rebuild.py`
        self.versions = self._versions()
        self.generators = _generators_of(device) if draws else []
        self.drawn: list[torch.Tensor] | None = [generator.get_state() for generator in self.generators]
        self.autocasts = [_autocast_on(kind) for kind in dict.fromkeys((device.type, "cpu"))]
        self.kept: list[weakref.ref[_Placeholder]] = []  # in their order; those that are gone get no value again
        self.backward: int | None = None  # the backward pass for which the layer has run again

    def _versions(self) -> list[int]:
        return [x._version for x in self.args if isinstance(x, torch.Tensor)]

    def run(self) -> Any:
        """Return the result of the layer, of which autograd keeps only placeholders."""
        with saved_tensors_hooks(_marked(self._keep, self.as_kept), _value_of):
            result = self.function(*self.args)
        assert self.drawn is not None
        if all(torch.equal(x.get_state(), before) for x, before in zip(self.generators, self.drawn, strict=True)):
            self.drawn = None  # a second run will draw nothing either
        return result

    def _keep(self, x: torch.Tensor) -> Any:
        if type(x) is Parameter:
            return x
        kept = _Placeholder()
        kept.call, kept.like, kept.value = self, (x.shape, x.dtype, x.device), None
        self.kept.append(weakref.ref(kept))
        return kept

    def value_of(self, kept: _Placeholder) -> torch.Tensor:
        """Return the tensor that `kept` stands for, once in each backward pass."""
        backward = torch._C._current_graph_task_id()
        if backward != self.backward or backward == -1:  # -1: other code looks at what is kept
            with contextlib.nullcontext() if self.around is None else self.around():
                self._run_again()
            self.backward = backward
        value, kept.value = kept.value, None
        if value is None:
            raise CheckpointError("A tensor of a checkpointed layer was asked for twice in one backward pass.")
        return value

    def _run_again(self) -> None:
        made, total = 0, len(self.kept)

        def keep(x: torch.Tensor) -> torch.Tensor:
            nonlocal made
            if type(x) is Parameter:
                return x
            x = x.detach() if x.requires_grad else x  # with its graph, it would keep all that it was made from
            kept = self.kept[made]()
            made += 1
            if kept is not None:
                if kept.like != (x.shape, x.dtype, x.device):
                    raise CheckpointError(
                        f"A recomputed layer keeps {tuple(x.shape)} {x.dtype} on {x.device} as tensor {made} of "
                        f"{total}; in the forward pass this was {tuple(kept.like[0])} {kept.like[1]} on "
                        f"{kept.like[2]}. It has to compute the same both times."
                    )
                kept.value = x
            if made == total:
                raise _AllMade
            return x

        if self.versions != self._versions():
            raise RuntimeError(
                "The input of a checkpointed layer has been modified by an inplace operation since its forward pass."
            )
        try:
            hooks = saved_tensors_hooks(_marked(keep, self.as_kept), lambda x: x)
            with hooks, torch.enable_grad(), self._random_state(), self._autocast():
                self.function(*self.args)
        except _AllMade:
            return
        raise CheckpointError(
            f"A recomputed layer keeps {made} tensors for its backward pass; in the forward pass it kept {total}. It "
            "has to compute the same both times."
        )

    def _autocast(self) -> contextlib.AbstractContextManager:
        """Return a context with the autocast of the forward pass."""
        if self.autocasts == [_autocast_on(kind) for kind, _, _ in self.autocasts]:
            return contextlib.nullcontext()
        stack = contextlib.ExitStack()
        for kind, enabled, dtype in self.autocasts:
            stack.enter_context(torch.autocast(kind, dtype, enabled=enabled))
        return stack

    @contextlib.contextmanager
    def _random_state(self) -> Iterator[None]:
        """Return a context in which the random numbers of the forward pass are drawn again."""
        gpus = [generator.device for generator in self.generators if generator.device.type == "cuda"]
        with torch.random.fork_rng(gpus, enabled=self.drawn is not None):
            for generator, state in zip(self.generators, self.drawn or (), strict=False):
                generator.set_state(state)
            yield


def _marked(keep: Callable[..., Any], as_kept: bool) -> Callable[..., Any]:
    """Return `keep`, marked for `rebuild.py`: whether what it can compute again need not be kept."""
    marked = functools.partial(keep)
    marked.keeps_values = as_kept  # type: ignore[attr-defined]
    return marked


def _value_of(kept: Any) -> torch.Tensor:
    return kept.call.value_of(kept) if type(kept) is _Placeholder else kept


def _generators_of(device: torch.device) -> list[torch.Generator]:
    on_gpu = [torch.cuda.default_generators[device.index]] if device.type == "cuda" else []
    return [torch.default_generator, *on_gpu]


def _autocast_on(kind: str) -> _Autocast:
    return kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def device_of(given: Any, args: tuple[Any, ...]) -> torch.device | None:
    """Return the one device of all tensors in `args`, the arguments of a layer to be checkpointed by `given`.

    Return None if it is not one CPU or CUDA GPU, or if PyTorch's function has to run for another reason.
    """
    options = options_of(given)
    if options is None or not options.keys() <= {"use_reentrant", "preserve_rng_state"}:
        return None
    if torch.compiler.is_compiling() or hooks_in_force() is not None or torch._C._len_torch_function_stack():
        return None
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    devices = {x.device for x in tensors}
    plain = torch.is_grad_enabled() and len(devices) == 1 and not any(x.is_inference() for x in tensors)
    return next((device for device in devices if device.type in ("cpu", "cuda")), None) if plain else None


def checkpoint(
    given: Any, function: Callable[..., Any], args: tuple[Any, ...], around: Around | None = None,
    as_kept: bool = False, lightly: bool = True,
) -> Any:  # fmt: skip
    """Return `given(function, *args)`, by `_Call` if `lightly` and `device_of` allow it.

    `around` makes a context that is entered when the layer runs again, by either. `as_kept` is for `_Call` alone.
    """
    device = device_of(given, args) if lightly else None
    if device is not None:
        return run_on(device, given, function, args, around, as_kept)

    def run(*args: Any) -> Any:
        again = torch._C._current_graph_task_id() != -1
        with around() if again and around is not None else contextlib.nullcontext():
            return function(*args)

    return given(run if around is not None else function, *args)


def run_on(
    device: torch.device, given: Any, function: Callable[..., Any], args: tuple[Any, ...], around: Around | None = None,
    as_kept: bool = False,
) -> Any:  # fmt: skip
    """Return `function(*args)` by `_Call`, where `device_of` has allowed it."""
    return _Call(function, args, device, given.keywords.get("preserve_rng_state", True), around, as_kept).run()
