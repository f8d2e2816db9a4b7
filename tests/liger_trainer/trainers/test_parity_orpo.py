"""`LigerORPOTrainer` against `trl.experimental.orpo.ORPOTrainer` from one seed: every logged number, every gradient."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from recipe_fixtures import command, losses, write_model, write_recipe
from tiny_models import pair_rows, tiny_model, tiny_tokenizer
from trainer_parity import (
    CHUNK_BYTES,
    LLAMA_AND_SLOWLY_QWEN3,
    PAIR_LIMITS,
    PAIR_SPLITS,
    WORDS,
    assert_head_is_ours,
    assert_no_logits,
    assert_same_metrics,
    assert_same_step,
    assert_same_training,
    batch_of,
    build_pairs,
    logged,
    logged_values,
    step,
    with_lora,
    without_times,
)
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.trainer.base_config import _BaseConfig

from liger_trainer import LigerORPOConfig, LigerORPOTrainer
from liger_trainer.trainers.scored_pairs import ScoredLogits


def pair(model, tmp_path, **options):
    stock = build_pairs(ORPOTrainer, ORPOConfig, model, tmp_path, **options)
    ours = build_pairs(LigerORPOTrainer, LigerORPOConfig, model, tmp_path, **options)
    assert_head_is_ours(ours)
    return ours, stock


@pytest.mark.parametrize("kind, split", [("full", PAIR_SPLITS[0]), ("lora", PAIR_SPLITS[1])], ids=str)
@pytest.mark.parametrize("model_type", LLAMA_AND_SLOWLY_QWEN3)
def test_every_logged_number_of_every_step(model_type, kind, split, tmp_path):
    model = tiny_model(model_type)
    if kind == "lora":
        model = with_lora(model, ["q_proj", "v_proj", "gate_proj", "lm_head"])
    ours, stock = pair(model, tmp_path, split=split)
    want = assert_same_training(ours, stock, limits=PAIR_LIMITS)
    assert len(want) == 3 and {"grad_norm", "logits/chosen", "log_odds_ratio", "nll_loss"} <= want[0].keys()
    for (name, start), trained in zip(model.named_parameters(), ours.model.parameters(), strict=True):
        assert torch.equal(start, trained) != start.requires_grad, f"{name}: moved, or not, against requires_grad"


def test_every_option_is_covered():
    """A new field of ORPOConfig needs a test here."""
    fields = {f.name for f in dataclasses.fields(ORPOConfig)} - {f.name for f in dataclasses.fields(_BaseConfig)}
    assert fields == {
        "beta",
        "max_length",  # below
        "max_completion_length",
        "is_encoder_decoder",  # for encoder-decoders: test_other_people_s_models.py
        "disable_dropout",
        "padding_value",
        "generate_during_eval",
        "model_init_kwargs",
        "trust_remote_code",
        "dataset_num_proc",  # does not affect the loss
    }


@pytest.mark.parametrize(
    "model_type, options",
    [
        pytest.param("llama", {"beta": 0.7, "max_length": 9, "gradient_checkpointing": True}, id="options"),
        pytest.param("gemma2", {}, id="softcap"),
        pytest.param("granite", {}, id="logit-scale"),
        pytest.param("phi", {}, id="bias"),
    ],
)
def test_losses_gradients_and_metrics(model_type, options, tmp_path):
    ours, stock = pair(tiny_model(model_type), tmp_path, **options)
    batch = batch_of(stock)
    assert_same_step(step(ours, batch), step(stock, batch))


def test_the_auxiliary_loss_of_experts(tmp_path):
    model = tiny_model("qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.3)
    ours, stock = pair(model, tmp_path)
    assert ours.aux_loss_enabled
    batch = batch_of(stock)
    assert_same_step(step(ours, batch), step(stock, batch))


@pytest.mark.parametrize("model_type", LLAMA_AND_SLOWLY_QWEN3)
def test_any_upstream_gradient(model_type, tmp_path):
    """The loss times 3.7, plus a loss of the weights."""
    ours, stock = pair(tiny_model(model_type), tmp_path)
    batch = batch_of(stock)

    def upstream(loss, model):
        return 3.7 * loss + 0.01 * sum(p.square().sum() for p in model.parameters())

    got, want = step(ours, batch, upstream), step(stock, batch, upstream)
    assert_same_step(got, want)
    assert not torch.allclose(got[1]["lm_head.weight"], step(ours, batch)[1]["lm_head.weight"])


def test_evaluation(tmp_path):
    ours, stock = pair(tiny_model("llama"), tmp_path)
    got, want = without_times(ours.evaluate()), without_times(stock.evaluate())
    assert_same_metrics(got, want)
    assert "eval_logits/rejected" in want


def test_no_tensor_of_tokens_times_vocabulary(tmp_path, monkeypatch):
    monkeypatch.setattr("liger_triton._chunks._CPU_CHUNK_BYTES", CHUNK_BYTES)
    assert_no_logits(*pair(tiny_model("llama", vocab_size=WORDS), tmp_path))


def test_use_liger_false_is_the_stock_trainer_bit_for_bit(tmp_path):
    stock = build_pairs(ORPOTrainer, ORPOConfig, tiny_model("llama"), tmp_path)
    ours = build_pairs(LigerORPOTrainer, LigerORPOConfig, tiny_model("llama"), tmp_path, use_liger=False)
    assert ours.liger_report is None
    assert logged(ours) == logged(stock)


def test_the_head_alone_can_be_switched_off(tmp_path):
    options = {"liger_config": {"fused_linear_cross_entropy": False}}
    stock = build_pairs(ORPOTrainer, ORPOConfig, tiny_model("llama"), tmp_path)
    ours = build_pairs(LigerORPOTrainer, LigerORPOConfig, tiny_model("llama"), tmp_path, **options)
    assert not ours.uses_fused_head and ours.liger_report is not None
    batch = batch_of(stock)
    assert_same_step(step(ours, batch), step(stock, batch))


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
def test_peft_config_and_a_model_on_disk(use_dora, tmp_path):
    """A DoRA on the head cannot be fused: real logits give the same numbers."""
    tiny_model("llama").save_pretrained(tmp_path / "model")
    config = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False, use_dora=use_dora)
    ours, stock = pair(str(tmp_path / "model"), tmp_path, trainer_options={"peft_config": config})
    batch = batch_of(stock)
    got, want = step(ours, batch), step(stock, batch)
    assert_same_step(got, want, rtol=2e-5)
    assert any("lm_head.lora_A" in name for name in got[1])


def test_prompt_tuning_which_stock_cannot_train(tmp_path):
    """The virtual tokens are rows of logits without labels. Compares with the same rows of the model's real logits."""
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    ours, stock = pair(tiny_model("llama"), tmp_path, trainer_options={"peft_config": config})
    batch = batch_of(stock)
    with pytest.raises(ValueError, match="batch_size"):
        step(stock, batch)

    def without_virtual(*args, **kwargs):
        outputs = stock.model(*args, **kwargs)
        outputs.logits = outputs.logits[:, 3:]
        return outputs

    stock.model.load_state_dict(ours.model.state_dict())
    want, want_metrics = stock.get_batch_loss_metrics(without_virtual, batch)
    want.backward()
    got_metrics, grads = step(ours, batch)
    assert_same_metrics(got_metrics, {"loss": want.item()} | want_metrics)
    (name,) = grads
    torch.testing.assert_close(grads[name], dict(stock.model.named_parameters())[name].grad, rtol=1e-4, atol=1e-6)


def test_mixed_precision(tmp_path):
    ours, stock = pair(tiny_model("llama"), tmp_path, bf16=True)
    got, want = logged(ours), logged(stock)
    for name in ("loss", "grad_norm", "logps/chosen", "nll_loss"):
        assert [log[name] for log in got[:2]] == pytest.approx([log[name] for log in want[:2]], rel=2e-2)


def test_a_tokenizer_without_padding_token(tmp_path):
    """Llama 3 has none. Stock stops at the first batch."""
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    ours = build_pairs(
        LigerORPOTrainer,
        LigerORPOConfig,
        tiny_model("llama"),
        tmp_path,
        trainer_options={"processing_class": tokenizer},
    )
    want = step(build_pairs(ORPOTrainer, ORPOConfig, tiny_model("llama"), tmp_path))
    got = step(ours)
    for metrics in (got[0], want[0]):
        del metrics["logits/chosen"], metrics["logits/rejected"]  # the mean includes padding, whatever the token
    assert_same_step(got, want)


def test_a_tokenizer_without_any_token_to_pad_with(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token = None
    with pytest.raises(ValueError, match="neither pad_token nor eos_token; set its pad_token"):
        build_pairs(
            LigerORPOTrainer,
            LigerORPOConfig,
            tiny_model("llama"),
            tmp_path,
            trainer_options={"processing_class": tokenizer},
        )


@pytest.mark.parametrize(
    "keys", [{"trainer": "orpo"}, {"trainer": "cpo", "loss_type": "simpo", "cpo_alpha": 0.0}], ids=["orpo", "simpo"]
)
def test_a_recipe(keys, tmp_path, capsys):
    write_model(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pair_rows()))
    path = write_recipe(tmp_path, prompt_template=None, per_device_train_batch_size=8, max_steps=8, **keys)
    code, out, err = command(capsys, "train", path)
    assert code == 0, err
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    margins = [log["rewards/margins"] for log in state["log_history"] if "rewards/margins" in log]
    assert len(margins) == 8 and margins[-1] > margins[0] + 0.1
    code, _, err = command(capsys, "train", path, "--load_in_4bit", "true")
    assert code == 2 and "load_in_4bit is True, which has no effect without use_peft: true" in err


@pytest.mark.parametrize("trainer", ["orpo", "cpo"])
def test_a_4_bit_recipe_trains_like_stock(trainer, tmp_path, capsys):
    """Runs without our LoRA layers, because they unpack a base that bitsandbytes multiplies in its own way on CPUs."""
    pytest.importorskip("bitsandbytes")
    write_model(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pair_rows()))
    keys = {"trainer": trainer, "prompt_template": None, "use_peft": True, "load_in_4bit": True, "lora_dropout": 0.0}
    logged = []
    for switch in ({"liger_config": {"lora": False}}, {"use_liger": False}):
        folder = tmp_path / next(iter(switch))
        path = write_recipe(tmp_path, lora_target_modules=["q_proj"], output_dir=str(folder), **keys, **switch)
        code, _, err = command(capsys, "train", path)
        assert code == 0, err
        logged.append(list(losses(folder).values()))
    assert logged[0] == pytest.approx(logged[1], rel=1e-5)


def test_a_4_bit_base_that_has_adapters_stays_in_16_bits(tmp_path, monkeypatch):
    """With `peft_config`, TRL would cast its norms to fp32, and most layers would keep PEFT's code."""
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr("liger_trainer.lora.layers.LEAST_WORK", 0)
    tiny_model("llama", hidden_size=64, intermediate_size=128, head_dim=16).save_pretrained(tmp_path)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    base = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, quantization_config=config)
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear"))
    ours, stock = pair(model, tmp_path, bf16=True)
    assert len(ours.liger_report["lora"].swapped) == 14
    assert {p.dtype for n, p in ours.model.named_parameters() if "lora_" not in n} == {torch.bfloat16, torch.uint8}
    for trainer in (ours, stock):
        trainer.train()
    got, want = (logged_values(t, "loss") for t in (ours, stock))
    assert len(want) > 1 and got == pytest.approx(want, rel=1e-3)


REFUSED = {
    "label smoothing": ({"label_smoothing_factor": 0.1}, "label_smoothing_factor is 0.1, which ORPOTrainer does"),
}


@pytest.mark.parametrize("options, message", REFUSED.values(), ids=REFUSED)
def test_options_that_would_be_ignored_are_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        build_pairs(LigerORPOTrainer, LigerORPOConfig, tiny_model("llama"), tmp_path, **options)


def test_a_token_loss_is_refused(tmp_path):
    class Focal(LigerORPOTrainer):
        def token_loss(self, outputs, inputs):
            return -outputs.log_probs

    with pytest.raises(ValueError, match="overrides token_loss, which ORPOTrainer never calls. Override odds_ratio"):
        build_pairs(Focal, LigerORPOConfig, tiny_model("llama"), tmp_path)


def test_labels_that_are_no_copies_of_the_input_are_an_error(tmp_path):
    ours, _ = pair(tiny_model("llama"), tmp_path)
    batch = batch_of(ours)
    batch["chosen_labels"][0, -1] = batch["chosen_labels"][0, -2] = 5
    batch["chosen_attention_mask"][0] = 1
    with pytest.raises(ValueError, match="not the next token of input_ids"):
        step(ours, batch)


def test_other_uses_of_deferred_logits_are_errors():
    logits = ScoredLogits(torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.long), torch.zeros(2, 3), 7)
    assert logits.shape == (2, 3, 7) and logits[0].shape == (3, 7) and logits[..., :2, :].view(-1, 7).shape == (4, 7)
    for use in (
        lambda z: z[..., 1:],
        lambda z: z.view(3, -1),
        lambda z: z.softmax(-1),
        lambda z: torch.logsumexp(z, -1),
        lambda z: torch.nn.functional.cross_entropy(z.view(-1, 7), torch.ones(6).long(), reduction="sum"),
    ):
        with pytest.raises(NotImplementedError, match="which the fused head does not build. Set liger_config="):
            use(logits)


@pytest.mark.slow
def test_trl_s_notice_of_an_experimental_module_appears_only_on_use():
    """With warnings as errors, everything else imports; with TRL_EXPERIMENTAL_SILENCE ORPO does too, even on retry."""
    code = (
        "import os, sys, warnings\n"
        "os.environ.pop('TRL_EXPERIMENTAL_SILENCE', None)\n"
        "from trl.import_utils import TRLExperimentalWarning\n"
        "warnings.simplefilter('error', TRLExperimentalWarning)\n"
        "import liger_trainer\n"
        "from liger_trainer import LigerSFTTrainer\n"
        "from liger_trainer.command.recipe.read import TRAINERS\n"
        "assert not [m for m in sys.modules if m.startswith('trl.experimental')]\n"
        "try:\n"
        "    liger_trainer.LigerORPOTrainer\n"
        "except TRLExperimentalWarning:\n"
        "    os.environ['TRL_EXPERIMENTAL_SILENCE'] = '1'\n"
        "    print(liger_trainer.LigerORPOTrainer.__name__, liger_trainer.LigerCPOConfig.__name__)\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["LigerORPOTrainer", "LigerCPOConfig"]
