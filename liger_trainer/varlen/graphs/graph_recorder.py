"""Records the kernels that a function launches as a CUDA graph, so that they run again without Python."""

import contextlib
import gc
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

RESERVE = 0.06  # fraction of the GPU's memory that a capture leaves free
ASIDE = 0.02  # largest fraction of the GPU's memory for a copy of the gradients so far, during a capture
TIMED_RUNS = 3  # in a row, as in training: while the device works on one step, the host prepares the next


class Graph(Protocol):
    def replay(self) -> None: ...


class GraphRecorder(Protocol):
    """Records functions on the device, so that they can be run again without Python."""

    def warm_up(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for runs before a recording. They use the stream of the recording."""

    def record(self, function: Callable[[], None]) -> Graph:
        """Record the kernels that `function` launches. None of them runs."""

    def random_state(self) -> Any:
        """Return the state of the device's random generator."""

    def set_random_state(self, state: Any) -> None:
        """Set the state of the device's random generator."""

    def begin_pool(self) -> None:
        """Record into new memory from now on, and free the memory of recordings that are gone."""

    def bytes_free(self) -> int:
        """Return how many bytes could be allocated beyond the reserve. Less than 0: the reserve is touched."""

    def make_room(self, size: int) -> bool:
        """Return whether a recording may allocate `size` bytes, after releasing what is cached."""

    def may_set_aside(self, size: int) -> bool:
        """Return whether `size` bytes are free, and few enough to be held during a recording."""

    def after_failure(self) -> None:
        """Make the device usable again after a recording that has failed."""

    def seconds_of(self, run: Callable[[], None]) -> float:
        """Return how long one of several runs in a row takes, until the device has done all of it."""


class CudaGraphRecorder:
    """Records CUDA graphs that share one memory pool, on one stream.

    The allocator reuses a block only on the stream that allocated it, so a second stream would double the memory.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        self._in_pool: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self.stream = torch.cuda.Stream(device)
        self._generator = torch.cuda.default_generators[torch.device(device).index or 0]

    @contextlib.contextmanager
    def warm_up(self) -> Iterator[None]:
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:  # also after an exception: what was launched before it still reads memory of the current stream
            current.wait_stream(self.stream)

    def record(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        if not self._in_pool:
            self.pool = torch.cuda.graph_pool_handle()  # PyTorch frees a pool with its last graph
        # Not `torch.cuda.graph`, which empties the allocator's cache and collects garbage at each capture.
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        collects = gc.isenabled()
        gc.disable()  # an event or a graph that is freed during a capture breaks it
        try:
            with torch.cuda.stream(self.stream):
                # In the default mode the thread that pins the next batch's memory would break the capture.
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                try:
                    function()
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        torch.cuda.synchronize(self.device)
        self._in_pool.add(graph)
        return graph

    def begin_pool(self) -> None:
        torch.cuda.synchronize(self.device)
        self.pool = torch.cuda.graph_pool_handle()
        self._in_pool.clear()
        torch.cuda.empty_cache()

    def random_state(self) -> torch.Tensor:
        return self._generator.get_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        self._generator.set_state(state)

    def bytes_free(self) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        stats = torch.cuda.memory_stats(self.device)
        cached = stats["reserved_bytes.all.current"] - stats["allocated_bytes.all.current"]
        return free + cached - int(RESERVE * total)

    def make_room(self, size: int) -> bool:
        if size > self.bytes_free():
            return False
        # The allocator cannot release its cache while it records, and the graphs' pool cannot use the blocks in it.
        torch.cuda.empty_cache()
        return True

    def may_set_aside(self, size: int) -> bool:
        _, total = torch.cuda.mem_get_info(self.device)
        return size <= min(ASIDE * total, self.bytes_free())

    def after_failure(self) -> None:
        """End what a failed capture leaves behind: a generator that still counts numbers for a graph."""
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize(self.device)
        empty = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            empty.capture_begin(capture_error_mode="thread_local")
            empty.capture_end()
        torch.cuda.synchronize(self.device)

    def seconds_of(self, run: Callable[[], None]) -> float:
        torch.cuda.synchronize(self.device)
        begin = time.perf_counter()
        for _ in range(TIMED_RUNS):
            run()
        torch.cuda.synchronize(self.device)
        return (time.perf_counter() - begin) / TIMED_RUNS
