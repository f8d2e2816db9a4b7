"""Set right before FSDP2 shards a model: losses stay in fp32, and references and teachers get their weights.

With `fsdp_cpu_ram_efficient_loading: true` only the first process of each machine reads a checkpoint. accelerate sends
the others the weights of the model that is trained. TRL shards references itself and sends nothing: with transformers
5.17 all but the first shard of a reference are then zeros, and DPO trains against it without a word.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations import is_fsdp_enabled


def keep_losses_in_fp32(accelerator: Any) -> None:
    """Keep losses and log-probabilities in fp32 under 16-bit FSDP2.

    accelerate has FSDP2 round everything that a unit returns to the 16-bit type. In bf16, a sum of log-probabilities
    between 512 and 1,024 nats would become a multiple of 4. Hidden states have that type anyhow.
    """
    plugin: Any = getattr(accelerator.state, "fsdp_plugin", None)
    policy: Any = getattr(plugin, "mixed_precision_policy", None)
    if getattr(policy, "output_dtype", None) in (torch.bfloat16, torch.float16):
        plugin.mixed_precision_policy = replace(policy, output_dtype=None)


def broadcast_weights(model: PreTrainedModel, accelerator: Any) -> None:
    """Copy the weights of `model` from process 0 to all others, if it is about to be sharded by FSDP2 and is not yet.

    Every process has to call this with its own copy of the model. Tensors stay on their device, meta tensors get memory
    on the CPU, and tied weights stay tied. A quantised model, which every process has read, is left alone.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None or plugin.fsdp_version != 2 or not is_fsdp_enabled() or getattr(model, "is_quantized", False):
        return
    if any(hasattr(p, "full_tensor") for p in model.parameters()):  # sharded already
        return
    if any(t.is_meta for t in model.state_dict().values()):
        _allocate_on_cpu(model)
        model.tie_weights()
    has_weights = dist.get_rank() == 0
    with torch.no_grad():
        for tensor in model.state_dict().values():  # tied weights twice, because all processes have to send as often
            sent = tensor.to(accelerator.device).contiguous()
            dist.broadcast(sent, src=0)
            if not has_weights:
                tensor.copy_(sent)


def _allocate_on_cpu(model: nn.Module) -> None:
    """Put an empty tensor on the CPU in the place of each parameter and buffer of the state dict that has no memory."""
    saved = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    model._apply(lambda t: torch.empty_like(t, device="cpu") if t.is_meta and id(t) in saved else t)
