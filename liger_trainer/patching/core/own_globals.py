"""Copy functions of transformers with their code unchanged and some of their globals replaced by ours."""

import functools
import types
from collections.abc import Callable
from typing import Any

from liger_trainer.patching.core.guards import global_lookups

_forwards: dict[tuple, tuple[Callable, list[Any]]] = {}


def forward_with_globals(own: types.FunctionType, replaced: tuple[tuple[str, Callable], ...]) -> Callable:
    """The function `own` with its code unchanged and a dict of globals of its own: those it reads, some replaced.

    Guards compare these globals with what the Python module has later. A dict that looks there itself would have
    torch.compile guard on all that the module has.
    """
    scope = own.__globals__
    names = [name for _, name, _ in global_lookups(own)]
    key = (own, replaced, tuple((name, id(scope[name])) for name in names))
    if key not in _forwards:
        own_globals = {name: scope[name] for name in (*names, "__builtins__")} | dict(replaced)
        own_globals["__package__"] = scope.get("__package__")  # for an import inside the function
        function = types.FunctionType(own.__code__, own_globals, own.__name__, own.__defaults__, own.__closure__)
        function.__kwdefaults__ = own.__kwdefaults__
        # The globals are kept as well, so that no other object gets one of their ids, which are part of the key.
        _forwards[key] = (functools.update_wrapper(function, own), [scope[name] for name in names])
    return _forwards[key][0]


@functools.cache
def decorated_like(decorated: Callable, forward: Callable) -> Callable:
    """Put the decorators of `decorated` around `forward`. Each holds the function that it decorates in a cell."""
    inner = getattr(decorated, "__wrapped__", None)
    if inner is None:
        return forward
    below = decorated_like(inner, forward)
    cells = (types.CellType(below) if x.cell_contents is inner else x for x in decorated.__closure__)  # type: ignore
    function = types.FunctionType(
        decorated.__code__, decorated.__globals__, decorated.__name__, decorated.__defaults__, tuple(cells)
    )
    function.__kwdefaults__ = decorated.__kwdefaults__  # type: ignore[attr-defined]
    return functools.update_wrapper(function, below)


def is_decorated_by(forward: Any, is_known: Callable[[Any, list], bool]) -> bool:
    """Return whether each decorator of a forward is known and has what it decorates in a cell.

    `is_known` gets the decorated function and what is in its cells.
    """
    inner = getattr(forward, "__wrapped__", None)
    while inner is not None:
        cells = [cell.cell_contents for cell in getattr(forward, "__closure__", None) or ()]
        if not is_known(forward, cells) or all(cell is not inner for cell in cells):
            return False
        forward = inner
        inner = getattr(forward, "__wrapped__", None)
    return True
