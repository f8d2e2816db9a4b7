"""Runs the checks, in the order of the table."""

import math
import os
import time
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from liger_trainer.errors import RecipeError
from liger_trainer.verify import options, sixteen_bits
from liger_trainer.verify.adam_training import AdamTraining
from liger_trainer.verify.bf16 import in_bf16
from liger_trainer.verify.captured import captured
from liger_trainer.verify.figures import (
    EPS,
    RTOL,
    Check,
    equal,
    errors,
    logged,
    number_errors,
    steps_of,
    worst,
    worst_number,
)
from liger_trainer.verify.observed import copies, differences, numbers
from liger_trainer.verify.padded import more_padding, padding_around
from liger_trainer.verify.runs import Bench, OtherOrder, Run, in_chunks

UNMOVED = 1e-3  # the largest reward of a policy equal to its reference, relative to the reward of another policy


class Checks:
    """The checks of one setup. `each` runs them, in the order of the table."""

    ours: Run
    stock: Run
    noise: dict[str, float]
    swapped = "nothing"

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.setup = bench.setup
        self.second: AdamTraining | Exception | None = None  # the error if it has failed
        # Ours is compared with a trainer of this kind (of `Bench.build`), which the table calls `compared_with`.
        self.kind = "stock"
        self.compared_with = self.setup.stock.__name__
        if self.setup.is_medusa:  # TRL has no trainer for them
            self.kind = "plain"
            self.compared_with = "a loss of Medusa heads that is written down from full logits"

    def each(self) -> Iterator[Check]:
        """Run the checks one by one. RecipeError if our trainer rejects the setup."""
        try:
            self.bench.build("ours")
        except (ValueError, ImportError) as error:
            raise RecipeError(f"{self.setup.trainer.__name__} refuses the recipe: {error}") from error
        for name, check in (
            ("losses and gradient norm", self._losses),
            ("gradients", self._gradients),
            ("updates of weights", self._updates),
            ("what trains", self._what_trains),
            ("every logged number", self._numbers),
            ("head in chunks = in one", self._chunks),
            ("Adam, 2 epochs: logs", self._of_second(AdamTraining.logs)),
            ("Adam, 2 epochs: gradients", self._of_second(AdamTraining.gradients)),
            ("Adam, 2 epochs: weights, states", self._of_second(AdamTraining.weights)),
            ("Adam, 2 epochs: what is seen", self._of_second(AdamTraining.surroundings)),
            ("evaluation", self._of_second(AdamTraining.evaluation)),
            ("evaluation changes nothing", self._of_second(AdamTraining.evaluation_changes_nothing)),
            ("model as saved", self._of_second(AdamTraining.saved)),
            ("norms in 16 bits", self._norms),
            ("gates in 16 bits", self._gates),
            ("head in 16 bits", self._head),
            ("training in bf16", self._autocast),
            ("captured steps = uncaptured", self._captured),
            ("packed rows = separate rows", self._packed),
            ("padded rows = unpadded rows", self._padded),
            ("padding on the left", self._padded_left),
            ("dropout drawn once", self._dropout),
            ("dropout = stock's", self._of_options(options.dropout_as_stock)),
            ("optimizer in backward = after it", self._of_options(options.optimizer_in_backward)),
            ("accumulation 1 x 4 = 4 x 1", self._accumulation),
            ("reference model", self._reference),
            ("adapter merged = applied", self._merged),
            ("saved and resumed = uninterrupted", self._resumed),
        ):
            start = time.perf_counter()
            try:
                check_result = check()
            except Exception as error:  # any error in a training fails the check
                check_result = Check(f"{type(error).__name__}: {error}", math.inf)
            check_result.name = name
            check_result.seconds = time.perf_counter() - start
            yield check_result
            if not hasattr(self, "noise"):
                return  # without the stock runs, the other checks cannot compare anything

    # Two steps with the stock trainer and with ours

    def _losses(self) -> Check:
        self.tokens: set[int] = set()
        self.ours = self.bench.run("ours", collate=lambda collator: lambda rows: self._with_tokens(collator(rows)))
        report = self.ours.trainer.liger_report
        if report is not None:
            self.swapped = report.one_line()
        try:
            self.stock = self.bench.run(self.kind)
        except Exception as error:  # the stock trainer does not support everything that ours does
            if self.kind == "plain":
                raise
            why = f"{self.compared_with}'s {type(error).__name__}: {error}"
            self.kind = "plain"
            self.compared_with = f"itself from full logits with nothing swapped, because of {why}"
            self.stock = self.bench.run(self.kind)

        # Every check allows as much as the same training moves if its products only add in another order.
        with OtherOrder():
            other = self.bench.run(self.kind)
        self.noise = {}
        for one, same in zip(steps_of(other), steps_of(self.stock), strict=True):
            self._allow(errors(one, same))
        self._allow(number_errors(other.logs, self.stock.logs))
        self.noise_of_updates = errors(other.updates, self.stock.updates)
        check = worst(logged(self.ours), logged(self.stock), self.noise)
        ours = ", then ".join(f"{log['loss']:.4f}" for log in self.ours.logs)
        stock = ", then ".join(f"{log['loss']:.4f}" for log in self.stock.logs)
        check.detail = ours if check.verdict == "ok" else f"{ours}, stock {stock}; {check.detail}"
        return check

    def _allow(self, sizes: dict[str, float]) -> None:
        """Raise the noise of each name to `sizes`, where that is larger."""
        for name, size in sizes.items():
            self.noise[name] = max(size, self.noise.get(name, 0.0))

    def _with_tokens(self, batch: Any) -> Any:
        """Record the tokens of `batch`, and return it."""
        if isinstance(batch, dict | UserDict):
            for name, value in batch.items():
                if name.endswith("input_ids"):
                    self.tokens |= set(value.flatten().tolist())
        return batch

    def _gradients(self) -> Check:
        check = worst(self.ours.gradients, self.stock.gradients, self.noise)
        if check.verdict != "ok" and self.kind == "stock":
            plain = worst(self.bench.run("plain").gradients, self.stock.gradients, self.noise)
            check.detail += f"; with nothing swapped it is {plain.figure:.1e}"
        return check

    def _updates(self) -> Check:
        updates, noise = self.stock.updates, self.noise_of_updates
        for name, value in updates.items():  # adding a small update to a weight near 1 loses this much
            lost = EPS * float(self.stock.after[name].norm()) / max(float(value.norm()), 1e-30)
            noise[name] = max(noise[name], lost)
        return worst([self.ours.updates], [updates], noise)

    def _numbers(self) -> Check:
        return worst_number(self.ours.logs, self.stock.logs, self.noise)

    def _chunks(self) -> Check:
        with in_chunks():
            run = self.bench.run("ours")
        return worst(steps_of(run), steps_of(self.stock), self.noise)

    # A second training

    def _of_second(self, check: Callable[[AdamTraining], Check]) -> Callable[[], Check]:
        def made() -> Check:
            if self.second is None:
                try:
                    self.second = AdamTraining(self.bench, self.kind, self.noise)
                except Exception as error:  # only the first of its checks fails with this error
                    self.second = error
                    raise
            if isinstance(self.second, Exception):
                return Check("the second training failed")
            return check(self.second)

        return made

    def _of_options(self, check: Callable[[Bench, str, dict[str, float]], Check]) -> Callable[[], Check]:
        return lambda: check(self.bench, self.kind, self.noise)

    def _dropout(self) -> Check:
        return options.dropout_drawn_once(self.bench, self.kind, self.noise, self.ours, self.stock)

    # Which weights train

    def _what_trains(self) -> Check:
        should, learns = self._what_should_train()
        model = dict(self.ours.trainer.model.named_parameters())
        moved = {name for name, value in self.ours.before.items() if not torch.equal(value, self.ours.after[name])}
        norms = {}  # the largest gradient of each parameter, over the steps
        for name in set().union(*self.ours.gradients):
            norms[name] = max(float(step[name].norm()) for step in self.ours.gradients if name in step)
        if self.setup.is_medusa:  # the heads train alone (stage 1), or together with the model (stage 2)
            heads = {name for name in model if "medusa_head." in name}
            trains_model = self.ours.trainer.args.medusa_stage == 2
            should = should | heads if trains_model else heads
            learns = learns | heads if trains_model else heads
        least = 1e-5 * max(norms.values(), default=0.0)  # a smaller gradient may round a weight to itself
        problems = {
            "frozen, and should train": {name for name in should if name not in model or not model[name].requires_grad},
            "trained, and should be frozen": {
                name for name, p in model.items() if name not in should and (p.requires_grad or name in moved)
            },
            "without a gradient": {name for name in learns if not norms.get(name)},
            "with a gradient, and never moved": {n for n in learns if norms.get(n, 0.0) > least and n not in moved},
        }
        messages = [f"{len(names)} {what}, such as {min(names)}" for what, names in problems.items() if names]
        if messages:
            return Check("; ".join(messages), len(set().union(*problems.values())))
        idle = f"; {len(should - learns)} of no effect on the model's own loss" if should - learns else ""
        return Check(f"{len(should)} of {len(model)} tensors have a gradient and move{idle}", 0)

    def _what_should_train(self) -> tuple[set[str], set[str]]:
        """Return the names of the parameters that should train, and of those that need a gradient.

        The latter are all adapters, and all other parameters that get a gradient from transformers' own loss.
        """
        model = self.bench.model()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_" in name:
                    p.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
        ids = self._ids(8, 64)
        if self.tokens:  # an embedding row that no batch looks up needs no gradient
            seen = torch.tensor(sorted(self.tokens))
            ids = seen[ids % len(seen)]
        model.train()(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        should = {name: p for name, p in model.named_parameters() if p.requires_grad}
        return set(should), {n for n, p in should.items() if "lora_" in n or (p.grad is not None and p.grad.any())}

    def _ids(self, rows: int, length: int) -> torch.Tensor:
        special, every = len(self.bench.tokenizer.all_special_ids), len(self.bench.tokenizer)
        return torch.randint(special, every, (rows, length), generator=torch.Generator().manual_seed(0))

    # In 16 bits

    def _norms(self) -> Check:
        return sixteen_bits.norms(self.ours.trainer)

    def _gates(self) -> Check:
        return sixteen_bits.gates(self.ours.trainer)

    def _head(self) -> Check:
        return sixteen_bits.head(self.bench.model(), self._ids(4, 120))

    def _autocast(self) -> Check:
        return in_bf16(self.bench, self.kind, self.noise)

    def _captured(self) -> Check:
        return captured(self.bench, self.ours.trainer, self.noise)

    # The same rows in other batches

    def _packed(self) -> Check:
        if not self.setup.packs:
            return Check("the recipe packs no rows")
        size = len(self.bench.rows)
        once: dict[str, Any] = {"max_steps": 1, "per_device_train_batch_size": size, "gradient_accumulation_steps": 1}
        packed = self.bench.run("ours", **once)
        apart = self.bench.run(self.kind, **once, packing=False, padding_free=False)
        return worst(steps_of(packed), steps_of(apart), self.noise)

    def _why_not_padded(self) -> str | None:
        """Return why padding cannot be added to the batches of this setup, or None."""
        if self.setup.generates:
            return "the trainer pads what it writes itself"
        return "packed rows have no padding" if self.setup.packs else None

    def _padded(self) -> Check:
        reason = self._why_not_padded()
        if reason is not None:
            return Check(reason)
        pad = self.bench.tokenizer.pad_token_id
        padded = self.bench.run("ours", collate=lambda collator: lambda rows: more_padding(collator(rows), pad))
        return worst(steps_of(padded), steps_of(self.ours), self.noise)

    def _padded_left(self) -> Check:
        reason = self._why_not_padded()
        if reason is not None:
            return Check(reason)
        pad = self.bench.tokenizer.pad_token_id
        ours, stock = (
            self.bench.run(kind, collate=lambda collator: lambda rows: padding_around(collator(rows), pad), max_steps=1)
            for kind in ("ours", self.kind)
        )
        return worst(steps_of(ours), steps_of(stock), self.noise)

    def _accumulation(self) -> Check:
        if self.setup.generates:
            return Check("each micro-batch writes completions of its own")
        if self.setup.stock.__name__ == "KTOTrainer":
            return Check("the KL term is of a micro-batch")
        check = self._split("ours")
        trainer = self.ours.trainer
        balanced = getattr(trainer, "aux_loss_enabled", trainer.model.config.to_dict().get("output_router_logits"))
        if check.verdict == "ok" or (self.setup.stock.__name__ in ("SFTTrainer", "Trainer") and not balanced):
            return check  # these losses are means over all tokens, so the split must not matter
        stock, ours = self._split(self.kind).figure or 0.0, check.figure or 0.0
        return Check(f"the stock loss depends on it too, by {stock:.1e}") if ours <= 2 * stock else check

    def _split(self, kind: str) -> Check:
        one, four = (
            self.bench.run(kind, per_device_train_batch_size=rows, gradient_accumulation_steps=4 // rows)
            for rows in (1, 4)
        )
        return worst(steps_of(one), steps_of(four), self.noise)

    # References, merging, resuming

    def _reference(self) -> Check:
        changed = self._changed_models()
        if changed:
            return equal(changed, "")
        if self.setup.stock.__name__ not in ("DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer"):
            return Check("the loss has none")
        if self.setup.generates and not self.ours.trainer.args.beta:
            return Check("beta is 0")
        apart, same = (_distance(run) for run in (self.ours, self.bench.run("ours", disturbed=False, max_steps=1)))
        detail = f"rewards or KL are {apart:.1e} for a policy apart from it, and {same:.1e} for the same weights"
        return Check(detail, same / apart if apart else math.inf, UNMOVED)

    def _changed_models(self) -> list[str]:
        """Name the weights of a reference or a teacher that the training has changed."""
        trainer = self.ours.trainer
        changed = []
        for attribute, path in (("ref_model", self.bench.path), ("teacher_model", self.bench.teacher)):
            model = getattr(trainer, attribute, None)
            if not isinstance(model, torch.nn.Module) or getattr(trainer.args, "sync_ref_model", False):
                continue
            before = dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters())
            for name, value in copies(model).items():
                if name in before and not torch.equal(value, before[name]):
                    changed.append(f"the training changes {name} of {attribute}")
        return changed

    def _merged(self) -> Check:
        if self.setup.peft_config is None:
            return Check("the recipe has no adapter")
        from peft import PeftModel

        from liger_trainer.lora.merge import merge

        folder = os.path.join(self.bench.folder, "adapter")
        ids = self._ids(2, 48)
        trainer = self.ours.trainer
        trainer.save_model(folder)
        is_prompt = self.setup.peft_config.is_prompt_learning  # tokens before the row, which cannot be merged
        base = self.bench.model(adapter=False).eval()
        with torch.no_grad():
            applied = trainer.model.eval()(input_ids=ids.to(trainer.args.device), use_cache=False).logits.cpu()
            without = base(input_ids=ids, use_cache=False).logits
            loaded = PeftModel.from_pretrained(base, folder)
            loaded = loaded if is_prompt else merge(loaded)
            logits = loaded.eval()(input_ids=ids, use_cache=False).logits
        if is_prompt:
            applied, logits = (x[:, -ids.shape[1] :] for x in (applied, logits))
        effect = float((without - applied).norm() / applied.norm())
        check = worst([{"logits": logits}], [{"logits": applied}], {})
        check.detail = f"the adapter changes the logits by {effect:.1e}"
        if is_prompt:
            check.detail += "; a prompt is loaded, not merged"
        if effect < 100 * RTOL:  # too small for the check to see whether the adapter is applied
            return Check(f"{check.detail} only", math.inf, RTOL)
        return check

    def _resumed(self) -> Check:
        chosen: dict[str, Any] = {"optim": "adamw_torch", "gradient_accumulation_steps": 1, "learning_rate": 1e-2}
        chosen |= {"max_steps": 4}
        folder = os.path.join(self.bench.folder, "saved")
        whole = self.bench.run("ours", **chosen, save_strategy="steps", save_steps=2, output_dir=folder)
        resumed = self.bench.run("ours", disturbed=False, resume=os.path.join(folder, "checkpoint-2"), **chosen)
        whole_logs = [numbers(log) for log in whole.logs[-2:]]
        resumed_logs = [numbers(log) for log in resumed.logs[-2:]]
        for log in (*whole_logs, *resumed_logs):
            log.pop("num_tokens", None)  # TRL restarts this count after a resume
        other = differences([resumed.after, resumed.states], [whole.after, whole.states])
        other = [text.partition(" (")[0] for text in other] + differences(resumed_logs, whole_logs)
        tensors = len(whole.after) + len(whole.states)
        return equal(other, f"{tensors} tensors and {len(whole_logs[0])} logged numbers, bit for bit")


def _distance(run: Run) -> float:
    """Return the distance of the policy from its reference at the first step, as the trainer has logged it."""
    values = [run.logs[0].get(name, math.nan) for name in ("rewards/chosen", "rewards/rejected", "kl")]
    return max((abs(value) for value in values if math.isfinite(value)), default=0.0)
