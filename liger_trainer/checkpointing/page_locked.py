"""Page-locked memory of the host, which a GPU reads and writes by itself.

PyTorch locks memory in powers of two, at 0.4 s for a GiB on the machine of the benchmarks. Here several threads touch
the pages first, so that the driver finds them in place, which takes 0.1 s. A process that is forked, such as one that
loads data, does not get these pages: the system would copy all of them for it.
"""

import contextlib
import ctypes
import mmap
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import torch

THREADS = 8


class _Pages(mmap.mmap):
    """Memory that is unlocked before it is given back.

    Attributes:
        address (`int` or `None`): Where it is, if it is locked.
    """

    address: int | None = None

    def __del__(self) -> None:
        if self.address is not None and not sys.is_finalizing():
            torch.cuda.cudart().cudaHostUnregister(self.address)


def page_locked(size: int) -> torch.Tensor:
    """A uint8 tensor (size,) in page-locked memory. RuntimeError if the system does not lock so much."""
    pages = _Pages(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError, AttributeError):  # a kernel without large pages
            pages.madvise(getattr(mmap, advice))
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    _touch(memory.data_ptr(), size)
    if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0)) != 0:  # as on WSL2
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    pages.address = memory.data_ptr()
    return memory


def _touch(address: int, size: int) -> None:
    threads = min(THREADS, os.cpu_count() or 1)
    part = -(-size // threads)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda start: ctypes.memset(address + start, 0, min(part, size - start)), range(0, size, part)))
