"""Rows with images packed by `LigerSFTTrainer`, compared with TRL's trainer on the same rows with padding."""

import copy
import itertools

import pytest
import torch
from datasets import Dataset
from image_models import image_model, noise_image, placeholder, processor_of
from peft import LoraConfig
from tiny_models import assert_same_gradients
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from trainer_parity import logged_values
from transformers import LlavaNextImageProcessorPil, LlavaNextProcessor, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from liger_trainer import LigerSFTConfig, LigerSFTTrainer
from liger_trainer.trainers.packed_images import PackedRows, best_fit
from liger_trainer.varlen import unpad_plan
from liger_trainer.verify.observed import KeepGradients

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
        pixels,
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


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


def qwen_rows(model_type, form):
    """Eight rows with images of several sizes, some with two images and some with none; or in another form."""
    source = torch.Generator().manual_seed(5)
    sizes = [[(56, 84)], [(60, 90), (84, 56)], [], [(30, 30)], [(28, 70), (56, 56)], [], [(90, 90)], [(56, 56)]]
    found = []
    for number, images in enumerate(sizes):
        words = [f"w{int(i)}" for i in torch.randint(3, 99, (4 + number,), generator=source)]
        made = [] if form == "no image" else [noise_image(width, height, source) for height, width in images]
        if form == "grey and alpha":
            made = [image.convert(("L", "RGBA", "LA", "P")[(number + k) % 4]) for k, image in enumerate(made)]
        for at in range(len(made)):
            words.insert(1 + 2 * at, placeholder(model_type))
        row = {"text": " ".join(words)}
        if form == "prompts":
            row = {"prompt": " ".join(words[:-2]), "completion": " " + " ".join(words[-2:])}
        found.append(row | {"images": made})
    return Dataset.from_list(found)


def trainer_of(trainer_class, args_class, model, folder, dataset, batch, given=None, **options):
    fixed = {
        "max_steps": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "optim": "sgd",
        "learning_rate": 0.05,
        "max_grad_norm": 0.0,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "max_length": 64,
    }
    args = args_class(output_dir=str(folder), per_device_train_batch_size=batch, **(fixed | options))
    given = {"processing_class": processor(), "callbacks": [KeepGradients()]} | (given or {})
    return trainer_class(model, args, train_dataset=dataset, **given)


def trained(trainer):
    trainer.train()
    steps = next(one.steps for one in trainer.callback_handler.callbacks if isinstance(one, KeepGradients))
    return logged_values(trainer, "loss"), steps[0]


@pytest.fixture
def model():
    found = image_model("llava_next")
    found.config.image_grid_pinpoints = POINTS
    return found


def test_a_step_of_all_rows_equals_trl(model, tmp_path, monkeypatch):
    dataset = rows()
    used = []
    packed = unpad_plan.UnpadPlan.unpad
    want = trained(trainer_of(SFTTrainer, SFTConfig, copy.deepcopy(model), tmp_path, dataset, len(dataset)))
    ours = trainer_of(LigerSFTTrainer, LigerSFTConfig, copy.deepcopy(model), tmp_path, dataset, 8, packing=True)
    assert ours.args.packing and isinstance(ours.train_dataset, PackedRows)
    assert 1 < len(ours.train_dataset) < len(dataset)
    lengths = [int(ours.data_collator([group])["attention_mask"].sum()) for group in ours.train_dataset]
    assert max(lengths) <= 64
    monkeypatch.setattr(unpad_plan.UnpadPlan, "unpad", lambda self, *given: used.append(self) or packed(self, *given))
    got = trained(ours)
    assert [plan.rows.tokens for plan in used] == [sum(lengths)]
    assert got[0] == pytest.approx(want[0], rel=1e-5)
    keep = [name for name in want[1] if not name.endswith("k_proj.bias")]
    assert_same_gradients({name: got[1][name] for name in keep}, {name: want[1][name] for name in keep})


def qwen(model_type):
    found = image_model(model_type)
    for name, parameter in found.named_parameters():
        parameter.requires_grad_(not name.endswith("k_proj.bias"))  # its gradient is zero up to rounding
    return found


def of_qwen(trainer_class, args_class, model, folder, dataset, batch, **options):
    given = {"processing_class": processor_of(model.config.model_type)} | options.pop("given", {})
    return trainer_of(trainer_class, args_class, copy.deepcopy(model), folder, dataset, batch, given, **options)


FORMS = {
    "qwen2_5_vl": ("plain", "no image", "adapters", "frozen tower"),
    "qwen3_vl": ("plain", "prompts", "grey and alpha", "frozen decoder"),
    "qwen3_5": ("plain", "adapters"),
}
ON_REQUEST = (("qwen3_vl", "plain"), ("qwen3_vl", "frozen decoder"), ("qwen3_5", "adapters"))


@pytest.mark.parametrize(
    "model_type, form",
    [
        pytest.param(name, form, marks=pytest.mark.slow if (name, form) in ON_REQUEST else ())
        for name, forms in FORMS.items()
        for form in forms
    ],
)
def test_positions_in_three_dimensions(model_type, form, tmp_path, monkeypatch):
    model = qwen(model_type)
    dataset = qwen_rows(model_type, form)
    given = {}
    used = []
    if form == "adapters":
        given = {"peft_config": LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "qkv", "down_proj"])}
    if form.startswith("frozen"):
        part = {"frozen tower": "visual", "frozen decoder": "language_model"}[form]
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and part not in name)
    want = trained(of_qwen(SFTTrainer, SFTConfig, model, tmp_path, dataset, 8, given=copy.deepcopy(given)))
    ours = of_qwen(
        LigerSFTTrainer, LigerSFTConfig, model, tmp_path, dataset, 8, given=given, packing=True, max_length=40
    )
    assert 1 < len(ours.train_dataset) < len(dataset)
    packed = unpad_plan.UnpadPlan.unpad
    monkeypatch.setattr(unpad_plan.UnpadPlan, "unpad", lambda self, *call: used.append(self) or packed(self, *call))
    got = trained(ours)
    assert len(used) == 1 and len(used[0].rows.lengths) == len(dataset)
    assert got[0] == pytest.approx(want[0], rel=1e-5)
    assert any("visual" in name for name in want[1]) == (form not in ("frozen tower", "no image"))
    assert_same_gradients(got[1], want[1])


@pytest.mark.parametrize("workers", [0, 2])
def test_micro_batches_and_epochs(workers, tmp_path):
    """Each group is a micro-batch. The loss is the mean of the stock model's losses, as in the stock trainers."""
    model, dataset = qwen("qwen2_5_vl"), qwen_rows("qwen2_5_vl", "plain")
    options = {
        "packing": True,
        "gradient_accumulation_steps": 2,
        "max_steps": 5,
        "dataloader_num_workers": workers,
        "learning_rate": 0.0,
        "max_length": 40,
    }
    ours = of_qwen(LigerSFTTrainer, LigerSFTConfig, model, tmp_path, dataset, 1, **options)
    losses = [float(model(**ours.data_collator([group])).loss) for group in ours.train_dataset]
    assert len(losses) >= 3
    ours.train()
    logged = logged_values(ours, "loss")
    pairs = {(a + b) / 2 for a, b in itertools.combinations(losses, 2)} | set(losses)
    for loss in logged:
        assert min(abs(loss - pair) for pair in pairs) < 1e-5 * loss
    assert len(set(logged)) > 1


def test_an_evaluation_equals_trl(tmp_path):
    model, dataset = qwen("qwen3_vl"), qwen_rows("qwen3_vl", "plain")
    found = []
    for trainer_class, args_class, more in (
        (SFTTrainer, SFTConfig, {}),
        (LigerSFTTrainer, LigerSFTConfig, {"packing": True}),
        (LigerSFTTrainer, LigerSFTConfig, {"packing": True, "eval_packing": True}),
    ):
        given = {"eval_dataset": dataset}
        trainer = of_qwen(trainer_class, args_class, model, tmp_path, dataset, 8, given=given, **more)
        found.append(trainer.evaluate()["eval_loss"])
    assert found == pytest.approx([found[0]] * 3, rel=1e-5)


def test_a_run_goes_on_in_the_middle_of_an_epoch(model, tmp_path):
    dataset = rows()
    options = {"packing": True, "save_strategy": "steps", "save_steps": 1, "max_length": 48, "max_steps": 6}
    whole, rest = (
        trainer_of(LigerSFTTrainer, LigerSFTConfig, copy.deepcopy(model), tmp_path, dataset, 1, **options)
        for _ in range(2)
    )
    assert 3 < len(whole.train_dataset) < 6
    whole.train()
    rest.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    logged = [logged_values(one, "loss") for one in (whole, rest)]
    assert len(logged[0]) == 6 and logged[1] == pytest.approx(logged[0], rel=1e-6)


def test_where_it_is_refused(model, tmp_path):
    with pytest.raises(ValueError, match="computes padding: use_liger or varlen_attention is switched off"):
        trainer_of(LigerSFTTrainer, LigerSFTConfig, model, tmp_path, rows(), 1, packing=True, use_liger=False)
    with pytest.raises(ValueError, match="packing_strategy is 'wrapped', which splits rows"):
        trainer_of(
            LigerSFTTrainer, LigerSFTConfig, model, tmp_path, rows(), 1, packing=True, packing_strategy="wrapped"
        )
    with pytest.raises(ValueError, match="max_length is None"):
        trainer_of(LigerSFTTrainer, LigerSFTConfig, model, tmp_path, rows(), 1, packing=True, max_length=None)


@pytest.mark.parametrize(
    "lengths, room, want",
    [
        ([5, 5, 5], 10, [[0, 1], [2]]),
        ([9, 1, 5, 5], 10, [[0, 1], [2, 3]]),
        ([30, 2], 10, [[0], [1]]),
        ([], 10, []),
        ([3, 3, 3, 3], 10, [[0, 1, 2], [3]]),
    ],
)
def test_groups(lengths, room, want):
    assert best_fit(lengths, room) == want
