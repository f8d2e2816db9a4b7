"""The models that one trainer has patched: the options of their heads, and how to undo it if building it fails."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from liger_trainer.head.find import base_model_of, has_fused_head, head_options
from liger_trainer.head.install import install_fused_head
from liger_trainer.head.outputs import HeadOptions
from liger_trainer.patching import LigerReport, apply_liger, remove_liger

# When our head has been removed, another forward takes the place of ours, and holds ours in this attribute.
STANDS_IN = "_liger_stands_in_for"
# The attributes that a module may get while a trainer is built, in addition to names that begin with _liger. Patching
# sets some of them. Accelerate sets the others, and puts its autocast around the forward once and never again.
_BOUND = ("forward", "_old_forward", "_apply_gate", "_original_forward", "_is_accelerate_prepared")


class PatchedModels:
    """What a trainer remembers of the models that it has patched.

    Two trainers may share a model and be used in turn. The head of the model has one set of options: those of the
    trainer that was built last, until another one calls `use`.
    """

    def __init__(self) -> None:
        self._options: list[tuple[nn.Module, HeadOptions]] = []
        # While the trainer is built: each model, the options of its head, and what was bound to each of its modules
        self._before: list[tuple[nn.Module, HeadOptions | None, dict[nn.Module, dict]]] | None = []

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Surrounds the building of a trainer. If that fails, every model is as it was before, patched or not."""
        try:
            yield
        except BaseException:
            for before in reversed(self._before or []):
                _restore(*before)
            raise
        finally:
            self._before = None

    def patch(
        self, model: nn.Module, config: dict | None, options: HeadOptions | None = None, instead: bool = False
    ) -> LigerReport:
        """`apply_liger`, whose `options` of the head are remembered. With `instead`, those of other models are not."""
        if self._before is not None:
            bound = {module: _bound_to(module) for module in model.modules()}
            self._before.append((model, head_options(model), bound))
        report = apply_liger(model, config, head_options=options)
        if has_fused_head(model):
            base = base_model_of(model)
            self._options = [] if instead else [known for known in self._options if known[0] is not base]
            self._options.append((base, options or HeadOptions()))
        return report

    def use(self) -> list[tuple[nn.Module, HeadOptions]]:
        """Give every head the options of this trainer. Returns the models that have lost their head, with options."""
        lost = []
        for model, options in self._options:
            current = head_options(model)
            if current is None:
                lost.append((model, options))
                continue
            if (inner := getattr(model.forward, STANDS_IN, None)) is not None:
                model.forward = inner  # ours, now that the head is there again
            if current != options:
                install_fused_head(model, options)
        return lost


def _bound_to(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name in _BOUND or name.startswith("_liger")}


def _restore(model: nn.Module, options: HeadOptions | None, bound: dict[nn.Module, dict]) -> None:
    remove_liger(model)
    for module, before in bound.items():
        for name in _bound_to(module):
            del module.__dict__[name]
        module.__dict__.update(before)
    if options is not None:
        install_fused_head(model, options)
