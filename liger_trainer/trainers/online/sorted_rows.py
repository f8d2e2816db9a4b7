"""Sorts the rows of a GRPO or RLOO step by prompt, for the option `sort_by_prompt`, and counts what that saves.

TRL shuffles a generation batch and splits it into micro-batches, so only some rows of a prompt end up in the same one.
Sorting moves rows between the micro-batches of one optimizer step. The step still has the same rows, so its gradient is
unchanged if the loss is a sum over rows. Other losses are rejected.
"""

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import nn

from liger_trainer.head.module import base_model_of
from liger_trainer.trainers.online.old_policy import overridden
from liger_trainer.trainers.online.rows import GeneratingTrainer
from liger_trainer.trainers.shared_prompts import sharing_rule
from liger_trainer.varlen.decide import bound_backbone
from liger_trainer.varlen.groups import Group, SharingRule, saved_by, worthwhile

if TYPE_CHECKING:  # the mixin always goes before one of TRL's trainers
    from trl import GRPOTrainer as StockTrainer
else:
    StockTrainer = object

# Each divides by the same number in all micro-batches of a step. 'bnpo' divides by the tokens of each micro-batch.
SUMS_OVER_ROWS = ("grpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo")
# Batches with images share nothing, and have tensors without one row for each prompt.
_IMAGES = ("pixel_values", "num_images")


class SortingArguments(Protocol):
    """The trainer arguments that sorting reads. Trainers of one algorithm have more, such as `loss_type`."""

    share_prompts: bool
    gradient_accumulation_steps: int
    steps_per_generation: int


class SortingTrainer(GeneratingTrainer, Protocol):
    """The trainer attributes that sorting reads. It moves rows within `_buffered_inputs`, and writes nothing else."""

    args: SortingArguments
    _step: int  # micro-batches so far; TRL's
    aux_loss_enabled: bool
    router_aux_loss_coef: float

    @property
    def uses_liger(self) -> bool:
        """Return whether the trainer patches its models."""


class SortedRows:
    """Counts the tokens that shared prompts save in training steps, in TRL's order and sorted, for the report.

    Args:
        is_on (`bool`): Whether rows are sorted.

    Attributes:
        shuffled (`int`): The tokens that are not computed in TRL's order.
        sorted (`int`): The tokens that are not computed in sorted order.
    """

    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on
        self.shuffled = 0
        self.sorted = 0

    def to_dict(self) -> dict[str, Any]:
        return {"on": self.is_on, "tokens_saved_shuffled": self.shuffled, "tokens_saved_sorted": self.sorted}


class Prompts(NamedTuple):
    """The prompt of each row of a batch, on the host.

    Attributes:
        keys (`list[bytes]`): Equal for equal prompts.
        lengths (`list[int]`): The tokens of each prompt.
        tokens (`list[int]`): The tokens of each row, prompt and completion.
    """

    keys: list[bytes]
    lengths: list[int]
    tokens: list[int]

    @classmethod
    def of(cls, batches: list[dict[str, Any]]) -> "Prompts":
        """Return the prompts of micro-batches of one generation batch, which are padded to the same length."""

        def joined(name: str) -> torch.Tensor:
            return torch.cat([batch[name] for batch in batches]).cpu()

        mask = joined("prompt_mask")
        rows = joined("prompt_ids").masked_fill(mask == 0, -1).numpy()
        lengths = mask.sum(1)
        tokens = lengths + joined("completion_mask").sum(1)
        return cls([row.tobytes() for row in rows], lengths.tolist(), tokens.tolist())

    def order(self) -> list[int]:
        """Return the row indices sorted by prompt. Prompts, and the rows of a prompt, keep their order."""
        firsts: dict[bytes, int] = {}
        for key in self.keys:
            firsts.setdefault(key, len(firsts))
        return sorted(range(len(self.keys)), key=lambda row: firsts[self.keys[row]])

    def saved(self, order: list[int], size: int, rule: SharingRule) -> int:
        """Return how many tokens `rule` saves with the rows in `order`, in micro-batches of `size` rows."""
        return sum(self._saved_in(order[i : i + size], rule) for i in range(0, len(order), size))

    def _saved_in(self, rows: list[int], rule: SharingRule) -> int:
        alike: dict[bytes, list[int]] = {}
        for row in rows:
            alike.setdefault(self.keys[row], []).append(row)
        # The last token of a prompt is computed in each row: its state predicts the row's first token.
        groups = [Group(same, 0, self.lengths[same[0]] - 1) for same in alike.values() if len(same) > 1]
        return saved_by(worthwhile(groups, sum(self.tokens[row] for row in rows), rule))


def micro_batches_of_a_step(args: SortingArguments) -> int | None:
    """Return how many micro-batches of a generation batch make a step, or None if a step takes parts of two batches."""
    generation = args.steps_per_generation
    step = args.gradient_accumulation_steps
    if step % generation == 0:
        return generation
    return step if generation % step == 0 else None


def in_order(batches: list[dict[str, Any]], order: list[int]) -> list[dict[str, Any]]:
    """Return micro-batches of the same sizes, with the rows of `batches` in `order`."""
    size = len(order) // len(batches)
    found: list[dict[str, Any]] = [{} for _ in batches]
    for name, first in batches[0].items():
        values = [batch[name] for batch in batches]
        if isinstance(first, torch.Tensor) and first.ndim:
            values = list(torch.cat(values)[torch.tensor(order, device=first.device)].split(size))
        elif isinstance(first, list):
            rows = [*itertools.chain.from_iterable(values)]
            ordered = [rows[row] for row in order]
            values = [ordered[i : i + size] for i in range(0, len(order), size)]
        for batch, value in zip(found, values, strict=True):
            batch[name] = value
    return found


class SortsRows(StockTrainer):
    """Mixin of trainers that generate their rows. It precedes `LigerTRLMixin`.

    Attributes:
        sorting (`SortedRows` or `None`): What sorting saves or would save. None if it changes nothing.
    """

    sorting: SortedRows | None = None

    def _finish_init(self) -> None:
        super()._finish_init()
        trainer: SortingTrainer = self
        if trainer.uses_liger and getattr(trainer.args, "sort_by_prompt", False):
            refuse_unfit_for_sorting(trainer)

    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        trainer: SortingTrainer = self
        before = trainer._buffered_inputs
        inputs = super()._prepare_inputs(*args, **kwargs)
        made = trainer._buffered_inputs
        rule = sharing_rule(trainer.args)
        if made is None or made is before or rule is None or not trainer.wants_part("varlen_attention"):
            return inputs
        together = micro_batches_of_a_step(trainer.args)
        if together is None or together == 1 or any(name in made[0] for name in _IMAGES):
            return inputs
        is_on = getattr(trainer.args, "sort_by_prompt", False)
        self.sorting = self.sorting or SortedRows(is_on)
        for begin in range(0, len(made), together):
            window = made[begin : begin + together]
            prompts = Prompts.of(window)
            order = prompts.order()
            size = len(window[0]["prompt_ids"])
            self.sorting.shuffled += prompts.saved(list(range(len(order))), size, rule)
            self.sorting.sorted += prompts.saved(order, size, rule)
            if is_on:
                made[begin : begin + together] = in_order(window, order)
        return made[trainer._step % trainer.args.steps_per_generation]


def sorting_of(trainer: object, model: nn.Module) -> SortedRows | None:
    """Return what sorting saves or would save in `trainer`, or None if it changes nothing.

    It changes nothing either if rows share nothing in `model`, the trainer's.
    """
    sorting = getattr(trainer, "sorting", None)
    bound = bound_backbone(base_model_of(model))
    if sorting is None or bound is None or bound.sharing.never is not None or bound.sharing.unshared:
        return None
    return sorting


def refuse_unfit_for_sorting(trainer: SortingTrainer) -> None:
    """Raise ValueError if sorting would change the gradient of a step or would save nothing."""
    args = trainer.args
    if not args.share_prompts:
        raise ValueError("sort_by_prompt is True, but share_prompts is False. Set share_prompts=True.")
    if micro_batches_of_a_step(args) is None:
        raise ValueError(
            f"sort_by_prompt is True, but a step takes parts of two generation batches: gradient_accumulation_steps is "
            f"{args.gradient_accumulation_steps} and steps_per_generation is {args.steps_per_generation}. Set one to a "
            "multiple of the other, or sort_by_prompt=False."
        )
    fault = _why_order_matters(trainer)
    if fault is not None:
        raise ValueError(f"sort_by_prompt is True, but {fault}, or sort_by_prompt=False.")


def _why_order_matters(trainer: SortingTrainer) -> str | None:
    """Return why the loss depends on which rows share a micro-batch, and what to set instead, or None."""
    args = trainer.args
    changed = overridden(trainer, ("_compute_loss", "compute_loss"))
    if changed is not None:
        return f"{changed}, and its loss may depend on which rows share a micro-batch. Remove it"
    loss_type = getattr(args, "loss_type", None)  # RLOO has one loss, a mean over rows
    if loss_type is not None and loss_type not in SUMS_OVER_ROWS:
        return f"loss_type is {loss_type!r}, which is not a sum over rows. Set one of {', '.join(SUMS_OVER_ROWS)}"
    quantile = getattr(args, "top_entropy_quantile", 1.0)
    if quantile < 1.0:
        return f"top_entropy_quantile is {quantile:g}: each micro-batch has its own limit. Set top_entropy_quantile=1.0"
    if getattr(args, "use_adaptive_entropy", False):
        return "use_adaptive_entropy is True: each micro-batch has its own mean. Set use_adaptive_entropy=False"
    bonus = getattr(args, "entropy_coef", 0.0)
    if bonus:
        return f"entropy_coef is {bonus:g}: each micro-batch has its own mean. Set entropy_coef=0.0"
    if trainer.aux_loss_enabled:
        return (
            f"router_aux_loss_coef is {trainer.router_aux_loss_coef:g}: the auxiliary loss of experts is not a sum "
            "over rows. Set router_aux_loss_coef=0.0"
        )
    return None
