"""How our kernels and our fused head get into TRL's trainers, whose losses stay TRL's.

TRL's trainers call `add_fused_lm_head`, a global of their module, for the policy and for the reference model while they
are built. During that time the name is ours, so that TRL keeps deciding which outputs, temperature and precision it
wants for which model, and each model is patched before anything shards or wraps it.
`tests/liger_trainer/test_contracts.py` fails when a TRL release moves what this stands on.
"""

import inspect
import sys
from contextlib import contextmanager

import trl

from liger_trainer.fused_head import HeadOptions, base_model_of, install_fused_head
from liger_trainer.patching import apply_liger
from liger_trainer.trainer import LigerTrainerMixin


class _NoAdapterIsRefused:
    """TRL refuses a PEFT layer as LM head because its head reads `lm_head.weight`; ours calls the module.

    Nothing is an instance.
    """


@contextmanager
def replaced_in(module, names: dict):
    """Within the block, the globals `names` of TRL's trainer module `module` have the values given.

    Raises:
        ImportError: The module has no such global.
    """
    missing = [name for name in names if not hasattr(module, name)]
    if missing:
        raise ImportError(
            f"{module.__name__} of trl {trl.__version__} has no {', '.join(missing)}, on which the fused head stands. "
            'Install trl>=1.16,<2, or set liger_config={"fused_linear_cross_entropy": false}.'
        )
    stock = {name: getattr(module, name) for name in names}
    for name, value in names.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in stock.items():
            setattr(module, name, value)


class LigerTRLMixin(LigerTrainerMixin):
    """A trainer of TRL with its models patched while it is built. Goes before the stock class:

    ```python
    class LigerDPOTrainer(LigerTRLMixin, DPOTrainer):
        loss_hook = None  # there is no method by which a subclass changes the loss
    ```

    That is all for a trainer that calls `add_fused_lm_head` for the models it scores with. One that does not overrides
    `_seam` (which globals of TRL's module are replaced while the stock `__init__` runs) and, for frozen models that the
    replacements do not see, calls `_patch_frozen`. What the stock trainer would ignore in silence is refused in
    `_finish_init`, which runs last.

    Attributes:
        ignored_fields (`tuple[str, ...]`): Fields that the config inherits and the stock trainer does not use; setting
            one is an error.
    """

    ignored_fields: tuple[str, ...] = ()

    def __init__(self, *args, **kwargs):
        stock_init = super().__init__
        position = list(inspect.signature(stock_init).parameters).index("args")
        self.args = args[position] if len(args) > position else kwargs.get("args")  # `uses_liger` and `_wants` read it
        if self.uses_liger:
            self._refuse_compute_loss_func(kwargs, stock_init)
        with replaced_in(sys.modules[self._stock_class().__module__], self._seam()):
            stock_init(*args, **kwargs)
        if self.liger_report is None:
            self._apply_liger(self.model)
        self._finish_init()

    @classmethod
    def _stock_class(cls) -> type:
        """The class of TRL that `cls` extends."""
        return next(base for base in cls.__mro__ if base.__module__.startswith("trl."))

    def _seam(self) -> dict:
        """What replaces which globals of the stock trainer's module while the stock `__init__` runs."""
        if not self.uses_liger:
            return {}
        if self._wants("fused_linear_cross_entropy"):
            return {"add_fused_lm_head": self._add_fused_lm_head, "BaseTunerLayer": _NoAdapterIsRefused}
        stock = vars(sys.modules[self._stock_class().__module__]).get("add_fused_lm_head")
        if stock is None:
            return {}

        def add_and_patch(model, **options):
            stock(model, **options)
            self._patch(model)

        return {"add_fused_lm_head": add_and_patch}

    def _add_fused_lm_head(self, model, temperature=1.0, cast_lm_head_to_fp32=False, outputs=("log_probs",)):
        self._patch(model)  # with the options of no trainer
        install_fused_head(model, HeadOptions(temperature, cast_lm_head_to_fp32, tuple(outputs)))

    def _patch(self, model) -> None:
        """Kernels into the policy, whose report is the trainer's, or into a model that is only scored with."""
        if base_model_of(model) is base_model_of(self.model):
            self._apply_liger(self.model)
        else:
            self._patch_frozen(model)

    def _patch_frozen(self, model) -> None:
        """Kernels into a reference or teacher model, by the same `liger_config`; before anything shards or wraps it."""
        if self.uses_liger:
            apply_liger(model, getattr(self.args, "liger_config", None))

    def _refuse_compute_loss_func(self, kwargs: dict, stock_init) -> None:
        """ValueError with the way out, where the stock trainer would only say that it knows no such argument."""
        if "compute_loss_func" in kwargs and "compute_loss_func" not in inspect.signature(stock_init).parameters:
            raise ValueError(
                f"compute_loss_func is not an argument of {self._stock_class().__name__}, whose loss is no function of "
                f"logits and labels. Override {self.loss_hook or 'compute_loss'} instead."
            )

    def _finish_init(self) -> None:
        for name in self.ignored_fields:
            if self.uses_liger and (value := getattr(self.args, name)):
                other = ", or set label_smoothing instead" if hasattr(self.args, "label_smoothing") else ""
                raise ValueError(
                    f"{name} is {value}, which {self._stock_class().__name__} does not use. Remove it{other}."
                )
        if self.loss_hook != "token_loss" and type(self).token_loss is not LigerTrainerMixin.token_loss:
            raise ValueError(
                f"{type(self).__name__} overrides token_loss, which {self._stock_class().__name__} never calls. "
                + (f"Override {self.loss_hook} instead." if self.loss_hook else "Override compute_loss instead.")
            )
        super()._finish_init()
