"""The models that one trainer has patched: the options of their heads, and the way back while it is being built."""

from contextlib import contextmanager

from liger_trainer.head.find import base_model_of, head_options
from liger_trainer.head.install import install_fused_head
from liger_trainer.head.outputs import HeadOptions
from liger_trainer.patching import remove_liger

STANDS_IN = "_liger_stands_in_for"  # attribute of a forward that was put around one which lost its head
# What is bound to a module while a trainer is built, beside names with _liger: by patching, and by accelerate, whose
# autocast is put around the forward once and never again
_BOUND = ("forward", "_old_forward", "_apply_gate", "_original_forward", "_is_accelerate_prepared")


class PatchedModels:
    """What a trainer remembers of the models that it has patched.

    Two trainers may share a model, and may be used in turn. The options of its head, of which there is one set, are
    those of the trainer that was built last, until `use` gives the head those of another one.
    """

    def __init__(self):
        self._options = []  # (model, HeadOptions)
        self._before = []  # (model, its head's options, module -> what was bound to it), while the trainer is built

    @contextmanager
    def undone_on_error(self):
        """While a trainer is built. Where that ends in an error, every model is patched as it was before, or not."""
        try:
            yield
        except BaseException:
            for before in reversed(self._before):
                _restore(*before)
            raise
        finally:
            self._before = None

    def about_to_patch(self, model) -> None:
        """To be called before anything is done to `model`."""
        if self._before is not None:
            bound = {module: _bound_to(module) for module in model.modules()}
            self._before.append((model, head_options(model), bound))

    def remember(self, model, options: HeadOptions, instead: bool = False) -> None:
        """`options` are this trainer's for the head of `model`; with `instead`, it has no other model any more."""
        model = base_model_of(model)
        self._options = [] if instead else [known for known in self._options if known[0] is not model]
        self._options.append((model, options))

    def use(self) -> list:
        """Give every head the options of this trainer. Returns the models, with options, that have lost their head."""
        lost = []
        for model, options in self._options:
            current = head_options(model)
            if current is None:
                lost.append((model, options))
                continue
            if (inner := getattr(model.forward, STANDS_IN, None)) is not None:
                model.forward = inner  # ours again, which lies inside of it
            if current != options:
                install_fused_head(model, options)
        return lost


def _bound_to(module) -> dict:
    return {name: value for name, value in vars(module).items() if name in _BOUND or name.startswith("_liger")}


def _restore(model, options, bound) -> None:
    remove_liger(model)
    for module, before in bound.items():
        for name in _bound_to(module):
            del module.__dict__[name]
        module.__dict__.update(before)
    if options is not None:
        install_fused_head(model, options)
