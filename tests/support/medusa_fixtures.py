"""Heads that guess some tokens right: fitted to the greedy text of a tiny random model."""

import torch
import torch.nn.functional as F
from tiny_models import VOCAB, tiny_model

from liger_trainer.data.answers import answer
from liger_trainer.medusa.heads import MedusaHeads

ENDS = {2}


def prompts_of(n, seed=3):
    """Prompts of 3 to 9 token ids."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 10, (n,), generator=generator).tolist()
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def model_with_heads(model_type="llama", num_heads=3, num_layers=1, tied=False, steps=60, **config):
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
