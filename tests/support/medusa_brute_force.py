"""The Medusa loss the slow way: full logits of every head, targets found token by token.

Also a trainer to compare, random heads, and heads that guess some tokens right.
"""

import copy

import torch
import torch.nn.functional as F
from datasets import Dataset
from tiny_models import VOCAB, collate, ragged_rows, tiny_model, tiny_tokenizer

from liger_trainer import LigerMedusaConfig, LigerMedusaTrainer
from liger_trainer.data.answers import answer
from liger_trainer.medusa.heads import MedusaHeads, attach_heads


def model_with_heads(model_type="llama", num_heads=3, num_layers=1, tied=True, seed=5, **config):
    """A tiny model with random heads, far from the identity."""
    model = tiny_model(model_type, **config)
    heads = attach_heads(model, MedusaHeads.for_model(model, num_heads, num_layers, tied))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in heads.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=generator))
    return model


def medusa_trainer(model, tmp_path, rows=None, trainer_options=None, **options):
    """A `LigerMedusaTrainer` with the defaults of these tests; `options` go to `LigerMedusaConfig`."""
    defaults = {
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "max_length": 64,
        "bf16": False,
        "gradient_checkpointing": False,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "medusa_decay": 0.7,
    }
    args = LigerMedusaConfig(output_dir=str(tmp_path / "medusa"), **(defaults | options))
    rows = Dataset.from_list(rows or ragged_rows())
    return LigerMedusaTrainer(
        model,
        args,
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=tiny_tokenizer(),
        **(trainer_options or {}),
    )


def packed_batch(seed=3, lengths=(9, 3, 12, 5)):
    """Four documents in one row, the first label of each masked, as TRL's padding-free collator does."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 131, (1, sum(lengths)), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    labels = ids.clone()
    labels[positions == 0] = -100
    labels[0, 4:6] = -100  # masked inside a document, like another speaker's turn
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def ragged_batch(n=8):
    return collate(ragged_rows(n))


def documents(batch):
    """The documents in every row of the batch, as lists of positions."""
    found = []
    for b in range(batch["input_ids"].shape[0]):
        places, row = range(batch["input_ids"].shape[1]), []
        for t in places:
            if "attention_mask" in batch and not batch["attention_mask"][b, t]:
                continue
            if not row or ("position_ids" in batch and batch["position_ids"][b, t] == 0):
                row.append([])
            row[-1].append(t)
        found += [(b, document) for document in row]
    return found


def brute_force(model, batch, stage, targets, decay, coefficient, count=None):
    """The loss of the batch, differentiable, and for each head (LM head first) its mean loss and accuracy.

    `targets` is "hard" or "soft". `count` is the divisor; if unset, the number of labels that the LM head learns from.
    """
    seen = []
    hook = model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    call = {name: value for name, value in batch.items() if name != "labels"}
    with torch.set_grad_enabled(stage == 2):
        logits = model(**call, use_cache=False).logits.float()
    hook.remove()
    scaled = logits_of(model)
    heads = [logits]
    for head in model.medusa_head:
        x = seen[0]
        for block in [m for m in head if hasattr(m, "linear")]:
            z = x @ block.linear.weight.T + block.linear.bias
            x = x + z * torch.sigmoid(z)
        weight = head[len(head) - 1].weight if not hasattr(head[len(head) - 1], "linear") else model.lm_head.weight
        heads.append(scaled(x @ weight.T).float())
    teacher = torch.log_softmax(logits.detach(), -1)
    total, report = 0.0, []
    for k, z in enumerate(heads):
        losses, hits = [], 0
        for b, places in documents(batch):
            for i, t in enumerate(places):
                if i + k + 1 >= len(places):
                    continue
                label = int(batch["labels"][b, places[i + k + 1]])
                if label == -100:
                    continue
                log_p = torch.log_softmax(z[b, t], -1)
                if k and targets == "soft":
                    log_q = teacher[b, places[i + k]]
                    losses.append((log_q.exp() * (log_q - log_p)).sum())
                else:
                    losses.append(-log_p[label])
                hits += int(z[b, t].argmax()) == label
        report.append((float(sum(losses).detach()) / len(losses), hits / len(losses), len(losses)))
        if k or stage == 2:
            total = total + sum(losses) * (coefficient * decay**k if k else 1.0)
    return total / (report[0][2] if count is None else count), report


def logits_of(model):
    """Logits as the model makes them from the product with its LM head."""
    config = model.config
    if getattr(config, "final_logit_softcapping", None):
        return lambda z: config.final_logit_softcapping * torch.tanh(z / config.final_logit_softcapping)
    if getattr(config, "logits_scaling", None):
        return lambda z: z / config.logits_scaling
    return lambda z: z


def plain_copy(model):
    """A copy for the brute force, with the same parameters trained."""
    twin = copy.deepcopy(model)
    twin.zero_grad()
    return twin


ENDS = {2}


def prompts_of(n, seed=3):
    """Prompts of 3 to 9 token ids."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 10, (n,), generator=generator).tolist()
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def model_with_fitted_heads(model_type="llama", num_heads=3, num_layers=1, tied=False, steps=60, **config):
    """A tiny model, and heads fitted, though not to the end, to its greedy texts after `prompts_of(4)`."""
    model = tiny_model(model_type, **config).eval()
    model.generation_config.eos_token_id = 2
    heads = MedusaHeads.for_model(model, num_heads, num_layers, tied)
    prompts = prompts_of(4)
    texts = answer(model, prompts, ENDS, 24)
    examples = []
    for prompt, text in zip(prompts, texts, strict=True):
        ids = torch.tensor(prompt + text)
        with torch.no_grad():
            examples.append((model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0], ids))
    optimizer = torch.optim.Adam(heads.parameters(), lr=0.02)
    for _ in range(steps):
        loss = 0
        for hidden, ids in examples:
            logits = heads.logits(hidden, model.get_output_embeddings())
            loss = loss + sum(F.cross_entropy(logits[k][: -2 - k], ids[k + 2 :]) for k in range(num_heads))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, heads.requires_grad_(False)
