"""Rows without their padding: proven on a small copy of the model's backbone, and installed in it.

The proof runs a batch padded on the right and one padded on the left through two small copies with the same weights,
one with the model's own code and one with ours. Hidden states of real tokens and the gradients of all weights must
agree. So must a packed row with the padded batch that has the same rows. A model whose rows would reach each other by
anything but attention (a state, a convolution) shows it there.
"""

import torch
from transformers import PreTrainedModel

from liger_trainer.head.find import base_model_of, head_options
from liger_trainer.instance.report import Place
from liger_trainer.patching import probe
from liger_trainer.patching.small_model import small_copy
from liger_trainer.varlen import padding
from liger_trainer.varlen.attention import NAME

OPERATION = "varlen_attention"
_LENGTHS, _WIDTH = (7, 1, 11, 12), 12  # longer and shorter than the window of a small copy
_RTOL = 2e-4  # of the largest element, over whole layers in fp32; a token too many or too few is off by 1e-2


def swap(model, report, wanted: dict) -> None:
    """Take padding out of the backbone of `model` where that is proven, or put it back where it is not wanted."""
    model = base_model_of(model)
    if not isinstance(model, PreTrainedModel):
        return
    backbone = padding.backbone_of(model)
    remove(model)
    if not wanted[OPERATION] or backbone is None:
        return
    part, name = report[OPERATION], model.base_model_prefix
    positions: str | None = None
    reason = _why_not(model, backbone)
    if reason is None:
        positions, reason = probe.attempt(_prove, backbone)
    if positions is not None:
        padding.install(backbone, positions, Place(part, name))
        part.swapped[name] = "runs on real tokens"
    else:
        part.skipped[name] = reason


def remove(model) -> None:
    """Undo `swap`."""
    model = base_model_of(model)
    backbone = padding.backbone_of(model) if isinstance(model, PreTrainedModel) else None
    if isinstance(backbone, PreTrainedModel):
        padding.remove(backbone)


def _why_not(model, backbone) -> str | None:
    config = model.config
    if head_options(model) is None:
        return "the fused LM head, whose forward sees the labels, is switched off"
    if config._attn_implementation != "sdpa":
        return f"attn_implementation is {config._attn_implementation!r}, which stays as it is"
    if config.is_encoder_decoder or config.get_text_config() is not config:
        return "the model is more than a decoder of text"
    if not isinstance(backbone, PreTrainedModel) or backbone is model:
        return "it has no backbone apart from its head"
    return None


def _prove(backbone):
    """(How the model numbers tokens, None), or (None, what differs)."""
    own, ours = small_copy(backbone, "sdpa", probe.SEED), small_copy(backbone, NAME, probe.SEED)
    ids = torch.randint(3, 40, (len(_LENGTHS), _WIDTH), generator=probe.generator())
    real = torch.arange(_WIDTH) < torch.tensor(_LENGTHS)[:, None]
    batches = {
        "rows padded on the right": {"input_ids": ids, "attention_mask": real.long()},
        "rows padded on the left": {"input_ids": ids, "attention_mask": real.flip(1).long()},
    }
    wanted = {what: _run(own, batch) for what, batch in batches.items()}
    one_row = {"input_ids": ids[real][None], "position_ids": torch.arange(_WIDTH).expand_as(ids)[real][None]}
    batches["a packed row"], wanted["a packed row"] = one_row, wanted["rows padded on the right"]
    for positions in (padding.COLUMNS, padding.FROM_MASK):
        padding.install(ours, positions)
        reason = next(filter(None, (_differs(ours, batches[what], wanted[what], what) for what in batches)), None)
        padding.remove(ours)
        if reason is None:
            return positions, None
    return None, reason


def _differs(ours, batch, wanted, what: str) -> str | None:
    plan = padding.plan_of(ours.config, batch | {"use_cache": False})
    with padding.running(plan):
        hidden, grads = _run(ours, batch)
    if plan is None or not plan.used:
        return f"with {what}, its backbone cannot be given real tokens alone"
    if not probe.same(hidden, wanted[0], _RTOL):
        return f"with {what}, hidden states differ from those of the padded batch"
    largest = max(grad.abs().max() for grad in wanted[1].values())
    for name, grad in wanted[1].items():
        # Of some weights, such as the bias of keys, the gradient is zero but for rounding.
        off = (grads[name] - grad).abs().max() if name in grads else largest
        if not off <= _RTOL * max(grad.abs().max(), 1e-3 * largest):
            return f"with {what}, the gradient of {name} differs"
    return None


def _run(backbone, batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Hidden states (N, H) of the real tokens, and the gradients of a function of them."""
    backbone.zero_grad()
    hidden = backbone(**batch, use_cache=False).last_hidden_state
    real = hidden[batch["attention_mask"].bool()] if "attention_mask" in batch else hidden[0]
    (real * probe.randn(real.shape, probe.generator())).sum().backward()
    return real.detach(), {name: p.grad for name, p in backbone.named_parameters() if p.grad is not None}
