"""One of two ranks, gloo on CPU: FP8 layers with scales by row sharded by FSDP2, with torchao's code and with ours.

Prints one line of JSON. For each recipe, patched or not, it has the loss and the norms of all gradients of two steps,
and how often torchao's code ran.
"""

import importlib
import json
import os
import sys

import torch.distributed as dist
from fp8_models import config_of, fp8_model, patched
from tiny_models import collate, ragged_rows
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchao.float8.float8_linear import Float8Linear


def run(recipe, patches, mesh, calls):
    model = fp8_model(config=config_of(recipe))
    if patches:
        patched(model)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    calls.clear()
    found = []
    for _ in range(2):  # weights are freed and gathered again, and change in between
        loss = model(**collate(ragged_rows(4))).loss
        loss.backward()
        found.append([loss.item(), *(p.grad.full_tensor().norm().item() for p in model.parameters())])
        for p in model.parameters():
            p.data.sub_(0.1 * p.grad)
            p.grad = None
    return {"steps": found, "theirs": len(calls)}


def main():
    for name in ("float8_cast",):
        importlib.import_module(f"liger_triton.{name}").runs_triton = lambda *tensors: False
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    calls = []
    own = Float8Linear.forward
    Float8Linear.forward = lambda self, input: calls.append(1) or own(self, input)
    recipes = ("rowwise", "rowwise_with_gw_hp")
    found = {
        f"{recipe} {patches}": run(recipe, patches, mesh, calls) for recipe in recipes for patches in (False, True)
    }
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort the interpreter on exit, after everything is done


if __name__ == "__main__":
    main()
