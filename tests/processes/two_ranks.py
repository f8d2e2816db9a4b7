"""One rank of `test_distributed.py`: `torchrun --nproc_per_node 2 two_ranks.py MODE OUT_DIR`, gloo on CPU.

Saves its gradients.
"""

import os
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from datasets import Dataset
from tiny_models import collate, pair_rows, ragged_rows, tiny_model, tiny_tokenizer

from liger_trainer import LigerSFTConfig, LigerSFTTrainer, LigerTrainer, LigerTrainingArguments, apply_liger
from liger_trainer.verify.observed import KeepGradients


def train(trainer_class, args_class, out, accumulation=1, varlen=False, **options):
    """One optimizer step over all 16 rows, on any number of processes; with `varlen`, without their padding."""
    model = tiny_model("llama")
    if varlen:
        model.set_attn_implementation("sdpa")
        options["liger_config"] = {"varlen_attention": int(os.environ.get("WORLD_SIZE", 1)) > 1}
    world = int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun; torch.distributed knows it only once `args` exist
    args = args_class(
        output_dir=f"{out}/run",
        max_steps=1,
        per_device_train_batch_size=16 // world // accumulation,
        logging_steps=1,
        gradient_accumulation_steps=accumulation,
        report_to="none",
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        max_grad_norm=0.0,
        **options,
    )
    save = KeepGradients()
    rows = ragged_rows(16)
    if trainer_class is LigerSFTTrainer:
        extra = {"train_dataset": Dataset.from_list(rows), "processing_class": tiny_tokenizer()}
    else:
        extra = {"train_dataset": rows, "data_collator": collate}
    trainer = trainer_class(model=model, args=args, callbacks=[save], **extra)
    if varlen and world > 1:
        assert trainer.liger_report["varlen_attention"].swapped
    trainer.train()
    return save.steps[0]


def train_on_pairs(trainer_class, args_class, out, ref_model=None, **options):
    """One optimizer step over 16 pairs, 8 at a time: means over the tokens of 8 pairs depend on the choice of pairs."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    args = args_class(
        output_dir=f"{out}/run",
        max_steps=1,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2 // world,
        report_to="none",
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        max_grad_norm=0.0,
        bf16=False,
        gradient_checkpointing=False,
        **options,
    )
    save = KeepGradients()
    trainer_class(
        model=tiny_model("llama"),
        args=args,
        callbacks=[save],
        train_dataset=Dataset.from_list(pair_rows(16)),
        processing_class=tiny_tokenizer(),
        **({} if ref_model is None else {"ref_model": ref_model}),
    ).train()
    return {f"{trainer_class.__name__}.{name}": grad for name, grad in save.steps[0].items()}


def pairs(out):
    """Several trainers in one launch, because a launch costs more than their steps."""
    from liger_trainer import (
        LigerCPOConfig,
        LigerCPOTrainer,
        LigerDPOConfig,
        LigerDPOTrainer,
        LigerORPOConfig,
        LigerORPOTrainer,
    )

    return (
        train_on_pairs(LigerORPOTrainer, LigerORPOConfig, out)
        | train_on_pairs(LigerCPOTrainer, LigerCPOConfig, out, loss_type="simpo")
        | train_on_pairs(LigerDPOTrainer, LigerDPOConfig, out, tiny_model("llama", seed=7), use_weighting=True)
    )


def sampled(out):
    """KTO and the trainers that write their own completions, ours and TRL's. Each rank draws with its own seed."""
    from pathlib import Path

    import trl
    from engine_stand_in import EngineStandIn
    from tiny_models import words
    from trainer_parity import build, letters, trained, with_reference

    import liger_trainer

    folder = Path(out) / os.environ["RANK"]
    model = with_reference(tiny_model("llama"), folder)  # before the process group exists; afterwards only rank 0 saves
    generator = torch.Generator().manual_seed(4)
    prompts = [{"prompt": words(generator, 2, 6)} for _ in range(8)]
    answers = [row | {"completion": " " + words(generator, 2, 6), "label": i % 3 != 1} for i, row in enumerate(prompts)]
    writes = {"max_completion_length": 4}
    groups = writes | {"num_generations": 2}
    rewards = {"reward_funcs": letters}
    cases = {
        "KTO": (answers, {}, {"ref_model": tiny_model("llama", seed=7)}),
        "GRPO": (prompts, groups | {"beta": 0.2, "loss_type": "dapo"}, rewards),
        "RLOO": (prompts, groups | {"beta": 0.2}, rewards),
        "Distillation": (prompts, writes | {"beta": 0.5}, {"teacher_model": tiny_model("llama", seed=7)}),
        # Without the pass of the old policy
        "GRPO-engine": (prompts, groups | {"use_vllm": True, "split": (2, 2)}, rewards),
        "RLOO-alone": (prompts, groups | {"beta": 0.0, "split": (2, 2)}, rewards),
    }
    trl.trainer.grpo_trainer.VLLMGeneration = EngineStandIn
    found = {}
    for case, (rows, options, given) in cases.items():
        for module, prefix in ((liger_trainer, "Liger"), (trl, "")):
            name = case.partition("-")[0]
            trainer_class, args_class = (getattr(module, f"{prefix}{name}{kind}") for kind in ("Trainer", "Config"))
            trainer = build(trainer_class, args_class, model, folder, rows, trainer_options=given, **options)
            logs, (step, *_) = trained(trainer)
            found |= {f"{prefix}{case}.{key.removeprefix('module.')}": grad for key, grad in step.items()}
            sampling = {key: torch.tensor(x) for key, x in logs[0].items() if key.startswith("sampling/")}
            found |= {f"{prefix}{case}.{key}": x for key, x in sampling.items()}
            if prefix and case in ("GRPO-engine", "RLOO-alone"):
                assert (trainer.old_policy.left_out, trainer.old_policy.run) == (1, {})
    return found


def fsdp2(out):
    """A plain loop: patch, shard every layer and the root, and take one step on this rank's half of the rows."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model = tiny_model("llama").train()
    apply_liger(model)
    mesh = dist.init_device_mesh("cpu", (2,)) if hasattr(dist, "init_device_mesh") else None
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    rows = ragged_rows(16)[dist.get_rank() :: 2]
    model(**collate(rows), num_items_in_batch=torch.tensor(40.0)).loss.backward()
    grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    with torch.no_grad():
        scores = model(**collate(rows), fused_lm_head=True, token_outputs=("log_probs", "vocab_mean"))
    return grads | {"log_probs": scores.log_probs, "vocab_mean": scores.vocab_mean} | references()


def references():
    """Compare what each process holds of a reference that only the first has read: zeros or no memory on the others."""
    from liger_trainer.trainers.fsdp2 import broadcast_weights

    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    state = SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=2))
    found = {}
    for kind in ("zeros", "meta"):
        model = tiny_model("llama", tie_word_embeddings=True)
        if dist.get_rank() > 0:
            model = model.to("meta") if kind == "meta" else model
            for p in model.parameters():
                p.data.zero_()
        broadcast_weights(model, SimpleNamespace(state=state, device=torch.device("cpu")))
        assert model.lm_head.weight is model.model.embed_tokens.weight
        found |= {f"{kind}.{name}": p.detach() for name, p in model.named_parameters()}
    return found


def fsdp2_lora(out):
    """FSDP2 on two processes with a LoRA on every linear layer: gradients of stock and patched, and the report."""
    from peft import LoraConfig, get_peft_model
    from torch.distributed.fsdp import fully_shard

    from liger_trainer.lora import layers as patched_lora

    patched_lora.LEAST_WORK = 0
    dist.init_process_group("gloo")
    lora = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    found = {}
    for checkpointing in (False, True):
        for patched in (False, True):
            torch.manual_seed(3)
            model = get_peft_model(tiny_model("llama"), lora).train()
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
                model.enable_input_require_grads()
            report = apply_liger(model) if patched else None
            for layer in model.base_model.model.model.layers:
                fully_shard(layer)
            fully_shard(model)
            for _ in range(2):  # the second pass finds the first one's memory sharded again
                batch = collate(ragged_rows(16)[dist.get_rank() :: 2])
                model(**batch, num_items_in_batch=torch.tensor(40.0)).loss.backward()
            for name, p in model.named_parameters():
                if p.grad is not None:
                    found[checkpointing, patched, name] = p.grad.full_tensor()
        found["swapped", checkpointing] = len(report["lora"].swapped)
    return found


def fsdp1(out):
    """FSDP1 in PEFT's units with a LoRA on the LM head: gradients (as sharded) of stock and patched."""
    from peft import LoraConfig, get_peft_model
    from peft.utils.other import fsdp_auto_wrap_policy
    from torch.distributed.fsdp import FullyShardedDataParallel

    dist.init_process_group("gloo")
    os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = "LlamaDecoderLayer"
    lora = LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    grads = {}
    for patched in (False, True):
        torch.manual_seed(3)
        model = get_peft_model(tiny_model("llama"), lora).train()
        if patched:
            apply_liger(model)
        policy = fsdp_auto_wrap_policy(model)
        sharded = FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
        )
        batch = collate(ragged_rows(16)[dist.get_rank() :: 2])
        outputs = sharded(**batch, num_items_in_batch=torch.tensor(40.0))
        assert (outputs.logits is None) == patched
        outputs.loss.backward()
        grads |= {(patched, name): p.grad for name, p in sharded.named_parameters() if p.grad is not None}
    return grads


MODES = {
    "trainer": lambda out: train(LigerTrainer, LigerTrainingArguments, out, remove_unused_columns=False),
    "trainer-accumulation": lambda out: train(
        LigerTrainer, LigerTrainingArguments, out, 4, remove_unused_columns=False
    ),
    "sft": lambda out: train(LigerSFTTrainer, LigerSFTConfig, out, bf16=False, gradient_checkpointing=False),
    "sft-accumulation": lambda out: train(LigerSFTTrainer, LigerSFTConfig, out, 4, bf16=False),
    "varlen": lambda out: train(LigerTrainer, LigerTrainingArguments, out, varlen=True, remove_unused_columns=False),
    "pairs": pairs,
    "sampled": sampled,
    "fsdp2": fsdp2,
    "fsdp2-lora": fsdp2_lora,
    "fsdp1": fsdp1,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    mode, out = sys.argv[1:]
    grads = MODES[mode](out)
    torch.save(grads, f"{out}/{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort the interpreter on exit, after everything is done
