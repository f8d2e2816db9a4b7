"""What accelerate's FSDP2 rounds or leaves behind, set right before a model is sharded."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from liger_trainer.fp8 import fields as fp8_fields


def keep_losses_in_fp32(accelerator: Any) -> None:
    """Keep losses and log-probabilities in fp32 under 16-bit FSDP2.

    accelerate has FSDP2 round everything that a unit returns to the 16-bit type. In bf16, a sum of log-probabilities
    between 512 and 1,024 nats would become a multiple of 4. Hidden states have that type anyhow.
    """
    plugin: Any = getattr(accelerator.state, "fsdp_plugin", None)
    policy: Any = getattr(plugin, "mixed_precision_policy", None)
    if getattr(policy, "output_dtype", None) in (torch.bfloat16, torch.float16):
        plugin.mixed_precision_policy = replace(policy, output_dtype=None)


def before_wrapping(accelerator: Any, model: nn.Module) -> None:
    """Do what accelerate leaves undone if it is going to wrap weights of `model` for fp8, to be gathered in eight bits.
    Call this before the optimizer is made.

    - For mixed precision it converts all weights that are trained to fp32, after it has wrapped some. With accelerate
      1.15 what is inside a wrapper stays as it was, and a model in 16 bits fails, since FSDP2 wants one dtype. So they
      are converted here.
    - After each step it makes the scales of all weights. Those of weights that are loaded later, such as the best ones
      at the end of a training, would be out of date. So they are dropped then, and made when weights are gathered.
    """
    handler = fp8_fields.handler_of(accelerator)
    if handler is None or not (accelerator.is_fsdp2 and handler.config.enable_fsdp_float8_all_gather):
        return
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return  # by an earlier training; some weights may be gathered now, in 16 bits
    for weight in model.parameters():
        if weight.requires_grad and weight.dtype in (torch.bfloat16, torch.float16):
            weight.data = weight.data.to(torch.float32)
    model.register_load_state_dict_post_hook(_drop_scales)


def _drop_scales(model: nn.Module, incompatible_keys: Any) -> None:
    for weight in model.parameters():
        shard: Any = getattr(weight, "_local_tensor", None)
        if hasattr(shard, "_precomputed_scale"):
            shard._precomputed_scale = None
