"""Log-probabilities of given tokens under an LM head, and other statistics of its logits, which never exist as a whole.

`_linear_head.py` describes how they are computed, in what precision and memory, and `_row_pass.py` has the formulas.
"""

import torch

from . import reference
from ._dispatch import takes_twin
from ._head_inputs import check_options, check_target_of_twin, prepare
from ._linear_head import run_head
from ._row_pass import ENTROPY, IS_TOP1, LOG_SUM_SQ, MEAN_LOGITS, RowSpec
from .results import LogProbs

_STATISTIC = {"entropy": ENTROPY, "log_sum_sq_probs": LOG_SUM_SQ, "mean_logits": MEAN_LOGITS, "is_top1": IS_TOP1}


def linear_logprobs(
    hidden: torch.Tensor,  # (..., H)
    weight: torch.Tensor,  # (V, H)
    target: torch.Tensor,  # (...)
    bias: torch.Tensor | None = None,  # (V,)
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    lora: tuple[torch.Tensor, torch.Tensor, float] | None = None,  # A (r, H), B (V, r), scaling
    lora_input: torch.Tensor | None = None,  # (..., H)
    outputs: tuple[str, ...] = ("log_probs",),
    uniform_grad: bool = False,
    accumulate: str = "fp32",
    chunk_rows: int | None = None,
) -> LogProbs:
    """log_softmax(z)[target] of z = softcap * tanh(logit_scale * l / softcap) / temperature, with the logits l of
    `linear_cross_entropy`, and further per-token quantities of p = softmax(z). The logits of all rows never exist.

    Any upstream gradient is honoured. For that the backward pass computes the logits again (four products in all),
    except those of the last chunk, or the only one, which are kept until then (three products). If the weight is frozen
    and no entropy is asked for, it only scales what the forward pass computed (two products). `uniform_grad=True`
    spares the fourth product of every chunk.

    Args:
        hidden, weight, target, bias, softcap, logit_scale, ignore_index, lora, lora_input, accumulate, chunk_rows:
            As in `linear_cross_entropy`.
        temperature (`float`, *optional*, defaults to 1.0): Divides the logits, after the softcap.
        label_smoothing (`float`, *optional*, defaults to 0.0): With e, `log_probs` is
            (1 - e) * log p_target + e * mean_v log p_v, whose negative is the row's term of a label-smoothed loss.
        outputs (`tuple`, *optional*, defaults to `("log_probs",)`): Which fields are wanted. `entropy` is
            -sum_v p_v log p_v, `log_sum_sq_probs` is log(sum_v p_v**2), `mean_logits` is mean_v z_v, and `is_top1` says
            whether the target has the first largest logit. Only `log_probs` and `entropy` are differentiable.
        uniform_grad (`bool`, *optional*, defaults to `False`): Promise that all rows that are not ignored get one and
            the same upstream gradient, as from a sum or mean of `log_probs`. A broken promise makes every gradient NaN,
            and a gradient that reaches the entropy raises a RuntimeError.

    Returns:
        `LogProbs`.

    Raises:
        ValueError: Shapes, dtypes or devices disagree, or an option is out of its range or unknown.
        IndexError: A target is outside [0, V). (While a CUDA graph is captured, the values of the row become NaN
            instead.)
    """
    head, y, dtype = prepare(hidden, weight, target, bias, lora, lora_input, accumulate, chunk_rows)
    check_options("hidden", hidden, target, "none", label_smoothing, softcap, logit_scale, 0.0)
    if not temperature > 0.0:
        raise ValueError(f"temperature is {temperature}; expected a positive number.")
    if isinstance(outputs, str):
        raise ValueError(f"outputs is the string {outputs!r}; expected a tuple of names: ({outputs!r},).")
    unknown = [name for name in outputs if name not in LogProbs._fields]
    if unknown:
        raise ValueError(f"outputs has {unknown[0]!r}; expected names out of {', '.join(LogProbs._fields)}.")
    if takes_twin(*head, target):
        check_target_of_twin(y, ignore_index, weight.shape[0], hidden)
        return reference.linear_logprobs(
            hidden, weight, target.long(), bias, temperature=temperature, softcap=softcap, logit_scale=logit_scale,
            label_smoothing=label_smoothing, ignore_index=ignore_index, lora=lora, lora_input=lora_input,
            outputs=outputs,
        )  # fmt: skip
    extras = sum(1 << _STATISTIC[name] for name in set(outputs) - {"log_probs"})
    rows = RowSpec(
        ignore_index, logit_scale / temperature, (softcap or 0.0) / temperature, float(label_smoothing), 0.0, extras
    )
    loss, entropy, stats = run_head(head, y, dtype, None, rows, uniform_grad, accumulate, chunk_rows)
    found = {name: stats[_STATISTIC[name]].view(target.shape) for name in _STATISTIC}
    found["is_top1"] = found["is_top1"] > 0
    # A result with a gradient must not be a view. FSDP2 attaches its gather to what a module returns, and a write into
    # a view would drop it.
    found["log_probs"] = -loss.view(target.shape)
    if "entropy" in outputs:
        found["entropy"] = entropy.view(target.shape).clone()
    return LogProbs(**{name: found[name] for name in outputs})
