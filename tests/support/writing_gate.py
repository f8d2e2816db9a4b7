"""A gate in plain PyTorch that writes its gradients over its inputs, as the kernel does on a GPU."""

import torch
from torch import nn

from liger_triton.gates import gate_gradients


class Gate(torch.autograd.Function):
    """silu(g) * u as the kernel does it. `allowed` and `done` count backward passes that may and do write over."""

    allowed = done = 0

    @staticmethod
    def forward(ctx, gate, up, reuse):
        ctx.save_for_backward(gate, up)
        ctx.reuse = reuse
        return nn.functional.silu(gate) * up

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        gate, up = ctx.saved_tensors
        s = torch.sigmoid(gate)
        du, dg = dy * gate * s, dy * up * s * (1 + gate * (1 - s))
        out = gate_gradients(gate, up, ctx.reuse)
        Gate.allowed += ctx.reuse
        Gate.done += out[0].data_ptr() == gate.data_ptr()
        return out[0].copy_(dg), out[1].copy_(du), None
