"""Layers whose activations wait on the host, each called as a test says."""

import torch
from torch import nn

from liger_trainer.memory.memory import PinnedMemory
from liger_trainer.memory.offload import Offload

GPU = torch.device("cuda") if torch.cuda.is_available() else None


class Host(PinnedMemory):
    """Memory of the host for tensors of any size, which counts what it was asked for."""

    def __init__(self, room=1 << 24):
        super().__init__(room, self._empty, slab=1 << 16, small=1)
        self.asked = []

    @staticmethod
    def _empty(size):
        return torch.empty(size, dtype=torch.uint8, pin_memory=GPU is not None)

    def take(self, size):
        self.asked.append(size)
        return super().take(size)

    @property
    def in_use(self):
        return sum(slab.slots for slab in self._slabs)


def offload_of(host, lag=0, ahead=1):
    return Offload(host, torch.cuda.Stream() if GPU else None, lag, ahead)


def on_device(module):
    return module.to(GPU) if GPU else module


def randn(*shape, **options):
    return torch.randn(*shape, device=GPU, **options)


class Layer(nn.Module):
    """With a weight, a frozen weight as a buffer, views, and a result that its operation keeps."""

    def __init__(self, width=16):
        super().__init__()
        self.inner, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("frozen", torch.randn(width, width) / 4)
        self.norm = nn.LayerNorm(width)

    def forward(self, x, scale=None):
        q, k, v = self.inner(self.norm(x) @ self.frozen).chunk(3, -1)
        y = torch.softmax(q @ k.mT, -1) @ v
        y = torch.tanh(y) * torch.sigmoid(y)
        return x + self.out(y if scale is None else y * scale)


def run(layers, x, call, backward=1, scale=None):
    for layer in layers:
        layer.zero_grad()
    x = x.detach().requires_grad_()
    y = x * 2
    for number, layer in enumerate(layers):
        y = call(number, layer, y, scale)
    loss = y.square().sum()
    for _ in range(backward - 1):
        loss.backward(retain_graph=True)
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad.clone() for layer in layers for p in layer.parameters())]


def plain(number, layer, x, scale):
    return layer(x, scale)


def through(carried, numbers=(0, 1, 2, 3)):
    def call(number, layer, x, scale):
        carried.before_call(number)
        if number in numbers:
            given = [] if scale is None else [scale]
            y = carried.call(number, layer, lambda x: layer(x, scale), (x,), given)
        else:
            y = layer(x, scale)
        carried.after_call(number, [y])
        return y

    return call


def same(got, want):
    return len(got) == len(want) and all(map(torch.equal, got, want))
