"""Lightning's Trainer with a model that `configure_model` patches: `lightning_ranks.py OUT_FILE PROCESSES`, on CPUs."""

import sys

import lightning
import torch
from tiny_models import collate, ragged_rows, tiny_model

from liger_trainer.head.find import has_fused_head
from liger_trainer.integrations.lightning import configure_model


class Finetuning(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.losses = None, []

    def configure_model(self):
        configure_model(self, lambda: tiny_model("llama"))

    def training_step(self, batch, index):
        # DDP takes the mean over ranks, so each divides its sum by its share of the 40 of all.
        loss = self.model(**batch, num_items_in_batch=torch.tensor(40.0 / self.trainer.world_size)).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-1)


if __name__ == "__main__":
    out, processes = sys.argv[1], int(sys.argv[2])
    module = Finetuning()
    rows = torch.utils.data.DataLoader(ragged_rows(16), batch_size=16 // processes, collate_fn=collate)
    strategy = "auto" if processes == 1 else lightning.pytorch.strategies.DDPStrategy(process_group_backend="gloo")
    trainer = lightning.Trainer(
        accelerator="cpu", devices=processes, strategy=strategy, max_epochs=3, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, rows)
    assert has_fused_head(module.model)
    first = module.model
    module.configure_model()
    assert module.model is first, "Lightning calls it once for each stage"
    if trainer.global_rank == 0:
        torch.save({name: p.detach() for name, p in module.model.named_parameters()}, out)
