"""Training under autocast to bf16: how far losses and gradients are from those of fp32, in ours and in stock."""

import math
import statistics
from typing import Any

from liger_trainer.verify.adam_training import calls, recorder_of
from liger_trainer.verify.figures import Check, equal, errors, number_errors
from liger_trainer.verify.generated import Generated, GenerationRecorder
from liger_trainer.verify.observed import Recorder, Tensors
from liger_trainer.verify.runs import Bench, Run, in_chunks

LOSS_IN_BF16 = 2e-2  # by which losses may differ from stock's
TIMES_STOCK_IN_BF16, MOST_IN_THE_MIDDLE = 4.0, 1.3  # how far a gradient is from fp32's, by stock's own distance
LEAST_IN_BF16 = 5e-3  # of that distance
_NUDGES = (1, 2, 3, 4)  # of weights, for further steps where the first is too far off
_TIMES_LOSS_OF_STOCK = 2.0  # by how much losses may differ over several steps, in units of stock's own distance
_LEAST_OF_A_STEP = 0.5  # a step much nearer than stock's does not make up for one that is far off


def in_bf16(bench: Bench, kind: str, noise: dict[str, float]) -> Check:
    """One step and one evaluation under autocast to bf16: ours is as near to fp32 as stock is.

    A trainer that writes completions trains on those of the stock trainer in fp32, in all runs.

    Where the loss is a difference of a few completions, its gradient has one error in all tensors, and how large that
    is, in one step, is chance: clean code has been seen at 0.8 and at 1.5 times stock's error. So a step that is too
    far off is made four times more, from weights that are moved by what they lose in bf16. That draws the rounding
    again, and leaves a bug where it is. The limit of gradients then holds for the geometric mean, and that of losses
    grows to what stock's own have lost.
    """
    steps = [_Step(bench, kind, 0, noise)]
    check = _judged_steps(steps)
    if check.verdict == "ok" or steps[0].different:
        return check
    steps += [_Step(bench, kind, nudge, noise) for nudge in _NUDGES]
    check = _judged_steps(steps)
    check.detail += f", over {len(steps)} steps"
    return check


class _Step:
    """One step from the same weights: of the stock trainer in fp32 and in bf16, and of ours in bf16.

    Attributes:
        different (`list[str]`): What else differs, which no precision explains.
        losses (`list`): The losses of ours and of stock in bf16.
        apart (`float`): How far they are from each other.
        stock_apart (`float`): How far stock's are from those of fp32.
        distances (`dict`): How far each gradient of ours is from that of fp32, by stock's own distance.
    """

    def __init__(self, bench: Bench, kind: str, nudge: int, noise: dict[str, float]) -> None:
        evaluated = bench.rows.select(range(min(2, len(bench.rows))))
        options: dict[str, Any] = {
            "max_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2,
            "given": {"eval_dataset": evaluated}, "nudge": nudge,
        }  # fmt: skip
        generates = bench.setup.generates
        exact = bench.run(kind, recorder=GenerationRecorder() if generates else Recorder(), **options)
        generations = _generations(exact)
        options["bf16"] = True
        with in_chunks():
            ours = bench.run(
                "ours", recorder=GenerationRecorder(replayed=generations) if generates else Recorder(), **options
            )
        stock = bench.run(
            kind, recorder=GenerationRecorder(replayed=generations) if generates else Recorder(), **options
        )
        self.different = calls(ours, stock)
        self.different += [f"an evaluation changes {name}" for name in sorted(recorder_of(ours).changed)]
        count = len(_generations(ours))
        if count != len(generations):
            self.different.append(f"the model generates {count} times, but {len(generations)} times in fp32")
        if self.different:
            return
        self.losses = [_losses(ours), _losses(stock)]
        self.apart = max(number_errors(*self.losses).values(), default=0.0)
        self.stock_apart = max(number_errors(_losses(stock), _losses(exact)).values(), default=0.0)
        self.distances = _distances(ours.gradients[0], stock.gradients[0], exact.gradients[0], noise)


def _generations(run: Run) -> list[Generated]:
    return run.recorder.generations if isinstance(run.recorder, GenerationRecorder) else []


def _losses(run: Run) -> list[dict[str, Any]]:
    names = ("loss", "eval_loss")
    return [{name: log[name] for name in names if name in log} for log in run.trainer.state.log_history]


def _judged_steps(steps: list[_Step]) -> Check:
    for step in steps:
        if step.different:
            return equal(step.different, "")
    apart = _root_mean_square([step.apart for step in steps])
    allowed = LOSS_IN_BF16
    if len(steps) > 1:
        of_stock = _root_mean_square([step.stock_apart for step in steps])
        allowed = max(allowed, _TIMES_LOSS_OF_STOCK * of_stock)
    if apart > allowed:
        ours, stock = steps[0].losses
        return Check(f"losses are {ours}, and not {stock}", apart, allowed)
    if len(steps) == 1:
        return _judged(steps[0].distances, "stock")
    means = {}
    for name in steps[0].distances:
        logarithms = [math.log(max(step.distances[name], _LEAST_OF_A_STEP)) for step in steps]
        means[name] = math.exp(statistics.fmean(logarithms))
    return _judged(means, "stock")


def by_distance(
    got: Tensors, stock: Tensors, exact_gradients: Tensors, noise: dict[str, float], yardstick: str
) -> Check:
    """Judge gradients in bf16 by how far they are from those of fp32, in units of how far those of `yardstick` are."""
    return _judged(_distances(got, stock, exact_gradients, noise), yardstick)


def _distances(got: Tensors, stock: Tensors, exact_gradients: Tensors, noise: dict[str, float]) -> dict[str, float]:
    mine, theirs = (errors(gradients, exact_gradients) for gradients in (got, stock))
    return {name: mine[name] / max(theirs[name], LEAST_IN_BF16, 20 * noise.get(name, 0.0)) for name in mine}


def _judged(distances: dict[str, float], yardstick: str) -> Check:
    middle = statistics.median(distances.values())
    if middle > MOST_IN_THE_MIDDLE:
        return Check(
            f"times the error of {yardstick} in bf16, in the middle of all tensors", middle, MOST_IN_THE_MIDDLE
        )
    name = max(distances, key=lambda name: distances[name])
    detail = f"times the error of {yardstick} in bf16, most in {name}, in the middle {middle:.2f}"
    return Check(detail, distances[name], TIMES_STOCK_IN_BF16)


def _root_mean_square(values: list[float]) -> float:
    return statistics.fmean(value**2 for value in values) ** 0.5
