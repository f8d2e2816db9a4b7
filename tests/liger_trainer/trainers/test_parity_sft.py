"""`LigerSFTTrainer` against `trl.SFTTrainer`, step by step from one seed.

Compares losses, gradient norms and every logged metric.
"""

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tiny_models import PARITY_SET, text_rows, tiny_model
from trainer_parity import CELLS, SFT_METRICS, SPLITS, assert_same_numbers, logged_values, run, with_lora
from trl import SFTTrainer

from liger_trainer import LigerSFTTrainer


@pytest.mark.parametrize("model_type, kind, checkpointing", CELLS)
def test_every_step_agrees_for_every_split(model_type, kind, checkpointing, tmp_path):
    model = tiny_model(model_type)
    if kind == "lora":
        model = with_lora(model, ["q_proj", "v_proj", "gate_proj", "down_proj"])
    runs, options = {}, {"gradient_checkpointing": checkpointing == "checkpointing"}
    for split in SPLITS:
        want, _ = run(SFTTrainer, model, tmp_path, split, **options)
        runs[split], trainer = run(LigerSFTTrainer, model, tmp_path, split, **options)
        assert trainer.uses_fused_head
        assert_same_numbers(runs[split], want)
    losses_and_norms = slice(
        0, 2
    )  # TRL averages entropy and accuracy over micro-batches, so they depend on the split in stock too
    assert_same_numbers(runs[4, 2][:, losses_and_norms], runs[8, 1][:, losses_and_norms])
    assert_same_numbers(runs[1, 8][:, losses_and_norms], runs[8, 1][:, losses_and_norms])


@pytest.mark.diagonal
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"label_smoothing_factor": 0.1}, id="label-smoothing"),
        pytest.param({"loss_type": "dft"}, id="dft"),
        pytest.param({"packing": True, "packing_strategy": "wrapped", "max_length": 16}, id="packing-wrapped"),
        pytest.param({"packing": True, "max_length": 32}, id="packing-bfd"),
    ],
)
@pytest.mark.parametrize("model_type, split", [("llama", (4, 2)), ("gemma2", (1, 8))], ids=str)
def test_options(model_type, split, options, tmp_path):
    model = tiny_model(model_type)
    want, _ = run(SFTTrainer, model, tmp_path, split, **options)
    got, _ = run(LigerSFTTrainer, model, tmp_path, split, **options)
    assert_same_numbers(got, want)


@pytest.mark.parametrize("trainer_class, passes", [(LigerSFTTrainer, 1), (SFTTrainer, 2)])
def test_smoothing_costs_no_second_forward_pass(trainer_class, passes, tmp_path):
    _, trainer = run(trainer_class, tiny_model("llama"), tmp_path, train=False, label_smoothing_factor=0.1)
    calls = []
    trainer.model.get_input_embeddings().register_forward_hook(lambda *_: calls.append(1))
    trainer.train()
    assert len(calls) == trainer.state.global_step * passes


@pytest.mark.parametrize("options", [{}, {"label_smoothing_factor": 0.1}, {"loss_type": "dft"}], ids=str)
def test_the_router_s_loss_of_experts(options, tmp_path):
    """TRL adds it to the loss, except with label smoothing, and always logs it."""
    model = tiny_model("qwen3_moe", router_aux_loss_coef=0.1)
    want, stock = run(SFTTrainer, model, tmp_path, (4, 2), **options)
    got, ours = run(LigerSFTTrainer, model, tmp_path, (4, 2), **options)
    assert_same_numbers(got, want)
    logged = [logged_values(t, "aux_loss") for t in (ours, stock)]
    assert logged[0] == pytest.approx(logged[1], rel=1e-5) and len(logged[0]) == 2


OF_THEIR_OWN = ("gemma2", "granite", "phi", "qwen3_moe", "qwen2_5_vl")  # a cap, a scale, a bias, experts, positions


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=() if name in OF_THEIR_OWN else pytest.mark.slow) for name in PARITY_SET]
)
def test_every_family(model_type, tmp_path):
    model = tiny_model(model_type)
    want, _ = run(SFTTrainer, model, tmp_path, (4, 2))
    got, trainer = run(LigerSFTTrainer, model, tmp_path, (4, 2))
    assert trainer.uses_fused_head
    assert_same_numbers(got, want)


@pytest.mark.parametrize("completion_only", [True, False])
def test_prompt_and_completion_rows(completion_only, tmp_path):
    model = tiny_model("llama")
    want, _ = run(SFTTrainer, model, tmp_path, rows=text_rows(), completion_only_loss=completion_only)
    got, _ = run(LigerSFTTrainer, model, tmp_path, rows=text_rows(), completion_only_loss=completion_only)
    assert_same_numbers(got, want)


def test_peft_config_given_to_the_trainer(tmp_path):
    options = {"trainer_options": {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "up_proj"])}}
    want, _ = run(SFTTrainer, tiny_model("llama"), tmp_path, **options)
    got, trainer = run(LigerSFTTrainer, tiny_model("llama"), tmp_path, **options)
    assert trainer.uses_fused_head
    assert_same_numbers(got, want)


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
def test_an_adapter_on_the_head_that_trl_refuses(use_dora, tmp_path):
    """Compares with TRL's own loss on real logits: `compute_loss_func` is its path without a fused head."""
    config = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False, use_dora=use_dora)
    with pytest.raises(ValueError, match="adapter to `lm_head` is not supported"):
        run(SFTTrainer, tiny_model("llama"), tmp_path, trainer_options={"peft_config": config})

    def loss(outputs, labels, num_items_in_batch):
        logits, labels = outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
        return torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch

    options = {"peft_config": config}
    want, _ = run(
        LigerSFTTrainer, tiny_model("llama"), tmp_path, trainer_options={**options, "compute_loss_func": loss}
    )
    got, trainer = run(LigerSFTTrainer, tiny_model("llama"), tmp_path, trainer_options=options)
    assert_same_numbers(got, want)
    moved = [name for name, p in trainer.model.named_parameters() if "lm_head" in name and p.requires_grad]
    assert moved and all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_prompt_learning(tmp_path):
    """Virtual tokens, without labels, come before the real ones."""
    torch.manual_seed(0)
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = get_peft_model(tiny_model("llama"), config)
    want, _ = run(SFTTrainer, model, tmp_path)
    got, trainer = run(LigerSFTTrainer, model, tmp_path)
    assert trainer.uses_fused_head
    assert_same_numbers(got, want)


def test_use_liger_false_is_the_stock_trainer_bit_for_bit(tmp_path):
    want, stock = run(SFTTrainer, tiny_model("llama"), tmp_path)
    got, trainer = run(LigerSFTTrainer, tiny_model("llama"), tmp_path, use_liger=False)
    assert torch.equal(got, want)
    assert trainer.liger_report is None


def test_head_alone_can_be_switched_off(tmp_path):
    want, _ = run(SFTTrainer, tiny_model("llama"), tmp_path)
    got, trainer = run(
        LigerSFTTrainer, tiny_model("llama"), tmp_path, liger_config={"fused_linear_cross_entropy": False}
    )
    assert not trainer.uses_fused_head
    assert_same_numbers(got, want)


def test_evaluation(tmp_path):
    results = {}
    for trainer_class in (SFTTrainer, LigerSFTTrainer):
        for metrics in (None, lambda prediction: {}):
            _, trainer = run(
                trainer_class,
                tiny_model("granite"),
                tmp_path,
                train=False,
                trainer_options={"compute_metrics": metrics},
            )
            result = trainer.evaluate()
            results[trainer_class, metrics is None] = {
                name: result[name] for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy")
            }
    want = results[SFTTrainer, True]
    for got in results.values():
        assert got == pytest.approx(want, rel=1e-5)


def test_trl_names_are_restored_after_init(tmp_path):
    import trl.trainer.sft_trainer as module

    before = module.add_fused_lm_head, module.BaseTunerLayer
    run(LigerSFTTrainer, tiny_model("llama"), tmp_path, train=False)
    assert (module.add_fused_lm_head, module.BaseTunerLayer) == before


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_mixed_precision_keeps_the_fused_paths(smoothing, tmp_path, monkeypatch):
    """accelerate wraps `model.forward` for bf16 when training starts. Our parts must not fall back to stock."""
    import liger_triton.linear_head as head

    modes, apply = [], head._LinearHead.forward
    monkeypatch.setattr(head._LinearHead, "forward", staticmethod(lambda ctx, *a: modes.append(a[7]) or apply(ctx, *a)))
    options = {"bf16": True, "label_smoothing_factor": smoothing}
    want, _ = run(SFTTrainer, tiny_model("llama"), tmp_path, **options)
    got, trainer = run(LigerSFTTrainer, tiny_model("llama"), tmp_path, **options)
    assert modes == ["uniform"] * 2  # two steps, gradients in the forward pass, no second forward
    assert trainer.uses_fused_head
    smooth = [
        SFT_METRICS.index(name) for name in ("loss", "grad_norm", "entropy", "num_tokens")
    ]  # an argmax may flip in bf16
    torch.testing.assert_close(got[:, smooth], want[:, smooth], rtol=2e-2, atol=0)
