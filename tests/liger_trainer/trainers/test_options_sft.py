"""Options of `SFTConfig`, forms of rows and adapters, each trained with `LigerSFTTrainer` and with `trl.SFTTrainer`."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tiny_models import ragged_rows, tiny_model
from trainer_parity import own_fields
from transformers import AutoConfig, AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from trl_options import (
    TOOL,
    adapters,
    as_conversation,
    case,
    chat_tokenizer,
    compare,
    conversational_prompts_and_completions,
    conversations,
    expert_lora,
    prompts_and_completions,
    texts,
    with_columns,
)

from liger_trainer import LigerSFTConfig, LigerSFTTrainer

METRICS = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens")
CHAT = {"processing_class": chat_tokenizer()}
ASSISTANT = {"given": CHAT, "rows": conversations(), "assistant_only_loss": True}
PACKED = {"packing": True, "max_length": 24}


def share_of_right_tokens(prediction):
    labels = prediction.label_ids[:, 1:]
    right = prediction.predictions[:, :-1].argmax(-1) == labels
    return {"right": float(right[labels != -100].mean())}


def argmax(logits, labels):
    return logits.argmax(-1)


def share_of_right_argmax(prediction):
    labels = prediction.label_ids[:, 1:]
    return {"right": float((prediction.predictions[:, :-1] == labels)[labels != -100].mean())}


def in_a_folder(model, folder):
    model.save_pretrained(folder / "model")
    return str(folder / "model")


def bf16_model():
    return tiny_model("llama", dtype=torch.bfloat16)


BF16_ADAPTER = 0.3  # the gradient of an adapter this large is off by 0.03 to 0.16 of its size with either trainer

LORA_DROPOUT = {"peft_config": LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.3)}
DROPOUT = {"resid_pdrop": 0.2, "embd_pdrop": 0.2}  # of GPT-2, in layers but not in attention


def gpt2(**options):
    torch.manual_seed(0)
    sizes = {"vocab_size": tiny_model("llama").config.vocab_size, "n_embd": 32, "n_layer": 2, "n_head": 4}
    config = AutoConfig.for_model("gpt2", **sizes, initializer_range=0.3, **options)
    return AutoModelForCausalLM.from_config(config)


class WithoutLabels(DataCollatorForLanguageModeling):
    """Makes batches in turn; the first and the last of each four have no labels."""

    made = 0

    def torch_call(self, rows):
        batch = super().torch_call(rows)
        if self.made % 4 in (0, 3):
            batch["labels"].fill_(-100)
        self.made += 1
        return batch


def without_labels(folder):
    return {"data_collator": WithoutLabels(pad_token_id=0)}


EVAL = {"eval_strategy": "steps", "eval_steps": 1}
REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
CHECKPOINT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}

CASES = [
    # forms of rows
    case("text", rows=texts()),
    case("text-field", rows=texts(column="story"), dataset_text_field="story"),
    case("formatting", rows=texts(column="story"), given={"formatting_func": lambda row: "w9 " + row["story"]}),
    case("conversation", rows=conversations(), given=CHAT),
    case("assistant-only", True, **ASSISTANT),
    case(
        "assistant-only-prompt-completion",
        rows=conversational_prompts_and_completions(),
        given=CHAT,
        assistant_only_loss=True,
    ),
    case("tools", True, rows=conversations(tools=[TOOL]), given=CHAT),
    case("template-arguments", rows=conversations(chat_template_kwargs={"formal": True}), given=CHAT),
    case("prompt-completion-conversation", rows=conversational_prompts_and_completions(), given=CHAT),
    case("whole-conversation", rows=as_conversation(prompts_and_completions()), given=CHAT, completion_only_loss=False),
    case("tools-prompt-completion", rows=conversational_prompts_and_completions(tools=[TOOL]), given=CHAT),
    case("other-columns", rows=with_columns(texts(), source="w3")),
    case("eos-token", rows=texts(), eos_token="w9"),
    case("shuffled", rows=texts(), shuffle_dataset=True),
    case("streamed", rows=texts(), given={"train_dataset": Dataset.from_list(texts()).to_iterable_dataset()}),
    case(
        "streamed-packed",
        rows=texts(),
        **PACKED,
        given={"train_dataset": Dataset.from_list(texts(16)).to_iterable_dataset()},
    ),
    # lengths
    case("cut", rows=texts(), max_length=7),
    case("cut-at-the-start", rows=texts(), max_length=7, truncation_mode="keep_end"),
    case("uncut", rows=prompts_and_completions(), max_length=None),
    case("multiple-of-8", rows=prompts_and_completions(), pad_to_multiple_of=8),
    case("padding-free", True, rows=prompts_and_completions(), padding_free=True, max_length=None),
    case("padding-free-assistant-only", **ASSISTANT, padding_free=True, max_length=None),
    case("packed-bfd", rows=prompts_and_completions(16), **PACKED),
    case("packed-bfd-assistant-only", True, **ASSISTANT | {"rows": conversations(16)}, packing=True, max_length=64),
    case("packed-split", True, rows=texts(16), **PACKED | {"max_length": 9}, packing_strategy="bfd_split"),
    case("packed-wrapped", rows=prompts_and_completions(16), **PACKED, packing_strategy="wrapped"),
    case("packed-not-in-evaluation", rows=texts(16), **PACKED, **EVAL, eval_packing=False),
    case("packed-in-evaluation-alone", rows=texts(16), max_length=24, **EVAL, eval_packing=True),
    case("packed-sliding-window", rows=texts(16), model="gemma3_text", packing=True, max_length=64),
    # losses
    case("dft-packed", rows=texts(16), loss_type="dft", **PACKED),
    case("dft-assistant-only", **ASSISTANT, loss_type="dft"),
    case("chunked", rows=prompts_and_completions(), loss_type="chunked_nll"),
    case("smoothed-packed", rows=texts(16), label_smoothing_factor=0.2, **PACKED),
    case("smoothed-assistant-only", **ASSISTANT, label_smoothing_factor=0.2),
    case("router-loss", True, rows=texts(), model="qwen3_moe", router_aux_loss_coef=0.3, metrics=("aux_loss",)),
    case("router-loss-gpt-oss", rows=texts(), model="gpt_oss", router_aux_loss_coef=0.3, metrics=("aux_loss",)),
    case("router-loss-packed", rows=texts(16), model="qwen3_moe", router_aux_loss_coef=0.3, **PACKED),
    case("router-loss-dft", rows=texts(), model="qwen3_moe", router_aux_loss_coef=0.3, loss_type="dft"),
    # training
    case("checkpoint", rows=texts(), **CHECKPOINT),
    case("checkpoint-reentrant", rows=texts(), **REENTRANT),
    case("noise", True, rows=texts(), neftune_noise_alpha=5.0),
    case("accumulated", rows=prompts_and_completions(), split=(1, 4)),
    case("accumulated-packed", rows=texts(32), split=(2, 2), **PACKED),
    case(
        "adam",
        rows=texts(),
        optim="adamw_torch",
        learning_rate=1e-3,
        weight_decay=0.1,
        max_grad_norm=0.5,
        lr_scheduler_type="cosine",
        warmup_steps=1,
        max_steps=3,
        rtol=1e-4,
    ),
    # random numbers and micro-batches of a window
    case("noise-packed-accumulated", rows=texts(32), neftune_noise_alpha=5.0, split=(2, 2), **PACKED),
    case(
        "noise-adapter-dropout",
        True,
        rows=texts(16),
        neftune_noise_alpha=5.0,
        split=(1, 4),
        **REENTRANT,
        given=LORA_DROPOUT,
    ),
    case("dropout-one-by-one", rows=texts(16), model=lambda: gpt2(attn_pdrop=0.2, **DROPOUT), split=(1, 4)),
    case("dropout-packed", rows=texts(32), model=lambda: gpt2(attn_pdrop=0.0, **DROPOUT), split=(2, 2), **PACKED),
    case("dropout-adapter-accumulated", rows=texts(), split=(2, 2), **CHECKPOINT, given=LORA_DROPOUT),
    case("without-labels", True, rows=texts(16), split=(2, 4), label_smoothing_factor=0.2, given=without_labels),
    case("without-labels-dft", rows=texts(16), split=(2, 4), loss_type="dft", given=without_labels),
    case(
        "without-labels-router-loss",
        rows=texts(16),
        model="qwen3_moe",
        router_aux_loss_coef=0.3,
        split=(2, 4),
        given=without_labels,
        metrics=("aux_loss",),
    ),
    case("assistant-only-accumulated", **ASSISTANT, split=(1, 4), label_smoothing_factor=0.2),
    case("bf16-model", rows=texts(), model=bf16_model, max_steps=1, rtol=0.1),
    case("autocast", rows=texts(), bf16=True, rtol=3e-2),
    case("dropout", rows=texts(), model=lambda: tiny_model("llama", attention_dropout=0.3)),
    case("model-in-a-folder", rows=texts(), prepare=in_a_folder, model_init_kwargs={"dtype": "float32"}),
    case("tied", rows=texts(), model=lambda: tiny_model("llama", tie_word_embeddings=True)),
    case("tied-softcap", rows=texts(), model=lambda: tiny_model("gemma2", tie_word_embeddings=True)),
    case("vision-language", rows=texts(), model="qwen2_5_vl"),
    case("by-length", rows=texts(16), train_sampling_strategy="group_by_length"),
    case("local-average", rows=texts(), average_tokens_across_devices=False),
    # evaluation
    case("evaluation", rows=prompts_and_completions(), **EVAL),
    case(
        "evaluation-of-two-sets",
        rows=texts(),
        **EVAL,
        metrics=("loss",),
        given={"eval_dataset": {"short": Dataset.from_list(texts(3)), "long": Dataset.from_list(texts(7))}},
    ),
    case(
        "evaluation-metrics",
        True,
        rows=prompts_and_completions(),
        **EVAL,
        given={"compute_metrics": share_of_right_tokens},
    ),
    case(
        "evaluation-argmax",
        rows=prompts_and_completions(),
        **EVAL,
        given={"compute_metrics": share_of_right_argmax, "preprocess_logits_for_metrics": argmax},
    ),
    case(
        "evaluation-accumulated",
        rows=texts(16),
        **EVAL,
        eval_accumulation_steps=1,
        given={"compute_metrics": share_of_right_tokens},
    ),
    case(
        "evaluation-packed-metrics", rows=texts(16), **PACKED, **EVAL, given={"compute_metrics": share_of_right_tokens}
    ),
    case("evaluation-dft", rows=texts(), loss_type="dft", **EVAL),
    case("evaluation-smoothed", rows=texts(), label_smoothing_factor=0.2, **EVAL),
    case("evaluation-router-loss", rows=texts(), model="qwen3_moe", router_aux_loss_coef=0.3, **EVAL),
    # adapters
    *(
        case(
            f"adapter-{name}",
            name in ("lora-all-linear", "p-tuning"),
            rows=texts(),
            part=part,
            given={"peft_config": config},
        )
        for name, (config, part) in adapters().items()
    ),
    case(
        "adapter-prompt-packed",
        rows=texts(16),
        part="prompt_encoder",
        given={"peft_config": adapters()["prompt"][0]},
        packing=True,
        max_length=24,
        packing_strategy="wrapped",
    ),
    case(
        "adapter-prompt-accumulated",
        rows=prompts_and_completions(),
        part="prompt_encoder",
        split=(2, 2),
        given={"peft_config": adapters()["prompt"][0]},
    ),
    case(
        "adapter-prompt-dft",
        rows=texts(),
        part="prompt_encoder",
        loss_type="dft",
        given={"peft_config": adapters()["prompt"][0]},
    ),
    case(
        "adapter-checkpoint",
        rows=texts(),
        **CHECKPOINT,
        given={"peft_config": LoraConfig(r=4, target_modules="all-linear")},
    ),
    case(
        "adapter-checkpoint-reentrant",
        rows=texts(),
        **REENTRANT,
        given={"peft_config": LoraConfig(r=4, target_modules="all-linear")},
    ),
    case(
        "adapter-bf16-model",
        rows=texts(),
        model=bf16_model,
        max_steps=1,
        rtol=BF16_ADAPTER,
        given={"peft_config": LoraConfig(r=4, target_modules="all-linear")},
    ),
    case(
        "adapter-autocast",
        rows=texts(),
        bf16=True,
        max_steps=1,
        rtol=BF16_ADAPTER,
        given={"peft_config": LoraConfig(r=4, target_modules="all-linear")},
    ),
    case("adapter-experts", True, rows=texts(), model="qwen3_moe", given={"peft_config": expert_lora()}),
    case("adapter-experts-gpt-oss", rows=texts(), model="gpt_oss", given={"peft_config": expert_lora()}),
    case(
        "adapter-experts-checkpoint",
        rows=texts(),
        model="qwen3_moe",
        **CHECKPOINT,
        given={"peft_config": expert_lora()},
    ),
]


def test_every_option_is_covered():
    """A new field of SFTConfig needs a case here."""
    used = set().union(*(parameters.values[0] for parameters in CASES))
    assert own_fields(SFTConfig) - used == {
        "activation_offloading",  # needs a GPU
        "chat_template_path",
        "dataset_kwargs",
        "dataset_num_proc",
        "pad_token",
        "trust_remote_code",  # has no effect in a step
    }


@pytest.mark.parametrize("options", CASES)
def test_options(options, tmp_path):
    """Two steps from one seed: every logged number, every gradient, and what was learned."""
    compare((LigerSFTTrainer, LigerSFTConfig), (SFTTrainer, SFTConfig), tmp_path, options, {"max_length": 64})


def test_labels_of_the_rows_themselves(tmp_path):
    """Rows of token ids with their own labels, like the rows of the tests of single options."""
    options = {"rows": ragged_rows(8), "packing": True, "max_length": 24, "metrics": METRICS}
    compare((LigerSFTTrainer, LigerSFTConfig), (SFTTrainer, SFTConfig), tmp_path, options, {})
