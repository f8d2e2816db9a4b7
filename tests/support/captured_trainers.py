"""Trainers whose steps are captured on a CPU, where what is recorded runs again as Python."""

import torch
from rerun_recorder import RerunRecorder

from liger_trainer.trainers import cuda_graphs
from liger_trainer.varlen.graphs.step_graphs import StepGraphs


class OnGpu:
    """Stands for an object, but for its `device`, which is a GPU."""

    def __init__(self, own, **replaced):
        self._own, self._replaced = own, replaced

    def __getattr__(self, name):
        return self._replaced[name] if name in self._replaced else getattr(self._own, name)


def capture_on_cpu(monkeypatch):
    """Let trainers capture their steps on a CPU. Returns the recorders, one for each backbone, as they are made."""
    recorders, own = [], cuda_graphs.why_not_captured

    def make_recorder(device):
        recorders.append(RerunRecorder(device))
        return recorders[-1]

    def why_not_captured(trainer):
        args = OnGpu(trainer.args, device=torch.device("cuda", 0))
        return own(OnGpu(trainer, args=args))

    monkeypatch.setattr(cuda_graphs, "why_not_captured", why_not_captured)
    monkeypatch.setattr(cuda_graphs, "StepGraphs", lambda: StepGraphs(make_recorder))
    return recorders
