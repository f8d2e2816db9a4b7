"""How far apart two runs are, and how far they may be."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from liger_trainer.verify.runs import Run, Tensors

RTOL = 1e-4  # of the norm of a tensor, in fp32
SMALL = 1e-3  # of the largest norm: what is smaller is measured by this, as the bias of keys, whose gradient is zero
EPS = torch.finfo(torch.float32).eps / 4  # by which storing a number in fp32 moves it, on average
TIMES_NOISE, MOST = 20, 1e-2  # as many times what another order of sums changes, and never more than this
OK, FAILED, LEFT_OUT = "ok", "FAILED", "-"
HEADER = f"{'check':34} {'':6} {'error':>8} {'allowed':>8} {'s':>6}"


@dataclass
class Check:
    """One line of the table.

    Attributes:
        name (`str`): What was checked.
        verdict (`str`): `"ok"`, `"FAILED"`, or `"-"` where the check does not apply.
        detail (`str`): What was found, or why it does not apply.
        figure (`float`, *optional*): The largest relative error, or what the detail says.
        tolerance (`float`, *optional*): What it may be.
        seconds (`float`): What it took.
    """

    name: str
    verdict: str
    detail: str
    figure: float | None = None
    tolerance: float | None = None
    seconds: float = 0.0

    @property
    def line(self) -> str:
        figure, tolerance = ("" if x is None else f"{x:.1e}" if x else "0" for x in (self.figure, self.tolerance))
        return f"{self.name:34} {self.verdict:6} {figure:>8} {tolerance:>8} {self.seconds:6.1f}  {self.detail}".rstrip()

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value not in (None, math.inf)}  # no JSON has it


@dataclass
class Found:
    """What a check has found: a figure, what it may be, and more in words."""

    figure: float
    tolerance: float
    detail: str

    @property
    def within(self) -> bool:
        return self.figure <= self.tolerance


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


def worst(got: list[Tensors], want: list[Tensors], noise: dict[str, float]) -> Found:
    """The worst error in several pairs of sets, by what the `noise` of each tensor allows."""
    if len(got) != len(want):
        return Found(math.inf, RTOL, f"{len(got)} steps in place of {len(want)}")
    found = [
        Found(error, max(RTOL, min(MOST, TIMES_NOISE * noise.get(name, 0.0))), f"most in {name}")
        for one, other in zip(got, want, strict=True)
        for name, error in errors(one, other).items()
    ]
    return max(found, key=lambda one: one.figure / one.tolerance)


def logged(run: Run) -> list[Tensors]:
    return [{name: torch.tensor(float(log[name])) for name in ("loss", "grad_norm") if name in log} for log in run.logs]


def steps_of(run: Run) -> list[Tensors]:
    """All that is compared of each step."""
    return [*logged(run), *run.gradients]
