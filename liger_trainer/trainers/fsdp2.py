"""Prepares models for FSDP2: keeps losses in fp32, and broadcasts the weights of references and teachers.

With `fsdp_cpu_ram_efficient_loading: true`, only the first process of each machine reads a checkpoint. accelerate sends
the weights of the trained model to the others. TRL shards references itself and sends nothing: with transformers 5.17
all shards of a reference but the first are zeros, and DPO silently trains against that.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations import is_fsdp_enabled


def keep_losses_in_fp32(accelerator: Accelerator) -> None:
    """Keep losses and log-probabilities in fp32 under 16-bit FSDP2.

    accelerate makes FSDP2 round everything that a unit returns to the 16-bit type. In bf16, a sum of log-probabilities
    between 512 and 1,024 nats would become a multiple of 4. Hidden states have the 16-bit type anyway.
    """
    plugin: Any = getattr(accelerator.state, "fsdp_plugin", None)
    policy: Any = getattr(plugin, "mixed_precision_policy", None)
    if getattr(policy, "output_dtype", None) in (torch.bfloat16, torch.float16):
        plugin.mixed_precision_policy = replace(policy, output_dtype=None)


def broadcast_weights(model: PreTrainedModel, accelerator: Accelerator) -> None:
    """Copy the weights of `model` from process 0 to all others, if FSDP2 is about to shard it.

    Every process has to call this with its own copy of the model. Tensors stay on their device, meta tensors get memory
    on the CPU, and tied weights stay tied. A quantized model is skipped, because every process has read it.
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
        for tensor in model.state_dict().values():  # tied weights twice: all processes need the same number of calls
            sent = tensor.to(accelerator.device).contiguous()
            dist.broadcast(sent, src=0)
            if not has_weights:
                tensor.copy_(sent)


def _allocate_on_cpu(model: nn.Module) -> None:
    """Replace each meta tensor of the state dict by an empty tensor on the CPU."""
    saved = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    model._apply(lambda t: torch.empty_like(t, device="cpu") if t.is_meta and id(t) in saved else t)
