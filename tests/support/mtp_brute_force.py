"""The loss of an MTP head of Qwen3.5, written out from full logits."""

import copy

import torch
from medusa_brute_force import documents


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
