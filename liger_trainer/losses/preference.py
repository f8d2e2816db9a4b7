"""Preference losses as functions of the log-probabilities of whole completions.

Shapes  B pairs (`kto_loss`: B rows). Log-probabilities, references and the losses of `reduction="none"` are (B,).
Dtypes  any floating one. Losses are computed and returned in fp32, or in fp64 for fp64.
Units   nats. "Summed" and "averaged" mean over the tokens of the completion, which `sequence_logprobs` does.

Each function returns `(loss, metrics)`. The loss is () or (B,). The metrics are means over this batch, detached
tensors () under TRL's names: `rewards/chosen`, `rewards/rejected`, `rewards/margins`, `rewards/accuracies`,
`logps/chosen`, `logps/rejected`. `reduction` is `"mean"`, `"sum"` or `"none"`. With several processes, or with
micro-batches of different sizes, take `"sum"` and divide by the total number of pairs.
A ValueError names the shapes that disagree, or the option that is unknown, out of range or without effect.
"""

import torch
import torch.nn.functional as F

Result = tuple[torch.Tensor, dict[str, torch.Tensor]]

# Losses (B,) of the rewards c and r of the chosen and the rejected completion, beta, and the label smoothing e.
_PAIR_LOSSES = {
    "sigmoid": lambda c, r, beta, e: -(1 - e) * F.logsigmoid(c - r) - e * F.logsigmoid(r - c),
    "robust": lambda c, r, beta, e: (-(1 - e) * F.logsigmoid(c - r) + e * F.logsigmoid(r - c)) / (1 - 2 * e),
    "hinge": lambda c, r, beta, e: torch.relu(1 - (c - r)),
    "ipo": lambda c, r, beta, e: (c - r - 0.5).square() / beta**2,
    "apo_zero": lambda c, r, beta, e: torch.sigmoid(-c) + torch.sigmoid(r),
    "apo_down": lambda c, r, beta, e: torch.sigmoid(c) + torch.sigmoid(r - c),
}
_SMOOTHED = ("sigmoid", "robust")


def sequence_logprobs(log_probs: torch.Tensor, mask: torch.Tensor, average: bool = False) -> torch.Tensor:
    """Sum the log-probabilities of the tokens of each sequence, to (B,).

    Args:
        log_probs (`torch.Tensor`): Log-probabilities of tokens (B, S), as in `outputs.log_probs` of a patched model.
        mask (`torch.Tensor`): True or 1 for each token that counts (B, S), as in `outputs.label_mask`.
        average (`bool`, *optional*, defaults to `False`): Divide by the number of tokens that count. A sequence
            without such tokens gets 0.

    Returns:
        `torch.Tensor`: (B,), in the dtype of `log_probs`, differentiable.

    Raises:
        ValueError: The two shapes differ, or are not (B, S).
    """
    if log_probs.shape != mask.shape or log_probs.ndim != 2:
        raise ValueError(
            f"log_probs is {tuple(log_probs.shape)} and mask {tuple(mask.shape)}; expected (B, S) for both. If the "
            "labels are (B, S + 1), shift them: mask = labels[:, 1:] != -100."
        )
    total = log_probs.masked_fill(~mask.bool(), 0.0).sum(-1)
    return total / mask.sum(-1).clamp(min=1) if average else total


def dpo_loss(
    chosen_logps: torch.Tensor,
    rejected_logps: torch.Tensor,
    ref_chosen_logps: torch.Tensor,
    ref_rejected_logps: torch.Tensor,
    *,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Result:
    """DPO, Rafailov et al. 2023 (arXiv:2305.18290), and its nearest relatives.

    With the rewards c = beta * (log p - log p_ref) of the chosen and r of the rejected completion, d = c - r and label
    smoothing e:

        sigmoid   -(1 - e) log sigmoid(d) - e log sigmoid(-d)       eq. 7; e > 0: "conservative", labels wrong with
                                                                    probability e
        robust    (-(1 - e) log sigmoid(d) + e log sigmoid(-d)) / (1 - 2e)     unbiased under such labels,
                                                                               arXiv:2403.00409
        hinge     max(0, 1 - d)                                     arXiv:2305.10425, 2309.06657
        ipo       (d / beta - 1 / (2 beta))**2                      arXiv:2310.12036, eq. 17
        apo_zero  1 - sigmoid(c) + sigmoid(r)                       arXiv:2408.06266
        apo_down  sigmoid(c) + 1 - sigmoid(c - r)                   arXiv:2408.06266

    Args:
        chosen_logps, rejected_logps (`torch.Tensor`): Summed log-probabilities (B,); averaged ones for `"ipo"`.
        ref_chosen_logps, ref_rejected_logps (`torch.Tensor`): The same under the reference model, without gradient.
        beta (`float`, *optional*, defaults to 0.1): Strength of the tie to the reference, which IPO calls tau.
        loss_type (`str`, *optional*, defaults to `"sigmoid"`): One of the above. [`LigerDPOTrainer`] takes all of
            TRL's.
        label_smoothing (`float`, *optional*, defaults to 0.0): In [0, 0.5), for `"sigmoid"` and `"robust"`.
        reduction (`str`, *optional*, defaults to `"mean"`): `"mean"` over the pairs, `"sum"`, or `"none"`.

    Returns:
        (`torch.Tensor`, `dict`): The loss, () or for `"none"` (B,), in fp32 or for fp64 inputs fp64; and metrics under
        TRL's names, such as `rewards/margins`, as detached means ().

    Raises:
        ValueError: Shapes disagree, `beta` is not positive, or an option is unknown, out of range or without effect.
    """
    chosen, rejected, ref_chosen, ref_rejected = _checked(
        beta,
        chosen_logps=chosen_logps,
        rejected_logps=rejected_logps,
        ref_chosen_logps=ref_chosen_logps,
        ref_rejected_logps=ref_rejected_logps,
    )
    c = beta * (chosen - ref_chosen.detach())
    r = beta * (rejected - ref_rejected.detach())
    losses = _pair_losses(c, r, beta, loss_type, label_smoothing, tuple(_PAIR_LOSSES))
    return _reduced(losses, reduction), _metrics(c, r, chosen, rejected)


def cpo_loss(
    chosen_logps: torch.Tensor,
    rejected_logps: torch.Tensor,
    chosen_nll: torch.Tensor,
    *,
    beta: float = 0.1,
    cpo_alpha: float = 1.0,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Result:
    """CPO, Xu et al. 2024 (arXiv:2401.08417): DPO against a uniform reference, plus a likelihood term.

        loss = cpo_alpha * chosen_nll + l(d),   d = beta * (log p(chosen) - log p(rejected))

    with l of `dpo_loss` for `loss_type` `"sigmoid"`, `"hinge"` or `"ipo"`.

    Args:
        chosen_logps, rejected_logps (`torch.Tensor`): Summed log-probabilities (B,); averaged ones for `"ipo"`.
        chosen_nll (`torch.Tensor`): Negative log-likelihood of the chosen completions, () or (B,). In the paper and in
            TRL it is the mean over all their tokens in the batch.
        beta (`float`, *optional*, defaults to 0.1): Temperature of the preference term.
        cpo_alpha (`float`, *optional*, defaults to 1.0): Weight of `chosen_nll`.
        loss_type, label_smoothing: As in `dpo_loss`.
        reduction (`str`, *optional*, defaults to `"mean"`): `"mean"` over the pairs, `"sum"`, or `"none"`.

    Returns:
        (`torch.Tensor`, `dict`): The loss, () or for `"none"` (B,), in fp32 or for fp64 inputs fp64; and metrics under
        TRL's names, such as `rewards/margins`, as detached means ().

    Raises:
        ValueError: Shapes disagree, `beta` is not positive, or an option is unknown, out of range or without effect.
    """
    chosen, rejected = _checked(beta, chosen_logps=chosen_logps, rejected_logps=rejected_logps)
    c = beta * chosen
    r = beta * rejected
    losses = _pair_losses(c, r, beta, loss_type, label_smoothing, ("sigmoid", "hinge", "ipo"))
    losses = losses + cpo_alpha * _nll(chosen_nll, chosen)
    return _reduced(losses, reduction), _metrics(c, r, chosen, rejected)


def simpo_loss(
    chosen_logps: torch.Tensor,
    rejected_logps: torch.Tensor,
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
    alpha: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Result:
    """SimPO, Meng et al. 2024 (arXiv:2405.14734), eq. 6: no reference, averaged log-probabilities, a target margin.

        loss = -(1 - e) log sigmoid(d) - e log sigmoid(-d),   d = beta * (x(chosen) - x(rejected)) - gamma

    with label smoothing e and x = log p, or AlphaPO's x = (1 - p**-alpha) / alpha for `alpha` other than 0
    (arXiv:2501.03884). The fields of TRL's `CPOConfig` are `beta`, `simpo_gamma` and `alpha`, with other defaults.

    Args:
        chosen_logps, rejected_logps (`torch.Tensor`): Averaged log-probabilities (B,), log p.
        beta (`float`, *optional*, defaults to 2.0): Scale of the reward.
        gamma (`float`, *optional*, defaults to 1.0): Margin, in units of the reward d.
        alpha (`float`, *optional*, defaults to 0.0): AlphaPO's shape of the reward.
        label_smoothing (`float`, *optional*, defaults to 0.0): In [0, 0.5).
        reduction (`str`, *optional*, defaults to `"mean"`): `"mean"` over the pairs, `"sum"`, or `"none"`.

    Returns:
        (`torch.Tensor`, `dict`): The loss, () or for `"none"` (B,), in fp32 or for fp64 inputs fp64; and metrics under
        TRL's names, such as `rewards/margins`, as detached means ().

    Raises:
        ValueError: Shapes disagree, `beta` is not positive, or an option is unknown, out of range or without effect.
    """
    chosen, rejected = _checked(beta, chosen_logps=chosen_logps, rejected_logps=rejected_logps)
    c, r = (beta * (-torch.expm1(-alpha * x) / alpha if alpha else x) for x in (chosen, rejected))
    losses = _pair_losses(c - r - gamma, torch.zeros_like(r), beta, "sigmoid", label_smoothing, ("sigmoid",))
    return _reduced(losses, reduction), _metrics(c, r, chosen, rejected)


def orpo_loss(
    chosen_logps: torch.Tensor,
    rejected_logps: torch.Tensor,
    chosen_nll: torch.Tensor,
    *,
    beta: float = 0.1,
    reduction: str = "mean",
) -> Result:
    """ORPO, Hong et al. 2024 (arXiv:2403.07691), eqs. 6 and 7: likelihood plus the log odds ratio of the pair.

        loss = chosen_nll - beta * log sigmoid(log odds(chosen) - log odds(rejected)),   odds = p / (1 - p)

    with p = exp(averaged log-probability). The loss and its gradient stay finite where p rounds to 1. The metrics also
    have `nll_loss`, `log_odds_ratio` and `log_odds_chosen`.

    Args:
        chosen_logps, rejected_logps (`torch.Tensor`): Averaged log-probabilities (B,), at most 0.
        chosen_nll (`torch.Tensor`): Negative log-likelihood of the chosen rows, () or (B,). In TRL it is the mean over
            all tokens of prompt and completion in the batch.
        beta (`float`, *optional*, defaults to 0.1): Weight of the odds ratio, lambda in the paper.
        reduction (`str`, *optional*, defaults to `"mean"`): `"mean"` over the pairs, `"sum"`, or `"none"`.

    Returns:
        (`torch.Tensor`, `dict`): The loss, () or for `"none"` (B,), in fp32 or for fp64 inputs fp64; and metrics under
        TRL's names, such as `rewards/margins`, as detached means ().

    Raises:
        ValueError: Shapes disagree, `beta` is not positive, or an option is unknown, out of range or without effect.
    """
    chosen, rejected = _checked(beta, chosen_logps=chosen_logps, rejected_logps=rejected_logps)
    log_odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
    ratio = F.logsigmoid(log_odds)
    nll = _nll(chosen_nll, chosen)
    metrics = _metrics(beta * chosen, beta * rejected, chosen, rejected)
    means = {"nll_loss": nll, "log_odds_ratio": ratio, "log_odds_chosen": log_odds}
    metrics |= {name: value.detach().mean() for name, value in means.items()}
    return _reduced(nll - beta * ratio, reduction), metrics


def kto_loss(
    logps: torch.Tensor,
    ref_logps: torch.Tensor,
    desirable: torch.Tensor,
    kl: torch.Tensor | float,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    reduction: str = "mean",
) -> Result:
    """KTO, Ethayarajh et al. 2024 (arXiv:2402.01306): single completions, each desirable or not.

        loss = w * (1 - sigmoid(s * beta * (log p - log p_ref - max(kl, 0)))),   s = 1 and w = desirable_weight
                                                                   where desirable, else -1 and undesirable_weight

    In the metrics "chosen" means the desirable rows and "rejected" the rest; the mean of no rows is NaN. The metrics
    have `kl` instead of `rewards/accuracies`.

    Args:
        logps, ref_logps (`torch.Tensor`): Summed log-probabilities (B,) under the model and the reference.
        desirable (`torch.Tensor`): (B,), bool.
        kl (`torch.Tensor` or `float`): Estimate of KL(model || reference), (): the mean of log p - log p_ref over
            prompts joined with completions of other prompts, in all processes. It gets no gradient.
        beta (`float`, *optional*, defaults to 0.1): Strength of the tie to the reference.
        desirable_weight, undesirable_weight (`float`, *optional*, defaults to 1.0): Weights of the two kinds of rows;
            the paper wants the ratio of the weighted counts between 1 and 4/3.
        reduction (`str`, *optional*, defaults to `"mean"`): `"mean"` over the rows, `"sum"`, or `"none"`.

    Returns:
        (`torch.Tensor`, `dict`): The loss, () or for `"none"` (B,), in fp32 or for fp64 inputs fp64; and the metrics
        named above, as detached means ().

    Raises:
        ValueError: Shapes disagree, `beta` is not positive, `kl` is not one number, or `reduction` is unknown.
    """
    logps, ref_logps = _checked(beta, logps=logps, ref_logps=ref_logps)
    if desirable.dtype != torch.bool or desirable.shape != logps.shape:
        raise ValueError(
            f"desirable is {tuple(desirable.shape)} {desirable.dtype}; expected {tuple(logps.shape)} torch.bool, the "
            "shape of logps."
        )
    kl = torch.as_tensor(kl, dtype=logps.dtype, device=logps.device).detach().clamp(min=0)
    if kl.ndim:
        raise ValueError(f"kl has shape {tuple(kl.shape)}; expected one number: take its mean.")
    ratios = logps - ref_logps.detach()
    signs = torch.where(desirable, 1.0, -1.0).to(logps.dtype)
    weights = torch.where(desirable, desirable_weight, undesirable_weight).to(logps.dtype)
    losses = weights * torch.sigmoid(-signs * beta * (ratios - kl))
    metrics = {"kl": kl}
    for kind, rows in (("chosen", desirable), ("rejected", ~desirable)):
        metrics[f"rewards/{kind}"] = beta * _mean_of(ratios.detach(), rows)
        metrics[f"logps/{kind}"] = _mean_of(logps.detach(), rows)
    metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    return _reduced(losses, reduction), metrics


def _mean_of(values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the mean of `values` (B,) where `rows` (B,) is true, or NaN. The host does not wait for the GPU."""
    return torch.where(rows, values, 0.0).sum() / rows.sum()


def _checked(beta: float, **named: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors in fp32 or fp64. Raise unless all are (B,) and floating-point, and beta is positive."""
    shape = next(iter(named.values())).shape
    if any(x.shape != shape or x.ndim != 1 or not x.is_floating_point() for x in named.values()):
        got = ", ".join(f"{name} {tuple(x.shape)} {x.dtype}" for name, x in named.items())
        raise ValueError(
            f"Got {got}; expected one floating-point log-probability per completion, (B,), in all of them. "
            "sequence_logprobs(log_probs, mask) sums the log-probabilities of tokens."
        )
    if not beta > 0:
        raise ValueError(f"beta is {beta}; expected a positive number.")
    return [x if x.dtype == torch.float64 else x.float() for x in named.values()]


def _pair_losses(
    c: torch.Tensor, r: torch.Tensor, beta: float, loss_type: str, label_smoothing: float, known: tuple[str, ...]
) -> torch.Tensor:
    if loss_type not in known:
        names = ", ".join(known)
        raise ValueError(f"loss_type is {loss_type!r}; expected one of {names}. The trainers take all of TRL's.")
    if not 0.0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is {label_smoothing}; expected a probability in [0, 0.5).")
    if label_smoothing and loss_type not in _SMOOTHED:
        raise ValueError(
            f"label_smoothing is {label_smoothing}, but the loss_type {loss_type!r} ignores it. Set it to 0, or use "
            f"the loss_type {' or '.join(map(repr, _SMOOTHED))}."
        )
    return _PAIR_LOSSES[loss_type](c, r, beta, label_smoothing)


def _nll(nll: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if nll.shape not in (torch.Size(()), like.shape):
        raise ValueError(f"chosen_nll has shape {tuple(nll.shape)}; expected () or {tuple(like.shape)}.")
    return nll.to(like.dtype)


def _log1mexp(x: torch.Tensor) -> torch.Tensor:
    """Return log(1 - exp(x)) for x <= 0, from the more accurate of two forms (Maechler 2012, R package Rmpfr)."""
    split = -0.6931471805599453  # -log 2
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    # The clamp keeps the unused branch finite: its gradient is infinite at 0, and `where` would turn that into NaN
    below_split = torch.log1p(-torch.exp(x.clamp(max=split)))
    above_split = torch.log(-torch.expm1(x))
    return torch.where(x < split, below_split, above_split)


def _reduced(losses: torch.Tensor, reduction: str) -> torch.Tensor:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}; expected 'mean', 'sum' or 'none'.")
    return losses if reduction == "none" else getattr(losses, reduction)()


def _metrics(
    chosen_rewards: torch.Tensor,
    rejected_rewards: torch.Tensor,
    chosen_logps: torch.Tensor,
    rejected_logps: torch.Tensor,
) -> dict[str, torch.Tensor]:
    c = chosen_rewards.detach()
    r = rejected_rewards.detach()
    return {
        "rewards/chosen": c.mean(),
        "rewards/rejected": r.mean(),
        "rewards/margins": (c - r).mean(),
        "rewards/accuracies": (c > r).to(c.dtype).mean(),
        "logps/chosen": chosen_logps.detach().mean(),
        "logps/rejected": rejected_logps.detach().mean(),
    }
