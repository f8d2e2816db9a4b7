"""Compares two runs: computes their errors, and the errors that are allowed."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from liger_trainer.verify.observed import Tensors, numbers
from liger_trainer.verify.runs import Run

RTOL = 1e-4  # of the norm of a tensor, in fp32
SMALL = (
    1e-3  # smallest scale of an error, relative to the largest norm: a key bias's exact gradient is zero, for example
)
LEAST_NUMBER = 1e-2  # smallest scale of a logged number: a loss is 0 if its advantages cancel, for example
OF_GROUP = 1e-2  # smallest scale of a logged number, relative to the largest number of its group
EPS = torch.finfo(torch.float32).eps / 4  # the average rounding error of a number stored in fp32
TIMES_NOISE, MOST = 20, 1e-2  # an error may be 20 times what another order of sums changes, but never more than 1e-2
HEADER = f"{'check':34} {'':6} {'error':>8} {'allowed':>8} {'s':>6}"


@dataclass
class Check:
    """One line of the table."""

    detail: str  # the result in words, or why the check does not apply
    figure: float | None = None  # the largest relative error, or the number in `detail`; None if it does not apply
    tolerance: float = 0.0
    name: str = ""
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        return "-" if self.figure is None else "ok" if self.figure <= self.tolerance else "FAILED"

    @property
    def line(self) -> str:
        figures = () if self.figure is None else (self.figure, self.tolerance)
        columns = "".join(f" {f'{x:.1e}' if x else 0:>8}" for x in figures)
        return f"{self.name:34} {self.verdict:6}{columns:18} {self.seconds:6.1f}  {self.detail}".rstrip()

    def to_dict(self) -> dict[str, Any]:
        fields = {"name": self.name, "verdict": self.verdict, "detail": self.detail, "seconds": self.seconds}
        if self.figure is None:
            return fields
        figure = {} if math.isinf(self.figure) else {"figure": self.figure}  # JSON has no infinity
        return fields | figure | {"tolerance": self.tolerance}


def errors(got: Tensors, want: Tensors) -> dict[str, float]:
    """Return the error of each tensor, relative to its norm. A tensor that is missing on one side counts as zero."""
    norms = {name: float(tensor.double().norm()) for name, tensor in want.items()}
    least = max(SMALL * max(norms.values(), default=0.0), 1e-30)
    relative = {}
    for name in want.keys() | got.keys():
        difference = torch.as_tensor(got.get(name, 0) - want.get(name, 0)).double().norm()
        error = float(difference) / max(norms.get(name, 0.0), least)
        relative[name] = error if math.isfinite(error) else math.inf
    return relative


def worst(got: list[Tensors], want: list[Tensors], noise: dict[str, float]) -> Check:
    """Return the worst error in several pairs of sets, relative to what the `noise` of each tensor allows."""
    if len(got) != len(want):
        return Check(f"{len(got)} steps in place of {len(want)}", math.inf, RTOL)
    candidates = [
        (error, max(RTOL, min(MOST, TIMES_NOISE * noise.get(name, 0.0))), name)
        for one, other in zip(got, want, strict=True)
        for name, error in errors(one, other).items()
    ]
    error, allowed, name = max(candidates, key=lambda one: one[0] / one[1])
    return Check(f"most in {name}", error, allowed)


def logged(run: Run) -> list[Tensors]:
    """Return the logged numbers of each step that are compared."""
    numbers: list[Tensors] = []
    for log in run.logs:
        names: list[str] = [name for name in ("loss", "grad_norm", "learning_rate") if name in log]
        numbers.append({name: torch.tensor(float(log[name])) for name in names})
    return numbers


def steps_of(run: Run) -> list[Tensors]:
    """Return everything that is compared for each step."""
    return [*logged(run), *run.gradients]


def worst_number(got: list[dict[str, Any]], want: list[dict[str, Any]], noise: dict[str, float]) -> Check:
    """Return the worst error of all numbers in two logs, relative to what the `noise` of each allows.

    An error is relative to the largest value of its name, or to a hundredth of the largest value of its group. The
    group is the part of a name before the slash: `rewards/margins` is computed from `rewards/chosen` and has its
    rounding.
    """
    if len(got) != len(want):
        return Check(f"{len(got)} records in place of {len(want)}", math.inf, RTOL)
    error_of = number_errors(got, want)
    if not error_of:
        return Check("nothing is logged")
    limits = {name: max(RTOL, min(MOST, TIMES_NOISE * noise.get(name, 0.0))) for name in error_of}
    name = max(error_of, key=lambda name: error_of[name] / limits[name])
    check = Check(f"{len(error_of)} names, most in {name}", error_of[name], limits[name])
    if check.verdict != "ok":
        got_values = [numbers(log).get(name) for log in got]
        want_values = [numbers(log).get(name) for log in want]
        check.detail += f": {_row(got_values)}, expected {_row(want_values)}"
    return check


def _row(values: list[float | None]) -> str:
    return ", ".join("nothing" if value is None else f"{value:.6g}" for value in values)


def number_errors(got: list[dict[str, Any]], want: list[dict[str, Any]]) -> dict[str, float]:
    """Return the largest error of each name, as `worst_number` measures it; infinite if one side lacks the name."""
    pairs = [(numbers(one), numbers(other)) for one, other in zip(got, want, strict=True)]
    largest: dict[str, float] = {}
    for _, log in pairs:
        for name, value in log.items():
            size = abs(value) if math.isfinite(value) else 0.0
            for key in (name, _group(name)):
                largest[key] = max(largest.get(key, 0.0), size)
    relative: dict[str, float] = {}
    for one, other in pairs:
        for name in one.keys() | other.keys():
            scale = max(largest.get(name, 0.0), OF_GROUP * largest.get(_group(name), 0.0), LEAST_NUMBER)
            a, b = one.get(name), other.get(name)
            if a is None or b is None:
                error = math.inf
            else:
                error = 0.0 if a == b or (math.isnan(a) and math.isnan(b)) else abs(a - b) / scale
            relative[name] = max(relative.get(name, 0.0), error if math.isfinite(error) else math.inf)
    return relative


def _group(name: str) -> str:
    plain = name.removeprefix("eval_")
    if plain in ("loss", "grad_norm", "train_loss"):
        return "the size of a loss/"
    return f"{plain.partition('/')[0]}/"


def equal(different: list[str], what: str) -> Check:
    """Return a check that fails if anything is `different`. `what` says what is equal."""
    return Check("; ".join(different[:3]), len(different)) if different else Check(what, 0)
