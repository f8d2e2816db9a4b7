"""`LigerKTOTrainer` against `trl.KTOTrainer` from one seed: every gradient, every logged number."""

import copy

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tiny_models import VOCAB, LogitRows, assert_same_gradients, kto_rows, tiny_model
from trainer_parity import assert_same_training, build, lora, loss_types, moved, own_fields
from trl import KTOConfig, KTOTrainer

from liger_trainer import LigerKTOConfig, LigerKTOTrainer

METRICS = ("loss", "grad_norm", "kl", "entropy", "num_tokens", "logits/chosen", "rewards/rejected", "rewards/margins")
LOSSES = KTOConfig.__dataclass_fields__["loss_type"].metadata["choices"]


def reference(model_type):
    """A reference other than the policy, because otherwise every log-ratio would be zero."""
    return tiny_model(model_type, seed=7)


# With a LoRA, the reference is the model without it.
KINDS = {"full": lambda name: {"ref_model": reference(name)}, "lora": lambda name: {"peft_config": lora()}}


def pair(model, folder, part="lora_B", **options):
    ours = build(LigerKTOTrainer, LigerKTOConfig, model, folder, kto_rows(), **options)
    stock = build(KTOTrainer, KTOConfig, model, folder, kto_rows(), **options)
    return moved(ours, part), moved(stock, part)


def test_every_option_is_covered():
    """A new field of KTOConfig needs a test here. The losses are read from TRL's choices and from its code."""
    assert set(LOSSES) == set(loss_types(KTOTrainer)) >= {"kto", "apo_zero_unpaired"}
    assert own_fields(KTOConfig) == {
        "loss_type",
        "beta",
        "desirable_weight",
        "undesirable_weight",
        "max_length",
        "pad_to_multiple_of",
        "precompute_ref_log_probs",
        "precompute_ref_batch_size",
        "router_aux_loss_coef",
        "sync_ref_model",
        "ref_model_sync_steps",  # below
        "activation_offloading",  # needs a GPU
        "ref_model_mixup_alpha",
        "disable_dropout",
        "model_init_kwargs",
        "trust_remote_code",
        "dataset_num_proc",
    }


@pytest.mark.parametrize(
    "loss_type, model_type, kind, whole",
    [
        cell
        for i, loss_type in enumerate(LOSSES)
        for models in [(("llama", "qwen3"), ("qwen3", "llama"))[i % 2]]
        for cell in ((loss_type, models[0], "full", True), (loss_type, models[1], "lora", False))
    ],
)
def test_every_loss(loss_type, model_type, kind, whole, tmp_path):
    """Four rows a step, `whole` or split. The KL estimate of "kto" needs two in a micro-batch (TRL refuses one)."""
    if whole:
        split = (4, 1)
    else:
        split = (2, 2) if loss_type == "kto" else (1, 4)
    model, given = tiny_model(model_type), KINDS[kind](model_type)
    options = {"loss_type": loss_type, "split": split, "trainer_options": given, "max_steps": 2, "beta": 0.3}
    assert_same_training(*pair(model, tmp_path, **options), METRICS if whole else METRICS[:-1])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"desirable_weight": 0.7, "undesirable_weight": 1.6, "max_length": 9}, id="weights-max-length"),
        pytest.param({"precompute_ref_log_probs": True, "precompute_ref_batch_size": 3}, id="precomputed-reference"),
        pytest.param({"gradient_checkpointing": True, "pad_to_multiple_of": 8}, id="checkpointing-padding"),
        pytest.param({"sync_ref_model": True, "ref_model_sync_steps": 1, "max_steps": 2}, id="synced-reference"),
    ],
)
def test_options(options, tmp_path):
    options = {"trainer_options": {"ref_model": reference("llama")}} | options
    assert_same_training(*pair(tiny_model("llama"), tmp_path, **options), METRICS)


def test_mixture_of_experts(tmp_path):
    model = tiny_model("qwen3_moe", output_router_logits=True)
    given = {"ref_model": reference("qwen3_moe")}
    ours, stock = pair(model, tmp_path, router_aux_loss_coef=0.3, trainer_options=given)
    assert_same_training(ours, stock, (*METRICS, "aux_loss"))


def test_reference_from_a_second_adapter(tmp_path):
    """TRL gives a `PeftModel` an adapter "ref", a copy of the trained one. Here it is a different one."""
    ours, stock = pair(get_peft_model(tiny_model("llama"), lora()), tmp_path, part="lora_B.ref")
    assert_same_training(ours, stock, METRICS)


def test_prompt_learning(tmp_path):
    """TRL's head allows it too. The virtual tokens are cut off its outputs and ours."""
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    ours, stock = pair(tiny_model("llama"), tmp_path, part="prompt_encoder", trainer_options={"peft_config": config})
    assert_same_training(ours, stock, METRICS)


def test_evaluation(tmp_path):
    given = {"trainer_options": {"ref_model": reference("llama")}}
    ours, stock = pair(tiny_model("llama"), tmp_path, eval_strategy="steps", eval_steps=1, **given)
    logs = assert_same_training(ours, stock, METRICS)
    assert {"eval_loss", "eval_kl", "eval_rewards/margins"} <= logs[1].keys()


def test_adapter_on_the_head_trains(tmp_path):
    """TRL refuses it. Ours gives the loss and gradients of the same adapter on real logits."""
    given = {"trainer_options": {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "lm_head"])}}
    with pytest.raises(ValueError, match="adapter to `lm_head`"):
        build(KTOTrainer, KTOConfig, tiny_model("llama"), tmp_path, kto_rows(), **given)
    losses, grads = [], []
    for fused in (True, False):
        trainer = moved(build(LigerKTOTrainer, LigerKTOConfig, tiny_model("llama"), tmp_path, kto_rows(), **given))
        if not fused:
            head = trainer.model.get_base_model().lm_head
            head.lora_bias["default"] = True  # this adapter has a bias, which the fused head cannot have
            head.lora_B["default"].bias = torch.nn.Parameter(torch.zeros(VOCAB))
        batch = next(iter(trainer.get_train_dataloader()))
        losses.append(trainer.compute_loss(trainer.model, batch))
        losses[-1].backward()
        trainable = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad and not n.endswith("bias")}
        grads.append({n: p.grad for n, p in trainable.items()})
    assert any("lm_head.lora_A" in name for name in grads[0]) and all(grad.norm() > 0 for grad in grads[0].values())
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    assert_same_gradients(*grads)


def test_scaled_loss_with_an_auxiliary_one(tmp_path):
    ours, stock = pair(tiny_model("llama"), tmp_path, trainer_options={"ref_model": reference("llama")})
    grads = []
    for trainer in (ours, stock):
        batch = next(iter(trainer.get_train_dataloader()))
        auxiliary = sum(p.square().sum() for p in trainer.model.parameters())
        (trainer.compute_loss(trainer.model, batch) * 3.7 + 0.01 * auxiliary).backward()
        grads.append({n: p.grad for n, p in trainer.model.named_parameters()})
    assert_same_gradients(*grads)


@pytest.mark.parametrize("kind, precompute", [("full", False), ("full", True), ("lora", False)])
def test_no_logits_of_policy_or_reference(kind, precompute, tmp_path, monkeypatch):
    """This holds while the reference is precomputed, in a training step and in an evaluation step."""
    monkeypatch.setattr("liger_triton._chunks._CPU_CHUNK_BYTES", 4 * VOCAB * 3)  # three rows a chunk
    given = {"trainer_options": KINDS[kind]("llama"), "precompute_ref_log_probs": precompute}
    with LogitRows() as seen:
        ours = build(LigerKTOTrainer, LigerKTOConfig, tiny_model("llama"), tmp_path, kto_rows(), **given)
    assert seen.rows == (3 if precompute else 0)
    batch = next(iter(ours.get_train_dataloader()))
    with LogitRows() as seen:
        ours.compute_loss(ours.model, batch).backward()
        ours.prediction_step(ours.model.eval(), batch, prediction_loss_only=True)
    assert seen.rows == 3


def test_reference_is_patched_and_survives_a_copy(tmp_path):
    ours = build(
        LigerKTOTrainer,
        LigerKTOConfig,
        tiny_model("llama"),
        tmp_path,
        kto_rows(),
        trainer_options={"ref_model": reference("llama")},
    )
    batch = next(iter(ours.get_train_dataloader()))
    want = ours.compute_ref_log_probs(ours.ref_model, batch)[0]
    twin = copy.deepcopy(ours.ref_model)
    ours.ref_model.lm_head.weight.data.zero_()
    assert torch.equal(ours.compute_ref_log_probs(twin, batch)[0], want)


def test_use_liger_false_is_the_stock_trainer(tmp_path):
    given = {"trainer_options": {"ref_model": reference("llama")}}
    ours = build(LigerKTOTrainer, LigerKTOConfig, tiny_model("llama"), tmp_path, kto_rows(), use_liger=False, **given)
    stock = build(KTOTrainer, KTOConfig, tiny_model("llama"), tmp_path, kto_rows(), **given)
    assert_same_training(ours, stock, METRICS, rtol=0)


def test_options_without_effect_are_refused(tmp_path):
    with pytest.raises(ValueError, match="label_smoothing_factor is 0.1, which KTOTrainer does not use. Remove it."):
        build(
            LigerKTOTrainer,
            LigerKTOConfig,
            tiny_model("llama"),
            tmp_path,
            kto_rows(),
            label_smoothing_factor=0.1,
            trainer_options={"ref_model": reference("llama")},
        )
