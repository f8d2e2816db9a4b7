"""`liger-trainer verify` is silent on correct code, for every trainer and shipped recipe; and its output."""

import json
import math

import pytest
import torch
from recipe_fixtures import ROOT, command, write_model, write_recipe, write_rows
from transformers import AutoConfig
from verify_setups import failed, lora, setup_of

from liger_trainer import LigerSFTTrainer
from liger_trainer.command.recipe.read import recipe_names
from liger_trainer.head.deferred import DeferredLogits
from liger_trainer.verify import quiet, verify
from liger_trainer.verify.figures import MOST, RTOL, errors, worst
from liger_trainer.verify.runs import Bench, OtherOrder

GROUPED = {"options": {"beta": 0.04, "num_iterations": 2}, "peft_config": lora()}
STAGE_2 = {
    "options": {"medusa_stage": 2, "medusa_heads_coefficient": 0.1, "medusa_schedule": "sine"},
    "peft_config": lora(),
}
SETUPS = {
    "Trainer": ("", {"options": {"label_smoothing_factor": 0.1}}),
    "Trainer, LoRA": ("", {"peft_config": lora()}),
    "SFT, padding-free": (
        "SFT",
        {"options": {"padding_free": True, "max_length": None, "activation_checkpointing": "true"}},
    ),
    "SFT, head saved": ("SFT", {"peft_config": lora("q_proj", modules_to_save=["lm_head"])}),
    "SFT, DFT": ("SFT", {"options": {"loss_type": "dft"}}),
    "DPO, LoRA": ("DPO", {"options": {"activation_checkpointing": "auto"}, "peft_config": lora()}),
    "DPO, precomputed": ("DPO", {"options": {"loss_type": ["ipo"], "precompute_ref_log_probs": True}}),
    "KTO": ("KTO", {}),
    "KTO, LoRA": ("KTO", {"peft_config": lora()}),
    "ORPO": ("ORPO", {"options": {"remove_unused_columns": False}}),
    "CPO, LoRA": ("CPO", {"options": {"loss_type": "simpo", "cpo_alpha": 0.0}, "peft_config": lora()}),
    "GRPO": ("GRPO", {}),
    "GRPO, LoRA": ("GRPO", GROUPED),
    "RLOO": ("RLOO", {}),
    "Distillation": ("Distillation", {}),
    "Medusa": ("Medusa", {}),
    "Medusa, untied, packed": ("Medusa", {"options": {"packing": True, "medusa_tied": False}}),
    "Medusa, stage 2, LoRA": ("Medusa", STAGE_2),
    "Medusa, soft": ("Medusa", {"options": {"medusa_stage": 2, "medusa_targets": "soft"}}),
}
QUICK = ("ORPO",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SETUPS]
)
def test_nothing_is_found_where_nothing_is_wrong(name):
    method, parts = SETUPS[name]
    assert failed(method, **parts) == {}


def test_what_applies_is_checked_and_what_does_not_says_so():
    report = verify(setup_of("SFT", options={"packing": True}, peft_config=lora()))
    assert report.failed == []
    found = {check.name: check for check in report.checks}
    left_out = {name for name, check in found.items() if check.verdict == "-"}
    assert left_out == {
        "captured steps = uncaptured",
        "optimizer in backward = after it",
        "padded rows = unpadded rows",
        "padding on the left",
        "reference model",
    }
    assert all(check.figure is None for check in report.checks if check.verdict == "-")
    assert 0 < found["gradients"].figure < 1e-5 and found["gradients"].tolerance >= RTOL
    assert report.compared_with == "SFTTrainer" and "swiglu 2/2" in report.swapped
    assert found["saved and resumed = uninterrupted"].detail.endswith("bit for bit")
    assert found["Adam, 2 epochs: weights, states"].detail == "2 steps of AdamW, bit for bit"


@pytest.mark.slow
def test_options_that_stock_refuses_equal_full_logits():
    report = verify(setup_of("SFT", peft_config=lora("q_proj", "lm_head")))
    assert report.failed == [] and "nothing swapped, because of SFTTrainer's ValueError" in report.compared_with


def test_a_run_with_nothing_swapped_has_real_logits(monkeypatch, tmp_path):
    monkeypatch.setattr(DeferredLogits, "fused", None)
    with quiet():
        Bench(setup_of("SFT", peft_config=lora("q_proj", "lm_head")), str(tmp_path)).run("plain", max_steps=1)


def test_a_step_that_raises_has_failed(monkeypatch):
    def compute_loss(*args, **kwargs):
        raise RuntimeError("no such step")

    monkeypatch.setattr(LigerSFTTrainer, "compute_loss", compute_loss)
    report = verify(setup_of("SFT"))
    assert [(check.name, check.detail) for check in report.checks] == [
        ("losses and gradient norm", "RuntimeError: no such step")
    ]


# The figures that decide


def test_errors_are_relative_to_a_tensor_or_to_the_largest_where_it_is_nothing():
    want = {"large": torch.tensor([3.0, 4.0]), "nothing": torch.zeros(2)}
    assert errors(want, want) == {"large": 0, "nothing": 0}
    found = errors({"large": torch.tensor([3.0, 4.5]), "nothing": torch.tensor([0.0, 1e-3])}, want)
    assert found["large"] == pytest.approx(0.1) and found["nothing"] == pytest.approx(0.2)  # of 5, and of 5e-3
    assert errors({"large": torch.tensor([math.nan, 0])}, want)["large"] == math.inf
    assert errors({}, want) == {"large": 1, "nothing": 0}, "a gradient that is missing is one of zero"


def test_a_tensor_may_be_off_by_some_times_its_own_noise_but_never_by_more_than_a_limit():
    want = [{"a": torch.ones(4), "b": torch.ones(4)}]
    got = [{"a": torch.ones(4) * (1 + 5e-4), "b": torch.ones(4)}]
    assert worst(got, want, {}).verdict == "FAILED" and "a" in worst(got, want, {}).detail
    assert worst(got, want, {"a": 1e-4}).verdict == "ok"
    assert worst(got, want, {"a": 1.0}).tolerance == MOST
    assert worst(got, [], {}).figure == math.inf


def test_another_order_of_sums_changes_a_product_by_rounding():
    x, w = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0))
    with OtherOrder():
        got = x @ w
    assert not torch.equal(got, x @ w) and (got - x @ w).norm() < 1e-6 * got.norm()


# The command


@pytest.fixture
def recipe(tmp_path):
    write_model(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", n=16)
    return write_recipe(tmp_path)


@pytest.mark.slow
def test_the_table_and_what_was_left_out(recipe, capsys):
    with open(recipe, "a") as file:
        file.write("optim: paged_adamw_8bit\n")  # bitsandbytes is not needed
    adapter = ["--use_peft", "true", "--lora_target_modules", "q_proj", "v_proj", "--lora_dropout", "0.1"]
    code, out, err = command(capsys, "verify", recipe, *adapter)
    told = [line for line in err.splitlines() if "still comparing" not in line]  # which a slow machine adds
    assert code == 0 and told == ["building small copies of the model: the first line takes some seconds"]
    lines = out.splitlines()
    assert lines[0].split() == ["check", "error", "allowed", "s"]
    assert lines[1].startswith("losses and gradient norm           ok ")
    assert "LigerSFTTrainer, compared with SFTTrainer" in lines
    assert lines[-3] == "left out of this recipe: optim, lora_dropout"
    assert lines[-2].startswith("left out of every recipe: kernels on a GPU; several processes; ")
    assert lines[-2].endswith("; captured steps (cuda_graphs), which need a GPU") or torch.cuda.is_available()
    assert lines[-1].startswith("0 of 28 checks failed, ")
    assert not (recipe.parent / "out").exists()


def test_json_and_the_exit_code_of_a_failure(recipe, capsys, monkeypatch):
    stock = LigerSFTTrainer.__init__

    def frozen(self, *args, **kwargs):
        stock(self, *args, **kwargs)
        self.model.get_output_embeddings().requires_grad_(False)

    monkeypatch.setattr(LigerSFTTrainer, "__init__", frozen)
    code, out, _ = command(capsys, "verify", recipe, "--json")
    report = json.loads(out)
    assert code == 1 and report["ok"] is False
    found = {check["name"]: check for check in report["checks"]}
    assert found["what trains"]["verdict"] == "FAILED" and "lm_head.weight" in found["what trains"]["detail"]
    assert "figure" not in found["reference model"] and found["reference model"]["verdict"] == "-"


def test_what_cannot_be_reached_says_what_to_pass(recipe, tmp_path, capsys):
    code, out, err = command(capsys, "verify", recipe, "--model_name_or_path", "meta-llama/Meta-Llama-3-8B")
    assert (code, out) == (2, "") and "pass --model_name_or_path FOLDER" in err and "offline mode" not in err
    code, _, err = command(capsys, "verify", recipe, "--dataset_name", "tatsu-lab/alpaca")
    assert code == 2 and ". A few rows" in err and "pass --dataset_name FILE" in err
    AutoConfig.for_model("t5").save_pretrained(tmp_path / "t5")
    code, _, err = command(capsys, "verify", recipe, "--model_name_or_path", str(tmp_path / "t5"))
    assert code == 2 and "'t5', which has no text decoder" in err


LLAMA_3 = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
}
LLAMA_3_2 = LLAMA_3 | {
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
ROWS = {"dpo": "preference_quickstart", "orpo": "preference_quickstart", "medusa": "smollm2_answers"}


# Recipes of Llamas that verify refuses, with the reason
REFUSED = {
    "llama3_8b/eagle3": "TRL has no trainer of drafters to compare with",
    "llama3_8b/reward": "verify cannot build its models",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in recipe_names() if name.startswith(("llama", "quickstart"))])
def test_shipped_recipes_with_the_config_of_their_model_alone(name, tmp_path, capsys):
    given = []
    if not name.startswith("quickstart"):
        AutoConfig.for_model("llama", **(LLAMA_3_2 if "3_2" in name else LLAMA_3)).save_pretrained(tmp_path / "model")
        kind = next((kind for kind in ROWS if kind in name), "")
        rows = ROOT / "recipes" / "data" / f"{ROWS.get(kind, 'alpaca_quickstart')}.jsonl"
        if "grpo" in name or name.endswith("kto"):
            rows = tmp_path / "rows.jsonl"
            texts = [{"prompt": f"What is {i} and {i}?", "solution": str(2 * i)} for i in range(16)]
            if name.endswith("kto"):
                texts = [row | {"completion": f"It is {i}.", "label": i % 2 == 0} for i, row in enumerate(texts)]
            rows.write_text("".join(json.dumps(row) + "\n" for row in texts))
        given = ["--model_name_or_path", str(tmp_path / "model"), "--dataset_name", str(rows)]
    code, out, err = command(capsys, "verify", name, *given)
    if name in REFUSED:
        assert code == 2 and REFUSED[name] in err
    else:
        assert code == 0, out + err
