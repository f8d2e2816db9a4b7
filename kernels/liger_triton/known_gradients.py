"""A loss whose gradients are known as soon as it is, for code that computes both at once."""

import torch

from ._dispatch import graph_is_kept, once_differentiable
from ._scale import scaled


class _WithGradients(torch.autograd.Function):
    """`loss` (), whose gradients with respect to `inputs` are known."""

    @staticmethod
    def forward(ctx, loss, *grads_and_inputs):
        half = len(grads_and_inputs) // 2
        grads, inputs = list(grads_and_inputs[:half]), grads_and_inputs[half:]
        ctx.dtypes, ctx.held = [t.dtype for t in inputs], None
        if torch.compiler.is_compiling():
            ctx.save_for_backward(*grads)
        else:  # not saved, because the last backward gives them away, which only their sole owner can do
            ctx.held = grads
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        grads = list(ctx.saved_tensors)  # PyTorch raises if an earlier backward did not keep the graph
        keep = False
        if not torch.compiler.is_compiling():
            grads, keep = list(ctx.held), graph_is_kept()
            if not keep:
                ctx.held = None
        factor, out = g.float(), []
        for k, dtype in enumerate(ctx.dtypes):
            grad = grads[k]
            grads[k] = None  # so that a sum in fp32 is freed before the next one is rounded
            out.append(scaled(grad.reshape(-1, grad.shape[-1]), factor, dtype, keep).view(grad.shape))
        return (None,) * (1 + len(out)) + tuple(out)


def with_gradients(loss, inputs, grads):
    """`loss` (), with d loss / d inputs[k] = grads[k]. The gradients belong to this function from here on, and are
    written over. Each is rounded to the dtype of its input after it has been multiplied by the upstream gradient."""
    return _WithGradients.apply(loss, *grads, *inputs) if inputs else loss
