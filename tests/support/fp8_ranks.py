"""One of two ranks, gloo on CPU: torchao's fp8 layers sharded by FSDP2, with its own code and with ours.

Prints one line of JSON: for each case the loss, the norms of some gradients, the calls of our function, and the report.
"""

import importlib
import json

import torch.distributed as dist
from tiny_models import collate, ragged_rows, tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from liger_trainer import apply_liger
from liger_trainer.patching import float8

NAMES = [f"model.layers.{layer}.{name}.weight" for layer in (0, 1) for name in ("self_attn.k_proj", "mlp.down_proj")]


def model_of(gathers):
    config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=gathers)
    model = tiny_model("llama")
    return convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name != "lm_head").train()


def shard(model, mesh):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    return fully_shard(model, mesh=mesh)


def run(gathers, patched, calls, mesh):
    """`patched` before sharding, after it, or never. Two steps, between which weights are freed and gathered again."""
    model, report, found = model_of(gathers), None, []
    others = dict.fromkeys(("rms_norm", "rope", "swiglu", "fused_linear_cross_entropy"), False)
    if patched == "before":
        report = apply_liger(model, others)
    shard(model, mesh)
    if patched == "after":
        report = apply_liger(model, others)
    calls.clear()
    for _ in range(2):
        loss = model(**collate(ragged_rows(4))).loss
        loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters()}
        found.append([loss.item(), *(grads[name].full_tensor().norm().item() for name in NAMES)])
        for p in model.parameters():
            p.data.sub_(0.1 * p.grad)
            p.grad = None
    skipped = sorted(set(report["float8"].skipped.values())) if report else []
    return {"steps": found, "calls": len(calls), "skipped": skipped}


def main():
    importlib.import_module("liger_triton.float8_cast").runs_triton = lambda *tensors: False
    dist.init_process_group("gloo")
    mesh, calls, own = init_device_mesh("cpu", (2,)), [], float8.float8_linear

    def counted(*args, **options):
        calls.append(1)
        return own(*args, **options)

    float8.float8_linear = counted
    cases = [(gathers, patched) for gathers in (False, True) for patched in ("never", "before", "after")]
    found = {f"{gathers} {patched}": run(gathers, patched, calls, mesh) for gathers, patched in cases}
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
