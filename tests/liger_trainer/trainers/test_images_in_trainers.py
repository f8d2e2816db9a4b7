"""Trainers on rows with images, with the models' processors, compared with TRL's trainers on the same rows.

Llama 4 is missing: TRL's own SFTTrainer fails on it. It is in `varlen/test_images.py`, its tower in
`varlen/proof/test_towers.py`.
"""

import copy

import pytest
import torch
from datasets import Dataset
from image_models import PROCESSED, image_model, noise_image, placeholder, processor_of
from peft import LoraConfig
from tiny_models import CANCELLING
from trainer_parity import assert_same_training, letters, moved
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

from liger_trainer import (
    LigerDPOConfig,
    LigerDPOTrainer,
    LigerGRPOConfig,
    LigerGRPOTrainer,
    LigerKTOConfig,
    LigerKTOTrainer,
    LigerRLOOConfig,
    LigerRLOOTrainer,
    LigerSFTConfig,
    LigerSFTTrainer,
)
from liger_trainer.varlen import unpad_plan

CLASSES = {
    "sft": ((SFTTrainer, SFTConfig), (LigerSFTTrainer, LigerSFTConfig)),
    "dpo": ((DPOTrainer, DPOConfig), (LigerDPOTrainer, LigerDPOConfig)),
    "kto": ((KTOTrainer, KTOConfig), (LigerKTOTrainer, LigerKTOConfig)),
    "grpo": ((GRPOTrainer, GRPOConfig), (LigerGRPOTrainer, LigerGRPOConfig)),
    "rloo": ((RLOOTrainer, RLOOConfig), (LigerRLOOTrainer, LigerRLOOConfig)),
}
ANSWERED = ("sft", "dpo", "kto")  # rows of these trainers have answers
ONLINE = {"num_generations": 2, "max_completion_length": 6, "beta": 0.0}
PREFIXED = ("gemma3",)  # tokens of an image see each other, so padding is computed
FAIL_IN_TRL = {("llava_onevision", "rloo")}  # RLOOTrainer does not know this argument
SIZES = {"several and none": [2, 0, 1, 1], "one each": [1, 1, 1, 1]}
TOWERS = ["q_proj", "v_proj", "qkv", "fc1", "linear_fc1", "gate_proj", "down_proj"]


def letters_of(completions, **columns):
    return letters([completion[0]["content"] for completion in completions])


def rows_of(model_type, kind, images):
    source = torch.Generator().manual_seed(5)

    def words(count):
        return [f"w{int(i)}" for i in torch.randint(3, 99, (count,), generator=source)]

    found = []
    for row, count in enumerate(images):
        prompt = words(4 + row)
        for at in range(count if kind in ANSWERED else 0):  # TRL puts images into messages itself
            prompt.insert(1 + 2 * at, placeholder(model_type))
        prompt, answers = " ".join(prompt), [" " + " ".join(words(2 + row)), " " + " ".join(words(6 - row))]
        made = [noise_image(40 + 30 * row, 60, source) for _ in range(count)]
        columns = {
            "sft": {"text": prompt + answers[0]},
            "dpo": {"prompt": prompt, "chosen": answers[0], "rejected": answers[1]},
            "kto": {"prompt": prompt, "completion": answers[0], "label": row % 2 == 0},
        }.get(kind, {"prompt": [{"role": "user", "content": prompt}]})
        found.append(columns | {"images": made})
    return Dataset.from_list(found)


def pair(model_type, kind, folder, images=SIZES["one each"], model=None, **given):
    """Ours and TRL's, from one model and the same rows."""
    model, rows = image_model(model_type) if model is None else model, rows_of(model_type, kind, images)
    model.config.get_text_config().final_logit_softcapping = None  # TRL leaves it out
    for name, parameter in model.named_parameters():
        if name.endswith(("k_proj.bias", *CANCELLING)):  # the gradient is zero, or nearly, up to rounding
            parameter.requires_grad_(False)
    options = {"max_length": None} if kind in ANSWERED else ONLINE
    made = []
    for trainer_class, args_class in CLASSES[kind]:
        args = args_class(
            output_dir=str(folder / trainer_class.__name__),
            per_device_train_batch_size=4,
            max_steps=1,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
            optim="sgd",
            learning_rate=0.05,
            max_grad_norm=0.0,
            gradient_checkpointing=False,
            disable_tqdm=True,
            remove_unused_columns=False,
            **options,
        )
        more = {} if kind in ANSWERED else {"reward_funcs": letters_of}
        more |= {"ref_model": copy.deepcopy(model)} if kind in ("dpo", "kto") and "peft_config" not in given else {}
        trainer = trainer_class(
            model=copy.deepcopy(model),
            args=args,
            train_dataset=rows,
            processing_class=processor_of(model_type),
            **more,
            **copy.deepcopy(given),
        )
        made.append(moved(trainer))
    return made[1], made[0]


@pytest.fixture
def real(monkeypatch):
    """The plans of the calls that left padding out."""
    used, packed = [], unpad_plan.UnpadPlan.unpad
    monkeypatch.setattr(unpad_plan.UnpadPlan, "unpad", lambda self, *given: used.append(self) or packed(self, *given))
    return used


CASES = [
    pytest.param(model_type, kind, id=f"{model_type}-{kind}", marks=[] if quick else pytest.mark.slow)
    for model_type in PROCESSED
    for kind in CLASSES
    if (model_type, kind) not in FAIL_IN_TRL
    for quick in [(kind == "sft" and model_type != "gemma3") or model_type == "qwen2_5_vl"]
]


@pytest.mark.parametrize("model_type, kind", CASES)
def test_a_step(model_type, kind, tmp_path, real):
    try:
        ours, stock = pair(model_type, kind, tmp_path)
    except ImportError as error:  # num2words
        pytest.skip(str(error).strip().splitlines()[0])
    assert_same_training(ours, stock, loss_size=1.0)
    assert bool(real) == (model_type not in PREFIXED)


def frozen(part, model_type):
    model = image_model(model_type)
    names = {"tower": ("vis",), "decoder": ("language_model", "text_model")}[part]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(one in name for one in names))
    return {"model": model}


FORMS = {
    "several and none": lambda model_type: {"images": SIZES["several and none"]},
    "adapters": lambda model_type: {"peft_config": LoraConfig(r=4, lora_alpha=8, target_modules=TOWERS)},
    "frozen tower": lambda model_type: frozen("tower", model_type),
    "frozen decoder": lambda model_type: frozen("decoder", model_type),
}
QUICK = {
    *(("qwen3_vl", kind, "several and none") for kind in ANSWERED),
    ("qwen2_5_vl", "sft", "adapters"),
    ("qwen2_5_vl", "dpo", "adapters"),
    ("qwen3_vl", "dpo", "frozen tower"),
    ("qwen3_vl", "dpo", "frozen decoder"),
}


@pytest.mark.parametrize(
    "model_type, kind, form",
    [
        pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
        for model_type in PROCESSED
        for kind in CLASSES
        for form in FORMS
        for case in [(model_type, kind, form)]
        if (model_type, kind) not in FAIL_IN_TRL
    ],
)
def test_other_forms(model_type, kind, form, tmp_path, real):
    """Several images in a row or none, adapters on both towers, and frozen parts."""
    try:
        ours, stock = pair(model_type, kind, tmp_path, **FORMS[form](model_type))
    except ImportError as error:  # num2words
        pytest.skip(str(error).strip().splitlines()[0])
    assert_same_training(ours, stock, loss_size=1.0)
    assert bool(real) == (model_type not in PREFIXED)
    trained = {"vis" in name for name, p in ours.model.named_parameters() if p.requires_grad}
    assert trained == {False} if form == "frozen tower" else True in trained
