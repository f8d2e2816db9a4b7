"""Compares a second, longer training of the stock trainer and ours, closer to the recipe: Adam with its options,
warmup, two epochs, incomplete accumulation windows, rows of more than 256 tokens, and evaluations.

The stock trainer's optimizer gets our gradients; its own are kept. So both have the same weights at every step. Losses
and gradients can be compared as closely in the last step as in the first, and the optimizer's results bit for bit.
Otherwise they would drift apart: Adam's first steps only keep the sign of a gradient, even of a rounding error.
"""

import json
import os
from typing import Any

import torch

from liger_trainer.verify.figures import RTOL, Check, equal, errors, worst, worst_number
from liger_trainer.verify.medusa import PlainMedusaTrainer
from liger_trainer.verify.observed import Recorder, Tensors, differences, saved_tensors
from liger_trainer.verify.runs import LONG, OPTIMIZERS, Bench, Run

EXACT = 1e-6  # relative to a tensor's norm: PyTorch has several kernels for one formula, such as fused Adam
_TRAINED, _EVALUATED = 5, 3  # rows. 5 rows are two micro-batches of 2 and one of 1, in windows of two
_OF_VERSION = ("transformers_version", "_name_or_path", "torch_dtype")


class AdamTraining:
    """Runs this training with both trainers, and checks the results. A trainer's errors are raised."""

    def __init__(self, bench: Bench, kind: str, noise: dict[str, float]) -> None:
        self.bench = bench
        self.kind = kind
        self.noise = noise
        self.ours = self._run("ours", Recorder())
        self.stock = self._run(kind, Recorder(self.ours.gradients))

    def _run(self, kind: str, recorder: Recorder) -> Run:
        setup, rows = self.bench.setup, self.bench.long_rows
        evaluated = range(_TRAINED, _TRAINED + _EVALUATED)
        trainer_arguments = {
            "train_dataset": rows.select(range(min(_TRAINED, len(rows)))),
            "eval_dataset": rows.select([i % len(rows) for i in evaluated]),
        }
        options: dict[str, Any] = {
            "max_steps": -1,
            "num_train_epochs": 2,
            "learning_rate": 1e-2,
            "weight_decay": setup.options.get("weight_decay") or 0.1,
            "warmup_steps": 2,
            "eval_strategy": "steps",
            "eval_steps": 1,
            "per_device_eval_batch_size": 2,
        }
        options["optim"] = chosen_optimizer(setup)
        if setup.options.get("max_length", 0) is not None:
            options["max_length"] = LONG
        if setup.options.get("num_iterations", 1) == 1:
            options["num_iterations"] = 2  # in the second iteration, the policy differs from the one that generated
        return self.bench.run(kind, recorder=recorder, trainer_arguments=trainer_arguments, **options)

    def logs(self) -> Check:
        return worst_number(self._records(self.ours, "loss"), self._records(self.stock, "loss"), self.noise)

    def _records(self, run: Run, of: str) -> list[dict[str, Any]]:
        return [log for log in run.trainer.state.log_history if of in log]

    def gradients(self) -> Check:
        return worst(self.ours.gradients, self.stock.gradients, self.noise)

    def weights(self) -> Check:
        """Compare weights and optimizer states, which come from the same gradients."""
        ours, stock = recorder_of(self.ours), recorder_of(self.stock)
        other = differences(ours.options, stock.options)
        if other:
            return equal(other, "")
        check = exact([*ours.weights, *ours.states], [*stock.weights, *stock.states])
        check.detail = f"{len(ours.weights)} steps of {_name(self.ours)}, {check.detail}"
        return check

    def surroundings(self) -> Check:
        """Compare batches, random numbers, and what callbacks see."""
        ours, stock = recorder_of(self.ours), recorder_of(self.stock)
        other = differences(ours.batches, stock.batches, RTOL)  # batches may hold scores of a reference
        around, around_stock = ours.around, stock.around
        if self.bench.routers_draw():  # they draw for each computed token, and we do not compute padding
            around = [_without_torch(one) for one in around]
            around_stock = [_without_torch(one) for one in around_stock]
        other += differences(around, around_stock)
        other += calls(self.ours, self.stock)
        return equal(other, f"{len(ours.batches)} micro-batches, random numbers, state and modes")

    def evaluation(self) -> Check:
        ours, stock = self._records(self.ours, "eval_loss"), self._records(self.stock, "eval_loss")
        noise = self.noise | {f"eval_{name}": size for name, size in self.noise.items()}
        check = worst_number(ours, stock, noise)
        if check.verdict == "FAILED" or self.bench.setup.stock.__name__ not in ("Trainer", "SFTTrainer"):
            return check
        logits = worst([_predicted(self.ours)], [_predicted(self.stock)], {})
        logits.detail = f"{check.detail}; predicted logits"
        return logits if logits.verdict == "FAILED" else check

    def evaluation_changes_nothing(self) -> Check:
        changed = sorted(recorder_of(self.ours).changed - recorder_of(self.stock).changed)
        detail = "weights, buffers, gradients and the optimizer's state are as before"
        return equal([f"an evaluation changes {name}" for name in changed], detail)

    def saved(self) -> Check:
        """Compare the saved models: file names, tensors and configs."""
        folders = [os.path.join(self.bench.folder, name) for name in ("saved by ours", "saved by stock")]
        (ours, files), (stock, wanted) = (
            saved_tensors(run.trainer.save_model, folder)
            for run, folder in zip((self.ours, self.stock), folders, strict=True)
        )
        other = [f"only one trainer saves {name}" for name in sorted({*files} ^ {*wanted})]
        for name in ("config.json", "adapter_config.json", "generation_config.json"):
            if name in files and name in wanted:
                configs = [_config(os.path.join(folder, name)) for folder in folders]
                other += [f"{name}: {text}" for text in differences(configs[:1], configs[1:])]
        for name in ours.keys() & stock.keys():
            if (ours[name].dtype, ours[name].shape) != (stock[name].dtype, stock[name].shape):
                other.append(f"{name} is saved as {ours[name].dtype} of {tuple(ours[name].shape)}")
        if other:
            return equal(other, "")
        check = exact([ours], [stock])
        check.detail = f"{len(files)} files, {check.detail}"
        return check


def _states(run: Run) -> set[tuple[str, ...]]:
    """Return the mode and the autocast of each call of a model."""
    return {(mode, autocast) for mode, _, autocast in recorder_of(run).calls}


def calls(ours: Run, stock: Run) -> list[str]:
    """Return the differences in how the model, its reference and its teacher were called."""
    # Calls without gradients are not compared: stock makes one more for metrics if a loss hides the logits
    our_states = _states(ours)
    stock_states = _states(stock)
    if isinstance(stock.trainer, PlainMedusaTrainer):  # it does not put a frozen model into eval mode
        our_states = {call[-1:] for call in our_states}
        stock_states = {call[-1:] for call in stock_states}
    if our_states == stock_states:
        return []
    return [f"models are called in {sorted(our_states)}, stock in {sorted(stock_states)}"]


def exact(got: list[Tensors], want: list[Tensors]) -> Check:
    """Return the worst error in sets of tensors that should be equal except for the last bit."""
    if len(got) != len(want):
        return Check(f"{len(got)} steps in place of {len(want)}", float("inf"), EXACT)
    relative: dict[str, float] = {}
    for one, other in zip(got, want, strict=True):
        for name in one.keys() ^ other.keys():
            relative[name] = float("inf")
        for name in one.keys() & other.keys():
            if not torch.equal(one[name], other[name]):
                error = errors({"": one[name].double()}, {"": other[name].double()})[""]
                relative[name] = max(error, relative.get(name, 0.0))
    if not relative:
        return Check("bit for bit", 0.0, EXACT)
    worst_of_all = max(relative, key=lambda name: relative[name])
    return Check(f"most in {worst_of_all}", relative[worst_of_all], EXACT)


def _without_torch(around: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in around.items() if name != "random numbers of torch"}


def _predicted(run: Run) -> Tensors:
    """Return the logits that `predict` returns for the evaluation rows, at positions with a label."""
    prediction = run.trainer.predict(run.trainer.eval_dataset)
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    logits, labels = torch.as_tensor(logits), torch.as_tensor(prediction.label_ids)
    return {"logits": logits[:, :-1][labels[:, 1:] != -100]}


def recorder_of(run: Run) -> Recorder:
    assert run.recorder is not None
    return run.recorder


def _name(run: Run) -> str:
    optimizer = run.trainer.optimizer
    return type(getattr(optimizer, "optimizer", optimizer)).__name__


def chosen_optimizer(setup: Any) -> str:
    """Return the recipe's optimizer, or AdamW if that needs another package."""
    chosen = str(getattr(setup.options.get("optim"), "value", setup.options.get("optim")))
    return chosen if chosen in OPTIMIZERS else "adamw_torch"


def _config(path: str) -> dict[str, Any]:
    with open(path) as file:
        return {name: json.dumps(value) for name, value in json.load(file).items() if name not in _OF_VERSION}
