"""PyTorch Lightning: a model that is patched in `configure_model`, before its strategy shards it."""

from collections.abc import Callable
from typing import Any

from torch import nn

from liger_trainer._logging import logger
from liger_trainer.patching import apply_liger


def configure_model(
    module: nn.Module, load: Callable[[], nn.Module], *, attribute: str = "model", liger_config: dict | None = None
) -> None:
    """Load a model, patch it, and make it `module.model`. Call this in `LightningModule.configure_model`.

    ```python
    class Finetuning(lightning.LightningModule):
        def configure_model(self):
            configure_model(self, lambda: AutoModelForCausalLM.from_pretrained("./model", dtype="float32"))

        def training_step(self, batch, index):
            return self.model(**batch).loss
    ```

    Lightning calls `configure_model` once for each stage, and only the first call loads anything. DDP and FSDP wrap the
    module afterwards. Under `ModelParallelStrategy`, which leaves the sharding to `configure_model`, the layers and the
    whole are sharded here with FSDP2, after they have been patched.

    Args:
        module (`LightningModule`): The module that trains the model.
        load (`Callable`): Makes the model, a model of transformers, wrapped by PEFT or not.
        attribute (`str`): The name that the model has in `module`.
        liger_config (`dict`, *optional*): Switches single operations off, as in `apply_liger`.
    """
    if getattr(module, attribute, None) is not None:
        return
    model = load()
    report = apply_liger(model, liger_config)
    if getattr(module, "global_rank", 0) == 0:
        logger.info(report.one_line())
    if (mesh := getattr(module, "_device_mesh", None)) is not None:
        shard(model, mesh)
    setattr(module, attribute, model)


def shard(model: nn.Module, mesh: Any) -> None:
    """Shard the decoder layers of `model`, and then the rest, over the dimension `data_parallel` of Lightning's mesh.

    Raises:
        ValueError: The mesh has tensor parallelism, or the model does not name its layers.
    """
    from torch.distributed.fsdp import fully_shard

    if "tensor_parallel" in mesh.mesh_dim_names and mesh["tensor_parallel"].size() > 1:
        raise ValueError(
            f"tensor_parallel_size is {mesh['tensor_parallel'].size()}, which configure_model does not shard for. Set "
            "tensor_parallel_size=1."
        )
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [layer for layer in model.modules() if type(layer).__name__ in names]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} does not name its layers (_no_split_modules), so it would be gathered as a whole "
            "in each step. Shard it yourself, after apply_liger."
        )
    for layer in layers:
        fully_shard(layer, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
