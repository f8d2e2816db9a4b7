"""Count steps with images of tiny models on meta tensors, with the processors that transformers has for them."""

import functools

import pytest
import torch
from image_models import image_model, processor_of

from liger_trainer.fitting import losses
from liger_trainer.fitting.images import UnknownSizes, known_numbers, row_images
from liger_trainer.fitting.meta_model import ModelSpec
from liger_trainer.fitting.step import TrainSpec, estimate_memory
from liger_triton import _dispatch

PLENTY = 1 << 40
ROWS, LENGTH = 3, 64


@pytest.fixture(autouse=True)
def kernels_are_proven_by_their_twins(monkeypatch):
    monkeypatch.setattr(_dispatch, "INTERPRET", False)


@functools.cache
def needed(model_type, *sizes, checkpointing=False, loss=losses.of_labels):
    images = row_images(processor_of(model_type), list(sizes)) if sizes else None
    job = TrainSpec(
        ModelSpec(image_model(model_type).config, torch.bfloat16),
        loss,
        torch.optim.AdamW,
        torch.bfloat16,
        checkpointing={"use_reentrant": False},
        images=images,
    )
    return estimate_memory(job, ROWS, LENGTH, checkpointing, PLENTY)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    [
        "qwen2_5_vl",
        "gemma3",
        "internvl",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("qwen3_vl", "llava_onevision")),
    ],
)
def test_images_add_what_their_tower_keeps(model_type):
    none, one, two = (needed(model_type, *[(80, 60)] * images) for images in range(3))
    assert (one.weights, one.gradients, one.states) == (none.weights, none.gradients, none.states)
    pixels = [
        ROWS * row_images(processor_of(model_type), number * [(80, 60)]).inputs["pixel_values"].nbytes
        for number in (1, 2)
    ]
    first, both = one.micro_batch - none.micro_batch, two.micro_batch - none.micro_batch
    assert first > pixels[0]
    assert both / first == pytest.approx(pixels[1] / pixels[0], rel=0.25)


def test_what_the_layers_of_a_tower_keep():
    """More than ten times its input without checkpointing, and only its input with it."""
    sizes, config = [(112, 84)], image_model("qwen2_5_vl").config.vision_config
    ((_, rows, columns),) = row_images(processor_of("qwen2_5_vl"), sizes).inputs["image_grid_thw"].tolist()
    one = ROWS * rows * columns * config.hidden_size * 2
    kept, recomputed = (
        needed("qwen2_5_vl", *sizes, checkpointing=way).micro_batch
        - needed("qwen2_5_vl", checkpointing=way).micro_batch
        for way in (False, True)
    )
    assert kept - recomputed > (config.depth - 1) * 10 * one
    assert recomputed > config.depth * one


def test_auto_keeps_layers_of_towers():
    found = needed("qwen2_5_vl", (80, 60), checkpointing="auto")
    assert found.checkpointing.kept == found.checkpointing.layers == 4
    assert found.micro_batch == needed("qwen2_5_vl", (80, 60)).micro_batch


@pytest.mark.slow
def test_pairs_have_the_images_twice():
    labels, pairs = (
        needed("qwen3_vl", (80, 60), loss=loss).micro_batch - needed("qwen3_vl", loss=loss).micro_batch
        for loss in (losses.of_labels, losses.of_pairs)
    )
    assert pairs == pytest.approx(2 * labels, rel=0.2)


def test_a_frozen_tower_keeps_nothing():
    from peft import LoraConfig

    def adapted(target):
        config = image_model("qwen2_5_vl").config
        images = row_images(processor_of("qwen2_5_vl"), [(112, 84)])
        shape = ModelSpec(config, torch.bfloat16, LoraConfig(r=4, target_modules=target))
        job = TrainSpec(shape, losses.of_labels, torch.optim.AdamW, torch.bfloat16, images=images)
        return estimate_memory(job, ROWS, LENGTH, False, PLENTY).micro_batch

    assert adapted("all-linear") - adapted(r".*language_model.*(q_proj|v_proj)") > 20 * 3 * 48 * 64


def test_sizes_that_depend_on_pixels_are_refused():
    """Idefics3 leaves out images of zero pixels."""
    try:
        processor_of("idefics3")
    except ImportError as error:  # of torchvision
        pytest.skip(str(error).strip().splitlines()[0])
    with pytest.raises(UnknownSizes, match="depends on the values of pixels"):
        needed("idefics3", (80, 60))


def test_pixels_are_not_lost_in_tensors_of_numbers():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True), known_numbers():
        numbers, pixels = torch.arange(4), torch.zeros(4)
        assert numbers.mul(2).tolist() == [0, 2, 4, 6]
        assert pixels[numbers > 1].shape == (2,)
        with pytest.raises(UnknownSizes, match="writes pixels"):
            numbers.copy_(pixels)


def test_a_batch_of_images():
    images = row_images(processor_of("qwen2_5_vl"), [(80, 60), (60, 80)])
    batch = images.batch(2, 40)
    assert batch["input_ids"].shape == batch["mm_token_type_ids"].shape == (2, 40)
    assert batch["image_grid_thw"].tolist() == 2 * images.inputs["image_grid_thw"].tolist()
    assert batch["pixel_values"].shape[0] == 2 * images.inputs["pixel_values"].shape[0]
    assert (batch["input_ids"] == 100).sum() == 2 * (images.ids == 100).sum() > 0
