"""Compares captured steps (`cuda_graphs`) with uncaptured ones, on the same rows and weights."""

from typing import Any

from liger_trainer.trainers.cuda_graphs import CapturedTrainer, uncaptured_reason
from liger_trainer.verify.bf16 import LOSS_IN_BF16, by_distance
from liger_trainer.verify.figures import Check, number_errors
from liger_trainer.verify.observed import KeepGradients, Tensors
from liger_trainer.verify.runs import Bench, Run

_STEPS = 6  # the first two run uncaptured, at least in part


def captured(bench: Bench, trainer: CapturedTrainer, noise: dict[str, float]) -> Check:
    """Compare losses and gradients of captured and uncaptured steps, in bf16.

    The optimizers of both runs get the gradients of a third run in fp32, so all three have the same weights at every
    step. A captured step is padded to its size, so it rounds differently. Its gradients must be as close to the fp32
    gradients as the uncaptured ones are.

    Args:
        bench (`Bench`): The bench of the setup.
        trainer (`LigerTrainerMixin`): A trainer that `bench` has built and that has trained.
        noise (`dict`): How far another order of sums moves each tensor in fp32.
    """
    reason = uncaptured_reason(trainer)
    if reason is not None:
        return Check(reason)
    if bench.setup.generates:
        return Check("the trainer generates the text that it trains on, and generates other text in fp32")
    if bench.routers_draw():
        return Check("its routers draw random numbers, and a padded step draws more numbers")
    exact = bench.run("ours", max_steps=_STEPS)
    options: dict[str, Any] = {"max_steps": _STEPS, "bf16": True}
    plain = bench.run("ours", recorder=KeepGradients(exact.gradients), **options)
    replayed = bench.run("ours", recorder=KeepGradients(exact.gradients), **options, cuda_graphs="auto")
    summary = replayed.trainer.captured_steps
    if not summary.replayed:
        return Check(f"captured {summary.describe()}")
    return _compare(replayed, plain, exact.gradients, noise)


def _compare(replayed: Run, plain: Run, exact_gradients: list[Tensors], noise: dict[str, float]) -> Check:
    summary = replayed.trainer.captured_steps
    calls = summary.replayed + sum(summary.uncaptured.values())
    counted = f"{summary.replayed} of {calls} calls replayed"
    losses = [{"loss": log["loss"]} for log in replayed.logs]
    uncaptured = [{"loss": log["loss"]} for log in plain.logs]
    apart = max(number_errors(losses, uncaptured).values())
    if apart > LOSS_IN_BF16:
        return Check(f"{counted}; losses are {losses}, uncaptured {uncaptured}", apart, LOSS_IN_BF16)
    checks = [
        by_distance(*gradients, noise, "uncaptured steps")
        for gradients in zip(replayed.gradients, plain.gradients, exact_gradients, strict=True)
    ]
    worst = max(checks, key=lambda check: (check.figure or 0.0) / check.tolerance)
    worst.detail = f"{counted}; {worst.detail}"
    return worst
