"""Packed rows: the trainers match TRL's, and refuse models that would let rows see each other."""

import copy

import pytest
import torch
from accelerate import ParallelismConfig
from attentions import with_own_attention
from datasets import Dataset
from tiny_models import ragged_rows, text_rows, tiny_model, tiny_tokenizer
from transformers import DataCollatorForSeq2Seq, DataCollatorWithFlattening, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from liger_trainer import LigerSFTConfig, LigerSFTTrainer, LigerTrainer, LigerTrainingArguments
from liger_trainer.varlen import unpad_plan

PACKINGS = {
    "bfd": {"packing": True, "max_length": 32},
    "bfd_split": {"packing": True, "packing_strategy": "bfd_split"},
    "padding_free": {"padding_free": True, "max_length": None},
    "multiples of 8": {"padding_free": True, "max_length": None, "pad_to_multiple_of": 8},
}


def options_of(folder, **options):
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "max_steps": 3,
        "logging_steps": 1,
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "bf16": False,
        "learning_rate": 0.1,
        "gradient_checkpointing": False,
        "optim": "sgd",
        **options,
    }


def logged(trainer):
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return torch.tensor([[log[key] for key in ("loss", "grad_norm")] for log in logs], dtype=torch.float64)


@pytest.fixture
def rows_of_calls(monkeypatch):
    """The row lengths of every backbone call that got them."""
    seen, packed = [], unpad_plan.UnpadPlan.unpad

    def counted(self, call):
        seen.append(self.rows.lengths)
        return packed(self, call)

    monkeypatch.setattr(unpad_plan.UnpadPlan, "unpad", counted)
    return seen


@pytest.mark.parametrize("name, kind", [*(("llama", kind) for kind in PACKINGS), ("gemma3_text", "bfd")])
def test_sft_is_trl_s(kind, name, tmp_path, rows_of_calls):
    model = tiny_model(name)
    model.set_attn_implementation("sdpa")
    given = {"train_dataset": Dataset.from_list(text_rows(24)), "processing_class": tiny_tokenizer()}
    options = options_of(tmp_path, **PACKINGS[kind])
    want = logged(SFTTrainer(model=copy.deepcopy(model), args=SFTConfig(**options), **given))
    assert rows_of_calls == []
    args = LigerSFTConfig(**options, liger_config={"varlen_attention": True})
    trainer = LigerSFTTrainer(model=copy.deepcopy(model), args=args, **given)
    rows_of_calls.clear()
    torch.testing.assert_close(logged(trainer), want, rtol=1e-4, atol=0)
    assert len(rows_of_calls) == 3 and all(len(lengths) > 1 for lengths in rows_of_calls)


def test_flattened_rows_are_rows_one_by_one(tmp_path, rows_of_calls):
    model, rows = tiny_model("qwen3"), ragged_rows(12)
    model.set_attn_implementation("sdpa")
    options = options_of(tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    want = logged(Trainer(model=copy.deepcopy(model), args=TrainingArguments(**options), train_dataset=rows))
    args = LigerTrainingArguments(**options_of(tmp_path), liger_config={"varlen_attention": True})
    trainer = LigerTrainer(
        model=copy.deepcopy(model), args=args, train_dataset=rows, data_collator=DataCollatorWithFlattening()
    )
    rows_of_calls.clear()
    torch.testing.assert_close(logged(trainer), want, rtol=1e-4, atol=0)
    assert len(rows_of_calls) == 3


@pytest.mark.parametrize("options", [{"packing": True, "max_length": 32}, {"padding_free": True, "max_length": None}])
def test_rows_that_would_see_each_other_are_an_error(options, tmp_path):
    given = {"train_dataset": Dataset.from_list(text_rows(24)), "processing_class": tiny_tokenizer()}
    options, off = options_of(tmp_path, **options), {"liger_config": {"varlen_attention": False}}
    with pytest.raises(ValueError, match="GptOssForCausalLM.*packed rows see each other"):
        LigerSFTTrainer(model=tiny_model("gpt_oss"), args=LigerSFTConfig(**options, **off), **given)
    LigerSFTTrainer(model=tiny_model("gpt_oss"), args=LigerSFTConfig(**options), **given)
    LigerSFTTrainer(model=tiny_model("gpt_oss"), args=LigerSFTConfig(**options, use_liger=False), **given)
    LigerSFTTrainer(model=tiny_model("qwen3_moe"), args=LigerSFTConfig(**options), **given)


def test_flattened_rows_are_refused_too(tmp_path):
    args = LigerTrainingArguments(**options_of(tmp_path), liger_config={"varlen_attention": False})
    given = {"train_dataset": ragged_rows(12), "data_collator": DataCollatorWithFlattening()}
    with pytest.raises(ValueError, match="DataCollatorWithFlattening.*packed rows see each other"):
        LigerTrainer(model=tiny_model("gpt_oss"), args=args, **given)


@pytest.mark.parametrize("split", [True, False])
def test_context_parallelism_splits_rows_itself(split, tmp_path, monkeypatch):
    """`Trainer` reads `attn_implementation` to choose SDPA's collectives."""

    class Split(LigerTrainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            monkeypatch.setattr(type(self.accelerator), "parallelism_config", ParallelismConfig(cp_size=1 + split))

    model = tiny_model("llama")
    model.set_attn_implementation("sdpa")
    trainer = Split(model=model, args=LigerTrainingArguments(**options_of(tmp_path)), train_dataset=ragged_rows(12))
    assert trainer.liger_report["varlen_attention"].enabled is not split


OFF = {"varlen_attention": False}


@pytest.mark.parametrize("name, config", [("qwen3_5_text", OFF), ("lfm2", OFF), ("recurrent_gemma", {})])
def test_flattened_rows_of_a_model_that_keeps_a_state_are_an_error(name, config, tmp_path):
    """If no layer is told where rows begin, a state passes from row to row. Only padded rows can be trained then."""
    model, _ = with_own_attention(name)
    args = LigerTrainingArguments(**options_of(tmp_path), liger_config=config)
    flattened = DataCollatorWithFlattening()
    padded = DataCollatorForSeq2Seq(tiny_tokenizer())
    trl_s = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    given = {"model": model, "args": args, "train_dataset": ragged_rows(12)}
    with pytest.raises(ValueError, match="packed rows see each other.*Train on padded rows.*DataCollatorForSeq2Seq"):
        LigerTrainer(**given, data_collator=flattened)
    with pytest.raises(ValueError, match="(can't keep packed|packed rows see each other).*Train on padded"):
        LigerTrainer(**given, data_collator=trl_s)
    LigerTrainer(**given, data_collator=padded)


@pytest.mark.parametrize("options", [{"packing": True, "max_length": 32}, {"padding_free": True, "max_length": None}])
def test_packed_rows_in_sft_are_refused_too(options, tmp_path):
    model, _ = with_own_attention("qwen3_5_text")
    given = {"train_dataset": Dataset.from_list(text_rows(24)), "processing_class": tiny_tokenizer()}
    options = options_of(tmp_path, **options)
    with pytest.raises(ValueError, match="(can't keep packed|packed rows see each other).*switch packing and"):
        LigerSFTTrainer(model=model, args=LigerSFTConfig(**options, liger_config=OFF), **given)
    LigerSFTTrainer(model=model, args=LigerSFTConfig(**options), **given)


@pytest.mark.diagonal
@pytest.mark.parametrize("kind", PACKINGS)
@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2"])
def test_sft_of_a_model_that_is_told_rows(kind, name, tmp_path, rows_of_calls):
    """One step has all rows, so it equals TRL's on padded rows, however they are packed."""
    model, _ = with_own_attention(name)
    rows = text_rows(12)
    given = {"train_dataset": Dataset.from_list(rows), "processing_class": tiny_tokenizer()}
    whole = {"per_device_train_batch_size": len(rows), "max_steps": 1}
    padded = SFTConfig(**options_of(tmp_path, **whole, max_length=32))
    want = logged(SFTTrainer(model=copy.deepcopy(model), args=padded, **given))
    args = LigerSFTConfig(**options_of(tmp_path, **whole, **PACKINGS[kind]))
    trainer = LigerSFTTrainer(model=copy.deepcopy(model), args=args, **given)
    rows_of_calls.clear()
    torch.testing.assert_close(logged(trainer), want, rtol=1e-5, atol=0)
    assert len(rows_of_calls) == 1 and len(rows_of_calls[0]) >= len(rows)


def test_rows_without_positions_are_one_row_to_every_model(tmp_path):
    """Nothing in such a batch says where rows begin, so attention by lengths takes it for one row too."""
    args = LigerTrainingArguments(**options_of(tmp_path))
    collator = DataCollatorWithFlattening(return_position_ids=False)
    with pytest.raises(ValueError, match="packed rows see each other.*return_position_ids"):
        LigerTrainer(model=tiny_model("llama"), args=args, train_dataset=ragged_rows(12), data_collator=collator)


def packs(rows):
    """A user's collator, with a class that says nothing about packing."""
    return dict(DataCollatorWithFlattening()(rows))


@pytest.mark.parametrize("name, config", [("qwen3_5_text", OFF), ("qwen3_5_text", {}), ("qwen3", {})])
def test_a_collator_of_the_user_s_is_tested_at_the_first_step(name, config, tmp_path, rows_of_calls):
    model, _ = with_own_attention(name)
    args = LigerTrainingArguments(**options_of(tmp_path), liger_config=config)
    given = {"args": args, "train_dataset": ragged_rows(12)}
    trainer = LigerTrainer(model=model, data_collator=packs, **given)
    rows_of_calls.clear()
    if config != OFF:
        trainer.train()
        assert len(rows_of_calls) == 3
        return
    with pytest.raises(ValueError, match="position_ids of a batch restart.*see each other.*Train on padded rows"):
        trainer.train()


def test_one_row_with_its_positions_is_not_packed(tmp_path):
    model, _ = with_own_attention("qwen3_5_text")
    args = LigerTrainingArguments(**options_of(tmp_path, per_device_train_batch_size=1))
    trainer = LigerTrainer(model=model, args=args, train_dataset=ragged_rows(4), data_collator=packs)
    assert logged(trainer).isfinite().all()
