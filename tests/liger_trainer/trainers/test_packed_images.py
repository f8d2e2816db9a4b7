"""Rows with images packed by `LigerSFTTrainer`, beside TRL's trainer on the same rows with padding."""

import copy

import pytest
import torch
from datasets import Dataset
from image_models import image_model
from image_processors import noise_image
from step_parity import KeepGradients, assert_same_gradients
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlavaNextImageProcessorPil, LlavaNextProcessor, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from liger_trainer import LigerSFTConfig, LigerSFTTrainer
from liger_trainer.trainers.packed_images import PackedRows, best_fit
from liger_trainer.varlen import padding

POINTS = [[28, 56], [56, 28], [56, 56]]


def processor():
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, 99)} | {"<image>": 100}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "extra_special_tokens": ["<image>"]}
    pixels = LlavaNextImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=POINTS
    )
    return LlavaNextProcessor(
        pixels, PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special), patch_size=14,
        vision_feature_select_strategy="default", num_additional_image_tokens=1,
    )  # fmt: skip


def rows():
    """Eight rows with images of several sizes, one with two and one with none."""
    generator = torch.Generator().manual_seed(5)
    sizes = [[(28, 28)], [(60, 90)], [], [(30, 30), (80, 28)], [(28, 70)], [(90, 90)], [(28, 28)], [(56, 56)]]
    found = []
    for images in sizes:
        words = [f"w{int(i)}" for i in torch.randint(3, 99, (int(torch.randint(2, 9, (), generator=generator)),))]
        for at in range(len(images)):
            words.insert(1 + 2 * at, "<image>")
        made = [noise_image(width, height, generator) for height, width in images]
        found.append({"text": " ".join(words), "images": made})
    return Dataset.from_list(found)


def trainer_of(trainer_class, args_class, model, folder, dataset, batch, **options):
    args = args_class(
        output_dir=str(folder), per_device_train_batch_size=batch, max_steps=1, logging_steps=1, save_strategy="no",
        report_to="none", use_cpu=True, bf16=False, optim="sgd", learning_rate=0.05, max_grad_norm=0.0,
        gradient_checkpointing=False, disable_tqdm=True, remove_unused_columns=False, **({"max_length": 64} | options),
    )  # fmt: skip
    return trainer_class(model, args, processing_class=processor(), train_dataset=dataset, callbacks=[KeepGradients()])


def trained(trainer):
    trainer.train()
    steps = next(one.steps for one in trainer.callback_handler.callbacks if isinstance(one, KeepGradients))
    return [row["loss"] for row in trainer.state.log_history if "loss" in row], steps[0]


@pytest.fixture
def model():
    found = image_model("llava_next")
    found.config.image_grid_pinpoints = POINTS
    return found


def test_a_step_of_all_rows_is_that_of_trl(model, tmp_path, monkeypatch):
    dataset, used, packed = rows(), [], padding.Plan.packed
    want = trained(trainer_of(SFTTrainer, SFTConfig, copy.deepcopy(model), tmp_path, dataset, len(dataset)))
    ours = trainer_of(LigerSFTTrainer, LigerSFTConfig, copy.deepcopy(model), tmp_path, dataset, 8, packing=True)
    assert ours.args.packing and isinstance(ours.train_dataset, PackedRows)
    assert 1 < len(ours.train_dataset) < len(dataset)
    lengths = [int(ours.data_collator([group])["attention_mask"].sum()) for group in ours.train_dataset]
    assert max(lengths) <= 64
    monkeypatch.setattr(padding.Plan, "packed", lambda self, *given: used.append(self) or packed(self, *given))
    got = trained(ours)
    assert [plan.rows.tokens for plan in used] == [sum(lengths)]
    assert got[0] == pytest.approx(want[0], rel=1e-5)
    keep = [name for name in want[1] if not name.endswith("k_proj.bias")]
    assert_same_gradients({name: got[1][name] for name in keep}, {name: want[1][name] for name in keep})


def test_where_it_is_refused(model, tmp_path):
    with pytest.raises(ValueError, match="computes padding: use_liger or varlen_attention is switched off"):
        trainer_of(LigerSFTTrainer, LigerSFTConfig, model, tmp_path, rows(), 1, packing=True, use_liger=False)
    with pytest.raises(ValueError, match="max_length is None"):
        trainer_of(LigerSFTTrainer, LigerSFTConfig, model, tmp_path, rows(), 1, packing=True, max_length=None)


@pytest.mark.parametrize("lengths, room, want", [
    ([5, 5, 5], 10, [[0, 1], [2]]), ([9, 1, 5, 5], 10, [[0, 1], [2, 3]]), ([30, 2], 10, [[0], [1]]), ([], 10, []),
    ([3, 3, 3, 3], 10, [[0, 1, 2], [3]]),
])  # fmt: skip
def test_groups(lengths, room, want):
    assert best_fit(lengths, room) == want
