"""The LM head: fused with the loss where the fused kernels compute what it computes."""

from liger_trainer.head.find import output_head
from liger_trainer.head.install import install_fused_head, remove_fused_head
from liger_trainer.instance.report import Place


def swap(model, report, wanted: dict, options=None) -> None:
    """Install the fused head in `model`, with `HeadOptions`, or take it out where it is not wanted."""
    if not wanted["fused_linear_cross_entropy"]:
        remove_fused_head(model)
        return
    head = output_head(model)
    if head is None:
        return
    part = report["fused_linear_cross_entropy"]
    name = next((name for name, module in model.named_modules() if module is head), type(head).__name__)
    reason = install_fused_head(model, options, Place(part, name))
    if reason is None:
        part.swapped[name] = "captured at the head"
    else:
        part.skipped[name] = reason
