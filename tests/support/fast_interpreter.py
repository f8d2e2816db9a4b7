"""Make Triton's interpreter faster without changing its arithmetic.

At each call of a device function it exchanges the functions of its language, and it restores them when the launch ends.
That takes a third of the tests' time. Here they stay exchanged, because the process interprets all kernels.
"""

import types

from triton.runtime import interpreter

_patch_lang, _patched = interpreter._patch_lang, set()
_LANGUAGES = interpreter.tl, interpreter.tl.core


def _patch_once(fn):
    modules = [value for value in fn.__globals__.values() if isinstance(value, types.ModuleType)]
    found = frozenset(module.__name__ for module in modules if module in _LANGUAGES)
    if found not in _patched:
        _patched.add(found)
        _patch_lang(fn)
        # Triton 3.6 converts a one-dimensional array here, which numpy 2.4 refuses.
        interpreter.tl.tensor.__index__ = lambda self: int(self.handle.data.item())
    return interpreter._LangPatchScope()


interpreter._patch_lang = _patch_once
