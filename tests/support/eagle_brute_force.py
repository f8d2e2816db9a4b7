"""EAGLE-3's loss the slow way, in plain PyTorch and float64: one rollout at a time, with all logits. And a trainer."""

import copy

import torch
import torch.nn.functional as F
from datasets import Dataset
from tiny_models import VOCAB, ragged_rows, tiny_model, tiny_tokenizer

from liger_trainer import LigerEagleConfig, LigerEagleTrainer
from liger_trainer.eagle.fresh import attach_drafter, fresh_config, fresh_drafter
from liger_trainer.eagle.vocabulary import draft_vocabulary

LAYERS = [0, 1, 3]
DEPTH = 4


def eagle_trainer(model, tmp_path, rows=None, trainer_options=None, **options):
    """A `LigerEagleTrainer` with the defaults of these tests; `options` go to `LigerEagleConfig`."""
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
        "eagle_decay": 0.7,
        "eagle_steps": 3,
        "eagle_draft_vocab_size": 60,
        "eagle_layers": LAYERS,
    }
    if options.get("eagle_init_from"):
        del defaults["eagle_layers"]
    args = LigerEagleConfig(output_dir=str(tmp_path / "eagle"), **(defaults | options))
    rows = Dataset.from_list(rows or ragged_rows())
    return LigerEagleTrainer(
        model,
        args,
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=tiny_tokenizer(),
        **(trainer_options or {}),
    )


def eagle_target(model_type="llama", **config):
    return tiny_model(model_type, num_hidden_layers=DEPTH, **config)


def with_random_drafter(model, draft_vocab_size=60, seed=5):
    """`model` with a drafter far from zero, and with a random draft vocabulary."""
    config = fresh_config(model, draft_vocab_size, LAYERS)
    generator = torch.Generator().manual_seed(seed)
    counts = torch.rand(VOCAB, generator=generator).mul(1000).long()
    drafter = attach_drafter(model, fresh_drafter(model, config, *draft_vocabulary(counts, config.draft_vocab_size)))
    with torch.no_grad():
        for p in drafter.parameters():
            p.add_(0.15 * torch.randn(p.shape, generator=generator))
    return model


def documents(batch):
    """The documents in every row of the batch, as lists of positions, found token by token."""
    found = []
    for b in range(batch["input_ids"].shape[0]):
        row = []
        for t in range(batch["input_ids"].shape[1]):
            if "attention_mask" in batch and not batch["attention_mask"][b, t]:
                continue
            if not row or ("position_ids" in batch and batch["position_ids"][b, t] == 0):
                row.append([])
            row[-1].append(t)
        found += [(b, document) for document in row]
    return found


def norm(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(x, position, theta):
    """x (heads, D) rotated by the angles of a position, the two halves of a head being the pairs."""
    half = x.shape[-1] // 2
    angle = position * theta ** (-torch.arange(half, dtype=x.dtype) / half)
    first, second = x[:, :half], x[:, half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


def rollouts(p, config, states, ids, embedding, steps):
    """The logits (steps, n, Vd) of every step from every token of one document; NaN past the document's end.

    `p` maps tensor names in the drafter's file to tensors, `states` is (n, 3 H), `ids` is (n,).
    """
    n, dim = len(ids), config.head_dim
    layer = {name.removeprefix("midlayer."): tensor for name, tensor in p.items() if name.startswith("midlayer.")}
    shared = config.num_attention_heads // config.num_key_value_heads

    def project(name, x):
        return (layer[f"self_attn.{name}_proj.weight"] @ x).view(-1, dim)

    def layer_input(f, token):
        embed = norm(embedding[token], layer["input_layernorm.weight"], config.rms_norm_eps)
        return torch.cat([embed, norm(f, layer["hidden_norm.weight"], config.rms_norm_eps)])

    first = states @ p["fc.weight"].T
    prefix = []  # the keys and values of step 1
    for t in range(n - 1):
        x = layer_input(first[t], ids[t + 1])
        prefix.append((rotated(project("k", x), t, config.rope_theta), project("v", x)))
    logits = torch.full((steps, n, config.draft_vocab_size), float("nan"), dtype=states.dtype)
    logits = list(logits.unbind())
    for t in range(n - 1):
        f, seen = first[t], list(prefix[: t + 1])
        for k in range(1, steps + 1):
            if t + k >= n:
                break
            x = layer_input(f, ids[t + k])
            if k > 1:
                seen.append((rotated(project("k", x), t + k - 1, config.rope_theta), project("v", x)))
            q = rotated(project("q", x), t + k - 1, config.rope_theta)
            out = []
            for head in range(config.num_attention_heads):
                keys = torch.stack([key[head // shared] for key, _ in seen])
                values = torch.stack([value[head // shared] for _, value in seen])
                out.append((keys @ q[head] * dim**-0.5).softmax(0) @ values)
            y = f + layer["self_attn.o_proj.weight"] @ torch.cat(out)
            x = norm(y, layer["post_attention_layernorm.weight"], config.rms_norm_eps)
            gate = F.silu(layer["mlp.gate_proj.weight"] @ x)
            f = y + layer["mlp.down_proj.weight"] @ (gate * (layer["mlp.up_proj.weight"] @ x))
            z = p["lm_head.weight"] @ norm(f, p["norm.weight"], config.rms_norm_eps)
            logits[k - 1] = logits[k - 1].index_put((torch.tensor(t),), z)
    return torch.stack(logits)


def brute_force(model, batch, steps, decay, layers=LAYERS, count=None):
    """The loss of the batch, the gradients of the drafter by name, and for each step (loss, accuracy, targets).

    `count` is the divisor; if unset, the number of labels that an LM head would learn from.
    """
    drafter = model.eagle_drafter
    names = {name for name, _ in drafter.named_parameters()}
    p = {name: t.detach().double().requires_grad_() if name in names else t for name, t in drafter.state_dict().items()}
    plain = copy.deepcopy(model).double().eval()
    del plain.eagle_drafter
    target_ids = p["t2d"].nonzero()[:, 0]
    embedding = plain.get_input_embeddings().weight.detach()
    total = 0.0
    labels = 0
    report = [[0.0, 0, 0] for _ in range(steps)]
    for b, places in documents(batch):
        ids = batch["input_ids"][b, places]
        with torch.no_grad():
            out = plain(input_ids=ids[None], output_hidden_states=True, use_cache=False)
        teacher = out.logits[0][:, target_ids].log_softmax(-1)
        states = torch.cat([out.hidden_states[i][0] for i in layers], -1)
        logits = rollouts(p, drafter.config, states, ids, embedding, steps)
        given = batch["labels"][b, places].tolist()
        labels += sum(label != -100 for label in given[1:])
        for k in range(1, steps + 1):
            for t in range(len(places) - k - 1):
                label = given[t + k + 1]
                if label == -100 or not p["t2d"][label]:
                    continue
                student = logits[k - 1][t].log_softmax(-1)
                loss = (teacher[t + k].exp() * (teacher[t + k] - student)).sum()
                total = total + decay ** (k - 1) * loss
                sums = report[k - 1]
                sums[0] += float(loss)
                sums[1] += int(target_ids[student.argmax()]) == label
                sums[2] += 1
    total = total / (labels if count is None else count)
    found = torch.autograd.grad(total, [p[name] for name in sorted(names)])
    gradients = dict(zip(sorted(names), found, strict=True))
    return float(total), gradients, [(loss / n, hits / n, n) for loss, hits, n in report]
