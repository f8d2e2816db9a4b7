"""Where the memory of a training step goes: GiB of each kind of tensor, at the end of a forward pass and at the peak.

    packed      frozen weights in 4 or 8 bits, with their scales
    frozen      other frozen weights, such as embeddings, head and norms in 16 bits
    trained     trained weights, such as adapters
    states      of the optimizer
    kept        the rest of the allocated memory when the forward pass ends: activations, and gradients that the loss
                has computed
    gradients   of trained weights, before the optimizer steps
    workspace   the peak minus everything allocated when the forward pass ends: gradients, recomputed layers, and 16-bit
                weights that are used and freed

Sizes come from the tensors. Without a GPU, no allocator can tell the last kinds: all but gradients are None.
"""

import torch
from _measure import DEVICE
from transformers import TrainerCallback

GIB = 2**30


def bytes_of(tensors):
    """Bytes of their storages, each counted once."""
    found = {}
    for tensor in tensors:
        storage = getattr(tensor, "_local_tensor", tensor).detach().untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def scales_of(weight):
    """The tensors that belong to a 4-bit weight of bitsandbytes."""
    state = vars(weight).get("quant_state")
    found = []
    for part in (state, getattr(state, "state2", None)):
        if part is not None:
            found += [value for value in vars(part).values() if isinstance(value, torch.Tensor)]
    return found


def weights_of(model):
    """{kind: bytes}."""
    kinds = {"packed": [], "frozen": [], "trained": []}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.requires_grad:
            kinds["trained"].append(tensor)
        elif is_packed(tensor):
            kinds["packed"].append(tensor)
        else:
            kinds["frozen"].append(tensor)
        kinds["packed"] += scales_of(tensor)
    return {kind: bytes_of(tensors) for kind, tensors in kinds.items()}


def is_packed(tensor):
    return tensor.dtype.itemsize == 1 or "quant_state" in vars(tensor)


class MemoryKinds(TrainerCallback):
    """Measures the last step of a trainer passed to `watch`. `gib` is then {kind: GiB or None}."""

    gib = None

    def watch(self, trainer):
        backward = trainer.accelerator.backward
        self.gradients = self.allocated = None

        def at_the_end_of_forward(loss, **options):
            if DEVICE == "cuda":
                self.allocated = torch.cuda.memory_allocated()
            self.states = states_of(trainer.optimizer)
            return backward(loss, **options)

        trainer.accelerator.backward = at_the_end_of_forward

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients = bytes_of(p.grad for p in model.parameters() if p.grad is not None)

    def on_train_end(self, args, state, control, model=None, **kwargs):
        found = weights_of(model) | {"states": self.states}
        on_gpu = self.allocated is not None
        found["kept"] = self.allocated - sum(found.values()) if on_gpu else None
        found["gradients"] = self.gradients
        found["workspace"] = torch.cuda.max_memory_allocated() - self.allocated if on_gpu else None
        self.gib = {kind: None if size is None else size / GIB for kind, size in found.items()}


def states_of(optimizer):
    tensors = []
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return bytes_of(tensors)
