"""Bugs published in this field, each put into a trainer, and the check that finds it."""

import contextlib
from unittest import mock

import pytest
import torch
from peft import peft_model
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import ParamWrapper
from transformers import PreTrainedModel, Trainer
from transformers import trainer as transformers_trainer
from trl.trainer import dpo_trainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from verify_setups import (
    GRADIENTS,
    LOSSES,
    MERGED,
    NORMS,
    PACKED,
    PADDED,
    REFERENCE,
    RESUMED,
    SEEN,
    SPLIT,
    TRAINS,
    UPDATES,
    assert_clean,
    assert_found,
    cases,
    in_the_head,
    lora,
    of_a_trainer,
    once_built,
    setups,
)

from liger_trainer import LigerDPOTrainer, LigerKTOTrainer, LigerSFTTrainer
from liger_trainer.head import scores
from liger_trainer.lora import layers as lora_layers
from liger_trainer.lora import merge as merging
from liger_trainer.medusa import trainer as medusa_trainer
from liger_trainer.medusa.heads import ResBlock
from liger_trainer.patching import gates
from liger_trainer.trainers import distillation_trainer
from liger_trainer.varlen import unpad_plan, unpadded_backbone
from liger_triton import reference


def labels_off_by_one(stock, self, model, inputs, *args, **kwargs):
    return stock(self, model, inputs | {"labels": inputs["labels"].roll(1, 1)}, *args, **kwargs)


def loss_on_padding(stock, self, model, inputs, *args, **kwargs):
    padding = inputs["attention_mask"] == 0
    return stock(self, model, inputs | {"labels": inputs["labels"].masked_fill(padding, 0)}, *args, **kwargs)


def mean_of_means(stock, self, model, inputs, return_outputs=False, num_items_in_batch=None):
    loss = stock(self, model, inputs, return_outputs, None)
    return loss / self.current_gradient_accumulation_steps


def head_frozen(stock, self, *args, **kwargs):
    stock(self, *args, **kwargs)
    self.model.get_output_embeddings().requires_grad_(False)


def no_aux_loss(stock, self, *args, **kwargs):
    stock(self, *args, **kwargs)
    self.router_aux_loss_coef = 0.0


def no_class_weights(stock, self, *args, **kwargs):
    stock(self, *args, **kwargs)
    self.desirable_weight = self.undesirable_weight = 1.0


def without_b(stock, self, *args, **kwargs):
    optimizer = stock(self, *args, **kwargs)
    b = {id(p) for name, p in self.model.named_parameters() if "lora_B" in name}
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) not in b]
    return optimizer


def no_optimizer_state(stock, self, checkpoint):
    state = self.optimizer.state_dict()
    stock(self, checkpoint)
    if checkpoint is not None:
        self.optimizer.load_state_dict(state)


def a_step_too_many(stock, self, checkpoint):
    stock(self, checkpoint)
    if checkpoint is not None:
        self.lr_scheduler.step()


def rows_that_mix(patch):
    stock = DataCollatorForLanguageModeling.torch_call

    def of_one_row(self, rows):
        batch = stock(self, rows)
        return batch | {"position_ids": torch.arange(batch["labels"].shape[1])[None]}

    patch.setattr(DataCollatorForLanguageModeling, "torch_call", of_one_row)


def positions_go_on(stock, self, call):
    return stock(self, call) | {"position_ids": torch.arange(self.rows.tokens)[None]}


def adapters_of_experts_dead(stock, self, adapter):
    return tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in stock(self, adapter))


def experts_with_each_other_s_b(stock, self, adapter):
    return stock(self, adapter).roll(1, 0)


def scaled_twice(stock, self, adapter):
    return stock(self, adapter) * self.scaling[adapter]


def no_reference(patch):
    patch.setattr(dpo_trainer, "use_adapter", lambda *args, **kwargs: contextlib.nullcontext())


def reference_trains(stock, self, *args, **kwargs):
    self.ref_model.train()
    return stock(self, *args, **kwargs)


def one_gradient_for_all_rows(stock, *args, **kwargs):
    found = stock(*args, **kwargs)
    if found[0].requires_grad:  # it does not for the reference
        found[0].register_hook(lambda grad: grad.flatten()[0].expand_as(grad))
    return found


def prompts_learned(stock, self, model, inputs, *args, **kwargs):
    every = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    return stock(self, model, inputs | {"labels": every}, *args, **kwargs)


def exact_gelu(stock, self, *args, **kwargs):
    with mock.patch.dict(gates.GATES["gelu_tanh"].keywords, gates.GATES["gelu"].keywords):
        return stock(self, *args, **kwargs)


def scaled_by_the_rank(stock, layer):
    parts = stock(layer)
    return parts and [part._replace(scaling=part.scaling / part.a.out_features**0.5) for part in parts]


def no_gradient_through_embeddings(patch):
    patch.setattr(PreTrainedModel, "enable_input_require_grads", lambda self: None)


def without_saved_modules(patch):
    stock = peft_model.get_peft_model_state_dict

    def of_adapters(*args, **kwargs):
        return {name: value for name, value in stock(*args, **kwargs).items() if "lora_" in name}

    patch.setattr(peft_model, "get_peft_model_state_dict", of_adapters)


def batches_restart(patch):
    patch.setattr(transformers_trainer, "skip_first_batches", lambda batches, count: batches)


def target_off_by_one(stock, inputs, num_heads):
    targets = stock(inputs, num_heads)
    targets[1:, :, 1:] = targets[1:, :, :-1].clone()
    return targets


def across_documents_and_one_too_near(inputs, num_heads):
    labels = inputs["labels"]
    targets = labels.new_full((num_heads + 1, *labels.shape), -100)
    for k in range(num_heads + 1):
        ahead = max(k, 1)
        targets[k, :, :-ahead] = labels[:, ahead:]
    return targets


def in_the_targets_of_medusa(patch):
    """The function itself has the bug, for every caller."""
    patch.setattr(medusa_trainer.head_targets, "__code__", across_documents_and_one_too_near.__code__)


EXPERTS = {"config": {"num_experts": 4}, "peft_config": lora("q_proj", target_parameters=["experts.gate_up_proj"])}
SEEDS = {
    "adapters of experts get no gradient (unsloth-zoo#606)": (
        of_a_trainer(ParamWrapper, "get_delta_factors", adapters_of_experts_dead),
        ("SFT", "qwen3_moe"),
        EXPERTS,
        {TRAINS},
    ),
    "an expert is merged with another one's B (unsloth-zoo#1269)": (
        of_a_trainer(ParamWrapper, "get_delta_weight", experts_with_each_other_s_b),
        ("SFT", "qwen3_moe"),
        EXPERTS,
        {MERGED},
    ),
    "the router's auxiliary loss is dropped": (
        of_a_trainer(LigerSFTTrainer, "__init__", no_aux_loss),
        ("SFT", "qwen3_moe"),
        {"model_init": {"output_router_logits": True}},
        {LOSSES, GRADIENTS},
    ),
    "packed rows see each other (trl#1230)": (rows_that_mix, ("SFT",), {"options": {"packing": True}}, {PACKED}),
    "the lengths of packed rows are ignored (transformers#46333)": (
        once_built(unpadded_backbone, "use_rows", lambda stock, rows: contextlib.nullcontext()),
        ("SFT",),
        {"options": {"packing": True}},
        {PACKED},
    ),
    "positions go on from row to row (trl#6515)": (
        once_built(unpad_plan.UnpadPlan, "unpad", positions_go_on),
        ("SFT", "gpt2"),
        {"options": {"packing": True}},
        {PACKED, LOSSES},
    ),
    "label smoothing is dropped (trl#7063)": (
        in_the_head(label_smoothing=0.0),
        ("SFT",),
        {"options": {"label_smoothing_factor": 0.1}},
        {LOSSES, GRADIENTS},
    ),
    "class weights are dropped (trl#7059)": (
        of_a_trainer(LigerKTOTrainer, "__init__", no_class_weights),
        ("KTO",),
        {"options": {"desirable_weight": 2.0}},
        {LOSSES, GRADIENTS},
    ),
    "an adapter on the head never trains (unsloth#9331)": (
        in_the_head(lora=None),
        ("SFT",),
        {"peft_config": lora("q_proj", "lm_head")},
        {LOSSES, TRAINS},
    ),
    "the head is frozen in silence (trl#4612)": (
        of_a_trainer(LigerSFTTrainer, "__init__", head_frozen),
        ("SFT",),
        {},
        {GRADIENTS, TRAINS},
    ),
    "B of a LoRA is in no group of the optimizer": (
        of_a_trainer(LigerSFTTrainer, "create_optimizer", without_b),
        ("SFT",),
        {"peft_config": lora()},
        {UPDATES, TRAINS},
    ),
    "a mean of means over accumulated batches (transformers#34576)": (
        of_a_trainer(LigerSFTTrainer, "compute_loss", mean_of_means),
        ("SFT",),
        {},
        {LOSSES, SPLIT},
    ),
    "the reference under PEFT is the policy (trl#7243)": (no_reference, ("DPO",), {"peft_config": lora()}, {REFERENCE}),
    "an adapter is scaled twice when it is merged": (
        of_a_trainer(LoraLinear, "get_delta_weight", scaled_twice),
        ("SFT",),
        {"peft_config": lora()},
        {MERGED},
    ),
    "labels are off by one": (of_a_trainer(LigerSFTTrainer, "compute_loss", labels_off_by_one), ("SFT",), {}, {LOSSES}),
    "padding is learned": (
        of_a_trainer(LigerSFTTrainer, "compute_loss", loss_on_padding),
        ("SFT",),
        {},
        {LOSSES, PADDED},
    ),
    "a norm has another epsilon": (
        once_built(reference, "rms_norm", lambda stock, x, w, eps, **k: stock(x, w, 1e-6, **k)),
        ("SFT",),
        {},
        {LOSSES},
    ),
    "a norm rounds where it should not": (
        once_built(reference, "rms_norm", lambda stock, x, w, eps, **k: stock(x, w, eps, **(k | {"cast": "gemma"}))),
        ("SFT",),
        {},
        {NORMS},
    ),
    "the weight of a norm has no gradient (unsloth's rms_layernorm)": (
        once_built(reference, "rms_norm", lambda stock, x, w, eps, **k: stock(x, w.detach(), eps, **k)),
        ("SFT",),
        {},
        {GRADIENTS, TRAINS},
    ),
    "the softcap of the logits is dropped (unsloth-zoo#593)": (
        in_the_head(softcap=None),
        ("SFT", "gemma2"),
        {},
        {LOSSES, GRADIENTS},
    ),
    "the scale of the logits is dropped (unsloth#11277)": (
        in_the_head(logit_scale=1.0),
        ("SFT", "granite"),
        {"config": {"logits_scaling": 8.0}},
        {LOSSES},
    ),
    "the temperature of GRPO is dropped (liger-kernel#1082)": (
        in_the_head(temperature=1.0),
        ("GRPO",),
        {"options": {"beta": 0.1, "temperature": 0.7}},
        {GRADIENTS},
    ),
    "the optimizer's state is not loaded (transformers#11323)": (
        of_a_trainer(Trainer, "_load_optimizer_and_scheduler", no_optimizer_state),
        ("SFT",),
        {},
        {RESUMED},
    ),
    "the schedule is a step ahead after a restart": (
        of_a_trainer(Trainer, "_load_optimizer_and_scheduler", a_step_too_many),
        ("SFT",),
        {"options": {"lr_scheduler_type": "cosine"}},
        {RESUMED},
    ),
    "the blocks of Medusa heads are skipped (liger-kernel#325)": (
        of_a_trainer(ResBlock, "forward", lambda stock, self, x: x + 0 * stock(self, x)),
        ("Medusa",),
        {"options": {"medusa_tied": False}},
        {LOSSES, TRAINS},
    ),
    "the targets of Medusa heads are off by one (medusa#85)": (
        once_built(medusa_trainer, "head_targets", target_off_by_one),
        ("Medusa",),
        {},
        {LOSSES, GRADIENTS},
    ),
    "the reference drops out (it is in training mode)": (
        of_a_trainer(LigerDPOTrainer, "training_step", reference_trains),
        ("DPO",),
        {},
        {SEEN},
    ),
    "Medusa heads guess a token too near": (in_the_targets_of_medusa, ("Medusa",), {}, {LOSSES, GRADIENTS}),
    "every row has the first one's gradient (liger-kernel#968)": (
        once_built(scores, "linear_logprobs", one_gradient_for_all_rows),
        ("DPO",),
        {},
        {GRADIENTS},
    ),
    "the completion mask is dropped (trl#3484)": (
        of_a_trainer(LigerSFTTrainer, "compute_loss", prompts_learned),
        ("SFT",),
        {},
        {LOSSES},
    ),
    "gelu is exact in place of tanh (transformers#29402)": (
        of_a_trainer(LigerSFTTrainer, "compute_loss", exact_gelu),
        ("SFT", "gemma"),
        {},
        {LOSSES},
    ),
    "rsLoRA is scaled like LoRA (tensorrt-llm#1668)": (
        once_built(lora_layers, "active_adapters", scaled_by_the_rank),
        ("SFT",),
        {"peft_config": lora(use_rslora=True)},
        {LOSSES, MERGED},
    ),
    "the bias of a layer with LoRA is dropped (axolotl#3528)": (
        once_built(lora_layers, "tensors_of", lambda stock, *args: stock(*args)._replace(bias=None)),
        ("SFT", "qwen2"),
        {"peft_config": lora()},
        {LOSSES},
    ),
    "adapters in checkpointed layers get no gradient (open-unlearning#178)": (
        no_gradient_through_embeddings,
        ("SFT",),
        {
            "peft_config": lora(modules_to_save=["lm_head"]),
            "options": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        },
        {TRAINS},
    ),
    "a head that is saved with an adapter is not (transformers#48595)": (
        without_saved_modules,
        ("SFT",),
        {"peft_config": lora(modules_to_save=["lm_head"])},
        {MERGED},
    ),
    "the temperature of a distillation is dropped (trl#5731)": (
        once_built(
            distillation_trainer, "linear_divergence", lambda stock, *a, **k: stock(*a, **(k | {"temperature": 1}))
        ),
        ("Distillation",),
        {"options": {"temperature": 2.0}},
        {LOSSES},
    ),
    "an adapter on a tied head is merged into the embeddings too (peft#2018)": (
        lambda patch: patch.setattr(merging, "merge", lambda adapted: adapted.merge_and_unload()),
        ("SFT",),
        {"config": {"tie_word_embeddings": True}, "peft_config": lora("q_proj", "lm_head")},
        {MERGED},
    ),
    "a restarted run begins with the first batches again (accelerate#2016)": (
        batches_restart,
        ("SFT",),
        {},
        {RESUMED},
    ),
}


@pytest.mark.parametrize(("seed", "what", "parts", "found_by"), cases(SEEDS, quick="a mean of means"))
def test_each_published_bug_is_found(seed, what, parts, found_by, monkeypatch):
    assert_found(seed, what, parts, found_by, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "parts"), setups(SEEDS))
def test_without_the_bug_nothing_is_found(what, parts):
    assert_clean(what, parts)
