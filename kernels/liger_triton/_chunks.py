"""The size of a chunk of logits, the memory for them, and the gradients that are collected from chunk to chunk.

Three loops use this: `linear_head.py` projects one head into a buffer that a backward pass may keep,
`linear_divergence.py` needs fp32 logits of two heads at once, and `linear_heads_kl.py` cuts windows in which all heads
share the rows of a teacher. Chunking: Liger report, arXiv:2410.10989.
"""

from collections.abc import Iterator

import torch

from ._dispatch import use_triton
from ._head_inputs import DB, DBIAS, DU, DW, DX, Head
from ._products import add_outer, back
from .sizes import computes_nothing, most_chunk_rows

# Past 4096 rows the products hardly get faster. 640 MiB hold 2048 rows of the vocabularies of 150 thousand.
_GPU_CHUNK_BYTES, _GPU_CHUNK_ROWS = 640 << 20, 4096
_CPU_CHUNK_BYTES = 64 << 20  # of fp32 logits


def chunk_size(
    rows: int, vocab: int, dtype: torch.dtype, device_type: str, allowed: int = 0, all_rows: bool = False
) -> int:
    """How many rows a chunk has. Its memory is bounded. On a GPU it has all rows, or a power of two of them (below 1024
    a multiple of 128).

    A power of two is chosen because the tiles of 128 x 128 elements of dx, (rows, H), then fill the multiprocessors in
    whole rounds more often: with H = 1024 and 132 multiprocessors, 2048 rows are one round and 2176 are two.

    `allowed` is how many bytes a chunk may have, if that is more than `_GPU_CHUNK_BYTES`. All rows make one chunk if
    they fit into `_GPU_CHUNK_BYTES`, and with `all_rows` also if they fit into `allowed`.

    Within `sizes.chunks_of_at_most` a chunk has no more rows than that says.
    """
    size = _size_by_memory(rows, vocab, dtype, device_type, allowed, all_rows)
    most = most_chunk_rows()
    return size if most is None else min(most, size)


def _size_by_memory(rows: int, vocab: int, dtype: torch.dtype, device_type: str, allowed: int, all_rows: bool) -> int:
    if device_type == "cpu" and not computes_nothing():
        most = max(1, _CPU_CHUNK_BYTES // (4 * vocab))
        return max(1, -(-rows // max(1, -(-rows // most))))
    allowed, row_bytes = max(_GPU_CHUNK_BYTES, allowed), vocab * dtype.itemsize
    if rows * row_bytes <= (allowed if all_rows else _GPU_CHUNK_BYTES):
        return max(1, rows)
    fitting = allowed // row_bytes
    if fitting < 1024:
        return max(128, fitting // 128 * 128)
    return min(_GPU_CHUNK_ROWS, 1 << fitting.bit_length() - 1)


class Chunks:
    """Rows cut into chunks.

    `kept` holds the indices of the rows that count, or is None if all `total` rows do. There are `rows` of them, and
    `number` chunks of `size` rows each, the last of which may be shorter.
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
        """`chunk_rows` is the size of a chunk. If it is 0 or None, `chunk_size` chooses it by the other arguments."""
        self.kept = kept
        self.rows = total if kept is None else kept.shape[0]
        size = chunk_rows or chunk_size(self.rows, vocab, dtype, device_type, allowed, all_rows)
        self.size = min(size, max(self.rows, 1))
        self.number = -(-self.rows // self.size)

    def each(self, last_first: bool = False) -> Iterator[slice | torch.Tensor]:
        """Where the rows of each chunk are found: a slice, or indices if some rows do not count."""
        starts = range(0, self.rows, self.size)
        for start in reversed(starts) if last_first else starts:
            rows = slice(start, min(start + self.size, self.rows))
            yield rows if self.kept is None else self.kept[rows]


def logits_buffer(rows: int, vocab: int, dtype: torch.dtype, like: torch.Tensor, align: int = 64) -> torch.Tensor:
    """Memory for the logits of every chunk in turn: (rows, V), with V rounded up to a multiple of `align` where Triton
    kernels run on the device of `like`. With 64 elements each row starts at a cache line, whatever the vocabulary."""
    width = -(-vocab // align) * align if use_triton(like) else vocab
    return torch.empty((rows, width), dtype=dtype, device=like.device)


def sum_dtype(like: torch.Tensor, lean: bool) -> torch.dtype:
    """The dtype in which a gradient is summed over chunks. A sum in fp16 would overflow, because it is not yet divided
    by the number of rows."""
    return like.dtype if lean and like.dtype != torch.float16 else torch.float32


class Accumulator:
    """The sum over the chunks of dl^T x, (V, k), where k is the last dimension of `like`."""

    def __init__(self, like: torch.Tensor, lean: bool, chunks: int):
        new = torch.empty if chunks else torch.zeros
        self.sum = new(like.shape, dtype=sum_dtype(like, lean), device=like.device)
        self.started = False

    def add(self, dl: torch.Tensor, x: torch.Tensor) -> None:
        add_outer(self.sum, dl, x, self.started)
        self.started = True


class HeadGradients:
    """The gradients in `needs` of the tensors of `head`, collected from the gradients dl (n, V) of chunks of logits.

    dx and du get rows of their own from each chunk; dW, dbias and dB are sums over the chunks. With `fill`, no row is
    left out, and the products write straight into the rows of dx and du; otherwise dx and du begin as zeros.
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
        """Add a chunk to all but dbias. w and lb are W and B in the dtype of dl; so are x and u, which hold only the
        rows of the chunk and are looked up in the head if they are not given. `product` multiplies dl by w and lb."""
        for grad, factor in ((self.dx, w), (self.du, lb)):
            if grad is None:
                continue
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
        """(dx, dW, dbias, du, dB) in the order of `Head`; None for a gradient that is not wanted."""
        dw, dlora_b = (None if total is None else total.sum for total in (self.dw, self.dlora_b))
        return self.dx, dw, self.dbias, self.du, dlora_b
