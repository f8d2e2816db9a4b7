"""`LigerDPOTrainer` against `trl.DPOTrainer` from one seed, for every loss type: loss, gradients, every logged metric.

Where stock refuses or cannot do it, the formulas on real logits are the reference.
"""

import inspect
import re

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tiny_models import LargestTensor, ragged_pairs, tiny_model
from trainer_parity import DPO_LIMITS, LORA, assert_same_run, batch_of, build_dpo, own_fields, trained, with_lora
from trl import DPOConfig, DPOTrainer

from liger_trainer import LigerDPOTrainer

SOURCE = inspect.getsource(DPOTrainer._compute_loss)
LOSS_TYPES = re.findall(r'loss_type == "(\w+)"', SOURCE)
DIVERGENCES = re.findall(r'f_divergence_type == "(\w+)"', SOURCE)
# Further options that a loss type needs, or uses although they are off by default.
OPTIONS = {
    "exo_pair": {"label_smoothing": 0.01},
    "robust": {"label_smoothing": 0.1},
    "aot": {"label_smoothing": 0.1},
    "aot_unpaired": {"label_smoothing": 0.1},
    "discopop": {"discopop_tau": 0.5},
}


def logps_of_logits(model, batch):
    """Sum of the log-probabilities of each completion, from real logits."""
    log_p = torch.log_softmax(model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits, -1)
    per_token = log_p[:, :-1].gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    return (per_token * batch["completion_mask"][:, 1:]).sum(1).chunk(2)


def compare(model, tmp_path, split=(4, 1), **options):
    want = trained(build_dpo(DPOTrainer, model, tmp_path, split, **options))
    trainer = build_dpo(LigerDPOTrainer, model, tmp_path, split, **options)
    assert trainer.uses_fused_head
    assert_same_run(trained(trainer), want, limits=DPO_LIMITS)
    return trainer


def test_the_list_of_loss_types_is_all_of_trl_s():
    """They are in the branches of TRL's loss, in the list of its error message, and in its config's help."""
    listed = re.search(r"Should be one of \[(.*?)\]", SOURCE.replace('"\n', "").replace('    "', ""), re.S).group(1)
    wording = DPOConfig.__dataclass_fields__["loss_type"].metadata["help"]
    assert len(LOSS_TYPES) >= 15
    assert set(re.findall(r"'(\w+)'", listed)) == set(LOSS_TYPES)
    assert set(re.findall(r"`'(\w+)'`", wording)) == set(LOSS_TYPES)


def test_every_option_is_covered():
    """A new field of DPOConfig needs a test here, and so does a new f-divergence."""
    assert own_fields(DPOConfig) == {
        "loss_type",
        "loss_weights",
        "ld_alpha",
        "f_divergence_type",
        "f_alpha_divergence_coef",
        "label_smoothing",
        "beta",
        "use_weighting",
        "discopop_tau",
        "precompute_ref_log_probs",
        "precompute_ref_batch_size",
        "router_aux_loss_coef",
        "sync_ref_model",
        "ref_model_sync_steps",
        "disable_dropout",
        "max_length",
        "truncation_mode",
        "pad_to_multiple_of",  # below
        "padding_free",  # TRL 1.16 warns that it has none
        "activation_offloading",  # needs a GPU
        "ref_model_mixup_alpha",
        "model_init_kwargs",
        "trust_remote_code",
        "dataset_num_proc",
        "pad_token",
    }
    assert DIVERGENCES == ["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]


# Loss types differ by a few lines of TRL on two sums: each runs in one cell, and one of them in all pairs of values.
CELLS = [("llama", "full", (4, 1)), ("llama", "lora", (1, 4)), ("qwen3", "lora", (4, 1)), ("qwen3", "full", (1, 4))]
GRID = [("sigmoid", *cell) for cell in CELLS] + [
    (loss_type, *CELLS[i % 4]) for i, loss_type in enumerate(LOSS_TYPES) if loss_type != "sigmoid"
]


@pytest.mark.parametrize("loss_type, model_type, kind, split", GRID, ids=str)
def test_every_loss_type(loss_type, model_type, kind, split, tmp_path):
    model = tiny_model(model_type)
    model = with_lora(model, LORA) if kind == "lora" else model
    compare(model, tmp_path, split, loss_type=loss_type, **OPTIONS.get(loss_type, {}))


def dropping():
    return tiny_model("llama", attention_dropout=0.2)


@pytest.fixture(scope="module")
def loss_without_options(tmp_path_factory):
    """The loss of the first step."""
    logs, _ = trained(build_dpo(LigerDPOTrainer, dropping(), tmp_path_factory.mktemp("plain")))
    return logs[0]["loss"]


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},  # MPO
        {"f_divergence_type": "forward_kl"},
        {"f_divergence_type": "js_divergence"},
        {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.7, "loss_type": ["ipo"]},
        {"ld_alpha": 0.4},
        {"use_weighting": True, "beta": 0.3},
        {"precompute_ref_log_probs": True, "ld_alpha": 0.4, "precompute_ref_batch_size": 3},
        {"sync_ref_model": True, "ref_model_sync_steps": 1, "gradient_checkpointing": True},
        {"max_length": 12, "pad_to_multiple_of": 8},
        {"truncation_mode": "keep_end", "max_length": 12, "disable_dropout": False},
    ],
    ids=lambda options: "+".join(options),
)
def test_options(options, tmp_path, loss_without_options):
    """Each option changes the loss of the first step, except the ones that must not."""
    trainer = compare(dropping(), tmp_path, **options)
    if not {"sync_ref_model", "precompute_ref_log_probs"} & options.keys():
        assert loss_without_options != pytest.approx(trainer.state.log_history[0]["loss"], rel=1e-4)


def test_mixture_of_experts(tmp_path):
    """The auxiliary loss is weighted and logged."""
    trainer = compare(tiny_model("qwen3_moe"), tmp_path, (2, 2), router_aux_loss_coef=0.1)
    assert trainer.state.log_history[0]["aux_loss"] > 0


@pytest.mark.parametrize("kind", ["disabled", "second"])
def test_the_reference_is_an_adapter_disabled_or_a_second_one(kind, tmp_path):
    """If a model comes with an adapter, stock makes a second one, named ref."""
    torch.manual_seed(0)
    model, given = tiny_model("llama"), {}
    if kind == "second":
        model = with_lora(model, ["q_proj", "up_proj"])
    else:
        given = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)}
    trainer = compare(model, tmp_path, trainer_options=given)
    assert ("ref" in trainer.model.peft_config) == (kind == "second")
    assert trainer.ref_model is None


def test_prompt_learning(tmp_path):
    """Virtual tokens come before the real ones in the head's output."""
    torch.manual_seed(0)
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = get_peft_model(tiny_model("llama"), config)
    compare(model, tmp_path, trainer_options={"ref_model": tiny_model("llama", seed=7)})


def test_an_adapter_on_the_head_that_trl_refuses(tmp_path):
    torch.manual_seed(0)
    given = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)}
    with pytest.raises(ValueError, match="adapter to `lm_head` is not supported"):
        build_dpo(DPOTrainer, tiny_model("llama"), tmp_path, trainer_options=given)
    trainer = build_dpo(LigerDPOTrainer, tiny_model("llama"), tmp_path, trainer_options=given)
    model, batch = trainer.model.train(), batch_of(trainer)
    with torch.no_grad(), model.disable_adapter():
        ref_chosen, ref_rejected = logps_of_logits(model, batch)
    chosen, rejected = logps_of_logits(model, batch)
    want = -F.logsigmoid(0.1 * (chosen - ref_chosen - rejected + ref_rejected)).mean()
    parameters = [p for p in model.parameters() if p.requires_grad]
    want_grads = torch.autograd.grad(want, parameters)
    got = trainer.compute_loss(model, batch)
    assert got.item() == pytest.approx(want.item(), rel=1e-5)
    for ours, stock in zip(torch.autograd.grad(got, parameters), want_grads, strict=True):
        assert (ours - stock).norm() <= 1e-5 * stock.norm()


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_any_upstream_gradient_and_an_auxiliary_loss(kind, tmp_path):
    model = with_lora(tiny_model("llama"), LORA) if kind == "lora" else tiny_model("llama")
    grads = []
    for trainer_class in (DPOTrainer, LigerDPOTrainer):
        trainer = build_dpo(trainer_class, model, tmp_path, use_weighting=True)
        batch = batch_of(trainer)
        parameters = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
        auxiliary = sum(p.square().sum() for p in parameters.values())
        (3.7 * trainer.compute_loss(trainer.model.train(), batch) + 0.01 * auxiliary).backward()
        grads.append({name: p.grad for name, p in parameters.items()})
    for name, grad in grads[0].items():
        assert (grads[1][name] - grad).norm() <= 1e-5 * grad.norm(), name


@pytest.mark.parametrize(
    "kind, options",
    [("full", {}), ("lora", {}), ("full", {"precompute_ref_log_probs": True, "use_weighting": True})],
    ids=str,
)
def test_no_logits_of_policy_or_reference(kind, options, tmp_path, monkeypatch):
    """This holds in a training step, in an evaluation step, and while the reference is precomputed."""
    import liger_triton._chunks as chunks

    monkeypatch.setattr(chunks, "_CPU_CHUNK_BYTES", 64 * 4 * 4096)  # 64 rows, out of 400 or more with a label
    model = tiny_model("llama", vocab_size=4096)
    given = {"ref_model": tiny_model("llama", vocab_size=4096, seed=7)} if kind == "full" else {}
    model = with_lora(model, LORA) if kind == "lora" else model
    rows = [{"prompt": "w3 w4", "chosen": f" w{i}" * 60, "rejected": f" w{20 + i}" * 50} for i in range(4)]
    with LargestTensor() as largest:
        trainer = build_dpo(LigerDPOTrainer, model, tmp_path, rows=rows, trainer_options=given, **options)
        batch = batch_of(trainer)
        trainer.compute_loss(trainer.model.train(), dict(batch)).backward()
        trainer.prediction_step(trainer.model.eval(), dict(batch), prediction_loss_only=True)
    labels = int(batch["completion_mask"][:, 1:].sum())
    assert labels > 400
    assert 64 * 4096 <= largest.numel < labels * 4096 / 4  # one chunk


def test_vision_language_batch(tmp_path):
    """Each prompt has an image, as TRL's vision collator gives it to the trainer."""
    tokens = {"image_token_id": 120, "vision_start_token_id": 119}
    model = tiny_model("qwen2_5_vl", **tokens)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 110, (4, 14), generator=generator)
    ids[:, 1:6] = torch.tensor([119, 120, 120, 120, 120])  # 4 x 4 patches, merged 2 x 2
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "completion_mask": (torch.arange(14) >= 9).long().expand(4, -1),
        "pixel_values": torch.randn(4 * 16, 3 * 2 * 14 * 14, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 4),
        "mm_token_type_ids": (ids == 120).int(),
    }
    losses, grads = [], []
    for trainer_class in (DPOTrainer, LigerDPOTrainer):
        given = {"ref_model": tiny_model("qwen2_5_vl", seed=7, **tokens)}
        trainer = build_dpo(trainer_class, model, tmp_path, trainer_options=given)
        loss = trainer.compute_loss(trainer.model.train(), dict(batch))
        loss.backward()
        losses.append(loss.item())
        grads.append({n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None})
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert any("visual" in name for name in grads[0])
    for name, grad in grads[0].items():
        assert (grads[1][name] - grad).norm() <= 1e-5 * grad.norm() + 1e-9, name


def test_evaluation(tmp_path):
    results = []
    for trainer_class in (DPOTrainer, LigerDPOTrainer):
        result = build_dpo(trainer_class, tiny_model("granite"), tmp_path).evaluate(Dataset.from_list(ragged_pairs(6)))
        results.append(
            {name: value for name, value in result.items() if "runtime" not in name and "_second" not in name}
        )
    assert results[1] == pytest.approx(results[0], rel=1e-5, abs=2e-6)


def test_both_models_are_patched_and_the_report_is_the_policy_s(tmp_path):
    trainer = build_dpo(LigerDPOTrainer, tiny_model("llama"), tmp_path, liger_config={"rope": False})
    assert trainer.liger_report["rms_norm"].swapped and not trainer.liger_report["rope"].swapped
    for model in (trainer.model, trainer.ref_model):
        assert "forward" in model.model.layers[0].input_layernorm.__dict__
        assert "forward" in model.lm_head.__dict__


def test_use_liger_false_is_the_stock_trainer_bit_for_bit(tmp_path):
    want, _ = trained(build_dpo(DPOTrainer, tiny_model("llama"), tmp_path))
    trainer = build_dpo(LigerDPOTrainer, tiny_model("llama"), tmp_path, use_liger=False)
    assert trainer.liger_report is None
    assert trained(trainer)[0] == want


def test_the_head_alone_can_be_switched_off(tmp_path):
    model = tiny_model("llama")
    options = {"liger_config": {"fused_linear_cross_entropy": False}}
    want = trained(build_dpo(DPOTrainer, model, tmp_path))
    trainer = build_dpo(LigerDPOTrainer, model, tmp_path, **options)
    assert not trainer.uses_fused_head and trainer.liger_report["rms_norm"].swapped
    assert_same_run(trained(trainer), want, limits=DPO_LIMITS)


def test_options_that_would_be_ignored_are_refused(tmp_path):
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="label_smoothing_factor is 0.1, which DPOTrainer does not use"):
        build_dpo(LigerDPOTrainer, model, tmp_path, label_smoothing_factor=0.1)
    with pytest.raises(
        ValueError, match="label_smoothing is 0.1, which DPOTrainer does not use with loss_type .'hinge'"
    ):
        build_dpo(LigerDPOTrainer, model, tmp_path, label_smoothing=0.1, loss_type="hinge")

    class OverridesTheWrongMethod(LigerDPOTrainer):
        def token_loss(self, outputs, inputs):
            return -outputs.log_probs

    with pytest.raises(ValueError, match="DPOTrainer never calls. Override compute_loss instead. In it, model"):
        build_dpo(OverridesTheWrongMethod, model, tmp_path)
