"""Tiny bases with an MTP head in their checkpoint, named like Qwen3.5's or DeepSeek's, and a trainer of the head.

`brute_force` is the head's loss, written out from full logits.
"""

import copy

import torch
from datasets import Dataset
from medusa_brute_force import documents
from safetensors.torch import load_file, save_file
from tiny_models import ragged_rows, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

from liger_trainer import LigerMTPConfig, LigerMTPTrainer, LigerSFTConfig, LigerSFTTrainer

HIDDEN = 32
INNER = 48
HEADS = 4
GROUPS = 2
DIM = 16
SHAPES = {  # in the checkpoints of Qwen3.5; q_proj includes the gate of the attention
    "mtp.fc.weight": (HIDDEN, 2 * HIDDEN),
    "mtp.pre_fc_norm_embedding.weight": (HIDDEN,),
    "mtp.pre_fc_norm_hidden.weight": (HIDDEN,),
    "mtp.norm.weight": (HIDDEN,),
    "mtp.layers.0.input_layernorm.weight": (HIDDEN,),
    "mtp.layers.0.post_attention_layernorm.weight": (HIDDEN,),
    "mtp.layers.0.self_attn.q_proj.weight": (2 * HEADS * DIM, HIDDEN),
    "mtp.layers.0.self_attn.k_proj.weight": (GROUPS * DIM, HIDDEN),
    "mtp.layers.0.self_attn.v_proj.weight": (GROUPS * DIM, HIDDEN),
    "mtp.layers.0.self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
    "mtp.layers.0.self_attn.q_norm.weight": (DIM,),
    "mtp.layers.0.self_attn.k_norm.weight": (DIM,),
    "mtp.layers.0.mlp.gate_proj.weight": (INNER, HIDDEN),
    "mtp.layers.0.mlp.up_proj.weight": (INNER, HIDDEN),
    "mtp.layers.0.mlp.down_proj.weight": (HIDDEN, INNER),
}


LAYER = "model.layers.2."  # of `write_layer_base`


def write_base(folder, shapes=SHAPES, kind="qwen3_5_text", **config):
    """Write a tiny model with an MTP head in its checkpoint. Return the tensors of the head."""
    model = tiny_model(kind, mtp_num_hidden_layers=1, **config)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    generator = torch.Generator().manual_seed(1)
    extra = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(load_file(folder / "model.safetensors") | extra, folder / "model.safetensors", {"format": "pt"})
    return extra


def write_layer_base(folder, kind, without=(), **config):
    """A tiny base with a layer 2 of its depth 2, by the names of the published checkpoints. Returns its tensors."""
    model = tiny_model(kind, num_nextn_predict_layers=1, **config)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    saved = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        return 0.2 * torch.randn(shape, generator=generator)

    extra = {}
    for name, tensor in saved.items():
        if name.startswith("model.layers.1."):
            extra[name.replace("layers.1.", "layers.2.")] = random(*tensor.shape)
    extra |= {
        f"{LAYER}enorm.weight": random(HIDDEN),
        f"{LAYER}hnorm.weight": random(HIDDEN),
        f"{LAYER}eh_proj.weight": random(HIDDEN, 2 * HIDDEN),
        f"{LAYER}shared_head.norm.weight": random(HIDDEN),
        f"{LAYER}shared_head.head.weight": saved["lm_head.weight"].clone(),
        f"{LAYER}embed_tokens.weight": saved["model.embed_tokens.weight"].clone(),
    }
    extra = {name: tensor for name, tensor in extra.items() if name not in without}
    save_file(saved | extra, folder / "model.safetensors", {"format": "pt"})
    return extra


def mtp_trainer(base, output, rows=None, trainer_options=None, alone=False, dtype=torch.float32, model=None, **options):
    """A `LigerSFTTrainer` with `train_mtp`, or, `alone`, an `LigerMTPTrainer`; `options` go to its config.

    Without `model`, the base is loaded in `dtype`.
    """
    defaults = {
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "max_length": 64,
        "bf16": False,
        "activation_checkpointing": False,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "train_mtp": not alone,
    }
    config_class, trainer_class = (LigerMTPConfig, LigerMTPTrainer) if alone else (LigerSFTConfig, LigerSFTTrainer)
    args = config_class(output_dir=str(output), **(defaults | options))
    if model is None:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    rows = Dataset.from_list(rows or ragged_rows())
    return trainer_class(
        model, args, train_dataset=rows, eval_dataset=rows, processing_class=tiny_tokenizer(), **(trainer_options or {})
    )


def brute_force(model, tensors, batch, soft=False):
    """Summed loss, the head's gradients by name, right guesses and targets, in float64, one document at a time.

    With `soft` the loss is the divergence from the model's logits at the token before the guessed one.

    The decoder layer is transformers' own; the rest is written out.
    """
    plain = copy.deepcopy(model).double().eval()
    p = {name: tensor.double().requires_grad_() for name, tensor in tensors.items()}
    config = copy.deepcopy(plain.config)
    config.layer_types = ["full_attention"]
    config._attn_implementation = "eager"
    layer = type(plain.model.layers[0])(config, 0).double()

    def norm(x, weight):
        return x * (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * (1 + weight)

    total = 0.0
    hits = 0
    count = 0
    for b, places in documents(batch):
        ids = batch["input_ids"][b, places][None]
        with torch.no_grad():
            hidden = plain.model(input_ids=ids).last_hidden_state[0]
            log_q = plain.lm_head(hidden).log_softmax(-1)
        embeds = plain.model.embed_tokens.weight.detach()[ids[0, 1:]]
        joined = [norm(embeds, p["mtp.pre_fc_norm_embedding.weight"])]
        joined.append(norm(hidden[:-1], p["mtp.pre_fc_norm_hidden.weight"]))
        x = torch.cat(joined, -1) @ p["mtp.fc.weight"].T
        n = len(x)
        positions = torch.arange(n)[None]
        angles = plain.model.rotary_emb(x[None], positions.expand(3, 1, n))
        mask = torch.full((n, n), float("-inf"), dtype=x.dtype).triu(1)[None, None]
        own = {name.removeprefix("mtp.layers.0."): t for name, t in p.items() if name.startswith("mtp.layers.0.")}
        call = {"position_embeddings": angles, "attention_mask": mask, "position_ids": positions}
        out = torch.func.functional_call(layer, own, (x[None],), call)[0]
        log_p = (norm(out, p["mtp.norm.weight"]) @ plain.lm_head.weight.detach().T).log_softmax(-1)
        for t in range(n - 1):
            label = int(batch["labels"][b, places[t + 2]])
            if label == -100:
                continue
            if soft:
                total = total + (log_q[t + 1].exp() * (log_q[t + 1] - log_p[t])).sum()
            else:
                total = total - log_p[t, label]
            hits += int(log_p[t].argmax()) == label
            count += 1
    names = sorted(p)
    gradients = dict(zip(names, torch.autograd.grad(total, [p[name] for name in names]), strict=True))
    return float(total.detach()), gradients, hits, count
