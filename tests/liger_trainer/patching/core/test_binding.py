"""Methods bound to one instance: how they are removed, and which may wrap another."""

import inspect

import pytest
import torch
from torch import nn

from liger_trainer.patching.apply import _swap
from liger_trainer.patching.core.binding import Binding, bind, call_previous, in_place_of, unbind_all
from liger_trainer.patching.core.pattern import PatchPattern, Proof, match_modules, slot_of
from liger_trainer.patching.core.report import LigerReport


class Outer(Binding):
    key = "_liger_outer"


def doubled(self, x):
    return 2 * type(self).forward(self, x)


doubled.__name__ = "forward"


def around(self, x):
    return call_previous(self, Outer, (x,), {}) + 1


around.__name__ = "forward"


def layer():
    return nn.Linear(3, 3, bias=False).requires_grad_(False)


def test_methods_around_each_other_are_unbound_the_last_one_first():
    model, x = nn.Sequential(layer()), torch.randn(2, 3)
    want, before = model(x), set(vars(model[0]))
    inner, outer = bind(model[0], Binding(doubled)), bind(model[0], Outer(around))
    torch.testing.assert_close(model(x), 2 * want + 1)
    unbind_all(model)
    assert torch.equal(model(x), want) and set(vars(model[0])) == before
    assert inner.fallback_active and outer.fallback_active


def test_a_method_that_is_held_runs_the_class_s_own_code_once_it_was_unbound():
    module, x = layer(), torch.randn(2, 3)
    want = module(x)
    bind(module, Binding(doubled))
    held = module.forward
    torch.testing.assert_close(held(x), 2 * want)
    unbind_all(module)
    assert torch.equal(held(x), want)


def test_a_user_s_own_key():
    module = layer()
    binding = bind(module, Binding(doubled, key="_liger_one"))
    assert vars(module)["_liger_one"] is binding and Binding.of(module) is None
    unbind_all(module)
    assert not {"_liger_one", "forward"} & set(vars(module))


def test_only_a_method_with_a_key_of_its_own_stands_around_another():
    module = layer()
    bind(module, Binding(doubled))
    assert "was replaced" in slot_of(module)[1]
    assert slot_of(module, around=True) == ("forward", None)
    module.forward = lambda x: x
    assert "was replaced" in slot_of(module, around=True)[1]


def test_a_module_of_two_kinds_is_swapped_once():
    """The second pattern finds the first one's method, and must not take it for the module's own."""
    proof = Proof("lora", "doubled", doubled)
    kind = PatchPattern(
        lambda module: isinstance(module, nn.Linear), lambda module: (proof, None), lambda module: "lora"
    )
    model, report = nn.Sequential(layer()), LigerReport("Sequential")
    _swap(match_modules([kind, kind], model.named_modules()), report)
    assert report["lora"].skipped["0"].startswith("its forward was replaced") and Binding.of(model[0]).previous is None


@pytest.mark.parametrize("name", ["forward", "get_rope_index"])
def test_a_method_in_the_place_of_another_has_its_signature(name):
    def own(self, x, *, scale: float = 1.0):
        """The module's own computation."""

    @in_place_of(own, name)
    def method(self, *args, **kwargs):
        pass

    assert method.__name__ == name and method.__doc__ == own.__doc__ and method.__module__ == __name__
    assert inspect.signature(method) == inspect.signature(own) and not hasattr(method, "__wrapped__")
