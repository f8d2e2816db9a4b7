"""The drafter, and how training unrolls it.

With h_t the three hidden states of the target at token t, concatenated, and e(x) the target's embedding of token x:

    f_1 = fc(h_t)                                                  step 1, from the target's hidden states
    y_k = f_k + attention([input_layernorm(e(x_{t+k})), hidden_norm(f_k)])
    f_{k+1} = y_k + mlp(post_attention_layernorm(y_k))             what step k + 1 starts from
    logits of step k = norm(f_{k+1}) @ lm_head.T                   a guess at token t + k + 1

Queries and keys of step k are rotated by the position of t plus k - 1. A query of step k sees the keys of step 1 at the
tokens of its document up to t, and the keys of steps 2 to k at t. A server's drafter sees the same: it has read the
target's hidden states up to t, and then k - 1 of its own. In training, x_{t+k} is the token of the text. In decoding,
it is the drafter's guess. The two are equal while all earlier guesses are right, and guesses after a wrong one do not
count.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from liger_trainer.eagle.files import DrafterConfig, read_drafter, write_drafter
from liger_trainer.head.flat_rows import FlatRows
from liger_trainer.memory.rebuild import call_rebuilding, only_caller_reads, rebuildable, rebuilding
from liger_triton import add_rms_norm, rms_norm, rollout_attention, rope, row_attention, swiglu

INIT_STD = 0.02


class DrafterNorm(nn.Module):
    """RMSNorm over the last dimension, in the dtype of its input.

    Under autocast the weight is fp32. It is rounded like the weights of the linear layers: an fp32 output would take
    twice the memory, and could not be rebuilt for a product in 16 bits.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rebuildable(self._normed(x, self.weight), self._normed, x, self.weight)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight.to(x.dtype), self.eps)

    def with_sum(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of x + residual, and the sum."""
        return add_rms_norm(x, residual, self.weight.to(x.dtype), self.eps)


class Step(NamedTuple):
    """The inputs of one step of the layer, other than its hidden states.

    Attributes:
        weight (`torch.Tensor`): (P, H), the half of the joined QKV weight that multiplies hidden states.
        embeds (`torch.Tensor`): The product of the other half with the embeddings, (T, P) in step 1 and (n, P) later.
        angles (`torch.Tensor`): (T, D / 2) in step 1 and (n, D / 2) later.
        rows (`FlatRows`): The T tokens.
        drafted (`torch.Tensor` or `None`): (n,) int64, the tokens that rollouts start from. None: all, n = T.
    """

    weight: torch.Tensor
    embeds: torch.Tensor
    angles: torch.Tensor
    rows: FlatRows
    drafted: torch.Tensor | None


class DrafterAttention(nn.Module):
    """Attention with queries, keys and values from an embedding and a hidden state, concatenated to (T, 2 H)."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.sizes = queries, keys, keys
        self.q_proj = nn.Linear(2 * config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def joined_weight(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights of queries, keys and values as one, (P, 2 H), for one product instead of three.

        It is rounded to `dtype` here, once. Autocast would do that again for each step, and each would keep its own.
        """
        weights = (self.q_proj.weight, self.k_proj.weight, self.v_proj.weight)
        return torch.cat([weight.to(dtype) for weight in weights])

    def forward(
        self, normed: torch.Tensor, step: Step, keys: list[torch.Tensor], values: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (n, H), and the keys and values of this step. `keys` and `values` come from the steps before.

        `normed` is (T, H) in the first step and (n, H) in the others. All rollouts see the first step's keys.
        """
        queries = self.sizes[0]
        if keys or step.drafted is None:
            with rebuilding(normed):
                projected = F.linear(normed, step.weight) + step.embeds
            q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in projected.split(self.sizes, -1))
            q = rotated(q, step.angles)
            k = rotated(k, step.angles)
        else:
            own = step.embeds[:, :queries].index_select(0, step.drafted)
            q = F.linear(normed.index_select(0, step.drafted), step.weight[:queries]) + own
            with rebuilding(normed):
                others = F.linear(normed, step.weight[queries:]) + step.embeds[:, queries:]
            k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in others.chunk(2, -1))
            q = rotated(q.unflatten(-1, (-1, self.head_dim)), step.angles.index_select(0, step.drafted))
            k = rotated(k, step.angles)
        k = k.contiguous()
        v = v.contiguous()  # later steps keep it; a view would keep the whole projection alive
        out = self._attention(q, [*keys, k], [*values, v], step.rows, step.drafted)
        return self.o_proj(out.flatten(1)), k, v

    @staticmethod
    def _attention(
        q: torch.Tensor,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        rows: FlatRows,
        drafted: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend to the keys of the first step, and to the later ones of the same rollout: (n, heads, D)."""
        first = keys[0], values[0]
        if len(keys) > 1:
            return rollout_attention(q, *first, keys[1:], values[1:], rows.offsets, rows.longest, places=drafted)
        if drafted is None:
            return row_attention(q, *first, rows.offsets, rows.longest)
        wide = q.new_zeros(len(first[0]), *q.shape[1:]).index_copy(0, drafted, q)
        return row_attention(wide, *first, rows.offsets, rows.longest).index_select(0, drafted)


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Return `x` (T, heads, D) rotated by angles (T, D / 2)."""
    cos = angles.cos().unsqueeze(0)
    sin = angles.sin().unsqueeze(0)
    turned, _ = rope(x.unsqueeze(0), None, cos, sin, cos_layout="single", cast="input", unsqueeze_dim=2)
    return turned.squeeze(0)


class DrafterMLP(nn.Module):
    """down(silu(gate(x)) * up(x)). The product of gate and up is recomputed in backward instead of saved."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(x)
        up = self.up_proj(x)
        reuse = only_caller_reads(self.gate_proj, gate) and only_caller_reads(self.up_proj, up)
        return call_rebuilding(self.down_proj, swiglu, gate, up, reuse)


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
        self, hidden: torch.Tensor, step: Step, keys: list[torch.Tensor], values: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the next hidden state (n, H), and the keys and values of this step."""
        seen, k, v = self.self_attn(self.hidden_norm(hidden), step, keys, values)
        if not keys and step.drafted is not None:
            hidden = hidden.index_select(0, step.drafted)
        normed, residual = self.post_attention_layernorm.with_sum(seen, hidden)
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
        self,
        states: torch.Tensor,
        embedding: torch.Tensor,
        rows: FlatRows,
        steps: int,
        recompute: bool = False,
        drafted: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Unroll the drafter along the text, from every token or from some.

        The embeddings' part of queries, keys and values is computed once for all steps: step k at token t reads the
        same embedding as step 1 at token t + k - 1.

        Args:
            states (`torch.Tensor`): (T, 3 H), the hidden states of the target.
            embedding (`torch.Tensor`): (V, H), the weight of its embeddings.
            rows (`FlatRows`): The tokens and their documents.
            steps (`int`): How many tokens are guessed from each token.
            recompute (`bool`, *optional*, defaults to `False`): Save only the input of each step, and recompute the
                step in backward.
            drafted (`torch.Tensor`, *optional*): (n,) int64, ascending, the tokens to start from. For the others, only
                the keys and values of the first step are computed. Unset: all tokens, n = T.

        Returns:
            `list` of `steps` tensors (n, H), the inputs of `lm_head`. A step that goes past the end of its document
            gives meaningless numbers.
        """
        step: Callable[..., Any] = self._step
        if recompute and torch.is_grad_enabled():
            step = _recomputed(self._step)
        layer = self.midlayer
        hidden = self.fc(states)
        of_embeds, of_hidden = layer.self_attn.joined_weight(hidden.dtype).chunk(2, 1)
        tokens = F.embedding(rows.ids.roll(-1), embedding).to(states.dtype)
        embeds = F.linear(layer.input_layernorm(tokens), of_embeds)
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        outputs = []
        for k in range(1, steps + 1):
            normed, hidden, key, value = step(hidden, of_hidden, embeds, rows, drafted, k, keys, values)
            keys = [*keys, key]  # a new list, because a recomputed step needs its own
            values = [*values, value]
            outputs.append(normed)
        return outputs

    def _step(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        embeds: torch.Tensor,
        rows: FlatRows,
        drafted: torch.Tensor | None,
        k: int,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        positions = rows.positions
        ahead = k - 1
        if ahead and drafted is None:
            embeds = embeds.roll(-ahead, 0)
        elif ahead and drafted is not None:
            embeds = embeds.index_select(0, (drafted + ahead) % len(embeds))
            positions = positions[drafted]
        step = Step(weight, embeds, self.angles(positions + ahead), rows, drafted)
        hidden, key, value = self.midlayer(hidden, step, keys, values)
        return self.norm(hidden), hidden, key, value

    def angles(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the rotary angles (T, D / 2) of positions (T,), in fp32."""
        half = torch.arange(0, self.config.head_dim, 2, device=positions.device, dtype=torch.float32)
        frequencies = self.config.rope_theta ** (-half / self.config.head_dim)
        return positions.float().unsqueeze(1) * frequencies

    @property
    def target_ids(self) -> torch.Tensor:
        """The target's token id for each draft id, (Vd,) int64."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def save_pretrained(self, folder: str, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """Write `config.json` and `model.safetensors`, as vLLM and SGLang read them.

        Pass `state_dict`, with full tensors under this module's names, if the module's own tensors are sharded.
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
