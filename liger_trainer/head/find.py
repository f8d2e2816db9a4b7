"""Where the LM head of a model is, what is bound to it, and why it might not be fused."""

from liger_trainer.head.module import why_not_fusable
from liger_trainer.head.outputs import HeadOptions
from liger_trainer.instance.binding import binding_of

KEY = "_liger_head"  # of what `install_fused_head` binds


def base_model_of(model):
    """The transformers model inside `torch.compile` and a PEFT wrapper, or the model itself."""
    model = getattr(model, "_orig_mod", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def output_head(model):
    """The module that makes the logits of a transformers model, or None."""
    get_head = getattr(base_model_of(model), "get_output_embeddings", None)
    return None if get_head is None else get_head()


def head_reason(model) -> str | None:
    """Why `model` cannot have a fused head, or None."""
    head = output_head(model)
    if head is None:
        return f"{type(base_model_of(model)).__name__} has no LM head (get_output_embeddings() is None)"
    options = head_options(model)
    reason = why_not_fusable(head, options is not None and options.cast_lm_head_to_fp32)
    return None if reason is None else f"the LM head of {type(base_model_of(model)).__name__} cannot be fused: {reason}"


def head_options(model) -> HeadOptions | None:
    """The options of the fused head of `model`, or None where it has none."""
    binding = binding_of(base_model_of(model), KEY)
    return None if binding is None else binding.options


def has_fused_head(model) -> bool:
    """Whether `install_fused_head` has been called on `model`.

    Asked of what was remembered, not of `model.forward`: accelerate wraps that one when training starts.
    """
    return head_options(model) is not None


def why_peft_needs_logits(model) -> str | None:
    """Why a PEFT wrapper around `model` computes something from logits that have labels, or None."""
    for name, config in getattr(model, "peft_config", {}).items():
        if config.peft_type == "CPT":
            return f"the adapter {name!r} is CPT, which computes its own loss from logits"
    return None
