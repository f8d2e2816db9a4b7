"""Reading GGUF files in a tenth of the time: transformers parses a file for each of config, tokenizer and weights.

A file's fields hold the whole vocabulary. The quickstart recipes train a model in such a file.
"""

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def parsed_once() -> Iterator[None]:
    """Context manager: `gguf` parses each file once, and computes each architecture's tensor names once.

    The results are kept for later contexts, because config, tokenizer and weights are loaded in turn.
    """
    import gguf

    reader, name_map = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader = _parsed_file  # type: ignore[misc, assignment]
    gguf.get_tensor_name_map = _name_map
    try:
        yield
    finally:
        gguf.GGUFReader = reader  # type: ignore[misc]
        gguf.get_tensor_name_map = name_map


def _parsed_file(path: Any, mode: str = "r") -> Any:
    """A reader of the file at `path`, in place of `gguf.GGUFReader`. Parses again if the file has changed."""
    if mode != "r":
        return _reader_class()(path, mode)
    at = os.path.realpath(path)
    status = os.stat(at)
    return _parsed(at, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=1)  # tens of MB for a large vocabulary
def _parsed(path: str, modified: int, size: int) -> Any:
    return _reader_class()(path)


@functools.cache
def _reader_class() -> type:
    from gguf.gguf_reader import GGUFReader
    from numpy import ndarray

    class PlainReader(GGUFReader):
        """Slices a plain array, not a `numpy.memmap`: making a slice of that takes three times as long."""

        @property
        def data(self) -> Any:
            return self._data

        @data.setter
        def data(self, mapped: Any) -> None:
            self._data = mapped.view(ndarray)  # which keeps the mapped file open

    return PlainReader


@functools.cache
def _name_map(architecture: Any, layers: int) -> Any:
    """`gguf.get_tensor_name_map`, which transformers calls for each module of a model."""
    from gguf.tensor_mapping import get_tensor_name_map

    return get_tensor_name_map(architecture, layers)
