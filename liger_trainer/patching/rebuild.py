"""What the backward pass can rebuild by elementwise work is not kept: the input of a down projection.

`down(act(gate) * up)` keeps three tensors of the intermediate width: gate and up, for the gradient of the product, and
the product itself, for the gradient of `down`'s weight. The product is dropped here and made again from the other two,
which reads two tensors and writes one.
"""

import weakref

import torch


def call_rebuilding(module, gate, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`module(gate(a, b))`, keeping a and b for the backward pass but not the product.

    `module` is called as usual, whatever it is (a LoRA, a quantised layer, hooks): of the tensors that autograd saves
    during the call, the product or a view of all of it is replaced by the way to make it. Others are kept, and as
    without this, changing one in place before the backward pass is an error. Inside someone else's saved-tensor hooks
    (checkpointing, offloading) and in traced code nothing is replaced.
    """
    x = gate(a, b)
    if torch.compiler.is_compiling() or not x.requires_grad or _other_hooks_active():
        return module(x)
    product, a, b = weakref.ref(x), a.detach(), b.detach()

    def pack(tensor):
        whole = tensor.numel() == x_numel and tensor.is_contiguous()
        if whole and (tensor is product() or tensor._base is product()):
            return tensor.shape
        return tensor, tensor._version

    def unpack(packed):
        if isinstance(packed, torch.Size):
            with torch.no_grad():
                return gate(a, b).view(packed)
        tensor, version = packed
        if tensor._version != version:
            raise RuntimeError(
                f"A tensor {tuple(tensor.shape)} that the backward pass needs has been modified by an inplace "
                f"operation: it is at version {tensor._version}, expected {version}."
            )
        return tensor

    x_numel = x.numel()
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return module(x)


def _other_hooks_active() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
