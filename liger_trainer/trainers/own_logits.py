"""The models whose own logits differ from TRL's fused head.

TRL multiplies the hidden states of the backbone with the weight of the head, and scales and caps the result by fields
of the config. Here the model's own forward runs, so the losses of these models differ. A test scores every model type
of transformers by both, and finds this list.
"""

from torch import nn

from liger_trainer.head.find import base_model_of

OTHER_LOGITS = frozenset(
    "bert big_bird camembert chameleon data2vec-text electra ernie inkling_text megatron-bert modernbert-decoder "
    "prophetnet recurrent_gemma rembert roberta roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl "
    "xlstm xmod".split()
)
NOT_APPLIED = {  # a field of the text config that TRL applies and the model does not
    "aya_vision": "logit_scale", "cohere2_vision": "logit_scale", "mpt": "logit_scale",
    "gemma3": "final_logit_softcapping", "shieldgemma2": "final_logit_softcapping",
}  # fmt: skip


def differs_from_trl(model: nn.Module) -> bool:
    """Whether the own forward of `model` computes logits that differ from TRL's fused head."""
    config = base_model_of(model).config
    field = NOT_APPLIED.get(config.model_type, "")
    return config.model_type in OTHER_LOGITS or getattr(config.get_text_config(), field, None) not in (None, 1)
