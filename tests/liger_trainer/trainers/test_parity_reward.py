"""`LigerRewardTrainer` against `trl.RewardTrainer` from one seed: loss, every gradient, every logged number.

Also compares classification heads in `LigerTrainer` with transformers' `Trainer`.
"""

import copy

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tiny_models import VOCAB, tiny_model, tiny_tokenizer
from trainer_parity import assert_same_training, build, own_fields
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding, Trainer, TrainingArguments
from trl import RewardConfig, RewardTrainer

from liger_trainer import LigerRewardConfig, LigerRewardTrainer, LigerTrainer, LigerTrainingArguments
from liger_trainer.head.classifier import ClassifierBinding
from liger_trainer.head.module import base_model_of
from liger_trainer.trainers.shared_prompts import shared_prompts_of
from liger_trainer.varlen import groups, unpad_plan
from liger_trainer.varlen.decide import bound_backbone

LOADING = {"dataset_num_proc", "eos_token", "pad_token", "chat_template_path", "model_init_kwargs", "trust_remote_code"}
METRICS = ("loss", "grad_norm", "min_reward", "mean_reward", "max_reward", "accuracy", "margin", "num_tokens")
PAD = 0


def judge(name="llama", labels=1, **fields):
    """A tiny model with a head of `labels` numbers, and weights large enough for tokens to affect each other."""
    config = copy.deepcopy(tiny_model(name).config)
    config.num_labels, config.pad_token_id = labels, PAD
    for field, value in fields.items():
        setattr(config, field, value)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="sdpa")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0, p.shape[-1] ** -0.5, generator=generator)
    return model


def pairs(n=8, margin=False, prompt=5):
    draw = torch.Generator().manual_seed(6)

    def ids(count):
        return torch.randint(3, VOCAB, (count,), generator=draw).tolist()

    rows = []
    for i in range(n):
        begin = ids(prompt)
        row = {"chosen_ids": begin + ids(1 + i % 4), "rejected_ids": begin + ids(2 + (3 * i) % 5)}
        rows.append(row | ({"margin": 0.1 * i} if margin else {}))
    return rows


def one(trainer_class, args_class, folder, rows, model, trainer_options=None, **options):
    return build(trainer_class, args_class, model, folder, rows, trainer_options=trainer_options, **options)


@pytest.fixture
def counted(monkeypatch):
    """Token counts of backbone calls that used a plan."""
    seen, packed = [], unpad_plan.UnpadPlan.unpad

    def counting(self, call):
        seen.append(self.rows.tokens)
        return packed(self, call)

    monkeypatch.setattr(unpad_plan.UnpadPlan, "unpad", counting)
    return seen


def compare(folder, rows=None, model=None, metrics=METRICS, **options):
    rows, model = rows or pairs(), judge() if model is None else model
    ours = one(LigerRewardTrainer, LigerRewardConfig, folder, rows, model, **options)
    stock = one(RewardTrainer, RewardConfig, folder, rows, model, **options)
    assert_same_training(ours, stock, metrics)
    return ours


def test_every_option_is_covered():
    """A new field of RewardConfig needs a test here."""
    assert own_fields(RewardConfig) - LOADING == {
        "center_rewards_coefficient",
        "max_length",
        "pad_to_multiple_of",
        "disable_dropout",
        "activation_offloading",
    }


@pytest.mark.diagonal
@pytest.mark.parametrize("shared", [False, True], ids=["unshared", "shared"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"center_rewards_coefficient": 0.1, "pad_to_multiple_of": 8}, id="centred"),
        pytest.param({"split": (2, 2), "max_steps": 2}, id="accumulated"),
        pytest.param({"gradient_checkpointing": True}, id="checkpointing"),
        pytest.param({"eval_strategy": "steps", "eval_steps": 1}, id="evaluation"),
    ],
)
def test_options(options, shared, tmp_path, monkeypatch, counted):
    if shared:
        monkeypatch.setattr(groups, "PAYS", groups.ALWAYS)
    trainer = compare(tmp_path, **options)
    assert counted, "padding was computed"
    assert (shared_prompts_of(trainer.model) is not None) == shared
    if shared:
        assert shared_prompts_of(trainer.model).unshared == {}


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "qwen3_moe"])
def test_families(name, tmp_path, monkeypatch):
    monkeypatch.setattr(groups, "PAYS", groups.ALWAYS)
    trainer = compare(tmp_path, model=judge(name))
    assert shared_prompts_of(trainer.model).saved > 0


def test_margins_and_an_adapter(tmp_path, monkeypatch):
    monkeypatch.setattr(groups, "PAYS", groups.ALWAYS)
    adapter = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], modules_to_save=["score"], task_type="SEQ_CLS")
    trainer = compare(tmp_path, rows=pairs(margin=True), trainer_options={"peft_config": adapter})
    assert shared_prompts_of(trainer.model).saved > 0


def test_answers_that_end_in_the_padding_token(tmp_path, counted):
    """transformers scores a row at its last token with another id than padding, even if a padding id is real there."""
    rows = [row | {"chosen_ids": [*row["chosen_ids"], PAD]} for row in pairs()]
    tokenizer = tiny_tokenizer()
    assert tokenizer.pad_token_id == PAD
    compare(tmp_path, rows=rows)
    assert counted


def test_use_liger_false_is_the_stock_trainer(tmp_path):
    trainer = one(LigerRewardTrainer, LigerRewardConfig, tmp_path, pairs(), judge(), use_liger=False)
    assert trainer.liger_report is None
    assert ClassifierBinding.of(trainer.model) is None
    trainer.train()


def step(model, call):
    model.zero_grad()
    outputs = model(**call)
    outputs.loss.backward()
    return outputs.logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("ids_of_padding", [PAD, 7], ids=["padding", "another-token"])
def test_a_row_judged_by_padding_runs_in_the_models_own_code(ids_of_padding, counted):
    """If another token stands in the padding, the last token without a padding id is padding by the mask."""
    from liger_trainer import apply_liger

    model = judge(labels=3).train()
    ids = torch.randint(8, VOCAB, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(9) < torch.tensor([9, 4, 6])[:, None]).long()
    ids[mask == 0] = ids_of_padding
    call = {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 2, 1]), "use_cache": False}
    want = step(model, call)
    assert ClassifierBinding.of(model) is None
    apply_liger(model)
    counted.clear()
    got = step(model, call)
    assert counted == ([19] if ids_of_padding == PAD else [])
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-6)
    for name, grad in want[1].items():
        assert (got[1][name] - grad).norm() <= 1e-5 * grad.norm(), name


def test_requested_hidden_states_include_padding(counted):
    from liger_trainer import apply_liger

    model = judge().eval()
    ids = torch.randint(3, VOCAB, (2, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1] * 6, [1] * 3 + [0] * 3])
    call = {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask, "output_hidden_states": True}
    want = model(**call, use_cache=False).hidden_states[-1]
    apply_liger(model)
    counted.clear()
    torch.testing.assert_close(model(**call, use_cache=False).hidden_states[-1], want, rtol=1e-5, atol=1e-5)
    assert counted == []


def test_classification_in_liger_trainer(tmp_path, counted):
    draw = torch.Generator().manual_seed(2)
    rows = [
        {"input_ids": torch.randint(3, VOCAB, (3 + i % 5,), generator=draw).tolist(), "labels": i % 3} for i in range(8)
    ]

    def trained(trainer_class, args_class):
        args = args_class(
            output_dir=str(tmp_path),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=2,
            logging_steps=1,
            learning_rate=0.1,
            optim="sgd",
            report_to="none",
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = trainer_class(
            model=judge(labels=3),
            args=args,
            train_dataset=Dataset.from_list(rows),
            data_collator=DataCollatorWithPadding(tiny_tokenizer()),
        )
        trainer.train()
        logs = [log for log in trainer.state.log_history if "loss" in log]
        return trainer, [(log["loss"], log["grad_norm"]) for log in logs]

    _, want = trained(Trainer, TrainingArguments)
    counted.clear()
    trainer, got = trained(LigerTrainer, LigerTrainingArguments)
    assert counted and bound_backbone(base_model_of(trainer.model)) is not None
    for ours, stock in zip(got, want, strict=True):
        assert ours == pytest.approx(stock, rel=1e-5)
    assert shared_prompts_of(trainer.model) is None
