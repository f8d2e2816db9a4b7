"""Prompts answered during training: the answers, where they go, and that training is unaffected."""

import copy
import json
import random

import pytest
import torch
from datasets import Dataset
from launching import in_processes
from peft import LoraConfig, PromptTuningConfig
from tiny_models import VOCAB, collate, ragged_rows, tiny_model, tiny_tokenizer
from trainer_parity import build_dpo, run
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    OPTConfig,
    TrainerCallback,
)
from transformers.integrations import integration_utils
from varlen_batches import capture_on_cpu

from liger_trainer import LigerDPOTrainer, LigerSFTConfig, LigerSFTTrainer, LigerTrainer
from liger_trainer.trainers.samples import _learned_positions

PROMPTS = {"sample_prompts": ["w3 w4", "w5"], "sample_steps": 1, "sample_max_new_tokens": 4}


def lora():
    return {"trainer_options": {"peft_config": LoraConfig(target_modules=["q_proj", "down_proj"], lora_dropout=0.3)}}


def dropout_model():
    return tiny_model("llama", attention_dropout=0.2)


def run_dpo(*args, **options):
    trainer = build_dpo(*args, **options)
    trainer.train()
    return None, trainer


RUNS = {
    "SFT": (LigerSFTTrainer, run, dropout_model, {}),
    "SFT, accumulation": (LigerSFTTrainer, run, dropout_model, {"split": (2, 4)}),
    "SFT, checkpointing": (LigerSFTTrainer, run, dropout_model, {"gradient_checkpointing": True}),
    "SFT, LoRA": (LigerSFTTrainer, run, dropout_model, lora()),
    "SFT, packing": (LigerSFTTrainer, run, lambda: sdpa("llama"), {"packing": True}),
    "SFT, NEFTune": (LigerSFTTrainer, run, dropout_model, {"neftune_noise_alpha": 5.0}),
    "linear attention": (LigerSFTTrainer, run, lambda: sdpa("qwen3_5_text"), {}),
    "experts": (LigerSFTTrainer, run, lambda: sdpa("qwen3_moe"), {}),
    "in backward": (
        LigerSFTTrainer,
        run,
        dropout_model,
        {"optimizer_in_backward": True, "max_grad_norm": 0},
    ),
    "stock": (LigerSFTTrainer, run, dropout_model, {"use_liger": False}),
    "DPO": (LigerDPOTrainer, run_dpo, lambda: sdpa("llama"), {}),
}


def sdpa(kind):
    model = tiny_model(kind)
    model.set_attn_implementation("sdpa")
    return model


def samples_in(trainer):
    with open(f"{trainer.args.output_dir}/samples.jsonl", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def assert_same_training(got, want):
    """Assert that logs and weights of two trainers are bit-equal."""
    for one, other in zip(got.state.log_history, want.state.log_history, strict=True):
        names = [name for name in one if not name.startswith("train_") and "runtime" not in name]
        assert {name: one[name] for name in names} == {name: other[name] for name in names}
    weights = dict(want.model.named_parameters())
    different = [name for name, p in got.model.named_parameters() if not torch.equal(p, weights[name])]
    assert not different


@pytest.mark.parametrize("case", RUNS.values(), ids=RUNS)
def test_training_is_the_same_to_the_bit(case, tmp_path):
    trainer_class, run, model, options = case
    model = model()
    runs = {}
    for name, given in (("without", {}), ("with", PROMPTS)):
        torch.manual_seed(5)
        random.seed(5)
        runs[name] = run(trainer_class, model, tmp_path / name, **copy.deepcopy(options), **given)[1]
        assert bool(torch.rand(1) >= 0)
    assert_same_training(runs["with"], runs["without"])
    found = samples_in(runs["with"])
    steps = runs["with"].state.global_step
    assert [line["step"] for line in found] == [step for step in range(steps + 1) for _ in range(2)]


def test_training_of_transformers_trainer_too(tmp_path):
    runs = {}
    for name, given in (("without", {}), ("with", PROMPTS)):
        trainer = build_plain(tmp_path / name, given)
        torch.manual_seed(5)
        trainer.train()
        runs[name] = trainer
    assert_same_training(runs["with"], runs["without"])
    assert len(samples_in(runs["with"])) == 6


def build_plain(folder, given):
    from liger_trainer import LigerTrainingArguments

    args = LigerTrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        num_train_epochs=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        **given,
    )
    return LigerTrainer(
        model=dropout_model(),
        args=args,
        train_dataset=ragged_rows(),
        data_collator=collate,
        processing_class=tiny_tokenizer(),
    )


def test_captured_steps_go_on(tmp_path, monkeypatch):
    capture_on_cpu(monkeypatch)
    rows = ragged_rows(48)
    options = {"rows": rows, "cuda_graphs": "true", "optim": "sgd"}
    runs = {}
    for name, given in (("without", {}), ("with", PROMPTS)):
        runs[name] = run(LigerSFTTrainer, sdpa("llama"), tmp_path / name, **options, **given)[1]
    counts = {name: trainer.captured_steps.to_dict()["calls_replayed"] for name, trainer in runs.items()}
    assert counts["with"] == counts["without"] > 0
    assert_same_training(runs["with"], runs["without"])


def test_two_processes_train_the_same_and_one_answers(tmp_path):
    in_processes("sampled_ranks.py", tmp_path)
    (file,) = tmp_path.rglob("samples.jsonl")
    steps = [json.loads(line)["step"] for line in file.read_text().splitlines()]
    assert steps == sorted(set(steps)) and steps[0] == 0 and len(steps) > 2


def test_what_is_put_back(tmp_path):
    class Look(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            before.append(model.generation_config.to_dict())  # the trainer has aligned it with the tokenizer

        def on_step_end(self, args, state, control, model=None, **kwargs):
            seen.append(([m.training for m in model.modules()], model.generation_config, model.config.use_cache))

    model = dropout_model()
    model.config.use_cache = False
    before, seen = [], []
    options = {"trainer_options": {"callbacks": [Look()]}, "gradient_checkpointing": True}
    _, trainer = run(LigerSFTTrainer, model, tmp_path, train=False, **options, **PROMPTS)
    trainer.add_callback(Look())  # after the samples
    trainer.train()
    assert len(seen) == 4
    for modes, config, use_cache in seen:
        assert all(modes)
        assert config.to_dict() == before[0] and config is trainer.model.generation_config
        assert use_cache is False


def test_answers_are_the_model_s_and_reach_trackers(tmp_path, monkeypatch, caplog):
    sent = []

    class WandbCallback(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            sent.append((state.global_step, logs))

    monkeypatch.setattr(WandbCallback, "__module__", integration_utils.__name__)
    options = {"trainer_options": {"callbacks": [WandbCallback()]}}
    model = tiny_model("llama")
    _, trainer = run(LigerSFTTrainer, model, tmp_path, **options, **PROMPTS)
    ids = tiny_tokenizer()("w3 w4", return_tensors="pt")["input_ids"]
    for line, of in ((samples_in(trainer)[0], model), (samples_in(trainer)[-2], trainer.model)):
        new = of.generate(ids, max_new_tokens=4, do_sample=False, attention_mask=torch.ones_like(ids))[0, 2:]
        assert line == {"step": line["step"], "prompt": "w3 w4", "answer": tiny_tokenizer().decode(new, True)}
    texts = [logs for _, logs in sent if "sample_1" in logs]
    assert [set(logs) for logs in texts] == [{"sample_1", "sample_2"}] * 3
    assert texts[0]["sample_1"].startswith("w3 w4\n\n")
    assert not any("sample_1" in log for log in trainer.state.log_history)
    assert "step 0: 'w3 w4' -> " in caplog.text


def test_prompts_are_asked_as_rows_are(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
    asked = []
    turns = [("system", "w9"), ("user", "w10"), ("assistant", "w11")]
    chat = {"messages": [{"role": role, "content": text} for role, text in turns]}
    for rows in ([chat] * 4, [{"text": "w10 w11"}] * 4):
        args = LigerSFTConfig(
            output_dir=str(tmp_path),
            use_cpu=True,
            bf16=False,
            max_steps=1,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            gradient_checkpointing=False,
            **PROMPTS,
        )
        trainer = LigerSFTTrainer(
            model=tiny_model("llama"), args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
        )
        stock = trainer.model.generate
        trainer.model.generate = lambda input_ids, stock=stock, **given: (
            asked.append(input_ids[0].tolist()) or stock(input_ids=input_ids, **given)
        )
        trainer.train()
    assert asked[0] == [9, 3, 4] and asked[-1] == [5]


REFUSED = {
    "no prompts": ({"sample_prompts": []}, {}, "sample_prompts is an empty list"),
    "a text": ({"sample_prompts": "w3 w4"}, {}, "sample_prompts is 'w3 w4'; expected a list of texts"),
    "a number": ({"sample_prompts": [3]}, {}, r"sample_prompts is \[3\]; expected a list of texts"),
    "no steps": ({"sample_steps": 0}, {}, "sample_steps is 0; expected 1 or more"),
    "a learned prompt": (
        PROMPTS,
        {"peft_config": PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")},
        "sample_prompts is set, but the adapter is a learned prompt",
    ),
}


@pytest.mark.parametrize("options, given, said", REFUSED.values(), ids=REFUSED)
def test_what_is_refused(options, given, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        run(LigerSFTTrainer, tiny_model("llama"), tmp_path, train=False, trainer_options=given, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param(
            {"sample_prompts": [""], "sample_max_new_tokens": 4},
            "sample_prompts has '', which has no tokens",
            id="empty",
        ),
        pytest.param(
            {"sample_prompts": ["w3 w4"], "sample_max_new_tokens": 32},
            "the model's 32 positions are too few",
            id="long",
        ),
    ],
)
def test_prompts_that_cannot_be_answered_stop_before_the_first_step(options, said, tmp_path):
    """Past its last learned position, GPT-2 raises an IndexError, if no earlier answer was so long."""
    config = GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=1)
    with pytest.raises(ValueError, match=said):
        run(LigerSFTTrainer, GPT2LMHeadModel(config), tmp_path, **options)


def test_tensor_parallel_models_are_refused(tmp_path, monkeypatch):
    """One process would wait for the others in the first layer."""
    monkeypatch.setattr(LigerSFTTrainer, "get_tp_size", lambda self: 2)
    with pytest.raises(ValueError, match="sharded over processes .FSDP, DeepSpeed, tensor parallelism"):
        run(LigerSFTTrainer, tiny_model("llama"), tmp_path, train=False, **PROMPTS)


def test_a_trainer_that_cannot_read_prompts(tmp_path):
    with pytest.raises(ValueError, match="the trainer has no processing_class to tokenize them"):
        run(LigerTrainer, tiny_model("llama"), tmp_path, **PROMPTS)


class OutOfMemory(TrainerCallback):
    """Raises from a layer in the second token of each answer, as an allocation does that fails."""

    raised = 0

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        (layer,) = (module for name, module in model.named_modules() if name.endswith("layers.1.mlp"))
        layer.register_forward_hook(self.fail)

    def fail(self, layer, args, output):
        torch.rand(3)  # an answer that was begun may have drawn random numbers
        if not layer.training and output.shape[1] == 1:
            self.raised += 1
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")


def test_memory_that_runs_out_costs_an_answer_and_not_the_training(tmp_path, caplog):
    runs, failing = {}, OutOfMemory()
    for name, given in (("without", {}), ("with", PROMPTS)):
        trainer = run(LigerSFTTrainer, dropout_model(), tmp_path / name, train=False, **lora(), **given)[1]
        trainer.callback_handler.callbacks.insert(0, failing)
        torch.manual_seed(5)
        trainer.train()
        runs[name] = trainer
    assert failing.raised == 6, "two prompts before and after each of two steps"
    assert_same_training(runs["with"], runs["without"])
    assert samples_in(runs["with"]) == [], "no answer is made up"
    (line,) = [record.getMessage() for record in caplog.records if "memory ran out" in record.getMessage()]
    assert "step 0" in line and "sample_max_new_tokens, which is 4" in line
    assert all(module.training for module in runs["with"].model.modules())


def test_other_errors_in_an_answer_are_raised(tmp_path):
    model = dropout_model()

    def fail(layer, args, output):
        if not layer.training:
            raise RuntimeError("a bug")

    model.model.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="a bug"):
        run(LigerSFTTrainer, model, tmp_path, **PROMPTS)


SMALL = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        pytest.param(GPT2Config(vocab_size=64, n_positions=12, n_embd=16, n_layer=1, n_head=2), 12, id="table"),
        pytest.param(
            OPTConfig(**SMALL, max_position_embeddings=12, ffn_dim=16, word_embed_proj_dim=16), 12, id="two rows before"
        ),
        pytest.param(
            BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2, max_position_embeddings=12),
            None,
            id="ALiBi",
        ),
        pytest.param(LlamaConfig(**SMALL, max_position_embeddings=12, intermediate_size=16), None, id="rotary"),
    ],
)
def test_how_many_positions_a_model_has(config, limit):
    model = AutoModelForCausalLM.from_config(config)
    assert _learned_positions(model) == limit
    if limit is None:
        assert model(torch.ones(1, 20, dtype=torch.long)).logits.shape == (1, 20, 64)
