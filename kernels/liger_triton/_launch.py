"""Launch kernels. Row-wise kernels share the checks, the views of tensors as rows, and the block and grid sizes.

Arguments of a kernel stand in this order: pointers (upper case), sizes and strides, numbers of the formula (scale, eps,
limit), then constants (`tl.constexpr`, upper case): flags first, block sizes last.
"""

import functools
from collections.abc import Collection, Sequence

import torch

from ._dispatch import INTERPRET
from .sizes import computes_nothing

MAX_COLUMNS = 65536  # a row lives in the registers of one program: at most 64 fp32 values a thread with 32 warps
BACKWARD_TILE = 8192
HIP = torch.version.hip is not None
MAX_WARPS = 16 if HIP else 32  # 1024 threads are the most a program may have; a wavefront has 64
MAX_INT32 = 2**31 - 1
TILE = 4096  # elements of a tile of narrow rows: 16 a thread with 8 warps, two 16-byte loads of bf16


def cdiv(a: int, b: int) -> int:
    """Return ceil(a / b). `triton.cdiv` belongs to the compiler: one call costs the host 8 us."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def launch(kernel, grid: tuple[int, ...], *args, **constants) -> None:
    """Run `kernel[grid](*args, **constants)` on the device of the first argument.

    If the kernel was compiled for such arguments before, this costs the host half as much as Triton's own launch.

    Triton looks up at every launch which version of a kernel fits: by the dtype and alignment of each tensor, and by
    which integers are 1, multiples of 16, or wider than 32 bits. The key here is the same, so rows of any length share
    a few versions. A kernel lists the arguments that depend on the number of rows in `do_not_specialize`; otherwise
    training would wait for the compiler again at the first step with a multiple of 16 rows. `constants` are the
    kernel's `tl.constexpr` arguments, all of them, in any order, and compiler options.
    """
    if computes_nothing():
        return
    if INTERPRET or not args[0].is_cuda:
        kernel[grid](*args, **constants)
        return
    device = args[0].get_device()
    if device != torch.cuda.current_device():  # with `device_map`, tensors may be on another one
        with torch.cuda.device(device):
            return launch(kernel, grid, *args, **constants)
    if HIP:  # on AMD, Triton also specializes on the size of a tensor's memory
        kernel[grid](*args, **constants)
        return
    key = _version_key(device, args, constants)
    version = kernel.__dict__.get("_liger_compiled", {}).get(key)
    if version is None:
        compiled = kernel[grid](*args, **constants)
        # Remember the constants in the kernel's order, so that a later launch need not look up their names.
        in_order = [constants[name] for name in kernel.arg_names[len(args) :]]
        kernel.__dict__.setdefault("_liger_compiled", {})[key] = compiled, in_order
    else:
        compiled, in_order = version
        compiled[*grid, 1, 1](*args, *in_order)


def _version_key(device: int, args: tuple, constants: dict) -> tuple:
    """Return the key of the compiled version that fits these arguments. It follows what Triton specializes on."""
    key: list = [device]
    for a in args:
        kind = type(a)
        if kind is int:
            aligned = a & 15 == 0
            if a > MAX_INT32:
                key.append(3 if aligned else 4)
            elif aligned:
                key.append(0)
            else:
                key.append(2 if a == 1 else 1)
        elif kind is float:
            key.append(kind)
        elif isinstance(a, torch.Tensor):
            key.append((a.dtype, a.data_ptr() & 15 == 0))
        else:
            key.append(a)
    key.extend(constants.values())
    return tuple(key)


def not_among(name: str, value: str, known: Collection[str]) -> ValueError:
    """Make the error for the argument `name` with a `value` that is not `known`."""
    return ValueError(f"{name} is {value!r}; expected one of {', '.join(map(repr, known))}.")


def check_norm(x: torch.Tensor, **parameters: torch.Tensor | None) -> None:
    """Raise ValueError unless x (..., N) and all parameters (N,) are floating point and on one device."""
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


def broadcasts(lead: Sequence[int], shape: Sequence[int]) -> bool:
    """Return whether a tensor with the leading dimensions `lead` broadcasts to as many dimensions of `shape`."""
    for one, other in zip(lead, shape, strict=True):
        if one not in (1, other):
            return False
    return True


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x (..., N) as (M, N) with unit stride in N: a view if the strides allow one, else a copy."""
    n = x.shape[-1]
    rows = x.reshape(x.numel() // n, n)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def as_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return x in `dtype`. PyTorch's `to` takes ten times as much host time when there is nothing to convert."""
    return x if x.dtype == dtype else x.to(dtype)


def as_matrix(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return x (..., K) as (T, K) in `dtype`, with unit stride in rows. It is a view where possible."""
    rows = as_dtype(x.reshape(-1, x.shape[-1]), dtype)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def row_tile(n: int) -> tuple[int, int, int]:
    """Return (BLOCK_M, BLOCK_N, num_warps) for rows of n elements: one wide row, or narrow ones that fill a tile."""
    block_n = next_power_of_2(n)
    block_m = max(1, TILE // block_n)
    return block_m, block_n, min(MAX_WARPS, max(4, block_m * block_n // 512))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 2 if INTERPRET else 64  # any number is correct; the interpreter runs programs one after another


def backward_tile(n: int, device: torch.device, *loaded: torch.Tensor) -> tuple[int, int, int, int]:
    """Return (BLOCK_M, BLOCK_N, num_warps, stages) for the backward pass of a norm, which loads a tile of each of
    `loaded`.

    One program on each multiprocessor loops over tiles of 8192 elements and loads two tiles ahead of the arithmetic.
    For rows of 128 to 8192 elements, that reaches 0.93 to 0.99 of the copy bandwidth of an H200; smaller tiles and more
    programs were slower. There are fewer stages if shared memory cannot hold three tiles of every tensor.
    """
    block_n = next_power_of_2(n)
    block_m = max(1, BACKWARD_TILE // block_n)
    tile_bytes = block_m * block_n * sum([t.element_size() for t in loaded])
    stages = max(1, min(3, shared_memory(device) // tile_bytes))
    return block_m, block_n, min(MAX_WARPS, max(8, block_m * block_n // 1024)), stages


def persistent_grid(tiles: int, device: torch.device) -> int:
    """Return how many programs share the tiles of `backward_tile`: one for each multiprocessor."""
    return min(tiles, multiprocessors(device))


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that one program may use. Every GPU has at least 48 KiB."""
    if device.type != "cuda":
        return 48 << 10
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 48 << 10) - 2048  # reductions use 2048 of them
