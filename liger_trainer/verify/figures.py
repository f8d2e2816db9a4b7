"""Compares two runs: how far apart they are, and how far they may be."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from liger_trainer.verify.runs import Run, Tensors

RTOL = 1e-4  # of the norm of a tensor, in fp32
SMALL = 1e-3  # of the largest norm: what is smaller is measured by this, as the bias of keys, whose gradient is zero
EPS = torch.finfo(torch.float32).eps / 4  # by which storing a number in fp32 moves it, on average
TIMES_NOISE, MOST = 20, 1e-2  # as many times what another order of sums changes, and never more than this
HEADER = f"{'check':34} {'':6} {'error':>8} {'allowed':>8} {'s':>6}"


@dataclass
class Check:
    """One line of the table."""

    detail: str  # what was found, or why the check does not apply
    figure: float | None = None  # the largest relative error, or what the detail says; None where it does not apply
    tolerance: float = 0.0
    name: str = ""
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        return "-" if self.figure is None else "ok" if self.figure <= self.tolerance else "FAILED"

    @property
    def line(self) -> str:
        figures = () if self.figure is None else (self.figure, self.tolerance)
        shown = "".join(f" {f'{x:.1e}' if x else 0:>8}" for x in figures)
        return f"{self.name:34} {self.verdict:6}{shown:18} {self.seconds:6.1f}  {self.detail}".rstrip()

    def to_dict(self) -> dict[str, Any]:
        found = {"name": self.name, "verdict": self.verdict, "detail": self.detail, "seconds": self.seconds}
        if self.figure is None:
            return found
        figure = {} if math.isinf(self.figure) else {"figure": self.figure}  # JSON has no infinity
        return found | figure | {"tolerance": self.tolerance}


def errors(got: Tensors, want: Tensors) -> dict[str, float]:
    """Relative errors by the norm of each tensor; one that is missing on one side counts as zero."""
    norms = {name: float(tensor.double().norm()) for name, tensor in want.items()}
    least = max(SMALL * max(norms.values(), default=0.0), 1e-30)
    found = {}
    for name in want.keys() | got.keys():
        difference = torch.as_tensor(got.get(name, 0) - want.get(name, 0)).double().norm()
        error = float(difference) / max(norms.get(name, 0.0), least)
        found[name] = error if math.isfinite(error) else math.inf
    return found


def worst(got: list[Tensors], want: list[Tensors], noise: dict[str, float]) -> Check:
    """The worst error in several pairs of sets, by what the `noise` of each tensor allows."""
    if len(got) != len(want):
        return Check(f"{len(got)} steps in place of {len(want)}", math.inf, RTOL)
    found = [
        (error, max(RTOL, min(MOST, TIMES_NOISE * noise.get(name, 0.0))), name)
        for one, other in zip(got, want, strict=True)
        for name, error in errors(one, other).items()
    ]
    error, allowed, name = max(found, key=lambda one: one[0] / one[1])
    return Check(f"most in {name}", error, allowed)


def logged(run: Run) -> list[Tensors]:
    names = ("loss", "grad_norm", "learning_rate")
    return [{name: torch.tensor(float(log[name])) for name in names if name in log} for log in run.logs]


def steps_of(run: Run) -> list[Tensors]:
    """All that is compared of each step."""
    return [*logged(run), *run.gradients]
