"""Lightning's Trainer with a model that `configure_model` patches.

Run `lightning_ranks.py OUT_FILE PROCESSES STRATEGY`. STRATEGY is `cpu` (one process, or DDP) or, on GPUs, `gpu` (one
process) or `fsdp`.
"""

import sys
from contextlib import nullcontext

import lightning
import torch
from tiny_models import collate, ragged_rows, tiny_model
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from liger_trainer.head.module import has_fused_head
from liger_trainer.patching import apply_liger


def model_of_all():
    """A model where Lightning wants it, with the same weights under each strategy. A GPU would draw other weights."""
    device = torch.get_default_device()
    with torch.device("cpu"):
        model = tiny_model("llama")
    return model.to(device)


class Finetuning(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.losses = None, []

    def configure_model(self):
        if self.model is None:
            self.model = model_of_all()
            apply_liger(self.model)

    def training_step(self, batch, index):
        # DDP averages over ranks, so each rank divides its sum by its share of the total of 40.
        loss = self.model(**batch, num_items_in_batch=torch.tensor(40.0 / self.trainer.world_size)).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-1)


def strategy_of(name, processes):
    strategies = lightning.pytorch.strategies
    if name == "fsdp":
        return strategies.FSDPStrategy(auto_wrap_policy={LlamaDecoderLayer})
    return "auto" if processes == 1 else strategies.DDPStrategy(process_group_backend="gloo")


def whole_weights(trainer, model):
    """The weights on the CPU, gathered if they are sharded. All processes have to call it."""
    wrapped = trainer.strategy.model
    gathered = FSDP.summon_full_params(wrapped) if isinstance(wrapped, FSDP) else nullcontext()
    with gathered:
        names = {name.replace("_fsdp_wrapped_module.", ""): p for name, p in model.named_parameters()}
        return {name: p.detach().cpu().clone() for name, p in names.items()}


if __name__ == "__main__":
    out = sys.argv[1]
    processes = int(sys.argv[2])
    strategy = sys.argv[3]
    module = Finetuning()
    rows = torch.utils.data.DataLoader(ragged_rows(16), batch_size=16 // processes, collate_fn=collate)
    trainer = lightning.Trainer(
        accelerator="cpu" if strategy == "cpu" else "gpu",
        devices=processes,
        strategy=strategy_of(strategy, processes),
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, rows)
    assert has_fused_head(module.model)
    assert isinstance(trainer.strategy.model, FSDP) == (strategy == "fsdp")
    first = module.model
    module.configure_model()
    assert module.model is first, "Lightning calls it once for each stage"
    weights = whole_weights(trainer, module.model)
    if trainer.global_rank == 0:
        torch.save(weights, out)
