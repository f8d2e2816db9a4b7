"""The fused head comes to a model, and goes again."""

from liger_trainer.head import masks
from liger_trainer.head.calls import fused_forward_of
from liger_trainer.head.find import KEY, base_model_of, head_reason, output_head
from liger_trainer.head.module import bind_all, unbind_head
from liger_trainer.head.outputs import EXTRA_OUTPUTS, TOKEN_OUTPUTS, HeadOptions
from liger_trainer.instance.binding import bind, binding_of, is_bound, unbind
from liger_trainer.instance.report import Place


def install_fused_head(model, options: HeadOptions | None = None, place: Place | None = None) -> str | None:
    """Bind the fused forward to `model`. Where it is bound already, only `options` and `place` change.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): Model with an LM head.
        options (`HeadOptions`, *optional*): Defaults of calls with `fused_lm_head=True`. Unset: those of `HeadOptions`,
            whatever was installed before.
        place (`Place`, *optional*): Where a report is told that the head stopped being fused. Unset: where it was.

    Returns:
        `str` or `None`: None where the head is fused, else why real logits are built. With a head that cannot be fused
        (a DoRA on it, say) the same calls are answered from real logits; a model without any head is left alone.
    """
    model, options = base_model_of(model), options or HeadOptions()
    if output_head(model) is None:
        return head_reason(model)
    unknown = set(options.outputs) - {*TOKEN_OUTPUTS, *EXTRA_OUTPUTS}
    if unknown:
        raise ValueError(f"outputs has {sorted(unknown)}; known are {[*TOKEN_OUTPUTS, *EXTRA_OUTPUTS]}.")
    binding = binding_of(model, KEY) or bind(model, KEY, fused_forward_of(type(model)), place=None)
    binding.options, binding.place = options, place or binding.place
    reason = head_reason(model)
    if reason is None:
        bind_all(output_head(model))
        masks.install(model)
    return reason


def remove_fused_head(model) -> None:
    """Undo `install_fused_head`: the `__dict__` of the model and of its head are as before.

    Where someone (accelerate) has since wrapped the forward, the wrapper stays and what it wraps calls the model's own.
    """
    model = base_model_of(model)
    for module in model.modules():
        unbind_head(module)
    masks.uninstall(model)
    binding = binding_of(model, KEY)
    if binding is None or is_bound(model, binding):
        unbind(model, KEY)
    else:
        binding.options = None  # remembered: a later install must not bind a second forward around the wrapper
