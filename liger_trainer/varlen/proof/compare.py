"""Runs small copies of a model on a batch, and compares what they compute: the values, the loss and all gradients."""

from typing import Any, TypeAlias

import torch

from liger_trainer.patching.core import probe

# The logits of real tokens, the loss, and the gradients by the names of weights.
Results: TypeAlias = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]
_RTOL = 2e-4  # relative to the largest element, in fp32; one token too many or too few changes results by 1e-2


def run(model: Any, batch: dict[str, Any]) -> Results:
    """Return the logits (N, V) of the real tokens, the loss, and the gradients by the names of weights.

    The loss is the model's, plus the auxiliary loss of experts, plus a random weighting of the logits, because the
    model's loss reads only logits that predict a label. A model without a head gives its hidden states in place of
    logits, and has no loss of its own.
    """
    embeds = batch.get("deepstack_visual_embeds", ())
    leaves = dict(model.named_parameters()) | {f"the visual embeddings {i}": x for i, x in enumerate(embeds)}
    for x in leaves.values():
        x.grad = None
    has_head = model.get_output_embeddings() is not None
    inputs = {name: x for name, x in batch.items() if has_head or name != "labels"}
    routers = {"output_router_logits": True} if _records_routers(model) else {}  # for the auxiliary loss
    outputs = model(**inputs, **routers, use_cache=False)
    logits = outputs.logits if has_head else outputs[0]
    logits = logits[batch["attention_mask"].bool()] if "attention_mask" in batch else logits[0]
    loss = outputs.loss if has_head else logits.new_zeros(())
    total = loss + (logits * probe.randn(logits.shape, probe.generator())).mean()
    if outputs.get("aux_loss") is not None:
        total = total + outputs.aux_loss
    total.backward()
    return logits.detach(), total.detach(), {n: x.grad for n, x in leaves.items() if x.grad is not None}


def _records_routers(model: Any) -> bool:
    """Return whether a forward of `model` can return the logits of its routers.

    In transformers 5.17 the configs of DBRX and of Granite's mixtures have the option, but the models do not record
    them: a call that asks for them raises in stock.
    """
    if not hasattr(model.config, "output_router_logits"):
        return False
    recorded = [getattr(module, "_can_record_outputs", None) or {} for module in model.modules()]
    return not any(recorded) or any("router_logits" in names for names in recorded)


def what_differs(got: Results, wanted: Results) -> str | None:
    """Return what differs between two results of `run`, or None."""
    (logits, loss, grads), (wanted_logits, wanted_loss, wanted_grads) = got, wanted
    if not probe.allclose_to_max(logits, wanted_logits, _RTOL):
        return "what is computed for real tokens differs"
    if not probe.allclose_to_max(loss, wanted_loss, _RTOL):
        return "the loss differs"
    largest = max(grad.abs().max() for grad in wanted_grads.values())
    for name, grad in wanted_grads.items():
        # Of some weights, such as the bias of keys, the gradient is zero but for rounding.
        off = (grads[name] - grad).abs().max() if name in grads else largest
        if not off <= _RTOL * max(grad.abs().max(), 1e-3 * largest):
            return f"the gradient of {name} differs"
    return None
