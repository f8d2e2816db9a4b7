"""What the row-wise and elementwise kernels share: checks of arguments, views of tensors as rows, and the sizes of
blocks and grids."""

import functools
from collections.abc import Callable

import torch

from ._dispatch import INTERPRET, KERNEL_DTYPES, graph_is_kept, runs_as_op, use_triton
from .halves import joined, joined_pairs
from .sizes import computes_nothing

MAX_COLUMNS = 65536  # a row lives in the registers of one program: at most 64 fp32 values a thread with 32 warps
BACKWARD_TILE = 8192
MAX_WARPS = 16 if torch.version.hip else 32  # 1024 threads are the most a program may have; a wavefront has 64
MOST_KINDS_OF_CALLS = 1024  # of one kernel that are remembered; rows of every length make new ones
TILE = 4096  # elements of a tile of narrow rows: 16 a thread with 8 warps, two 16-byte loads of bf16


def cdiv(a: int, b: int) -> int:
    """ceil(a / b). `triton.cdiv` and its siblings are functions of the compiler, and a call of one takes 8 us."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def runs_triton(*tensors: torch.Tensor | None) -> bool:
    """True if the kernel takes these tensors. The PyTorch twin takes empty ones and other dtypes (float64)."""
    for t in tensors:
        if t is not None and t.dtype not in KERNEL_DTYPES:
            return False
    x = tensors[0]
    return x is not None and use_triton(x) and x.numel() > 0


def launch(kernel, grid: tuple[int, ...], *args, **constants) -> None:
    """`kernel[grid](*args, **constants)`, where a call like an earlier one costs the host half as much.

    Triton asks at every launch for what it has compiled the kernel: the dtype and alignment of each tensor, and which
    integers are 1 or multiples of 16. Here calls with the same dtypes, alignments and numbers, as those of all layers
    of a model, are handed to what was compiled for the first of them. `constants` are all those that the kernel
    declares as `tl.constexpr`, in any order, and options of the compiler.
    """
    if computes_nothing():
        return
    in_order = [constants[name] for name in kernel.arg_names[len(args) :]]
    if INTERPRET or torch.version.hip or not args[0].is_cuda:  # on ROCm the size of a tensor's memory counts too
        kernel[grid](*args, **constants)
        return
    key = (
        torch.cuda.current_device(),
        *[(a.dtype, a.data_ptr() % 16 == 0) if isinstance(a, torch.Tensor) else a for a in args],
        *constants.values(),
    )
    known = kernel.__dict__.setdefault("_liger_compiled", {})
    found = known.get(key)
    if found is None:
        if len(known) >= MOST_KINDS_OF_CALLS:
            known.clear()
        known[key] = kernel[grid](*args, **constants)
    else:
        found[*grid, 1, 1](*args, *in_order)


def check_norm(x: torch.Tensor, **parameters: torch.Tensor | None) -> None:
    """ValueError unless x (..., N) and all parameters (N,) are floating point and on one device."""
    if x.ndim == 0 or not x.is_floating_point():
        raise ValueError(f"x is {tuple(x.shape)} {x.dtype}; expected a floating-point tensor (..., N).")
    for name, p in parameters.items():
        if p is None:
            continue
        if p.ndim != 1 or p.shape[0] != x.shape[-1]:
            expected = f"expected {name} ({x.shape[-1]},) or None"
            raise ValueError(f"{name} is {tuple(p.shape)}, x {tuple(x.shape)}; {expected}.")
        if p.device != x.device:
            raise ValueError(f"{name} is on {p.device}, x on {x.device}; move {name} to {x.device}.")
        if not p.is_floating_point():
            raise ValueError(f"{name} is {p.dtype}; expected a floating-point tensor, such as {x.dtype}.")


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x (..., N) as (M, N) with unit stride in N. It is a view if the strides allow that, and a copy if not."""
    n = x.shape[-1]
    rows = x.reshape(x.numel() // n, n)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def row_tile(n: int) -> tuple[int, int, int]:
    """(BLOCK_M, BLOCK_N, num_warps) for rows of n elements. A program takes one wide row, or as many narrow ones as
    fill a tile."""
    block_n = next_power_of_2(n)
    block_m = max(1, TILE // block_n)
    return block_m, block_n, min(MAX_WARPS, max(4, block_m * block_n // 512))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 2 if INTERPRET else 64  # any number gives right results, and the interpreter runs one program after another


def backward_tile(n: int, itemsize: int, tensors: int, device: torch.device) -> tuple[int, int, int, int]:
    """(BLOCK_M, BLOCK_N, num_warps, stages) of the backward pass of a norm.

    It loads `tensors` tiles of `itemsize` bytes an element. On each multiprocessor, one program loops over tiles of
    8192 elements and loads two of them ahead of the arithmetic. For rows of 128 to 8192 that reaches 0.93 to 0.99 of
    the copy bandwidth of an H200; smaller tiles or more programs were slower. There are fewer stages where the shared
    memory of the device does not hold three tiles of every tensor.
    """
    block_n = next_power_of_2(n)
    block_m = max(1, BACKWARD_TILE // block_n)
    tile_bytes = tensors * block_m * block_n * itemsize
    stages = max(1, min(3, _shared_memory(device) // tile_bytes))
    return block_m, block_n, min(MAX_WARPS, max(8, block_m * block_n // 1024)), stages


def persistent_grid(tiles: int, device: torch.device) -> int:
    """The number of programs that share the tiles of `backward_tile`: one on each multiprocessor."""
    return min(tiles, _multiprocessors(device))


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """The bytes of shared memory that one program may use. Every GPU gives 48 KiB."""
    if device.type != "cuda":
        return 48 << 10
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 48 << 10) - 2048  # reductions need 2048


def check_gate(gate: torch.Tensor, up: torch.Tensor) -> None:
    """ValueError unless both are floating point of one shape, dtype and device."""
    if (gate.shape, gate.dtype, gate.device) != (up.shape, up.dtype, up.device) or not gate.is_floating_point():
        raise ValueError(
            f"gate is {tuple(gate.shape)} {gate.dtype} on {gate.device}, up is {tuple(up.shape)} {up.dtype} on "
            f"{up.device}; expected floating-point tensors of one shape, dtype and device."
        )


def gate_tiles(*tensors: torch.Tensor) -> tuple[list[torch.Tensor], int, int, tuple[int], int]:
    """(tensors as rows, row length, tiles per row, grid, BLOCK) of tensors of one shape. If all are contiguous, each is
    one long row."""
    if all(t.is_contiguous() for t in tensors):
        rows = [t.view(1, -1) for t in tensors]
    else:
        rows = [as_rows(t) if t.ndim else t.view(1, 1) for t in tensors]
    m, n = rows[0].shape
    block = min(2048, next_power_of_2(n))  # 16 elements a thread with 4 warps: two 16-byte loads of bf16
    tiles_per_row = cdiv(n, block)
    return rows, n, tiles_per_row, (m * tiles_per_row,), block


def paired(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, str] | None:
    """(the contiguous tensor whose even and odd columns the two are, which of them is even: "gate" or "up"), or None if
    they are not."""
    if (whole := joined_pairs(gate, up)) is not None:
        return whole, "gate"
    if (whole := joined_pairs(up, gate)) is not None:
        return whole, "up"
    return None


def gate_gradients(
    gate: torch.Tensor, up: torch.Tensor, reuse: bool, pairs: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the backward pass of a gate writes the two gradients. They are halves of one tensor if `gate` and `up` are,
    and with `pairs` its even and odd columns.

    If `reuse` allows it and the backward pass cannot run again, they are written over `gate` and `up`. That is safe
    because a program of the kernel reads all its elements before it writes any. Otherwise they are new tensors.
    """
    if runs_as_op():  # then the two may not share memory
        return _new_like(gate), _new_like(up)
    again = not reuse or graph_is_kept()
    both = paired(gate, up) if pairs else None
    if both is not None:
        whole = _new_like(both[0]) if again else both[0]
        even, odd = whole[..., ::2], whole[..., 1::2]
        dg, du = (even, odd) if both[1] == "gate" else (odd, even)
        return _written_over(gate, up, dg, du, again)
    for first, second in ((gate, up), (up, gate)):
        whole = joined(first, second)
        if whole is not None:
            a, b = (_new_like(whole) if again else whole).chunk(2, dim=-1)
            dg, du = (a, b) if first is gate else (b, a)
            break
    else:
        apart = gate.untyped_storage()._cdata != up.untyped_storage()._cdata
        again = again or not (apart and gate.is_contiguous() and up.is_contiguous())
        dg, du = (_new_like(t) if again else t.detach() for t in (gate, up))
    return _written_over(gate, up, dg, du, again)


def _written_over(
    gate: torch.Tensor, up: torch.Tensor, dg: torch.Tensor, du: torch.Tensor, again: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dg, du). Unless `again`, they lie over `gate` and `up`, and whoever has saved those gets an error instead of a
    wrong gradient."""
    if not again:
        for t in (gate, up):
            torch.autograd.graph.increment_version(t)
    return dg, du


def gradients_and_product_of(
    twin: Callable, dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dg, du, y) of a gate by its PyTorch twin, in new memory."""
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (gate, up)]
        y = twin(*leaves)
    return *torch.autograd.grad(y, leaves, dy), y.detach()


def _new_like(t: torch.Tensor) -> torch.Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device=t.device)
