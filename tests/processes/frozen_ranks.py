"""One of two ranks, gloo on CPU: adapters on an FP8 base, trained with DDP. Run alone, it is one process.

Prints one line of JSON: the losses, the norm of each gradient of the first step, and the types of the base's layers.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from frozen_bases import adapted
from tiny_models import collate, ragged_rows
from trainer_parity import logged_values

from liger_trainer import LigerTrainer, LigerTrainingArguments
from liger_trainer.fp8 import feature as fp8_fields
from liger_trainer.fp8.frozen_layer import FrozenFloat8Linear
from liger_trainer.verify.observed import KeepGradients


def main(folder, world):
    fp8_fields.fault_of_device = lambda device: None
    args = LigerTrainingArguments(
        output_dir=folder,
        max_steps=2,
        per_device_train_batch_size=8 // world,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        max_grad_norm=0.0,
        fp8=True,
        optim="sgd",
    )
    save = KeepGradients()
    trainer = LigerTrainer(adapted(), args, train_dataset=ragged_rows(16), data_collator=collate, callbacks=[save])
    trainer.train()
    layers = [module for module in trainer.model.modules() if type(module) is FrozenFloat8Linear]
    bits = torch.cat([layer.bits.flatten() for layer in layers])
    found = {
        "wrapped": type(trainer.model_wrapped).__name__,
        "layers": len(layers),
        "bits": int(bits.long().sum()),
        "dtypes": sorted({str(layer.scale.dtype) for layer in layers}),
        "losses": logged_values(trainer, "loss"),
        "grads": {name: grad.double().norm().item() for name, grad in save.steps[0].items()},
    }
    if args.process_index == 0:
        print(json.dumps(found))
    return found


if __name__ == "__main__":
    main(sys.argv[1], 2)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort the interpreter on exit, after everything is done
