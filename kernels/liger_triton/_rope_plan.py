"""Plans the launch of `rope` on the host: the strides of its results, the order of its rows, and its tiles.

The plan is computed once for each set of shapes and strides.
"""

import functools
import math

from ._launch import TILE, cdiv, next_power_of_2


def _memory_order(strides: tuple[int, ...]) -> list[int]:
    """Return the leading dimensions of a tensor, ordered from the longest stride to the shortest."""
    return sorted(range(len(strides) - 1), key=lambda d: -strides[d])


def dense_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return strides of a dense tensor of that shape, with leading dimensions in the memory order of `strides`."""
    dense, step = [1] * len(shape), shape[-1]
    for d in reversed(_memory_order(strides)):
        dense[d] = step
        step *= shape[d]
    return tuple(dense)


def _lead(values: tuple[int, ...], order: list[int], fill: int) -> list[int]:
    """Return the values of the leading dimensions in `order`, padded in front to three."""
    return [fill] * (3 - len(order)) + [values[d] for d in order]


def _angle_strides(shape, strides, ndim: int, cos_layout: str, unsqueeze_dim: int) -> list[int]:
    """Return strides of cos or sin, read as one number per pair, that broadcast against `ndim` dimensions."""
    broadcast = [0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True)]
    broadcast[-1] = strides[-1] * (2 if cos_layout == "interleaved" else 1)
    broadcast.insert(unsqueeze_dim % (len(shape) + 1), 0)
    return [0] * (ndim - len(broadcast)) + broadcast


@functools.lru_cache(maxsize=1024)
def plan(
    q_shape,
    q_memory,
    q_strides,
    k_shape,
    k_memory,
    k_strides,
    cos_shape,
    cos_strides,
    sin_strides,
    cos_layout,
    unsqueeze_dim,
):
    """Return (strides of the two results, numbers of programs, integer kernel arguments, HALF, block sizes).

    `memory` are the strides that the results follow; `strides` are read. The plan is cached, because it is most of a
    call's host time.
    """
    order, d = _memory_order(q_memory), q_shape[-1]  # neighbouring rows in memory share cache lines and angles
    half = cos_shape[-1] if cos_layout == "single" else (cos_shape[-1] + 1) // 2
    block_half = next_power_of_2(half)
    block_r = max(1, TILE // (2 * block_half))
    out = []
    sizes_and_strides = []
    tiles = []
    for shape, memory, strides in ((q_shape, q_memory, q_strides), (k_shape, k_memory, k_strides)):
        rows = math.prod(shape[:-1])
        out.append(dense_strides(shape, memory))
        tiles.append(cdiv(rows, block_r))
        sizes_and_strides += [rows, *_lead(shape, order, 1)[1:], *_lead(strides, order, 0), *_lead(out[-1], order, 0)]
    angles = []
    for strides in (cos_strides, sin_strides):
        broadcast = _angle_strides(cos_shape, strides, len(q_shape), cos_layout, unsqueeze_dim)
        angles += [*_lead(broadcast, order, 0), broadcast[-1]]
    blocks = (block_r, block_half, next_power_of_2(max(1, d - 2 * half)))
    return out, tiles, (tiles[0], *sizes_and_strides, *angles), half, blocks
