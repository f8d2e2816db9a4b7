"""Make Triton's interpreter faster without changing its arithmetic.

At each call of a device function it exchanges the functions of its language, and it restores them when the launch ends.
Here they stay exchanged, because the process interprets all kernels. At each sum and product of integers it computes
whether they overflow, and drops the answer unless `debug` is set. At each operation it makes a dictionary of numpy's
dtypes. Together these take more than half of the tests' time.
"""

import types

from triton.runtime import interpreter

_patch_lang = interpreter._patch_lang
_LANGUAGES = interpreter.tl, interpreter.tl.core
_get_np_dtype = interpreter._get_np_dtype
_patched_modules = set()
_patched_languages = set()
_np_dtypes = {}


def _patch_once(fn):
    if fn.__module__ not in _patched_modules:
        _patched_modules.add(fn.__module__)
        _patch_languages(fn)
    return interpreter._LangPatchScope()


def _patch_languages(fn):
    modules = [value for value in fn.__globals__.values() if isinstance(value, types.ModuleType)]
    found = frozenset(module.__name__ for module in modules if module in _LANGUAGES)
    if found not in _patched_languages:
        _patched_languages.add(found)
        _patch_lang(fn)
        # Triton 3.6 converts a one-dimensional array here, which numpy 2.4 refuses.
        interpreter.tl.tensor.__index__ = lambda self: int(self.handle.data.item())


def _np_dtype_of(dtype):
    """`_get_np_dtype`, computed once for each scalar. Pointers and blocks cannot be hashed."""
    if type(dtype) is interpreter.tl.block_type:
        dtype = dtype.element_ty
    if type(dtype) is not interpreter.tl.dtype:
        return _get_np_dtype(dtype)
    if dtype.name not in _np_dtypes:
        _np_dtypes[dtype.name] = _get_np_dtype(dtype)
    return _np_dtypes[dtype.name]


interpreter._patch_lang = _patch_once
interpreter._get_np_dtype = _np_dtype_of
object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)  # a frozen dataclass
