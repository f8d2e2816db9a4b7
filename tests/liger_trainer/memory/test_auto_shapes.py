"""`activation_checkpointing: auto` with batches of different content: within the budget, and bit-equal to `true`."""

import copy
import functools

import memory_runs
import pytest
import torch
from image_models import image_batch, image_model
from memory_runs import CountedMemory, build, frozen_model, rows_of_one_length, same_bits, train
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from liger_trainer import LigerTrainer
from liger_trainer.memory.device_memory import GIB

IMAGE, PATCHES = 130, 64


class OneAfterTheOther(LigerTrainer):
    """Trains on a test's batches in their order."""

    batches = ()

    def get_train_dataloader(self):
        return torch.utils.data.DataLoader(self.batches, batch_size=None)


def with_images():
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=128, num_hidden_layers=8, num_attention_heads=2, image_size=32, patch_size=4
    )
    text = LlamaConfig(
        vocab_size=131,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
    )
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE, vision_feature_layer=-1)
    return LlavaForConditionalGeneration(config)


def rows_with_images(step):
    ids = torch.full((2, 200), 7) + torch.arange(200) % 50 + step
    batch = {"input_ids": ids, "labels": ids.clone()}
    if step >= 3:
        ids[:, 5 : 5 + PATCHES] = IMAGE
        batch["labels"] = ids.where(ids != IMAGE, torch.tensor(-100))
        batch["pixel_values"] = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(step))
    return batch


def encoder_and_decoder(**options):
    torch.manual_seed(0)
    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=131,
            d_model=32,
            encoder_layers=6,
            decoder_layers=6,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            dropout=0.0,
            **options,
        )
    )


def pairs(longer_by):
    def batch(step):
        source = torch.full((4, 150), 9) + torch.arange(150) % 40
        target = torch.full((4, 20 + longer_by * (step >= 4)), 5) + step
        return {"input_ids": source, "labels": target}

    return batch


CASES = {
    "images after text": (with_images, rows_with_images),
    "a decoder that grows": (encoder_and_decoder, pairs(200)),
    "layerdrop": (lambda: encoder_and_decoder(encoder_layerdrop=0.3, decoder_layerdrop=0.3), pairs(0)),
}


def run(out, case, checkpointing, budget=None):
    make, batch = CASES[case]
    memory = CountedMemory()
    options = {"max_steps": 10, "gradient_accumulation_steps": 1, "optim": "sgd", "learning_rate": 0.1}
    trainer = build(
        out, checkpointing, memory, model=make(), trainer_class=OneAfterTheOther, memory_budget=budget, **options
    )
    trainer.batches = [batch(step) for step in range(10)]
    return train(trainer), memory.highest, trainer.checkpointing


@pytest.fixture(scope="module")
def bounds(tmp_path_factory):
    """For a case: the result and peak bytes with all layers checkpointed, and the peak bytes without checkpointing."""

    @functools.cache
    def of(case):
        out = tmp_path_factory.mktemp("bounds")
        want, least, _ = run(out, case, True)
        return want, least, run(out, case, False)[1]

    return of


@pytest.mark.diagonal
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("case", CASES)
def test_no_batch_exceeds_the_budget(case, share, bounds, tmp_path):
    want, least, most = bounds(case)
    budget = least + share * (most - least)
    got, highest, chosen = run(tmp_path, case, "auto", budget / GIB)
    print(case, share, f"{highest / budget:.3f} of the budget", chosen)
    assert same_bits(got, want)
    assert highest <= 1.005 * budget
    assert 0 <= chosen.kept <= chosen.layers <= 12
    assert chosen.most > 0 or share < 0.3


@pytest.mark.slow
def test_a_tower_before_a_decoder_that_leaves_padding_out(tmp_path):
    """The number of real tokens is known, so the tower may keep what it needs too."""
    model, found = image_model("qwen2_5_vl"), {}
    lengths = [(40, 9, 30), (40, 9, 30), (40, 9, 30), (20, 40, 8), (40, 40, 40), (40, 39, 40), (40, 40, 40), (40, 3, 4)]
    batches = [image_batch(model, (1, 0, 1), text) for text in lengths]

    def run(checkpointing, budget=None):
        memory = CountedMemory()
        trainer = build(
            tmp_path,
            checkpointing,
            memory,
            model=copy.deepcopy(model),
            trainer_class=OneAfterTheOther,
            optim="sgd",
            memory_budget=budget,
            gradient_accumulation_steps=1,
            use_liger=True,
        )
        trainer.batches = batches
        found[checkpointing] = train(trainer)
        return memory.highest, trainer.checkpointing

    (least, _), (most, _) = run(True), run(False)
    for share, kept in ((0.0, 0), (0.6, 1), (1.02, 4)):
        budget = least + share * (most - least)
        highest, chosen = run("auto", budget / GIB)
        assert same_bits(found["auto"], found[True]), share
        assert highest <= 1.005 * budget, share
        assert chosen.layers == 4 and chosen.most >= kept, share


@pytest.mark.parametrize("layers", [2, 12])
def test_measuring_stays_within_the_budget(layers, tmp_path, monkeypatch):
    """If nearly everything is frozen, the forward pass ends at the peak, and every kept layer adds to it."""
    monkeypatch.setattr(memory_runs, "uneven_rows", rows_of_one_length)
    highest = {}
    for checkpointing in (True, "auto"):
        budget = None if checkpointing is True else highest[True] / GIB
        memory = CountedMemory()
        trainer = build(
            tmp_path,
            checkpointing,
            memory,
            model=frozen_model(layers),
            memory_budget=budget,
            gradient_accumulation_steps=1,
        )
        train(trainer)
        highest[checkpointing] = memory.highest
    print(layers, f"{highest['auto'] / highest[True]:.3f} of the budget")
    assert highest["auto"] <= 1.005 * highest[True]
