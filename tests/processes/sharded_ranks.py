"""One of the two ranks of `test_sharded.py`, gloo on CPU: `sharded_ranks.py MODE OUT_DIR`, MODE a key of `OF_MODE`.

Every case trains the stock trainer and ours. Saves the weights after three steps, and the logs of steps and evaluation.
"""

import os
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import transformers
import trl
from datasets import Dataset
from image_models import image_batch, image_model
from launching import init_deepspeed, shard_on_cpus
from medusa_sharded import ZERO3
from peft import LoraConfig, get_peft_model
from tiny_models import collate, pair_rows, ragged_rows, tiny_model, tiny_tokenizer
from torch.distributed.tensor import DTensor
from trainer_parity import letters
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

import liger_trainer
from liger_trainer.varlen import unpad_plan

PAIRS = pair_rows(24)
PROMPTS = [{"prompt": row["prompt"]} for row in PAIRS]
ANSWERS = [
    {"prompt": row["prompt"], "completion": row["chosen"], "label": i % 3 != 1, "solution": i}
    for i, row in enumerate(PAIRS)
]
WRITES = {"max_completion_length": 4}
STOCK = {"ORPO": (ORPOTrainer, ORPOConfig), "": (transformers.Trainer, transformers.TrainingArguments)}
# Name of the trainer, rows, options, and additional models.
CASES = {
    "trainer": ("", None, {"remove_unused_columns": False}, ()),
    "trainer-tied": ("", None, {"remove_unused_columns": False}, ()),
    "trainer-smoothing": ("", None, {"remove_unused_columns": False, "label_smoothing_factor": 0.1}, ()),
    "trainer-lora-on-the-head": ("", None, {"remove_unused_columns": False}, ()),
    "trainer-lora-and-saved-head": ("", None, {"remove_unused_columns": False}, ()),
    "trainer-experts": ("", None, {"remove_unused_columns": False}, ()),
    "trainer-experts-lora": ("", None, {"remove_unused_columns": False}, ()),
    "trainer-images": ("", None, {"remove_unused_columns": False}, ()),
    "sft": ("SFT", None, {"max_length": 64, "dataset_kwargs": {"skip_prepare_dataset": True}}, ()),
    "sft-checkpointing": (
        "SFT",
        None,
        {"max_length": 64, "dataset_kwargs": {"skip_prepare_dataset": True}, "gradient_checkpointing": True},
        (),
    ),
    "dpo": ("DPO", PAIRS, {}, ("ref_model",)),
    "kto": ("KTO", ANSWERS, {}, ("ref_model",)),
    "orpo": ("ORPO", PAIRS, {}, ()),
    "grpo": ("GRPO", PROMPTS, WRITES | {"num_generations": 2}, ()),
    # Without the pass of the old policy: each rank leaves it out.
    "rloo": ("RLOO", PROMPTS, WRITES | {"num_generations": 2, "beta": 0.0}, ()),
    "distillation": ("Distillation", PROMPTS, WRITES, ("teacher_model",)),
}
OF_ALL = tuple(case for case in CASES if "images" not in case and case != "rloo")
WITHOUT_EXPERTS = tuple(case for case in OF_ALL if "experts" not in case)
ZERO2 = ZERO3 | {"zero_optimization": ZERO3["zero_optimization"] | {"stage": 2}}
DEEPSPEED = {
    "zero2": ZERO2,
    "zero3": ZERO3,
    "zero3-experts": ZERO3,
    "zero3-varlen": ZERO3,
    "zero3-more-varlen": ZERO3,
    "zero3-bf16": ZERO3 | {"bf16": {"enabled": "auto"}},
}
OF_MODE = {
    "zero2": ("trainer", "trainer-lora-on-the-head", "dpo"),
    "fsdp2": OF_ALL,
    **dict.fromkeys(("zero3", "fsdp2-bf16"), WITHOUT_EXPERTS),  # bf16: ours in bf16, stock in fp32
    "zero3-experts": ("trainer-experts", "trainer-experts-lora"),
    # With `varlen_attention`, and other lengths on each rank.
    "fsdp2-varlen": ("trainer-images", "sft-checkpointing", "dpo"),
    "fsdp2-more-varlen": ("trainer", "grpo", "rloo"),
    "zero3-varlen": ("sft-checkpointing",),
    "zero3-more-varlen": ("trainer", "dpo", "grpo", "rloo"),
    # DeepSpeed cannot shard trained parameters of two dtypes: a LoRA in fp32 and a saved head in bf16.
    "zero3-bf16": tuple(case for case in WITHOUT_EXPERTS if case != "trainer-lora-and-saved-head"),
}


def with_images(model, rows):
    """A batch of as many rows with one or two images each. Neighbouring rows have different images."""
    lengths = [len(row["input_ids"]) for row in rows]
    return image_batch(model, [1 + length % 2 for length in lengths], lengths, seed=sum(lengths))


def trainer_of(case, ours, mode, out, folder):
    name, rows, options, models = CASES[case]
    varlen = mode.endswith("varlen")
    if ours and varlen:
        options = options | {"liger_config": {"varlen_attention": True}}
    if ours:
        args_name = "LigerTrainingArguments" if not name else f"Liger{name}Config"
        trainer_class = getattr(liger_trainer, f"Liger{name}Trainer")
        args_class = getattr(liger_trainer, args_name)
    else:
        stock = STOCK.get(name) or tuple(getattr(trl, f"{name}{kind}") for kind in ("Trainer", "Config"))
        trainer_class, args_class = stock
    args = args_class(
        output_dir=out,
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        adam_epsilon=1e-3,  # otherwise gradients that are only rounding make full-length steps
        disable_tqdm=True,
        logging_steps=1,
        bf16=ours and mode.endswith("bf16"),
        deepspeed=DEEPSPEED.get(mode),
        **({"gradient_checkpointing": False} | options),
    )

    def load(which):  # sharded under ZeRO-3, now that there are args
        attention = "sdpa" if varlen else "eager"
        auto = AutoModelForImageTextToText if which == "images" else AutoModelForCausalLM
        return auto.from_pretrained(folder / which, dtype="float32", attn_implementation=attention)

    model = load(next((which for which in ("tied", "experts", "images") if which in case), "policy"))
    # With transformers 5.17, a reference read by one rank is zeros on the others, unless our trainer sends it.
    everywhere = {} if ours else {"FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
    with mock.patch.dict(os.environ, everywhere):
        given = {name: load("other") for name in models}
    if case == "trainer-experts-lora":
        torch.manual_seed(3)
        parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        config = LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj"], target_parameters=parameters)
        model = get_peft_model(model, config)
    elif "lora" in case:
        torch.manual_seed(3)
        where = {"target_modules": ["q_proj", "lm_head"]}
        if "saved-head" in case:  # a full copy of the head is trained
            where = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
        model = get_peft_model(model, LoraConfig(r=2, init_lora_weights=False, **where))
    if name in ("GRPO", "RLOO"):
        given["reward_funcs"] = letters
    if not name:
        given |= {"train_dataset": ragged_rows(24), "eval_dataset": ragged_rows(8), "data_collator": collate}
    if case == "trainer-images":
        given["data_collator"] = partial(with_images, model)
    else:
        given["train_dataset"] = Dataset.from_list(rows or ragged_rows(24))
        given["eval_dataset"] = given["train_dataset"].select(range(8))
        given["processing_class"] = tiny_tokenizer()
    trainer = trainer_class(model=model, args=args, **given)
    if case == "trainer-smoothing" and mode.startswith("fsdp2") and not ours:
        # It decides by the name of the model's class. FSDP2 changes it, and the model would learn to copy its input.
        trainer.label_smoother = partial(trainer.label_smoother, shift_labels=True)
    return trainer


def run(case, ours, mode, out, folder):
    transformers.set_seed(0)
    trainer = trainer_of(case, ours, mode, f"{out}/{case}-{ours}", folder)
    counted, own_packed = [], unpad_plan.UnpadPlan.unpad
    unpad_plan.UnpadPlan.unpad = lambda self, *given: counted.append(self.rows.tokens) or own_packed(self, *given)
    if mode.startswith("zero3"):
        assert any(p.numel() == 0 for p in trainer.model.parameters()), "the model was loaded in parts"
    trainer.train()
    if mode.startswith("fsdp2"):
        assert all(isinstance(p, DTensor) for p in trainer.model_wrapped.parameters()), "the model was sharded"
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    trainer.evaluate()
    unpad_plan.UnpadPlan.unpad = own_packed
    if ours and case == "rloo":
        assert trainer.old_policy.left_out > 3 and trainer.old_policy.run == {}
    wanted = ("loss", "grad_norm", "eval_loss")
    logs = [{k: v for k, v in log.items() if k in wanted} for log in trainer.state.log_history]
    return {
        "weights": weights and {k: v.float().clone() for k, v in weights.items()},
        "logs": [log for log in logs if log],
        "without_padding": len(counted),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    mode, out = sys.argv[1:]
    folder = Path(out, "models", os.environ["RANK"])
    models = {"policy": {}, "other": {"seed": 7}, "tied": {"tie_word_embeddings": True}}
    for which, options in models.items():  # before the process group exists; afterwards only rank 0 would save
        tiny_model("llama", **options).save_pretrained(folder / which)
    tiny_model("qwen3_moe").save_pretrained(folder / "experts")
    image_model("qwen2_5_vl").save_pretrained(folder / "images")
    if mode.startswith("fsdp2"):
        shard_on_cpus()
        dist.init_process_group("gloo")
    else:
        init_deepspeed()
    results = {case: [run(case, ours, mode, out, folder) for ours in (False, True)] for case in OF_MODE[mode]}
    torch.save(results, f"{out}/{dist.get_rank()}.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
