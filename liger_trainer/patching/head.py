"""The LM head, which is fused with the loss where the fused kernels compute what the head computes."""

from torch import nn

from liger_trainer.head.find import output_head
from liger_trainer.head.install import install_fused_head, remove_fused_head
from liger_trainer.head.outputs import HeadOptions
from liger_trainer.instance.report import LigerReport, Place


def swap(
    model: nn.Module, report: LigerReport, wanted: dict[str, bool | float], options: HeadOptions | None = None
) -> None:
    """Install the fused head in `model`, or remove it where `wanted`, the checked config, switches it off."""
    if not wanted["fused_linear_cross_entropy"]:
        remove_fused_head(model)
        return
    head = output_head(model)
    if head is None:
        return
    operation = report["fused_linear_cross_entropy"]
    name = next((name for name, module in model.named_modules() if module is head), type(head).__name__)
    reason = install_fused_head(model, options, Place(operation, name))
    if reason is None:
        operation.swapped[name] = "captured at the head"
    else:
        operation.skipped[name] = reason
