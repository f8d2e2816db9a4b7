"""Cases of losses over the vocabulary.

A fused head's floor is the FLOP of its products or, with very few rows, the bytes of its weight.
"""

from functools import partial

import torch
import torch.nn.functional as F
from _cases import Case, compiled, liger, randn
from _measure import DEVICE

import liger_triton as lt

BETA = 0.01  # of the DPO loss; small, so that rounding of long sums hardly changes a pair's gradient


def targets(*shape, vocab):
    return torch.randint(0, vocab, shape, device=DEVICE)


def head_tensors(rows, hidden, vocab, dtype, grad=True, frozen=False):
    x = randn(rows, hidden, dtype=dtype, grad=grad)
    w = randn(vocab, hidden, dtype=dtype, scale=hidden**-0.5 * 2, grad=grad and not frozen)
    return x, w, targets(rows, vocab=vocab)


# Cross-entropy of given logits


def cross_entropy(rows, vocab, *, dtype):
    z, y = randn(rows, vocab, dtype=dtype, scale=2.0), targets(rows, vocab=vocab)

    def eager(z, y):
        return F.cross_entropy(z.float(), y)

    # The gradient overwrites the logits, which must not be a leaf. An alias costs no time, and a copy would.
    def in_place(fn):
        return lambda z, y: fn(z.view_as(z), y)

    return Case(
        "cross_entropy",
        f"{rows}x{vocab}",
        (z, y),
        {
            "ours": in_place(partial(lt.cross_entropy, inplace=True)),
            "eager": eager,
            "compile": compiled(eager),
            "liger": in_place(liger("liger_cross_entropy")),
        },
        lambda case: exact_cross_entropy(*case.inputs),
        dtype,
        bytes=2 * dtype.itemsize * rows * vocab,
        graph=False,
        overwrites=True,
    )


def exact_cross_entropy(z, y, chunk=1024):
    """Loss and gradient in float64, a chunk of rows at a time."""
    total, grad = 0.0, torch.empty_like(z, requires_grad=False, dtype=torch.float64)
    n = z.shape[0]
    for i in range(0, n, chunk):
        z_c = z[i : i + chunk].detach().double().requires_grad_()
        loss = F.cross_entropy(z_c, y[i : i + chunk], reduction="sum") / n
        (grad[i : i + chunk],) = torch.autograd.grad(loss, z_c)
        total += loss.detach()
    return [total, grad]


# The fused head: three products a row, or two if the weight is frozen


def trl_logprobs(x, w, y, outputs=("log_probs",)):
    from trl.kernels import ChunkedLogProbFunction

    return ChunkedLogProbFunction.apply(x, w, None, y, 1.0, 32768, None, 1.0, outputs)


def trl_head(x, w, y):
    return -trl_logprobs(x, w, y)[0].sum() / y.shape[0]


def cce(x, w, y):
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(x, w, y, filter_eps=None)  # filter_eps=None: the exact variant


def eager_head(x, w, y):
    return F.cross_entropy((x @ w.t()).float(), y)


def linear_cross_entropy(rows, hidden, vocab, frozen=False, *, dtype):
    few = 1 << (-(-rows // -(-vocab // hidden)) - 1).bit_length()  # the chunks of Liger, to compare memory
    providers = {
        "ours": lt.linear_cross_entropy,
        "ours lean": lambda x, w, y: lt.linear_cross_entropy(x, w, y, accumulate="lean"),
        "ours small": lambda x, w, y: lt.linear_cross_entropy(x, w, y, accumulate="lean", chunk_rows=few),
        "eager": eager_head,
        "compile": compiled(eager_head),
        "liger": liger("liger_fused_linear_cross_entropy"),
        "liger fp32": lambda x, w, y: liger("liger_fused_linear_cross_entropy")(x, w, y, accum_dtype=torch.float32),
        "TRL": trl_head,
        "CCE exact": cce,
    }
    if hasattr(F, "linear_cross_entropy"):
        providers["F.linear_cross_entropy"] = lambda x, w, y: F.linear_cross_entropy(x, w, y)
    if frozen or dtype == torch.float32:  # there is nothing to accumulate, or fp32 does it anyway
        del providers["ours lean"], providers["liger fp32"]
    return Case(
        "linear_cross_entropy" + (" frozen" if frozen else ""),
        f"{rows}x{hidden}x{vocab}",
        head_tensors(rows, hidden, vocab, dtype, frozen=frozen),
        providers,
        lambda case: exact_head(*case.inputs, torch.full((rows,), -1 / rows, dtype=torch.float64, device=DEVICE)),
        dtype,
        bytes=dtype.itemsize * hidden * (2 * rows + (1 if frozen else 2) * vocab),
        flop=(2 if frozen else 3) * 2 * rows * hidden * vocab,
        graph=False,
    )


def exact_logprobs(x, w64, y, chunk=1024):
    """Log-probabilities of the targets (T,) and entropies (T,) in float64, a chunk of rows at a time."""
    log_probs, entropy = [], []
    for i in range(0, x.shape[0], chunk):
        z = torch.log_softmax(x[i : i + chunk].detach().double() @ w64.t(), -1)
        log_probs.append(z.gather(-1, y[i : i + chunk, None]).squeeze(-1))
        entropy.append(-(z.exp() * z).sum(-1))
    return torch.cat(log_probs), torch.cat(entropy)


def exact_head(x, w, y, g, chunk=1024):
    """Value and gradients of sum(g * log p_target) in float64, g (T,)."""
    w64, g = w.detach().double(), g.double()
    total = 0.0
    dx = torch.empty_like(x, requires_grad=False, dtype=torch.float64)
    dw = torch.zeros_like(w64)
    for i in range(0, x.shape[0], chunk):
        x_c, g_c = x[i : i + chunk].detach().double(), g[i : i + chunk]
        p = torch.softmax(x_c @ w64.t(), -1)
        rows = torch.arange(p.shape[0], device=p.device)
        total += (g_c * p[rows, y[i : i + chunk]].log()).sum()
        p[rows, y[i : i + chunk]] -= 1
        p *= -g_c[:, None]
        dx[i : i + chunk] = p @ w64
        if w.requires_grad:
            dw.addmm_(p.t(), x_c)
    return [total, dx, dw] if w.requires_grad else [total, dx]


# Log-probabilities: the forward pass with the entropy, and the head of a DPO step


def eager_logprobs(x, w, y):
    return -F.cross_entropy((x @ w.t()).float(), y, reduction="none")


def eager_logprobs_entropy(x, w, y):
    z = torch.log_softmax((x @ w.t()).float(), -1)
    return z.gather(-1, y[:, None]).squeeze(-1), -(z.exp() * z).sum(-1)


def logprobs_entropy(rows, hidden, vocab, *, dtype):
    x, w, y = head_tensors(rows, hidden, vocab, dtype, grad=False)
    both = ("log_probs", "entropy")

    def ours(x, w, y):
        out = lt.linear_logprobs(x, w, y, outputs=both)
        return out.log_probs, out.entropy

    return Case(
        "logprobs + entropy, forward",
        f"{rows}x{hidden}x{vocab}",
        (x, w, y),
        {
            "ours": ours,
            "eager": eager_logprobs_entropy,
            "compile": compiled(eager_logprobs_entropy),
            "TRL": lambda x, w, y: trl_logprobs(x, w, y, both)[:2],
        },
        lambda case: list(exact_logprobs(x, w.double(), y)),
        dtype,
        bytes=dtype.itemsize * hidden * (rows + vocab),
        flop=2 * rows * hidden * vocab,
        graph=False,
    )


def dpo_loss(log_probs, ref_log_probs, sequences):
    """The sigmoid DPO loss of log-probabilities (T,) for tokens of `sequences` of equal length, chosen ones first."""
    score = (log_probs - ref_log_probs).view(sequences, -1).sum(-1)
    chosen, rejected = score.chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def dpo_head(sequences, tokens, hidden, vocab, *, dtype):
    """The policy's forward and backward pass and the reference's forward pass make four products.

    Every sequence has its own gradient.
    """
    rows = sequences * tokens
    x, w, y = head_tensors(rows, hidden, vocab, dtype)
    ref_x, ref_w = ((t + 0.5 * t.std() * torch.randn_like(t)).detach() for t in (x, w))

    def with_logprobs(fn):
        def call(x, w, ref_x, ref_w, y):
            with torch.no_grad():
                ref = fn(ref_x, ref_w, y)
            return dpo_loss(fn(x, w, y), ref, sequences)

        return call

    def ours(accumulate):
        return with_logprobs(lambda x, w, y: lt.linear_logprobs(x, w, y, accumulate=accumulate).log_probs)

    def liger_dpo(x, w, ref_x, ref_w, y):
        from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss

        x, ref_x = (t.view(sequences, tokens, hidden) for t in (x, ref_x))
        loss = LigerFusedLinearDPOLoss(beta=BETA)
        return loss(w, x, y.view(sequences, tokens), None, ref_x, ref_w)[0]

    def exact(case):
        log_probs = exact_logprobs(x, w.detach().double(), y)[0].requires_grad_()
        loss = dpo_loss(log_probs, exact_logprobs(ref_x, ref_w.double(), y)[0], sequences)
        (g,) = torch.autograd.grad(loss, log_probs)
        return [loss.detach(), *exact_head(x, w, y, g)[1:]]

    providers = {
        "ours": ours("fp32"),
        "ours lean": ours("lean"),
        "eager": with_logprobs(eager_logprobs),
        "compile": with_logprobs(compiled(eager_logprobs)),
        "liger": liger_dpo,
        "TRL": with_logprobs(lambda x, w, y: trl_logprobs(x, w, y)[0]),
    }
    if dtype == torch.float32:
        del providers["ours lean"]
    return Case(
        "DPO head",
        f"{sequences} x {tokens}, {hidden}x{vocab}",
        (x, w, ref_x, ref_w, y),
        providers,
        exact,
        dtype,
        bytes=dtype.itemsize * hidden * 3 * (rows + vocab),
        flop=4 * 2 * rows * hidden * vocab,
        graph=False,
    )
