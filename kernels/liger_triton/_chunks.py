"""Chunks of logits: their size, their memory, and the gradients summed over them.

Three loops use this: `linear_head.py` projects one head into a buffer that a backward pass may keep,
`linear_divergence.py` needs fp32 logits of two heads at once, and `linear_heads_kl.py` cuts windows, so that all heads
share the teacher's rows in a window. Chunking: Liger report, arXiv:2410.10989.

Shapes  hidden states x (T, H), weight W (V, H), logits and their gradient dl (C, V) for the C rows of a chunk.
"""

from collections.abc import Iterator

import torch

from ._dispatch import on_cuda, use_triton
from ._head_inputs import DB, DBIAS, DU, DW, DX, Head
from ._products import add_outer, back
from .sizes import now

# Beyond 4096 rows the matrix products hardly get faster. 640 MiB hold 2048 rows for a vocabulary of 150 thousand.
_GPU_CHUNK_BYTES, _GPU_CHUNK_ROWS = 640 << 20, 4096
_CPU_CHUNK_BYTES = 64 << 20  # of fp32 logits


def chunk_size(
    rows: int, vocab: int, dtype: torch.dtype, device_type: str, allowed: int = 0, all_rows: bool = False
) -> int:
    """Return how many rows a chunk has, so that its logits stay within a bound on memory.

    On a GPU a chunk has all rows, or a power of two of them, or a multiple of 128 below 1024 rows. With a power of two,
    the 128 x 128 tiles of dx (rows, H) more often fill the multiprocessors in whole rounds: with H = 1024 and 132
    multiprocessors, 2048 rows are one round and 2176 are two.

    Args:
        rows, vocab, dtype, device_type: Describe the logits.
        allowed: Bytes that a chunk may take, if more than `_GPU_CHUNK_BYTES`.
        all_rows: Make one chunk of all rows if they fit into `allowed`. Unset: only if they fit into
            `_GPU_CHUNK_BYTES`.

    Inside `sizes.chunks_of_at_most`, a chunk has no more rows than that context allows.
    """
    row_bytes = vocab * dtype.itemsize
    allowed = max(_GPU_CHUNK_BYTES, allowed)
    if device_type == "cpu" and not now.computes_nothing:
        most = max(1, _CPU_CHUNK_BYTES // (4 * vocab))
        size = -(-rows // max(1, -(-rows // most)))
    elif rows * row_bytes <= (allowed if all_rows else _GPU_CHUNK_BYTES):
        size = rows
    elif allowed // row_bytes < 1024:
        size = max(128, allowed // row_bytes // 128 * 128)
    else:
        size = min(_GPU_CHUNK_ROWS, 1 << (allowed // row_bytes).bit_length() - 1)
    size = max(1, size)
    return size if now.most_rows is None else min(now.most_rows, size)


class Chunks:
    """Cut rows into chunks.

    Attributes:
        kept: Indices of the rows that count. None: all `total` rows count.
        rows: Number of rows that count.
        number, size: Number of chunks, and rows in each. The last chunk may be shorter.
    """

    def __init__(
        self,
        total: int,
        kept: torch.Tensor | None,
        chunk_rows: int | None,
        vocab: int,
        dtype: torch.dtype,
        device_type: str,
        allowed: int = 0,
        all_rows: bool = False,
    ):
        """Use `chunk_rows` as the size. If it is 0 or None, `chunk_size` chooses one from the other arguments."""
        self.kept = kept
        self.rows = total if kept is None else kept.shape[0]
        size = chunk_rows or chunk_size(self.rows, vocab, dtype, device_type, allowed, all_rows)
        self.size = min(size, max(self.rows, 1))
        self.number = -(-self.rows // self.size)

    def each(self, last_first: bool = False) -> Iterator[slice | torch.Tensor]:
        """Yield the rows of each chunk: a slice, or indices if some rows do not count."""
        starts = range(0, self.rows, self.size)
        for start in reversed(starts) if last_first else starts:
            rows = slice(start, min(start + self.size, self.rows))
            yield rows if self.kept is None else self.kept[rows]


def logits_buffer(rows: int, vocab: int, dtype: torch.dtype, like: torch.Tensor, align: int = 64) -> torch.Tensor:
    """Allocate a buffer (rows, V) that holds the logits of one chunk after another.

    Where Triton kernels run on the device of `like`, V is rounded up to a multiple of `align`. With 64 elements, each
    row starts at a cache line for any vocabulary.
    """
    width = -(-vocab // align) * align if use_triton(like) else vocab
    # Under Triton's interpreter, the product of 16-bit matrices on some processors reads one column past an odd
    # vocabulary and multiplies it by zero. What lies there must not be NaN.
    new = torch.zeros if width > vocab and not on_cuda(like) else torch.empty
    return new((rows, width), dtype=dtype, device=like.device)


def sum_dtype(like: torch.Tensor, lean: bool) -> torch.dtype:
    """Return the dtype for a gradient summed over chunks: never fp16, where an undivided sum would overflow."""
    return like.dtype if lean and like.dtype != torch.float16 else torch.float32


class Accumulator:
    """Sum dl^T x over the chunks into (V, k). k is the last dimension of `like`."""

    def __init__(self, like: torch.Tensor, lean: bool, chunks: int):
        new = torch.empty if chunks else torch.zeros
        self.sum = new(like.shape, dtype=sum_dtype(like, lean), device=like.device)
        self.started = False

    def add(self, dl: torch.Tensor, x: torch.Tensor) -> None:
        add_outer(self.sum, dl, x, self.started)
        self.started = True


class HeadGradients:
    """Collect the gradients in `needs` for the tensors of `head`, from the gradients dl (n, V) of each chunk.

    Each chunk fills its own rows of dx and du; dW, dbias and dB are sums over chunks. `fill` promises that no row is
    left out: the products then write straight into the rows of dx and du. Otherwise dx and du start as zeros.
    """

    def __init__(self, head: Head, needs: int, lean: bool, chunks: int, fill: bool):
        x, weight, bias, u, lora_b = head
        new = torch.empty_like if fill else torch.zeros_like
        self.head, self.fill = head, fill
        self.dx = new(x, memory_format=torch.contiguous_format) if needs & DX else None
        self.du = new(u, memory_format=torch.contiguous_format) if needs & DU else None
        self.dw = Accumulator(weight, lean, chunks) if needs & DW else None
        self.dlora_b = Accumulator(lora_b, lean, chunks) if needs & DB else None
        self.dbias = torch.zeros(weight.shape[0], dtype=torch.float32, device=x.device) if needs & DBIAS else None

    def add(self, dl, rows, w, lb, x=None, u=None, product=back) -> None:
        """Add a chunk to all gradients but dbias.

        `w` and `lb` are W and B in the dtype of dl. `x` and `u` are the rows of the chunk in the same dtype; unset,
        they are read from the head. `product` multiplies dl by w and by lb.
        """
        for grad, factor in ((self.dx, w), (self.du, lb)):
            if grad is None:
                continue
            # `grad[rows]` is a view only if rows is a slice, and a product can write only its own dtype.
            if self.fill and grad.dtype == dl.dtype:
                product(dl, factor, out=grad[rows])
            else:
                grad[rows] = product(dl, factor).to(grad.dtype)
        for total, factor, whole in ((self.dw, x, self.head.x), (self.dlora_b, u, self.head.u)):
            if total is not None:
                total.add(dl, whole[rows].to(dl.dtype) if factor is None else factor)

    def add_bias(self, dl: torch.Tensor) -> None:
        """Add a chunk to dbias."""
        if self.dbias is not None:
            self.dbias += dl.sum(0, dtype=torch.float32)

    def all(self) -> tuple[torch.Tensor | None, ...]:
        """Return (dx, dW, dbias, du, dB) in the order of `Head`, with None for gradients that are not needed."""
        dw = None if self.dw is None else self.dw.sum
        dlora_b = None if self.dlora_b is None else self.dlora_b.sum
        return self.dx, dw, self.dbias, self.du, dlora_b
