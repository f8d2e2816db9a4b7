"""The parts of a model of transformers: what is inside its wrappers, its LM head and its backbone."""

from torch import nn


def base_model_of(model: nn.Module) -> nn.Module:
    """The transformers model inside `torch.compile` and a PEFT wrapper, or the model itself."""
    model = getattr(model, "_orig_mod", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def output_head(model: nn.Module) -> nn.Module | None:
    """The module that makes the logits of a transformers model, or None."""
    get_head = getattr(base_model_of(model), "get_output_embeddings", None)
    return None if get_head is None else get_head()


def base_of(model):
    """The part of a transformers model before its head, with towers if it has any, or None."""
    name = getattr(model, "base_model_prefix", "")
    # The prefix of Llama 4's decoder is that of the model of images.
    return model._modules.get(name, model._modules.get("model")) if name else None


def backbone_of(model):
    """The part of a transformers model before its head, or None.

    In a model of images and text it is the decoder of text inside that part, which sees images as embeddings.
    """
    base = base_of(model)
    config = getattr(base, "config", None)
    if config is None or config.is_encoder_decoder or (text := config.get_text_config()) is config:
        return base
    return next((part for part in base._modules.values() if type(getattr(part, "config", None)) is type(text)), base)
