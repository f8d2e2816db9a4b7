"""One of two ranks, gloo on CPU: torchao's FP8 layers sharded by FSDP2, with torchao's code and with ours.

Prints one line of JSON. For each case it has the losses, the norms of some gradients, the calls of our function, and
the report.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from fp8_models import multiply_exactly
from tiny_models import collate, ragged_rows, tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from liger_trainer import apply_liger
from liger_trainer.fp8 import layers as float8

NAMES = [f"model.layers.{layer}.{name}.weight" for layer in (0, 1) for name in ("self_attn.k_proj", "mlp.down_proj")]
OTHERS = dict.fromkeys(("rms_norm", "rope", "swiglu", "fused_linear_cross_entropy"), False)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CASES = {  # arguments of `run`
    "plain": {},
    "not freed": {"reshard": False},
    "bf16": {"policy": BF16},
    "checkpointed": {"reentrant": False},
    "checkpointed, reentrant": {"reentrant": True},
    "rebuilding": {"config": {"rebuild_above_mib": 0}},
}
PATCHED = {"plain": ("before", "after")}  # without the cases above


def model_of(reentrant=None):
    config = Float8LinearConfig(emulate=True)
    model = tiny_model("llama")
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name != "lm_head").train()


def shard(model, reshard, policy):
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)


def whole(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def steps(model, ranks):
    """Two steps of two micro-batches, with an evaluation before each, all on the rows of `ranks`."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    rows = ragged_rows(16)

    def of_rank(rank, batch):
        return collate(rows[8 * rank + 2 * batch :][:2])

    for step in range(2):
        losses = []
        for batch in (2 * step, 2 * step + 1):
            with torch.no_grad():
                losses.append(model.eval()(**of_rank(ranks[0], batch)).loss)
                model.train()
            for rank in ranks:
                loss = model(**of_rank(rank, batch)).loss
                (loss / len(ranks)).backward()
                losses.append(loss.detach())
        grads = {name: p.grad for name, p in model.named_parameters()}
        found.append([*(loss.item() for loss in losses), *(whole(grads[name]).norm().item() for name in NAMES)])
        optimizer.step()
        optimizer.zero_grad()
    return found


def run(calls, patched, reshard=True, policy=None, reentrant=None, config=OTHERS):
    """Patch before sharding, after it, or never."""
    model, report = model_of(reentrant), None
    config = config | ({"float8": False} if patched == "never" else {})
    if patched != "after":
        report = apply_liger(model, config)
    shard(model, reshard, policy or MixedPrecisionPolicy())
    if patched == "after":
        report = apply_liger(model, config)
    calls.clear()
    found = {"steps": steps(model, [dist.get_rank()]), "calls": len(calls), "of": sorted(set(calls))}
    return found | {"skipped": sorted(set(report["float8"].skipped.values()))}


def main():
    multiply_exactly()
    dist.init_process_group("gloo")
    calls, own = [], float8.float8_linear

    def counted(x, weight, *args, **options):
        calls.append(type(weight).__name__)
        return own(x, weight, *args, **options)

    float8.float8_linear = counted
    found = {
        f"{case}, {patched}": run(calls, patched, **options)
        for case, options in CASES.items()
        for patched in ("never", *PATCHED.get(case, ("before",)))
    }
    model = model_of()
    apply_liger(model, OTHERS)
    found["one process"] = {"steps": steps(model, [0, 1])}
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort the interpreter on exit, after everything is done


if __name__ == "__main__":
    main()
