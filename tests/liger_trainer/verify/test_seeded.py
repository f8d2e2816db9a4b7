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
from verify_setups import failed, lora

from liger_trainer import LigerDPOTrainer, LigerKTOTrainer, LigerMedusaTrainer, LigerSFTTrainer
from liger_trainer.head import scores
from liger_trainer.head.deferred import DeferredLogits
from liger_trainer.lora import layers as lora_layers
from liger_trainer.lora import merge as merging
from liger_trainer.medusa import trainer as medusa_trainer
from liger_trainer.medusa.heads import ResBlock
from liger_trainer.patching import gates, norms
from liger_trainer.trainers import distillation_trainer
from liger_trainer.varlen import unpad_plan, unpadded_backbone
from liger_triton import _chunks
from liger_triton._chunks import Accumulator

LOSSES = "losses and gradient norm"
GRADIENTS = "gradients"
UPDATES = "updates of weights"
TRAINS = "what trains"
NORMS = "norms in 16 bits"
PACKED = "packed rows = separate rows"
PADDED = "padded rows = unpadded rows"
SPLIT = "accumulation 1 x 4 = 4 x 1"
REFERENCE = "reference model"
MERGED, RESUMED = "adapter merged = applied", "saved and resumed = uninterrupted"
LOGGED, CHUNKS, LEFT, DROPOUT = (
    "every logged number",
    "head in chunks = in one",
    "padding on the left",
    "dropout drawn once",
)
ADAM_LOGS, ADAM_GRADIENTS = "Adam, 2 epochs: logs", "Adam, 2 epochs: gradients"
ADAM_WEIGHTS, SEEN = "Adam, 2 epochs: weights, states", "Adam, 2 epochs: what is seen"
EVALUATION = "evaluation"
UNCHANGED = "evaluation changes nothing"
SAVED = "model as saved"
GATES = "gates in 16 bits"
HEAD = "head in 16 bits"
BF16 = "training in bf16"


def in_the_head(**changes):
    """Call the fused loss with other arguments than it should get."""

    def seed(patch):
        stock = DeferredLogits.fused

        def fused(self, function, *args, **kwargs):
            return stock(self, lambda hidden, **own: function(hidden, **(own | changes)), *args, **kwargs)

        patch.setattr(DeferredLogits, "fused", fused)

    return seed


def once_built(module, name, faulty):
    """Replace a function of ours by `faulty` while a trainer trains, but not during the earlier proofs."""

    def seed(patch):
        stock = getattr(module, name)
        init = Trainer.__init__
        train = Trainer.train
        built = []

        def initialised(self, *args, **kwargs):
            built.clear()
            init(self, *args, **kwargs)

        def trained(self, *args, **kwargs):
            built.append(True)
            train(self, *args, **kwargs)

        patch.setattr(Trainer, "__init__", initialised)
        patch.setattr(Trainer, "train", trained)
        patch.setattr(module, name, lambda *a, **k: faulty(stock, *a, **k) if built else stock(*a, **k))

    return seed


def of_a_trainer(cls, name, faulty):
    """Replace a method by `faulty(stock method, self, ...)`."""

    def seed(patch):
        stock = getattr(cls, name)
        patch.setattr(cls, name, lambda self, *args, **kwargs: faulty(stock, self, *args, **kwargs))

    return seed


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
    with mock.patch.dict(gates.GATES, {"gelu_tanh": gates.GATES["gelu"]}):
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


# Bugs that show only in a longer run, an evaluation or 16 bits


def first_chunk_alone(stock, self, dl, x):
    if not self.started:
        stock(self, dl, x)


def margins_of_the_other_sign(stock, self, *args, **kwargs):
    for values in self._metrics.values():
        if "rewards/margins" in values:
            values["rewards/margins"] = [-value for value in values["rewards/margins"]]
    stock(self, *args, **kwargs)


def accuracy_a_little_off(stock, self, mode):
    return {name: value * 1.01 for name, value in stock(self, mode).items()}


def loss_a_little_off(stock, self, *args, **kwargs):
    loss, *others = stock(self, *args, **kwargs)
    return (loss * 1.001, *others)


def a_weight_is_cast(stock, self, *args, **kwargs):
    found = stock(self, *args, **kwargs)
    weight = self.model.get_output_embeddings().weight
    weight.data.copy_(weight.data.bfloat16())
    return found


def a_gradient_is_left(stock, self, *args, **kwargs):
    found = stock(self, *args, **kwargs)
    weight = self.model.get_output_embeddings().weight
    weight.grad = torch.ones_like(weight)
    return found


def without_autocast(stock, self, *args, **kwargs):
    forward = self.model.forward
    plain = forward.__wrapped__ if hasattr(forward, "__wrapped__") else forward
    with mock.patch.object(self.model, "forward", plain):
        return stock(self, *args, **kwargs)


def positions_from_the_first_token(stock, self, call):
    found = stock(self, call)
    if self.index is None:
        return found
    lengths = call["attention_mask"].sum(-1).tolist()
    return found | {"position_ids": torch.cat([torch.arange(length) for length in lengths])[None]}


def positions_end_at_255(stock, self, model, inputs, *args, **kwargs):
    length = inputs["input_ids"].shape[1]
    positions = torch.arange(length).clamp(max=255)[None]
    return stock(self, model, inputs | ({"position_ids": positions} if length > 256 else {}), *args, **kwargs)


def other_epsilon(stock, self, *args, **kwargs):
    optimizer = stock(self, *args, **kwargs)
    for group in optimizer.param_groups:
        group["eps"] = 1e-6
    return optimizer


def decayed_norms(stock, self, *args, **kwargs):
    optimizer = stock(self, *args, **kwargs)
    for group in optimizer.param_groups:
        group["weight_decay"] = self.args.weight_decay
    return optimizer


def moments_are_forgotten(stock, self, *args, **kwargs):
    for state in self.optimizer.state.values():
        if "exp_avg_sq" in state:
            state["exp_avg_sq"].mul_(0.5)
    return stock(self, *args, **kwargs)


def no_warmup(stock, self, num_training_steps, optimizer=None):
    with mock.patch.object(type(self.args), "get_warmup_steps", lambda *_: 0):
        return stock(self, num_training_steps, optimizer)


def full_windows(stock, self, model, inputs, return_outputs=False, num_items_in_batch=None):
    loss = stock(self, model, inputs, return_outputs, num_items_in_batch)
    return loss * self.current_gradient_accumulation_steps / self.args.gradient_accumulation_steps


class OneOrder(torch.utils.data.SequentialSampler):
    def __iter__(self):
        order = torch.randperm(len(self.data_source), generator=torch.Generator().manual_seed(0))
        return iter(order.tolist())


def one_order_for_all_epochs(stock, self, dataset=None):
    return OneOrder(self.train_dataset)


def random_numbers_are_drawn(stock, self, *args, **kwargs):
    torch.rand(1)
    return stock(self, *args, **kwargs)


def dropped_again(patch):
    stock = torch.utils.checkpoint.checkpoint

    def checkpoint(*args, **kwargs):
        return stock(*args, **(kwargs | {"preserve_rng_state": False}))

    patch.setattr(torch.utils.checkpoint, "checkpoint", checkpoint)
    patch.setattr("transformers.modeling_utils.checkpoint", checkpoint)


def untied(stock, self, *args, **kwargs):
    stock(self, *args, **kwargs)
    head = self.model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())


def saved_in_16_bits(stock, self, output_dir=None, state_dict=None):
    state_dict = {name: x.bfloat16() for name, x in self.model.state_dict().items()}
    return stock(self, output_dir, state_dict)


def half_a_derivative(stock, self, module):
    gate = stock(self, module)

    def faulty(g, u, **options):
        return u * (g * g.sigmoid().detach()) if g.dtype == torch.bfloat16 else gate(g, u, **options)

    return faulty


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
        once_built(unpadded_backbone, "rows_known", lambda stock, rows: contextlib.nullcontext()),
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
        once_built(norms, "rms_norm", lambda stock, x, w, eps, **k: stock(x, w, 1e-6, **k)),
        ("SFT",),
        {},
        {LOSSES},
    ),
    "a norm rounds where it should not": (
        once_built(norms, "rms_norm", lambda stock, x, w, eps, **k: stock(x, w, eps, **(k | {"cast": "gemma"}))),
        ("SFT",),
        {},
        {NORMS},
    ),
    "the weight of a norm has no gradient (unsloth's rms_layernorm)": (
        once_built(norms, "rms_norm", lambda stock, x, w, eps, **k: stock(x, w.detach(), eps, **k)),
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
    "the head's gradient has the first chunk alone": (
        of_a_trainer(Accumulator, "add", first_chunk_alone),
        ("SFT",),
        {},
        {CHUNKS},
    ),
    "the margins that are logged have the other sign": (
        of_a_trainer(LigerDPOTrainer, "log", margins_of_the_other_sign),
        ("DPO",),
        {},
        {LOGGED, ADAM_LOGS},
    ),
    "the accuracy of Medusa heads is a percent off": (
        of_a_trainer(LigerMedusaTrainer, "_mean_metrics", accuracy_a_little_off),
        ("Medusa",),
        {},
        {LOGGED},
    ),
    "the loss of an evaluation is a thousandth off": (
        of_a_trainer(LigerSFTTrainer, "prediction_step", loss_a_little_off),
        ("SFT",),
        {},
        {EVALUATION},
    ),
    "an evaluation rounds a weight": (
        of_a_trainer(LigerSFTTrainer, "prediction_step", a_weight_is_cast),
        ("SFT",),
        {},
        {UNCHANGED},
    ),
    "an evaluation leaves a gradient": (
        of_a_trainer(LigerSFTTrainer, "prediction_step", a_gradient_is_left),
        ("SFT",),
        {},
        {UNCHANGED},
    ),
    "an evaluation runs without autocast": (
        of_a_trainer(LigerSFTTrainer, "prediction_step", without_autocast),
        ("SFT",),
        {},
        {BF16},
    ),
    "positions begin at the first token of a row that is padded on the left": (
        once_built(unpad_plan.UnpadPlan, "unpad", positions_from_the_first_token),
        ("SFT", "gpt2"),
        {},
        {LEFT},
    ),
    "positions end at 255": (
        of_a_trainer(LigerSFTTrainer, "compute_loss", positions_end_at_255),
        ("SFT",),
        {},
        {ADAM_LOGS, ADAM_GRADIENTS},
    ),
    "Adam has another epsilon": (
        of_a_trainer(LigerSFTTrainer, "create_optimizer", other_epsilon),
        ("SFT",),
        {},
        {ADAM_WEIGHTS},
    ),
    "norms are decayed": (
        of_a_trainer(LigerSFTTrainer, "create_optimizer", decayed_norms),
        ("SFT",),
        {},
        {ADAM_WEIGHTS},
    ),
    "Adam's second moment is scaled": (
        of_a_trainer(LigerSFTTrainer, "training_step", moments_are_forgotten),
        ("SFT",),
        {},
        {ADAM_WEIGHTS},
    ),
    "the warmup is left out": (
        of_a_trainer(LigerSFTTrainer, "create_scheduler", no_warmup),
        ("SFT",),
        {},
        {ADAM_LOGS, ADAM_WEIGHTS},
    ),
    "a window that is cut short counts as a full one": (
        of_a_trainer(LigerSFTTrainer, "compute_loss", full_windows),
        ("SFT",),
        {},
        {ADAM_LOGS},
    ),
    "the second epoch has the order of the first": (
        of_a_trainer(LigerSFTTrainer, "_get_train_sampler", one_order_for_all_epochs),
        ("SFT",),
        {},
        {SEEN},
    ),
    "a step draws a random number": (
        of_a_trainer(LigerSFTTrainer, "compute_loss", random_numbers_are_drawn),
        ("SFT",),
        {},
        {SEEN},
    ),
    "dropout is drawn again in the recomputation": (dropped_again, ("SFT",), {}, {DROPOUT}),
    "the head is tied no longer": (
        of_a_trainer(LigerSFTTrainer, "__init__", untied),
        ("SFT",),
        {"config": {"tie_word_embeddings": True}},
        {TRAINS, SEEN},
    ),
    "the model is saved in 16 bits": (of_a_trainer(LigerSFTTrainer, "_save", saved_in_16_bits), ("SFT",), {}, {SAVED}),
    "a gate in 16 bits has half of its derivative": (
        once_built(gates.Gate, "function", half_a_derivative),
        ("SFT",),
        {},
        {GATES, BF16},
    ),
    "the head's gradient is summed in 16 bits": (
        lambda patch: patch.setattr(_chunks, "sum_dtype", lambda like, lean: like.dtype),
        ("SFT",),
        {},
        {HEAD},
    ),
}
QUICK = ("a mean of means",)


@pytest.mark.parametrize(
    ("seed", "what", "parts", "found_by"),
    [
        pytest.param(*seeded, id=name, marks=() if name.startswith(QUICK) else pytest.mark.slow)
        for name, seeded in SEEDS.items()
    ],
)
def test_each_published_bug_is_found(seed, what, parts, found_by, monkeypatch):
    seed(monkeypatch)
    assert found_by <= failed(*what, **parts).keys()


WITHOUT = list({str((what, parts)): (what, parts) for _, what, parts, _ in SEEDS.values()}.values())


@pytest.mark.slow
@pytest.mark.parametrize(("what", "parts"), WITHOUT)
def test_without_the_bug_nothing_is_found(what, parts):
    assert failed(*what, **parts) == {}
