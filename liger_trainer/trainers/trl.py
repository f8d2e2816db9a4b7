"""Puts our kernels and our fused head into TRL's trainers. The losses stay TRL's.

The `__init__` of TRL's trainers calls `add_fused_lm_head`, a global of its module, for the policy and the reference. A
copy of this `__init__` finds our function under that name. So TRL still decides which outputs, temperature and
precision it wants for each model, and each model is patched before anything shards or wraps it.
`tests/liger_trainer/trainers/test_contracts.py` fails if a TRL release moves a name that this depends on.
"""

import inspect
import sys
import types
from collections.abc import Iterable, Sized
from typing import Any

import trl
from accelerate import Accelerator
from torch import nn
from transformers.integrations import is_fsdp_enabled

from liger_trainer.data.formats import first_conversation
from liger_trainer.head.module import base_model_of, why_peft_needs_logits
from liger_trainer.head.outputs import HeadOptions
from liger_trainer.trainers.base import LigerTrainerMixin
from liger_trainer.trainers.fsdp2 import broadcast_weights
from liger_trainer.trainers.model_card import WritesCards
from liger_trainer.trainers.online.exact_sync import keep_base_weights
from liger_trainer.trainers.patched_models import PatchedModels
from liger_trainer.trainers.shared_prompts import sharing_rule


class NoAdapterIsRefused:
    """Replaces PEFT classes in TRL's `isinstance` checks. Nothing is an instance of it.

    TRL refuses a PEFT layer as the LM head because its fused head reads `lm_head.weight`. Ours calls the module.
    """


def with_globals(function: types.FunctionType, names: dict[str, Any]) -> types.FunctionType:
    """Return a copy of `function` (one of TRL's) that sees the globals in `names` with other values.

    TRL's own function and its module do not change.

    Raises:
        ImportError: The function has no such global.
    """
    missing = [name for name in names if name not in function.__globals__]
    if missing:
        raise ImportError(
            f"{function.__module__} of trl {trl.__version__} has no {', '.join(missing)}, which the fused head depends "
            'on. Install trl>=1.16,<2, or set liger_config={"fused_linear_cross_entropy": false}.'
        )
    code, scope = function.__code__, function.__globals__ | names
    copy = types.FunctionType(code, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _for_fsdp(module: types.ModuleType) -> dict[str, Any]:
    """Return replacements for globals of a TRL trainer's module, for training with FSDP."""
    replaced = {}
    stock_prepare = vars(module).get("prepare_fsdp")
    if stock_prepare is not None:

        def fill_and_prepare(model: nn.Module, accelerator: Accelerator) -> nn.Module:
            """Give every process the weights of a reference before it is sharded."""
            broadcast_weights(model, accelerator)
            return stock_prepare(model, accelerator)

        replaced["prepare_fsdp"] = fill_and_prepare
    stock_create = vars(module).get("create_model_from_path")
    if stock_create is not None:

        def create_on_cpu(*args: Any, **kwargs: Any) -> nn.Module:
            """Load a model without TRL's `device_map="auto"` under FSDP.

            With it, the process that reads the file would spread the model over all GPUs, and broadcasting a reference
            from there ended in "CUDA error: unspecified launch failure".
            """
            if is_fsdp_enabled():
                kwargs.setdefault("device_map", None)
            return stock_create(*args, **kwargs)

        replaced["create_model_from_path"] = create_on_cpu
    return replaced


class LigerTRLMixin(LigerTrainerMixin, WritesCards):
    """Mixin that patches the models of a TRL trainer while it is built. It goes before the stock class:

    ```python
    class LigerDPOTrainer(LigerTRLMixin, DPOTrainer):
        gives_token_predictions = True
    ```

    A trainer that calls `add_fused_lm_head` for its models needs nothing more. Any other trainer overrides
    `_replaced_globals`, which replaces globals of TRL's module for the stock `__init__`, and calls `_patch_frozen` for
    frozen models that the replacements do not see. `_finish_init` runs last, and rejects options that the stock trainer
    would silently ignore.

    Attributes:
        ignored_fields (`tuple[str, ...]`): Inherited config fields that the stock trainer does not use. Setting one is
            an error.
        rows_given (`int` or `None`): Number of training rows that the trainer got.
        rows_left_out (`int`): How many of them TRL has left out, or packed into others. 0 if their number is unknown.
        shares_prompts (`bool`): Whether `share_prompts` lets rows that begin alike share their beginning.
    """

    rows_given: int | None = None
    rows_left_out: int = 0
    shares_prompts: bool = False
    loss_hook: str | None = None
    ignored_fields: tuple[str, ...] = ("label_smoothing_factor",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        stock_init = super().__init__
        arguments = dict(zip(inspect.signature(stock_init).parameters, args, strict=False)) | kwargs
        config: Any = arguments.get("args")
        self.args = config  # `uses_liger` and `wants_part` read it
        self._patched = PatchedModels()
        rows = arguments.get("train_dataset")
        self.rows_given = len(rows) if isinstance(rows, Sized) else None
        first = first_conversation(rows)
        self.rows_are_chats = first is not None
        if first is not None and first[0]["role"] == "system" and isinstance(first[0].get("content"), str):
            self.system_prompt = first[0]["content"]
        replaced = _for_fsdp(sys.modules[self.stock_class().__module__]) | self._replaced_globals()
        init = with_globals(self._stock_init(stock_init), replaced)
        init(self, *args, **kwargs)
        # Counted now, since the user may set another `train_dataset` before training begins.
        if self.rows_given is not None and isinstance(self.train_dataset, Sized):
            self.rows_left_out = max(0, self.rows_given - len(self.train_dataset))
        if self.liger_report is None:
            self._apply_liger(self.model)
        self._finish_init()

    def _stock_init(self, following: Any) -> types.FunctionType:
        """Return the stock `__init__`. TypeError if `following`, the next one in the MRO, is another."""
        stock: Any = self.stock_class().__init__  # type: ignore[misc]
        if following.__func__ is not stock:
            defining = (cls for cls in type(self).__mro__ if vars(cls).get("__init__") is following.__func__)
            owner = next(defining, self.stock_class()).__name__
            raise TypeError(
                f"{owner}.__init__ comes between {LigerTRLMixin.__name__} and {self.stock_class().__name__}. "
                f"Put {owner} before the Liger trainer in the bases of {type(self).__name__}."
            )
        return stock

    def _replaced_globals(self) -> dict[str, Any]:
        """Return replacements for globals of the stock `__init__`."""
        if not self.uses_liger:
            return {}
        if self.wants_part("fused_linear_cross_entropy"):
            return {"add_fused_lm_head": self._add_fused_lm_head, "BaseTunerLayer": NoAdapterIsRefused}
        stock = vars(sys.modules[self.stock_class().__module__]).get("add_fused_lm_head")
        if stock is None:
            return {}

        def add_and_patch(model: nn.Module, **options: Any) -> None:
            stock(model, **options)
            self._patch(model)

        return {"add_fused_lm_head": add_and_patch}

    def _add_fused_lm_head(
        self,
        model: nn.Module,
        temperature: float = 1.0,
        cast_lm_head_to_fp32: bool = False,
        outputs: Iterable[str] = ("log_probs",),
    ) -> None:
        why = why_peft_needs_logits(self.model)
        if why is not None:
            raise ValueError(
                f"{self.stock_class().__name__} of trl {trl.__version__} builds no logits, but {why}. Use "
                "LigerTrainer, or another adapter, such as PromptTuningConfig."
            )
        self._needs_heads = True  # the stock trainer calls its models with `fused_lm_head=True`
        sharing = sharing_rule(self.args) if self.shares_prompts else None
        self._patch(model, HeadOptions(temperature, cast_lm_head_to_fp32, tuple(outputs), sharing))

    def _patch(self, model: nn.Module, options: HeadOptions | None = None) -> None:
        """Patch the policy, which sets the trainer's report, or patch a frozen model."""
        if base_model_of(model) is base_model_of(self.model):
            self._apply_liger(self.model, options)
        else:
            self._patch_frozen(model, options)

    def _patch_frozen(self, model: nn.Module, options: HeadOptions | None = None) -> None:
        """Patch a reference or teacher model with the same `liger_config`, before anything shards or wraps it."""
        if self.uses_liger:
            self._patched.patch(model, getattr(self.args, "liger_config", None), options)

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(self._with_predictions(model), *args, **kwargs)

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        """Score the reference before training, in DPO and KTO. It may be the model without its adapter."""
        if self.ref_model is None:
            broadcast_weights(self.model, self.accelerator)
        return super()._precompute_ref_logps(*args, **kwargs)

    def _finish_init(self) -> None:
        if self.uses_liger:
            keep_base_weights(self)
        for name in self.ignored_fields:
            value = getattr(self.args, name) if self.uses_liger else None
            if value:
                other = ", or set label_smoothing instead" if hasattr(self.args, "label_smoothing") else ""
                raise ValueError(
                    f"{name} is {value}, which {self.stock_class().__name__} does not use. Remove it{other}."
                )
        if self.loss_hook != "token_loss" and type(self).token_loss is not LigerTrainerMixin.token_loss:
            advice = f"Override {self.loss_hook or 'compute_loss'} instead."
            if self.loss_hook is None and not self.takes_classifiers:  # a classifier has no log-probabilities
                advice += " In it, model(..., labels=labels, fused_lm_head=True).log_probs needs no logits."
            raise ValueError(
                f"{type(self).__name__} overrides token_loss, which {self.stock_class().__name__} never calls. {advice}"
            )
        super()._finish_init()
