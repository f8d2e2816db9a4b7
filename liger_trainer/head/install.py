"""Installing the fused head in a model, and removing it."""

from torch import nn

from liger_trainer.head import masks
from liger_trainer.head.calls import fused_forward_of
from liger_trainer.head.find import FusedHeadBinding, base_model_of, head_reason, output_head
from liger_trainer.head.module import CaptureBinding, bind_all
from liger_trainer.head.outputs import EXTRA_OUTPUTS, TOKEN_OUTPUTS, HeadOptions
from liger_trainer.instance.binding import bind, is_bound, unbind
from liger_trainer.instance.report import Place


def install_fused_head(model: nn.Module, options: HeadOptions | None = None, place: Place | None = None) -> str | None:
    """Bind the fused forward to `model`. Where it is bound already, only `options` and `place` change.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): Model with an LM head.
        options (`HeadOptions`, *optional*): Defaults of calls with `fused_lm_head=True`. Unset: those of `HeadOptions`,
            whatever was installed before.
        place (`Place`, *optional*): The place in a report that is told if the head stops being fused. Unset: the place
            that was given before.

    Returns:
        `str` or `None`: None where the head is fused, else why real logits are built. A model whose head cannot be
        fused, because of a DoRA on it for example, answers the same calls from real logits. A model without a head is
        left alone.

    Raises:
        ValueError: `options.outputs` has an unknown name.
    """
    model, options = base_model_of(model), options or HeadOptions()
    if output_head(model) is None:
        return head_reason(model)
    unknown = set(options.outputs) - {*TOKEN_OUTPUTS, *EXTRA_OUTPUTS}
    if unknown:
        raise ValueError(f"outputs has {sorted(unknown)}; expected names from {[*TOKEN_OUTPUTS, *EXTRA_OUTPUTS]}.")
    binding = FusedHeadBinding.of(model)
    if binding is None:
        forward = fused_forward_of(type(model))  # type: ignore[arg-type] # mypy takes no class for hashable
        binding = bind(model, FusedHeadBinding(forward))
    binding.options, binding.place = options, place or binding.place
    reason = head_reason(model)
    if reason is None:
        bind_all(output_head(model))
        masks.install(model)
    return reason


def remove_fused_head(model: nn.Module) -> None:
    """Undo `install_fused_head`: the `__dict__` of the model and of its head are as before.

    Where the forward has been wrapped since, as by accelerate, the wrapper stays. The forward inside it then
    calls the model's own.
    """
    model = base_model_of(model)
    for module in model.modules():
        unbind(module, CaptureBinding)
    masks.uninstall(model)
    binding = FusedHeadBinding.of(model)
    if binding is None or is_bound(model, binding):
        unbind(model, FusedHeadBinding)
    else:
        binding.options = None  # see `FusedHeadBinding`
