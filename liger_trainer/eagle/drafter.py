"""The drafter, and how training unrolls it.

With h the three hidden states of the target at token t, side by side, and e(x) the target's embedding of token x:

    f_1 = fc(h_t)                                                  step 1, from the target's hidden states
    y_k = f_k + attention([input_layernorm(e(x_{t+k})), hidden_norm(f_k)])
    f_{k+1} = y_k + mlp(post_attention_layernorm(y_k))             what step k + 1 starts from
    logits of step k = norm(f_{k+1}) @ lm_head.T                   a guess at token t + k + 1

Queries and keys of step k are rotated by the position of t plus k - 1. A query of step k sees the keys of step 1 at the
tokens of its document up to t, and the keys of steps 2 to k at t. A server's drafter sees the same: it has read the
target's hidden states up to t, and then k - 1 of its own. In training x_{t+k} is the token of the text. In decoding it
is the drafter's guess. The two are equal as long as all earlier guesses were right, and later guesses do not count.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from liger_trainer.eagle.files import DrafterConfig, read_drafter, write_drafter
from liger_trainer.head.flat_rows import FlatRows
from liger_triton import add_rms_norm, rms_norm, rollout_attention, rope, row_attention, swiglu

INIT_STD = 0.02


class DrafterNorm(nn.Module):
    """RMSNorm over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class DrafterAttention(nn.Module):
    """Attention with queries, keys and values from an embedding and a hidden state side by side (T, 2 H)."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def forward(
        self,
        x: torch.Tensor,
        angles: torch.Tensor,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        offsets: torch.Tensor,
        longest: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (T, H), and the keys and values (T, G, D) of this step. `keys` are the keys of earlier steps."""
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        q = _rotated(q, angles)
        k = _rotated(k, angles)
        if keys:
            out = rollout_attention(q, keys[0], values[0], [*keys[1:], k], [*values[1:], v], offsets, longest)
        else:
            out = row_attention(q, k, v, offsets, longest)
        return self.o_proj(out.flatten(1)), k, v


def _rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Return `x` (T, heads, D) rotated by angles (T, D / 2)."""
    cos = angles.cos().unsqueeze(0)
    sin = angles.sin().unsqueeze(0)
    turned, _ = rope(x.unsqueeze(0), None, cos, sin, cos_layout="single", cast="input", unsqueeze_dim=2)
    return turned.squeeze(0)


class DrafterMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class DrafterLayer(nn.Module):
    """The decoder layer."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = DrafterNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = DrafterNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DrafterAttention(config)
        self.post_attention_layernorm = DrafterNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = DrafterMLP(config)

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, *attention: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the next hidden state (T, H), and the keys and values of this step."""
        x = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], -1)
        seen, k, v = self.self_attn(x, *attention)
        after = self.post_attention_layernorm
        normed, residual = add_rms_norm(seen, hidden, after.weight, after.eps)
        return residual + self.mlp(normed), k, v


class EagleDrafter(nn.Module):
    """An EAGLE-3 drafter. `state_dict()` has the names and shapes of `files.py`.

    Args:
        config (`DrafterConfig`): Its shape.
    """

    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = DrafterLayer(config)
        self.norm = DrafterNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=INIT_STD)

    def forward(
        self, states: torch.Tensor, embedding: torch.Tensor, rows: FlatRows, steps: int, recompute: bool = False
    ) -> list[torch.Tensor]:
        """Unroll the drafter from every token, along the text.

        Args:
            states (`torch.Tensor`): (T, 3 H), the hidden states of the target.
            embedding (`torch.Tensor`): (V, H), the weight of its embeddings.
            rows (`FlatRows`): The tokens and their documents.
            steps (`int`): Number of tokens to guess from each token.
            recompute (`bool`, *optional*, defaults to `False`): Save only the input of each step, and recompute its
                activations in the backward pass.

        Returns:
            `list` of `steps` tensors (T, H), the inputs of `lm_head`. Steps that go past the end of a document hold
            meaningless numbers in its last tokens.
        """
        step: Callable[..., Any] = self._step
        if recompute and torch.is_grad_enabled():
            step = _recomputed(self._step)
        hidden = self.fc(states)
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        outputs = []
        for k in range(1, steps + 1):
            normed, hidden, key, value = step(hidden, embedding, rows, k, keys, values)
            keys = [*keys, key]  # a new list, because the recomputation of a step needs the list of that step
            values = [*values, value]
            outputs.append(normed)
        return outputs

    def _step(
        self,
        hidden: torch.Tensor,
        embedding: torch.Tensor,
        rows: FlatRows,
        k: int,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        embeds = F.embedding(rows.ids.roll(-k), embedding)
        angles = self.angles(rows.positions + (k - 1))
        hidden, key, value = self.midlayer(embeds, hidden, angles, keys, values, rows.offsets, rows.longest)
        return self.norm(hidden), hidden, key, value

    def angles(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the rotary angles (T, D / 2) of positions (T,), in fp32."""
        half = torch.arange(0, self.config.head_dim, 2, device=positions.device, dtype=torch.float32)
        frequencies = self.config.rope_theta ** (-half / self.config.head_dim)
        return positions.float().unsqueeze(1) * frequencies

    @property
    def target_ids(self) -> torch.Tensor:
        """The target's id (Vd,) of each draft id."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def save_pretrained(self, folder: str, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """Write `config.json` and `model.safetensors`, as vLLM and SGLang read them.

        `state_dict` has full tensors by the names of this module, in case the module's own are sharded.
        """
        tensors = self.state_dict() if state_dict is None else state_dict
        write_drafter(folder, self.config, {n: t.detach().cpu().contiguous() for n, t in tensors.items()})

    @classmethod
    def from_pretrained(cls, folder: str) -> "EagleDrafter":
        """Load a drafter from the output_dir of a training, an exported folder, or a published drafter.

        Raises:
            ValueError: A file is missing, the drafter has another architecture, or the config contradicts the tensors.
        """
        config, tensors = read_drafter(folder)
        drafter = cls(config).to(tensors["fc.weight"].dtype)
        drafter.load_state_dict(tensors)
        return drafter


def _recomputed(step: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return checkpoint(step, *args, use_reentrant=False)

    return run
