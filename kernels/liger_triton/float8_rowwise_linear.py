"""A linear layer in eight bits with scales by row: y = x W^T, dx = dy W, dW = dy^T x, each for `float8_linear`.

Both factors of a product are rounded to e4m3 with a scale for each row and column of the result, that is along the sum:

    y  = x8 w8^T     x with a scale for each token, W for each output feature
    dx = d8 w8'      dy with a scale for each token, W for each input feature
    dW = d8'^T x8'   dy with a scale for each output feature, x for each input feature

So each tensor is rounded twice, and the two differ by more than their layout (`float8_rowwise.py`). These are torchao's
recipe "rowwise" and, with `gw_hp`, its recipe "rowwise_with_gw_hp": dW is computed in the dtype of the results, for
which neither x nor dy is rounded, and in dx W has one scale for all of it.

Shapes  x (..., K), W (N, K), y (..., N), with N and K multiples of 16. The number of rows of x is free.
Dtypes  x and W bf16, fp16, fp32. y and dx have the dtype of x, under autocast that of autocast. dW is rounded to that
        too, as a linear layer does it, and has that of W.
Bytes   b per element, beside the products: x and dy are each read twice and written twice, W once and once in the
        forward pass and again in the backward pass.
        Kept for backward: the columns of x, one byte an element, or x itself where that costs nothing; with `gw_hp`, x;
        and W itself.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from ._dispatch import no_autocast, once_differentiable
from ._float8_product import row_product
from ._lora import as_matrix, computed, in_shape, without_memory
from .float8_cast import float8_cast
from .float8_linear import Float8Input
from .float8_rowwise import Float8Columns, Float8Rows, float8_columns, float8_rows


class Float8RowwiseForm(NamedTuple):
    """How a layer is computed in eight bits with scales by row.

    Attributes:
        power_of_2 (`bool`): Whether scales are rounded down to powers of two.
        gw_hp (`bool`): Whether the gradient of the weight is computed in the dtype of the results, and the weight has
            one scale for all of it where the gradient of the input is.
        fast_accum (`tuple`): Whether the sums of y, dx and dW may be kept in the registers of the matrix units, which
            have fewer bits than fp32.
    """

    power_of_2: bool = True
    gw_hp: bool = False
    fast_accum: tuple[bool, bool, bool] = (True, False, False)

    def input_of(self, x: torch.Tensor, keeps_input: bool = False) -> "Float8RowwiseInput":
        return Float8RowwiseInput(x, self, keeps_input)

    def columns_of(self, rows: torch.Tensor, maxima: torch.Tensor) -> Float8Columns:
        return float8_columns(rows, maxima, self.power_of_2)


class _Cast(NamedTuple):
    """What layers that share their input use of it: its rows, and what they keep of it if they keep less than all."""

    rows: Float8Rows
    columns: Float8Columns | None
    narrow: torch.Tensor | None


class Float8RowwiseInput(Float8Input):
    """One x in eight bits with scales by row, for all linear layers that get it, one after the other."""

    form: Float8RowwiseForm

    def in_eight_bits(self, x: torch.Tensor, columns: bool) -> _Cast:
        """x by rows. With `columns`, what the gradient of a weight needs of it is there too."""
        known: _Cast | None = self.cast
        if known is not None and (not columns or known.rows.maxima is not None or self.form.gw_hp):
            return known
        matrix, power_of_2 = as_matrix(x, self.dtype).contiguous(), self.form.power_of_2
        rows = float8_rows(matrix, power_of_2, maxima=columns and not self.form.gw_hp)
        turned = narrow = None
        if rows.maxima is not None and not self.keeps_input:
            turned = self.form.columns_of(matrix, rows.maxima)
        if self.form.gw_hp and not self.keeps_input and x.dtype != self.dtype:
            narrow = matrix
        self.cast = known = _Cast(rows, turned, narrow)
        return known

    def times(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if x.numel() == 0 or weight.numel() == 0:
            return F.linear(x.to(self.dtype), weight.to(self.dtype))
        made: list[Float8Rows] = []
        with no_autocast(x.device.type):
            if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
                return computed((_KeptByRow.apply(self, made, x, weight),), lambda: self._product(x, weight, made))
            with torch.no_grad():
                return self._product(x, weight, made)

    def _product(self, x: torch.Tensor, weight: torch.Tensor, made: list[Float8Rows]) -> torch.Tensor:
        if not made:
            made = [self.in_eight_bits(x, columns=False).rows, float8_rows(weight.contiguous(), self.form.power_of_2)]
        x8, w8 = made
        y = row_product(x8.rows, x8.inverse, w8.rows, w8.inverse, self.dtype, fast_sums=self.form.fast_accum[0])
        return in_shape(y, (*x.shape[:-1], y.shape[1]))


class _KeptByRow(torch.autograd.Function):
    """Keeps what the backward pass of a layer needs, and returns a tensor without memory in place of its output."""

    @staticmethod
    def forward(ctx, given, made, x, weight):
        form = given.form
        needs_x, needs_weight = ctx.needs_input_grad[2:]
        cast = given.in_eight_bits(x, columns=needs_weight)
        w8 = float8_rows(weight.contiguous(), form.power_of_2, maxima=needs_x)
        made += (cast.rows, w8)
        kept = x_inverse = x_maxima = None
        if needs_weight:
            x_maxima = cast.rows.maxima
            if cast.columns is not None:
                kept, x_inverse = cast.columns
            else:
                kept = x if cast.narrow is None else cast.narrow
                given.columns.layers += not form.gw_hp
        ctx.save_for_backward(kept, x_inverse, x_maxima, weight if needs_x else None, w8.maxima)
        ctx.set_materialize_grads(False)
        ctx.form, ctx.columns = form, given.columns
        ctx.dtype, ctx.weight_dtype, ctx.x_dtype, ctx.shape = given.dtype, weight.dtype, x.dtype, x.shape
        return without_memory((*x.shape[:-1], weight.shape[0]), given.dtype, x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        if dy is None:
            return None, None, None, None
        kept, x_inverse, x_maxima, weight, w_maxima = ctx.saved_tensors
        form = ctx.form
        needs_x, needs_weight = ctx.needs_input_grad[2:]
        dx = dw = None
        with no_autocast(dy.device.type):
            rows = as_matrix(dy, ctx.dtype).contiguous()
            eight_bits = needs_weight and not form.gw_hp
            dy8 = float8_rows(rows, form.power_of_2, maxima=eight_bits) if needs_x or eight_bits else None
            if eight_bits:
                if x_inverse is None:
                    x8 = ctx.columns.get(as_matrix(kept, ctx.dtype).contiguous(), x_maxima, form)
                else:
                    x8 = Float8Columns(kept, x_inverse)
                d8 = form.columns_of(rows, dy8.maxima)
                dw = row_product(*d8, *x8, ctx.dtype, fast_sums=form.fast_accum[2]).to(ctx.weight_dtype)
                del x8, d8
            elif needs_weight:
                dw = (rows.t() @ as_matrix(kept, ctx.dtype)).to(ctx.weight_dtype)
            if needs_x:
                w8 = _weight_columns(weight.contiguous(), w_maxima, form)
                dx = row_product(dy8.rows, dy8.inverse, *w8, ctx.dtype, fast_sums=form.fast_accum[1])
                dx = dx.view(ctx.shape).to(ctx.x_dtype)
        return None, None, dx, dw


def _weight_columns(weight: torch.Tensor, maxima: torch.Tensor, form: Float8RowwiseForm) -> Float8Columns:
    if not form.gw_hp:
        return form.columns_of(weight, maxima)
    most = maxima.amax(0, keepdim=True)
    w8 = float8_cast(weight, rows=False, columns=True, power_of_2=form.power_of_2, maxima=most)
    assert w8.columns is not None
    return Float8Columns(w8.columns, w8.inverse.repeat(weight.shape[1]))
