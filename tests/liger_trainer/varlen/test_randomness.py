"""What draws random numbers in a model is found, in the part that reads text and in the one that looks at images."""

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from liger_trainer.varlen.randomness import what_is_random

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION = {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 8, "attention_dropout": 0.5, **SIZES}
TEXT = {"model_type": "llama", "vocab_size": 32, **SIZES}


def test_dropout_of_images_that_no_module_shows():
    config = AutoConfig.for_model("llava", vision_config=VISION, text_config=TEXT, vision_feature_layer=-1)
    model = AutoModelForImageTextToText.from_config(config).train()
    images = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    once, again = (model.model.vision_tower(pixel_values=images).last_hidden_state for _ in range(2))
    assert not torch.equal(once, again)
    modules = [*model.modules()]
    assert what_is_random(model, modules) == "attention_dropout of its config is 0.5"
    assert what_is_random(model.eval(), modules) is None
