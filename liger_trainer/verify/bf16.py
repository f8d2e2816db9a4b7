"""Compares the bf16 errors of our trainer with the stock trainer's, both measured against fp32."""

import math
import statistics
from typing import Any

from liger_trainer.verify.adam_training import calls, recorder_of
from liger_trainer.verify.figures import Check, equal, errors, number_errors
from liger_trainer.verify.generated import Generated, GenerationRecorder
from liger_trainer.verify.observed import Recorder, Tensors
from liger_trainer.verify.runs import Bench, Run, in_chunks

LOSS_IN_BF16 = 2e-2  # the allowed relative difference between our loss and stock's
# A gradient's error against fp32, as a multiple of stock's error: the largest and the median that are allowed
TIMES_STOCK_IN_BF16 = 4.0
MOST_IN_THE_MIDDLE = 1.3
LEAST_IN_BF16 = 5e-3  # stock's error counts as at least this large
_NUDGES = (1, 2, 3, 4)  # seeds of small changes to the weights, for more steps if the first fails
_TIMES_LOSS_OF_STOCK = 2.0  # over several steps, losses may differ by this multiple of stock's own error
_LEAST_OF_A_STEP = 0.5  # so that one very close step cannot compensate for one that is far off


def in_bf16(bench: Bench, kind: str, noise: dict[str, float]) -> Check:
    """Check that one bf16 step and evaluation of ours are as close to fp32 as stock's.

    If the trainer generates completions, all runs train on the completions of the stock trainer in fp32.

    If the loss is a difference of a few completions, all tensors share one error, and its size in a single step is
    random: correct code has been seen at 0.8 and at 1.5 times stock's error. So a step that is too far off is repeated
    four times, from weights that are changed by about one bf16 rounding. That draws new rounding errors, but a bug
    stays. The limit for gradients then applies to the geometric mean, and the limit for losses to stock's own error.
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
    """One step from the same weights with three trainers: stock in fp32, stock in bf16, ours in bf16.

    Attributes:
        different (`list[str]`): Differences that precision cannot explain.
        losses (`list`): The bf16 losses of ours and of stock.
        apart (`float`): The error between these losses.
        stock_apart (`float`): The error of stock's bf16 losses against fp32.
        distances (`dict`): For each gradient, our error against fp32, divided by stock's error.
    """

    def __init__(self, bench: Bench, kind: str, nudge: int, noise: dict[str, float]) -> None:
        evaluated = bench.rows.select(range(min(2, len(bench.rows))))
        options: dict[str, Any] = {
            "max_steps": 1,
            "eval_strategy": "steps",
            "eval_steps": 1,
            "per_device_eval_batch_size": 2,
            "trainer_arguments": {"eval_dataset": evaluated},
            "nudge": nudge,
        }
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
    losses = []
    for log in run.trainer.state.log_history:
        losses.append({name: log[name] for name in ("loss", "eval_loss") if name in log})
    return losses


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
        return Check(f"losses are {ours}, stock {stock}", apart, allowed)
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
    """Judge bf16 gradients by their error against fp32, divided by the error of `yardstick`."""
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
