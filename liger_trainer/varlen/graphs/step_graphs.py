"""The captures of all backbones that a trainer calls in its steps."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator

import torch
from torch import nn

from liger_trainer.varlen.graphs.backbone_graphs import BackboneGraphs
from liger_trainer.varlen.graphs.capture_summary import CaptureSummary
from liger_trainer.varlen.graphs.graph_recorder import CudaGraphRecorder, GraphRecorder


class StepGraphs:
    """The captures of all backbones that a trainer calls in its steps."""

    def __init__(self, make_recorder: Callable[[torch.device], GraphRecorder] = CudaGraphRecorder):
        self._make_recorder = make_recorder
        self._of: dict[int, BackboneGraphs] = {}
        self.summary = CaptureSummary()
        self.may_capture = False

    def of(
        self,
        backbone: nn.Module,
        around: Callable[[], list[nn.Module]],
        keeps_state: bool = False,
        per_layer: tuple[str, ...] = (),
    ) -> BackboneGraphs:
        """Return the captures of a backbone. For the arguments see `BackboneGraphs`."""
        graphs = self._of.get(id(backbone))
        if graphs is None:
            device = next(backbone.parameters()).device
            recorder = self._make_recorder(device)
            graphs = BackboneGraphs(backbone, around, recorder, self.summary, keeps_state, per_layer)
            self._of[id(backbone)] = graphs
        graphs.may_capture = self.may_capture
        return graphs

    def release(self) -> None:
        for graphs in self._of.values():
            graphs.release()
        self._of.clear()


_active: contextvars.ContextVar[StepGraphs | None] = contextvars.ContextVar("graphs of the step", default=None)


@contextlib.contextmanager
def use_graphs(graphs: StepGraphs | None) -> Iterator[None]:
    """Context manager: calls of backbones on real tokens are captured and replayed by `graphs`."""
    token = _active.set(graphs)
    try:
        yield
    finally:
        _active.reset(token)


def current_graphs() -> StepGraphs | None:
    return _active.get()
