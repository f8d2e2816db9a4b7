"""A linear layer with its three products in fp8: y = x W^T, dx = dy W, dW = dy^T x.

There are two forms, both recipes of torchao. Sums are in fp32, and a result is rounded once:

    Float8Form          "tensorwise": one scale for each tensor; e4m3, and e5m2 for gradients unless told otherwise
    Float8RowwiseForm   "rowwise": a scale for each row and column of the result, that is along the sum; all in e4m3
                        y  = x8 w8^T     x with a scale for each token, W for each output feature
                        dx = d8 w8'      dy with a scale for each token, W for each input feature
                        dW = d8'^T x8'   dy with a scale for each output feature, x for each input feature
                        Each tensor is rounded twice, and the two differ by more than their layout.
    ... with `gw_hp`    "rowwise_with_gw_hp": dW is computed in the dtype of the results, and in dx W has one scale

Shapes  x (..., K), W (N, K), y (..., N), with N and K multiples of 16. x may have any number of rows: products that sum
        over rows are padded with zeros.
Dtypes  x and W bf16, fp16, fp32. y and dx have the dtype of x, or the autocast dtype. dW has the dtype of W; with row
        scales it is rounded to the dtype of y first, as in a linear layer.
Bytes   b per element, besides the products (they move half the bytes of 16-bit products). Forward reads x and W twice
        and writes them once. Backward reads and writes dy twice, and W once more. With row scales x is written twice.
        Layers with the same x share its cast.
        Kept for backward: W, and the transpose of x (one byte an element), or x itself where that costs nothing or with
        `gw_hp`. W is cast in every call, even for micro-batches of one step: optimizers write to weights without
        changing PyTorch's version counter.
"""

import functools
import threading
import weakref
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from . import reference
from ._autograd import computed, once_differentiable, records_graph, without_memory
from ._dispatch import KERNEL_DTYPES, no_autocast, on_cuda, result_dtype
from ._float8_product import row_product
from ._launch import as_matrix
from .float8_cast import (
    E4M3,
    E5M2,
    MULTIPLE,
    Float8Rows,
    Turned,
    fault_of_device,
    float8_cast,
    float8_columns,
    float8_rows,
    maxima_of,
)


class _Cast(NamedTuple):
    """The parts of an fp8 matrix that were requested: its rows and their factor, the maxima for a later transpose, the
    transpose, and the matrix itself in the dtype of the product if only that is kept."""

    rows: torch.Tensor | None = None
    inverse: torch.Tensor | None = None
    maxima: torch.Tensor | None = None
    turned: Turned | None = None
    narrow: torch.Tensor | None = None


class Float8Form(NamedTuple):
    """Compute a layer in fp8 with one scale for each tensor.

    Attributes:
        grad_dtype: Dtype of the cast of the output's gradient, e5m2 or e4m3.
        power_of_2 (`bool`): Round scales down to powers of two.
        fast_accum (`tuple`): For y, dx and dW: allow sums in the registers of the matrix units, which have fewer bits
            than fp32.
    """

    grad_dtype: torch.dtype = E5M2
    power_of_2: bool = False
    fast_accum: tuple[bool, bool, bool] = (True, False, False)

    @property
    def gw_hp(self) -> bool:
        return False

    @staticmethod
    def product(a, a_inverse, b, b_inverse, dtype: torch.dtype, *, fast_sums: bool) -> torch.Tensor:
        """Return a b^T (M, N) of two fp8 matrices, times the factors of both."""
        if not on_cuda(a):
            return reference.float8_product(a, a_inverse, b.t(), b_inverse, dtype)
        return torch._scaled_mm(
            a, b.t(), scale_a=a_inverse, scale_b=b_inverse, out_dtype=dtype, use_fast_accum=fast_sums
        )

    def cast(self, matrix, rows=True, turn=False, finds=False, maxima=None, gradient=False) -> _Cast:
        """Cast a contiguous matrix to fp8.

        `rows`, `turn`: return it, return its transpose. `finds`: return the maxima that a later call needs for the
        transpose. `gradient`: the matrix is the gradient of the output.
        """
        dtype = self.grad_dtype if gradient else E4M3
        x8 = float8_cast(matrix, dtype, rows=rows, columns=turn, power_of_2=self.power_of_2, maxima=maxima)
        return _Cast(x8.rows, x8.inverse, x8.maxima, (x8.columns, x8.inverse) if turn else None)

    def turned_weight(self, weight: torch.Tensor, maxima: torch.Tensor) -> Turned | None:
        return self.cast(weight, rows=False, turn=True, maxima=maxima).turned

    def prepared(self, weight: torch.Tensor, turns: bool) -> _Cast:
        """Return what `upright` and `turned_weight` both need from a weight."""
        return _Cast(maxima=maxima_of(weight))

    def upright(self, weight: torch.Tensor, prepared: _Cast | None) -> _Cast:
        """Cast W (N, K) to fp8."""
        return self.cast(weight.contiguous(), maxima=None if prepared is None else prepared.maxima)


class Float8RowwiseForm(NamedTuple):
    """Compute a layer in fp8 with row scales.

    Attributes:
        power_of_2 (`bool`): Round scales down to powers of two.
        gw_hp (`bool`): Compute the gradient of the weight in the dtype of the results, and use one scale for the weight
            in the gradient of the input.
        fast_accum (`tuple`): As in `Float8Form`.
    """

    power_of_2: bool = True
    gw_hp: bool = False
    fast_accum: tuple[bool, bool, bool] = (True, False, False)

    @staticmethod
    def product(*factors, fast_sums: bool) -> torch.Tensor:
        """As in `Float8Form`, with a scale for each row of both."""
        return row_product(*factors, fast_sums=fast_sums)

    def cast(self, matrix, rows=True, turn=False, finds=False, maxima=None, gradient=False) -> _Cast:
        rows = rows or maxima is None
        made = float8_rows(matrix, self.power_of_2, maxima=turn or finds) if rows else Float8Rows(None, None, maxima)
        return _Cast(*made, float8_columns(matrix, made.maxima, self.power_of_2) if turn else None)

    def turned_weight(self, weight: torch.Tensor, maxima: torch.Tensor) -> Turned | None:
        if not self.gw_hp:
            return self.cast(weight, rows=False, turn=True, maxima=maxima).turned
        most = maxima.amax(0, keepdim=True)
        w8 = float8_cast(weight, rows=False, columns=True, power_of_2=self.power_of_2, maxima=most)
        return w8.columns, w8.inverse.repeat(weight.shape[1])

    def prepared(self, weight: torch.Tensor, turns: bool) -> _Cast:
        return self.cast(weight, finds=turns)

    def upright(self, weight: torch.Tensor, prepared: _Cast | None) -> _Cast:
        return prepared or self.cast(weight.contiguous())


Form = Float8Form | Float8RowwiseForm


class _Columns:
    """The transpose of an input for the backward passes of the layers that share it. The first one makes it, and it is
    dropped after the last."""

    def __init__(self) -> None:
        self.layers = self.asked = 0
        self.made: Turned | None = None

    def get(self, matrix: torch.Tensor, maxima: torch.Tensor, form: Form) -> Turned | None:
        made = form.cast(matrix, rows=False, turn=True, maxima=maxima).turned if self.made is None else self.made
        self.asked += 1
        self.made = made
        if self.asked >= self.layers:
            self.made, self.asked = None, 0
        return made


class Float8Input:
    """The fp8 cast of one x, for consecutive linear layers with that input.

    Args:
        x (`torch.Tensor`): (..., K), the input. It is not kept alive.
        form (`Float8Form` or `Float8RowwiseForm`): The form of all these layers.
        keeps_input (`bool`): Save `x` for backward instead of its fp8 transpose. That takes less memory if `x`, or what
            it is recomputed from, is kept anyway.
    """

    def __init__(self, x: torch.Tensor, form: Form, keeps_input: bool = False):
        self.x = weakref.ref(x, functools.partial(_forget, weakref.ref(self)))
        self.version = _version(x)
        self.dtype = result_dtype(x)
        self.form = form
        self.keeps_input = keeps_input
        self.columns = _Columns()
        self.cast: _Cast | None = None

    def fits(self, x: torch.Tensor, form: Form, keeps_input: bool) -> bool:
        """Return whether this is the cast of `x` as it is now."""
        return (
            self.x() is x
            and _version(x) == self.version
            and (self.dtype, self.form, self.keeps_input) == (result_dtype(x), form, keeps_input)
        )

    def as_fp8(self, x: torch.Tensor, turn: bool) -> _Cast:
        """Return the cast of x. `turn` adds what the gradient of a weight needs."""
        form, known = self.form, self.cast
        finds = turn and not form.gw_hp
        turn = finds and not self.keeps_input
        if known is None or (finds and known.maxima is None) or (turn and known.turned is None):
            matrix = as_matrix(x, self.dtype).contiguous()
            known = form.cast(matrix, turn=turn, finds=finds, maxima=None if known is None else known.maxima)
            if form.gw_hp and not self.keeps_input and x.dtype != self.dtype:
                known = known._replace(narrow=matrix)
            self.cast = known
        return known


def _version(x: torch.Tensor) -> int:
    """Return the version counter of x. Tensors of inference mode have none."""
    return 0 if x.is_inference() else x._version


def _forget(given: "weakref.ref[Float8Input]", x: weakref.ref) -> None:
    """Drop the cast when x is gone: no further layer can get x."""
    alive = given()
    if alive is not None:
        alive.cast = None


class _Kept(torch.autograd.Function):
    """Save what the backward pass of a layer needs, and return a stub for its output."""

    @staticmethod
    def forward(ctx, given, made, x, weight):
        form = given.form
        needs_x, needs_weight = ctx.needs_input_grad[2:]
        cast = given.as_fp8(x, turn=needs_weight)
        prepared = form.prepared(weight.contiguous(), needs_x)
        made += (cast, prepared)
        kept = inverse = None
        if needs_weight and cast.turned is not None:
            kept, inverse = cast.turned
        elif needs_weight:
            kept = x if cast.narrow is None else cast.narrow
            given.columns.layers += not form.gw_hp
        maxima = cast.maxima if needs_weight else None
        ctx.save_for_backward(kept, inverse, maxima, weight if needs_x else None, prepared.maxima)
        ctx.set_materialize_grads(False)
        ctx.form, ctx.columns = form, given.columns
        ctx.dtype = given.dtype
        ctx.weight_dtype = weight.dtype
        ctx.x_dtype = x.dtype
        ctx.shape = x.shape
        return without_memory((*x.shape[:-1], weight.shape[0]), given.dtype, x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        if dy is None:
            return (None,) * 4
        kept, inverse, maxima, weight, w_maxima = ctx.saved_tensors
        form = ctx.form
        needs_x, needs_weight = ctx.needs_input_grad[2:]
        dx = dw = None
        with no_autocast(dy.device.type):
            rows = as_matrix(dy, ctx.dtype).contiguous()
            turns = needs_weight and not form.gw_hp
            casts = needs_x or turns
            *d8, _, d8_turned, _ = form.cast(rows, rows=needs_x, turn=turns, gradient=True) if casts else _Cast()
            if needs_weight and form.gw_hp:
                dw = (rows.t() @ as_matrix(kept, ctx.dtype)).to(ctx.weight_dtype)
            elif needs_weight:
                x8 = (kept, inverse)
                if inverse is None:
                    x8 = ctx.columns.get(as_matrix(kept, ctx.dtype).contiguous(), maxima, form)
                dtype = ctx.weight_dtype if isinstance(form, Float8Form) else ctx.dtype
                dw = form.product(*d8_turned, *x8, dtype, fast_sums=form.fast_accum[2]).to(ctx.weight_dtype)
                del x8
            del d8_turned
            if needs_x:
                w8 = form.turned_weight(weight.contiguous(), w_maxima)
                dx = form.product(*d8, *w8, ctx.dtype, fast_sums=form.fast_accum[1]).view(ctx.shape).to(ctx.x_dtype)
        return None, None, dx, dw


_latest = threading.local()


def shared_input(x: torch.Tensor, form: Form, keeps_input: bool = False, alone: bool = False) -> Float8Input:
    """Return the `Float8Input` of the previous call in this thread if it was for this x, unchanged; else a new one.

    With `alone`, return a new one that no other call gets. Use it for an x that is overwritten without its version
    counter.
    """
    known: Float8Input | None = getattr(_latest, "input", None)
    if known is None or alone or x.is_inference() or not known.fits(x, form, keeps_input):
        known = Float8Input(x, form, keeps_input)
        _latest.input = None if alone else known
    return known


def float8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    form: Form | None = None,
    given: Float8Input | None = None,
) -> torch.Tensor:
    """Compute x W^T + b in fp8, differentiable in all three. The result differs from a 16-bit linear layer.

    Args:
        x (`torch.Tensor`): (..., K); bf16, fp16 or fp32.
        weight (`torch.Tensor`): (N, K), in one of these dtypes. N and K are multiples of 16.
        bias (`torch.Tensor`, *optional*): (N,). It is added to the rounded product.
        form (`Float8Form` or `Float8RowwiseForm`, *optional*): Unset: `Float8Form()`, with torchao's defaults.
        given (`Float8Input`, *optional*): The cast of this `x`, for layers that share it; it has its own form.

    Returns:
        `torch.Tensor` (..., N) in the dtype of `x`, or in the autocast dtype. A CPU multiplies the fp8 numbers in fp32.

    Raises:
        ValueError: A shape, dtype or device does not fit, or the GPU has no fp8 matrix units. RuntimeError:
        `torch.compile` traces the call.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError("float8_linear is for eager code; under torch.compile, use torchao's Float8Linear.")
    _check(x, weight, bias)
    if given is None:
        given = Float8Input(x, form or Float8Form())
    elif not given.fits(x, given.form, given.keeps_input) or form not in (None, given.form):
        raise ValueError("given is of another x, of another form, or of x before it was changed; make a new one.")
    y = _without_bias(x, weight, given)
    return y if bias is None else y + bias.to(y.dtype)


def _without_bias(x: torch.Tensor, weight: torch.Tensor, given: Float8Input) -> torch.Tensor:
    if x.numel() == 0 or weight.numel() == 0:
        return F.linear(x.to(given.dtype), weight.to(given.dtype))
    made: list[Any] = []

    def compute() -> torch.Tensor:
        form = given.form
        cast, prepared = made or (given.as_fp8(x, turn=False), None)
        w8 = form.upright(weight, prepared)[:2]
        return form.product(cast.rows, cast.inverse, *w8, given.dtype, fast_sums=form.fast_accum[0])

    with no_autocast(x.device.type):
        stub = _Kept.apply(given, made, x, weight) if records_graph(x, weight) else None
        return computed(compute, x.shape[:-1], stub)


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raise ValueError unless the tensors fit one another and their device can multiply them in fp8."""
    if x.ndim == 0 or x.dtype not in KERNEL_DTYPES:
        raise ValueError(f"x is {tuple(x.shape)} {x.dtype}; expected (..., K) in bfloat16, float16 or float32.")
    if weight.ndim != 2 or weight.shape[1] != x.shape[-1] or weight.dtype not in KERNEL_DTYPES:
        raise ValueError(
            f"weight is {tuple(weight.shape)} {weight.dtype}, x {tuple(x.shape)}; expected weight (N, {x.shape[-1]}) "
            "in bfloat16, float16 or float32."
        )
    if any(width % MULTIPLE for width in weight.shape):
        raise ValueError(
            f"weight is {tuple(weight.shape)}; expected multiples of {MULTIPLE} for fp8 products. "
            "Use torch.nn.functional.linear."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias is {tuple(bias.shape)}; expected ({weight.shape[0]},) or None.")
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.device != x.device:
            raise ValueError(f"{name} is on {t.device}, x on {x.device}; move {name} to {x.device}.")
    fault = fault_of_device(x.device)
    if fault is not None:
        raise ValueError(f"{fault}. Use torch.nn.functional.linear.")
