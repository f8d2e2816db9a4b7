"""`LigerDistillationTrainer` against `trl.DistillationTrainer` from one seed: completions, gradients, numbers."""

import copy

import gemma4_models
import pytest
import torch
import trl.trainer.distillation_trainer as trl_distillation
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from tiny_models import VOCAB, LogitRows, assert_same_gradients, tiny_model, words
from trainer_parity import LLAMA_AND_SLOWLY_QWEN3, WRITING, assert_same_training, build, lora, moved, own_fields
from transformers import CONFIG_MAPPING
from trl import DistillationConfig, DistillationTrainer

from liger_trainer import LigerDistillationConfig, LigerDistillationTrainer
from liger_triton import reference

METRICS = ("loss", "grad_norm", "entropy", "completions/mean_length", "num_tokens")
KINDS = {"full": {}, "lora": {"peft_config": lora()}}
BETAS = [0.0, 0.4, 1.0]


def one(trainer_class, args_class, student, folder, part="lora_B", teacher=None, trainer_options=None, **options):
    """The teacher is wider than the student, and a different model."""
    generator = torch.Generator().manual_seed(4)
    rows = [{"prompt": words(generator, 2, 6)} for _ in range(8)]
    student = tiny_model(student) if isinstance(student, str) else student
    if teacher is None:
        teacher = tiny_model(student.config.model_type, seed=7, hidden_size=40)
    given = {"teacher_model": teacher} | (trainer_options or {})
    options = {"max_completion_length": 6} | options
    return moved(build(trainer_class, args_class, student, folder, rows, trainer_options=given, **options), part)


def ours_of(*args, **options):
    return one(LigerDistillationTrainer, LigerDistillationConfig, *args, **options)


def pair(*args, **options):
    return ours_of(*args, **options), one(DistillationTrainer, DistillationConfig, *args, **options)


def scored(trainer):
    """A generated batch in training."""
    trainer.model.train()
    return trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))


def gradients(trainer, batch, upstream=lambda loss, model: loss):
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, batch)
    upstream(loss, trainer.model).backward()
    return loss.detach(), {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}


def test_every_option_is_covered():
    """A new field of DistillationConfig needs a test here."""
    assert own_fields(DistillationConfig) - WRITING == {
        "beta",
        "temperature",
        "pad_to_multiple_of",
        "max_completion_length",  # below
        "teacher_model_name_or_path",
        "teacher_model_revision",
        "teacher_model_init_kwargs",
        "disable_dropout",
    }


@pytest.mark.diagonal
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("kind, split", [("full", (4, 1)), ("lora", (1, 4))], ids=str)
@pytest.mark.parametrize("model_type", LLAMA_AND_SLOWLY_QWEN3)
def test_every_divergence(beta, model_type, kind, split, tmp_path):
    options = {"beta": beta, "trainer_options": KINDS[kind], "split": split, "max_steps": 2, "temperature": 0.8}
    assert_same_training(*pair(model_type, tmp_path, **options), METRICS)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"split": (1, 4)}, id="one-row"),
        pytest.param({"gradient_checkpointing": True, "pad_to_multiple_of": 8}, id="checkpointing-padding"),
        pytest.param({"eval_strategy": "steps", "eval_steps": 1}, id="evaluation"),
    ],
)
def test_options(options, tmp_path):
    student = tiny_model("llama")
    student.generation_config.eos_token_id = list(range(2, 30))  # completions of unequal length
    logs = assert_same_training(*pair(student, tmp_path, beta=0.5, **options), METRICS)
    assert "eval_strategy" not in options or {"eval_loss", "eval_entropy"} <= logs[1].keys()


@pytest.mark.parametrize("model_type", ["gemma2", "granite", "cohere2"])
def test_families_that_scale_or_cap_their_logits(model_type, tmp_path):
    assert_same_training(*pair(model_type, tmp_path, beta=0.3, teacher=tiny_model("llama", seed=7)), METRICS)


@pytest.mark.skipif("gemma4" not in CONFIG_MAPPING, reason="this transformers has no Gemma 4")
@pytest.mark.parametrize("split", [(4, 1), (1, 4)])
def test_models_that_compute_only_completions_in_their_last_layers(split, tmp_path):
    """TRL asks student and teacher for the states of completions, and Gemma 4's layers cut their masks for it."""
    teacher = gemma4_models.text_model("e2b")
    ours, stock = pair(gemma4_models.text_model("e4b"), tmp_path, teacher=teacher, beta=0.4, split=split)
    assert_same_training(ours, stock, METRICS)
    assert "logits_to_keep" not in str(ours.liger_report["varlen_attention"])


@pytest.mark.parametrize("kind", KINDS)
def test_bf16(kind, tmp_path):
    """TRL scores outside the autocast that accelerate wraps around both models: in fp32, if the models are."""
    ours, stock = pair("llama", tmp_path, beta=0.5, bf16=True, trainer_options=KINDS[kind], max_steps=2)
    assert_same_training(ours, stock, METRICS)


def real_logits(trainer, batch):
    """Loss of the batch from logits, by autograd, for `beta` 0.5 and temperature 1."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    rows = slice(-batch["completion_ids"].shape[1] - 1, -1)
    logits = [m(input_ids=ids, attention_mask=mask).logits[:, rows] for m in (trainer.model, trainer.teacher_model)]
    eye = torch.eye(VOCAB)
    divergence = reference.linear_divergence(logits[0], eye, logits[1], eye, beta=0.5).divergence
    kept = batch["completion_mask"]
    return (divergence * kept).sum() / kept.sum()


PEFT = {
    "head": LoraConfig(r=4, target_modules=["q_proj", "lm_head"]),
    "head-dropout-off": LoraConfig(r=4, target_modules=["lm_head"], lora_dropout=0.0),
    "head-saved": LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "prompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


@pytest.mark.parametrize("name", PEFT)
def test_adapters_that_trl_refuses(name, tmp_path):
    """TRL's loss bypasses an adapter on the head, and virtual tokens. Here loss and gradients are right."""
    given = {"trainer_options": {"peft_config": PEFT[name]}}
    if name != "head-saved":
        with pytest.raises(ValueError, match="not supported"):
            one(DistillationTrainer, DistillationConfig, "llama", tmp_path, **given)
    ours = ours_of("llama", tmp_path, beta=0.5, part="lora_B" if "head" in name else "prompt_encoder", **given)
    batch = scored(ours)
    loss, grads = gradients(ours, batch)
    ours.model.zero_grad()
    want = real_logits(ours, batch)
    want.backward()
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=0)
    assert all(grad.norm() > 0 for grad in grads.values())
    assert_same_gradients(grads, {n: p.grad for n, p in ours.model.named_parameters() if p.grad is not None})


def test_teacher_with_an_adapter_on_its_head(tmp_path):
    teacher = get_peft_model(tiny_model("llama", seed=7), LoraConfig(r=4, target_modules=["lm_head"]))
    torch.nn.init.normal_(teacher.get_base_model().lm_head.lora_B["default"].weight)
    ours = ours_of("llama", tmp_path, beta=0.5, teacher=teacher)
    batch = scored(ours)
    torch.testing.assert_close(gradients(ours, batch)[0], real_logits(ours, batch).detach(), rtol=1e-5, atol=0)


def test_scaled_loss_with_an_auxiliary_one(tmp_path):
    ours, stock = pair("llama", tmp_path, beta=0.5)
    batch = scored(ours)
    stock.model.train()

    def upstream(loss, model):
        return loss * 3.7 + 0.01 * sum(p.square().sum() for p in model.parameters())

    assert_same_gradients(gradients(ours, batch, upstream)[1], gradients(stock, batch, upstream)[1])


@pytest.mark.parametrize("kind", KINDS)
def test_no_logits_of_student_or_teacher(kind, tmp_path, monkeypatch):
    """Generating makes one row of logits for each completion. Scoring makes three, for both models.

    The teacher, which TRL leaves trainable, gets no gradient.
    """
    monkeypatch.setattr("liger_triton._chunks._CPU_CHUNK_BYTES", 2 * 4 * VOCAB * 3)
    ours = ours_of("llama", tmp_path, trainer_options=KINDS[kind], beta=0.5)
    with LogitRows() as seen:
        batch = scored(ours)
    assert seen.rows == 4
    with LogitRows() as seen:
        _, grads = gradients(ours, batch)
    assert seen.rows == 3 and len(grads) > 0
    assert all(p.grad is None for p in ours.teacher_model.parameters())


def test_names_are_restored(tmp_path):
    before = dict(vars(trl_distillation))
    ours = ours_of("llama", tmp_path)
    gradients(ours, scored(ours))
    assert {name for name, value in vars(trl_distillation).items() if before.get(name) is not value} == set()


def test_teacher_is_patched_and_survives_a_copy(tmp_path):
    ours = ours_of("llama", tmp_path)
    batch = scored(ours)
    want, _ = gradients(ours, batch)
    twin = copy.deepcopy(ours.teacher_model)
    ours.teacher_model.lm_head.weight.data.zero_()
    ours.teacher_model = twin
    assert torch.equal(gradients(ours, batch)[0], want)


def test_vocabularies_of_two_sizes(tmp_path):
    with pytest.raises(ValueError, match=f"vocab_size {VOCAB} but the teacher model has vocab_size {VOCAB + 1}"):
        ours_of("llama", tmp_path, teacher=tiny_model("llama", vocab_size=VOCAB + 1))
    padded = tiny_model("llama")
    padded.lm_head = torch.nn.Linear(32, VOCAB + 5, bias=False)
    with pytest.raises(ValueError, match=f"a vocabulary of {VOCAB}, teacher_weight of {VOCAB + 5}"):
        ours_of("llama", tmp_path, teacher=padded).train()


def test_a_head_that_cannot_be_fused(tmp_path):
    config = {"peft_config": LoraConfig(r=4, target_modules=["lm_head"], use_dora=True)}
    with pytest.raises(
        ValueError, match="The student cannot be distilled with a fused divergence, since .*LoRA variant"
    ):
        ours_of("llama", tmp_path, trainer_options=config)


@pytest.mark.parametrize(
    "options, rtol", [({"use_liger": False}, 0), ({"liger_config": {"fused_linear_cross_entropy": False}}, 1e-5)]
)
def test_without_the_head_the_loss_is_the_stock_one(options, rtol, tmp_path):
    ours = ours_of("llama", tmp_path, beta=0.5, **options)
    assert not ours.uses_fused_head
    assert_same_training(ours, one(DistillationTrainer, DistillationConfig, "llama", tmp_path, beta=0.5), METRICS, rtol)


def test_options_without_effect_are_refused(tmp_path):
    with pytest.raises(ValueError, match="label_smoothing_factor is 0.1, which DistillationTrainer does not use"):
        ours_of("llama", tmp_path, label_smoothing_factor=0.1)
