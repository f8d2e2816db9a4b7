"""A linear layer whose three products are computed in eight bits: y = x W^T, dx = dy W, dW = dy^T x.

Each factor is rounded to e4m3, the gradients to e5m2 unless told otherwise, with one scale for a whole tensor
(`float8_cast.py`). The sums are in fp32, and a result is rounded to its own dtype once. Layers with scales by row, in
`float8_rowwise_linear.py`, are called by the same function.

Shapes  x (..., K), W (N, K), y (..., N), with N and K multiples of 16. The number of rows of x is free: where they are
        summed over, zeros are added.
Dtypes  x and W bf16, fp16, fp32. y and dx have the dtype of x, under autocast that of autocast; dW has that of W.
Bytes   b per element, beside the products, which read and write half of what those in 16 bits do: x and W are read
        twice and written once in the forward pass; dy is read twice and written twice, and W is read and written once
        more, in the backward pass. Layers of one x share its cast.
        Kept for backward: the transpose of x, one byte an element, or x itself where that costs nothing; and W itself.
        W is cast in every call. Its eight bits would be the same in all micro-batches of a step, but optimizers and
        others write to weights behind the back of PyTorch's version counter, and the cast of a weight costs as much as
        one more row of x for each row of W.
        A W that arrives in eight bits is not cast: it is read and written in one byte for dx, and that is all.
"""

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from . import reference
from ._dispatch import KERNEL_DTYPES, no_autocast, on_cuda, once_differentiable
from ._lora import as_matrix, computed, in_shape, without_memory
from .float8_cast import E4M3, E5M2, MULTIPLE, Float8, fault_of_device, float8_cast, maxima_of
from .float8_transpose import transposed
from .lora_linear import result_dtype


class Float8Form(NamedTuple):
    """How a layer is computed in eight bits.

    Attributes:
        grad_dtype: What the gradient of the output is rounded to, e5m2 or e4m3.
        power_of_2 (`bool`): Whether scales are rounded down to powers of two.
        fast_accum (`tuple`): Whether the sums of y, dx and dW may be kept in the registers of the matrix units, which
            have fewer bits than fp32.
    """

    grad_dtype: torch.dtype = E5M2
    power_of_2: bool = False
    fast_accum: tuple[bool, bool, bool] = (True, False, False)

    def input_of(self, x: torch.Tensor, keeps_input: bool = False) -> "Float8Input":
        """x in this form. Another form, as that of `float8_rowwise_linear.py`, has an input of another class."""
        return Float8Input(x, self, keeps_input)

    def columns_of(self, rows: torch.Tensor, maxima: torch.Tensor) -> Float8:
        """The transpose of an input."""
        return float8_cast(rows, rows=False, columns=True, power_of_2=self.power_of_2, maxima=maxima)


BitsOf = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Gives the eight bits of a weight, (N, K) in e4m3, and what they have to be multiplied by, () in fp32."""


def _product(a, a_inverse, b, b_inverse, dtype, fast_accum) -> torch.Tensor:
    """a b, with a in rows and b in columns."""
    if on_cuda(a):
        return torch._scaled_mm(
            a, b, scale_a=a_inverse, scale_b=b_inverse, out_dtype=dtype, use_fast_accum=fast_accum
        )  # fmt: skip
    return reference.float8_product(a, a_inverse, b, b_inverse, dtype)


class _Columns:
    """The transpose of an input in eight bits in the backward passes of the layers that have got it. It is made for the
    first of them and dropped after the last."""

    def __init__(self) -> None:
        self.layers = self.asked = 0
        self.made: Any = None

    def get(self, rows: torch.Tensor, maxima: torch.Tensor, form: Any) -> Any:
        made = form.columns_of(rows, maxima) if self.made is None else self.made
        self.asked += 1
        self.made = made
        if self.asked >= self.layers:
            self.made, self.asked = None, 0
        return made


class Float8Input:
    """One x in eight bits, for all linear layers that get it, one after the other.

    Args:
        x (`torch.Tensor`): (..., K), the input. It is not kept alive.
        form (`Float8Form`): Of all these layers.
        keeps_input (`bool`): For the backward pass keep `x` itself, and not its transpose in eight bits. That is less
            where somebody keeps it anyway, or keeps what it can be computed from again.
    """

    def __init__(self, x: torch.Tensor, form: Any, keeps_input: bool = False):
        self.x = weakref.ref(x, functools.partial(_forget, weakref.ref(self)))
        self.version = _version(x)
        self.dtype, self.form, self.keeps_input = result_dtype(x), form, keeps_input
        self.columns = _Columns()
        self.cast: Any = None  # of a `Float8Form`, a `Float8`

    def fits(self, x: torch.Tensor, form: Any, keeps_input: bool) -> bool:
        """Whether this is of `x` as it is now."""
        return (
            self.x() is x
            and _version(x) == self.version
            and (self.dtype, self.form, self.keeps_input) == (result_dtype(x), form, keeps_input)
        )

    def in_eight_bits(self, x: torch.Tensor, columns: bool) -> Any:
        """x, with its transpose if `columns` asks for it."""
        known = self.cast
        if known is None or (columns and known.columns is None):
            rows, maxima = as_matrix(x, self.dtype).contiguous(), None if known is None else known.maxima
            self.cast = known = float8_cast(
                rows, columns=columns, power_of_2=self.form.power_of_2, maxima=maxima
            )  # fmt: skip
        return known

    def times(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x W^T, differentiable in both."""
        return _without_bias(x, weight, self, None)


def _version(x: torch.Tensor) -> int:
    """Counts the changes of x in place; a tensor of inference mode does not count them."""
    return 0 if x.is_inference() else x._version


def _forget(given: "weakref.ref[Float8Input]", x: weakref.ref) -> None:
    """Called when x is gone, which nobody will give to a layer any more."""
    if (found := given()) is not None:
        found.cast = None


class _Kept(torch.autograd.Function):
    """Keeps what the backward pass of a layer needs, and returns a tensor without memory in place of its output."""

    @staticmethod
    def forward(ctx, given, made, bits_of, x, weight):
        form = given.form
        needs_x, needs_weight = ctx.needs_input_grad[3:]
        cast = given.in_eight_bits(x, columns=needs_weight and not given.keeps_input)
        maxima = maxima_of(weight.contiguous()) if bits_of is None else None
        made += (cast, maxima)
        kept = None
        if needs_weight:
            kept = x if given.keeps_input else cast.columns
            given.columns.layers += given.keeps_input
        ctx.save_for_backward(kept, cast.inverse, cast.maxima, weight if needs_x else None, maxima)
        ctx.set_materialize_grads(False)
        ctx.form, ctx.keeps_input, ctx.columns, ctx.bits_of = form, given.keeps_input, given.columns, bits_of
        ctx.dtype, ctx.weight_dtype, ctx.x_dtype, ctx.shape = given.dtype, weight.dtype, x.dtype, x.shape
        return without_memory((*x.shape[:-1], weight.shape[0]), given.dtype, x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        if dy is None:
            return (None,) * 5
        kept, inverse, x_maxima, weight, maxima = ctx.saved_tensors
        form = ctx.form
        needs_x, needs_weight = ctx.needs_input_grad[3:]
        dx = dw = None
        with no_autocast(dy.device.type):
            dy8 = float8_cast(
                as_matrix(dy, ctx.dtype).contiguous(), form.grad_dtype, rows=needs_x, columns=needs_weight,
                power_of_2=form.power_of_2,
            )  # fmt: skip
            if needs_weight:
                x8 = kept
                if ctx.keeps_input:
                    x8 = ctx.columns.get(as_matrix(kept, ctx.dtype).contiguous(), x_maxima, form).columns
                dw = _product(dy8.columns, dy8.inverse, x8.t(), inverse, ctx.weight_dtype, form.fast_accum[2])
                del x8
            if needs_x:
                columns, w_inverse = _turned(weight, maxima, form, ctx.bits_of)
                dx = _product(dy8.rows, dy8.inverse, columns.t(), w_inverse, ctx.dtype, form.fast_accum[1])
                dx = dx.view(ctx.shape).to(ctx.x_dtype)
        return None, None, None, dx, dw


def _upright(weight, maxima, form, bits_of) -> tuple[torch.Tensor, torch.Tensor]:
    """W (N, K) in eight bits, and what it has to be multiplied by."""
    if bits_of is not None:
        return _asked(bits_of, weight)
    w8 = float8_cast(weight.contiguous(), power_of_2=form.power_of_2, maxima=maxima)
    return w8.rows, w8.inverse


def _turned(weight, maxima, form, bits_of) -> tuple[torch.Tensor, torch.Tensor]:
    """The transpose of W (K, N) in eight bits, and what it has to be multiplied by."""
    if bits_of is not None:
        bits, inverse = _asked(bits_of, weight)
        return transposed([bits]), inverse
    w8 = float8_cast(weight.contiguous(), rows=False, columns=True, power_of_2=form.power_of_2, maxima=maxima)
    return w8.columns, w8.inverse


def _asked(bits_of: BitsOf, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    bits, inverse = bits_of(weight)
    if bits.dtype != E4M3 or bits.shape != weight.shape or not bits.is_contiguous() or bits.device != weight.device:
        raise ValueError(
            f"bits_of gives {tuple(bits.shape)} {bits.dtype} with strides {bits.stride()} on {bits.device}; expected "
            f"contiguous {tuple(weight.shape)} {E4M3} on {weight.device}."
        )
    return bits, inverse


class _Numbers(torch.autograd.Function):
    """What the eight bits of a weight stand for."""

    @staticmethod
    def forward(ctx, weight, bits_of, dtype):
        bits, inverse = _asked(bits_of, weight)
        return (bits.to(torch.float32) * inverse).to(dtype)

    @staticmethod
    def backward(ctx, dw):
        return dw, None, None


_latest = threading.local()


def shared_input(x: torch.Tensor, form: Any, keeps_input: bool = False, alone: bool = False) -> Float8Input:
    """`Float8Input` of x: that of the call before in this thread, if it was for this very x and nothing has changed.

    With `alone`, it is a new one, and no later call gets it or an earlier one: for where somebody may write over x
    behind its version counter.
    """
    known: Float8Input | None = getattr(_latest, "input", None)
    if known is None or alone or x.is_inference() or not known.fits(x, form, keeps_input):
        known = form.input_of(x, keeps_input)
        _latest.input = None if alone else known
    return known


def float8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    form: Any = None,
    given: Float8Input | None = None,
    bits_of: BitsOf | None = None,
) -> torch.Tensor:
    """x W^T + b, differentiable in all three. These are not the numbers of a linear layer in 16 bits.

    Args:
        x (`torch.Tensor`): (..., K); bf16, fp16 or fp32.
        weight (`torch.Tensor`): (N, K), in one of these dtypes. N and K are multiples of 16.
        bias (`torch.Tensor`, *optional*): (N,). It is added to the rounded product.
        form (`Float8Form` or `Float8RowwiseForm`, *optional*): Unset: the defaults of `Float8Form`, which are those of
            torchao.
        given (`Float8Input`, *optional*): Of this `x`, for several layers that share it; it has a form of its own.
        bits_of (`Callable`, *optional*): Gives, of a `weight` that is in eight bits already, these and what they have
            to be multiplied by. `weight` itself, which has the gradient and is kept for it, may then be any tensor of
            its shape and dtype. It is asked in each pass, since the bits may be freed in between and come again.

    Returns:
        `torch.Tensor` (..., N) in the dtype of `x`, under autocast in that of autocast. On a CPU the numbers in eight
        bits are multiplied in fp32.

    Raises:
        ValueError: A shape, dtype or device does not fit, or the GPU has no matrix units for eight bits.
        RuntimeError: `torch.compile` traces the call.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError("float8_linear is for eager code; under torch.compile, use torchao's Float8Linear.")
    _check(x, weight, bias)
    if given is None:
        given = (form or Float8Form()).input_of(x)
    elif not given.fits(x, given.form, given.keeps_input) or form not in (None, given.form):
        raise ValueError("given is of another x, of another form, or of x before it was changed; make a new one.")
    if bits_of is not None and not isinstance(given.form, Float8Form):
        raise ValueError(f"form is {given.form}; a weight that is in eight bits already has one scale: Float8Form.")
    y = given.times(x, weight) if bits_of is None else _without_bias(x, weight, given, bits_of)
    return y if bias is None else y + bias.to(y.dtype)


def _without_bias(x: torch.Tensor, weight: torch.Tensor, given: Float8Input, bits_of: BitsOf | None) -> torch.Tensor:
    if x.numel() == 0 or weight.numel() == 0:
        numbers = weight.to(given.dtype) if bits_of is None else _Numbers.apply(weight, bits_of, given.dtype)
        return F.linear(x.to(given.dtype), numbers)
    made: list = []

    def compute() -> torch.Tensor:
        cast, maxima = made or (given.in_eight_bits(x, columns=False), None)
        w8, w_inverse = _upright(weight, maxima, given.form, bits_of)
        y = _product(cast.rows, cast.inverse, w8.t(), w_inverse, given.dtype, given.form.fast_accum[0])
        return in_shape(y, (*x.shape[:-1], y.shape[1]))

    with no_autocast(x.device.type):
        if not torch.is_grad_enabled() or not (x.requires_grad or weight.requires_grad):
            with torch.no_grad():
                return compute()
        return computed((_Kept.apply(given, made, bits_of, x, weight),), compute)


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """ValueError unless the three fit one another and can be multiplied in eight bits where they are."""
    if x.ndim == 0 or x.dtype not in KERNEL_DTYPES:
        raise ValueError(f"x is {tuple(x.shape)} {x.dtype}; expected (..., K) in bfloat16, float16 or float32.")
    if weight.ndim != 2 or weight.shape[1] != x.shape[-1] or weight.dtype not in KERNEL_DTYPES:
        raise ValueError(
            f"weight is {tuple(weight.shape)} {weight.dtype}, x {tuple(x.shape)}; expected weight (N, {x.shape[-1]}) "
            "in bfloat16, float16 or float32."
        )
    if any(width % MULTIPLE for width in weight.shape):
        raise ValueError(
            f"weight is {tuple(weight.shape)}; expected multiples of {MULTIPLE}, in which matrix units multiply eight "
            "bits. Use torch.nn.functional.linear."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias is {tuple(bias.shape)}; expected ({weight.shape[0]},) or None.")
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.device != x.device:
            raise ValueError(f"{name} is on {t.device}, x on {x.device}; move {name} to {x.device}.")
    if (fault := fault_of_device(x.device)) is not None:
        raise ValueError(f"{fault}. Use torch.nn.functional.linear.")
