"""The loss of an EAGLE-3 drafter alone, forward and backward, on given hidden states: time, memory and errors.

    python benchmarks/eagle_loss.py --speculators FOLDER
    python benchmarks/eagle_loss.py --counted 0.5
    python benchmarks/eagle_loss.py --tiny

The inputs are the drafter's hidden states of K steps (K, T, H), the model's last hidden states (T, H), both weights
over the draft vocabulary (Vd, H), and the rows that count. All are random, in bf16. The outputs are the sum over k of
decay^k * KL(teacher at t + k || step k at t), the number of rows where both have the same first choice, and the
gradients of the drafter's hidden states and weight. The arms:

ours                 `linear_heads_kl`.
speculators          Both logits, and the kernels of speculators 0.9, from `--speculators`: a folder with the unpacked
                     wheel. Its losses are imported without the rest of the package, which needs older transformers.
                     The arm computes what its `Eagle3` does: the model's logits once, the logits of each step, the loss
                     of each step on shifted slices, and the argmax of both.
both logits          The same with softmax, log_softmax and kl_div in fp32, like its option "eager".
256 MB slices        A stand-in for Unsloth's fused losses, which have no such loss, written from their description:
                     slices of rows with 256 MB of fp32 logits, a compiled `grad_and_value` for each, and gradients that
                     are summed outside of it.

`floor_ms` is the time of the products that every arm needs, at the matmul rate of the same process: 3 K of the drafter
and one of the model, for rows that count. `gib` is the peak beyond the inputs. The first rows of each 2,048 do not
count, as in a chat with a prompt. The other arms compute them too and leave them out of the sum.
"""

import functools
import sys
import types
from pathlib import Path

import torch
import torch.nn.functional as F
from _arms import difference, print_rows, run_arm, run_arms
from _measure import DEVICE, Record, arguments, ceilings, milliseconds, peak_gib, relative_error

OURS, SPECULATORS, PLAIN, SLICES = "ours", "speculators", "both logits", "256 MB slices"
ARMS = (OURS, SPECULATORS, PLAIN, SLICES)
DECAY = 0.8
ROW = 2048  # tokens of a row; its first tokens do not count
SLICE_BYTES = 256 << 20


def inputs_of(options):
    """Make hidden states, weights and the mask of rows that count."""
    torch.manual_seed(0)
    steps, tokens, width, vocab = options.eagle_steps, options.tokens, options.width, options.draft_vocab
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32

    def random(*shape, scale=1.0):
        return (torch.randn(shape, device=DEVICE) * scale).to(dtype)

    place = torch.arange(tokens, device=DEVICE)
    counts = place % ROW >= (1 - options.counted) * min(ROW, tokens)
    ahead = place + torch.arange(1, steps + 1, device=DEVICE)[:, None]
    return {
        "hidden": [random(tokens, width).requires_grad_() for _ in range(steps)],
        "weight": random(vocab, width, scale=width**-0.5).requires_grad_(),
        "teacher_hidden": random(tokens, width),
        "teacher_weight": random(vocab, width, scale=width**-0.5),
        "valid": counts & (ahead < tokens),
    }


def ours(hidden, weight, teacher_hidden, teacher_weight, valid):
    from liger_triton import linear_heads_kl

    decay = torch.tensor([DECAY**k for k in range(len(hidden))], device=valid.device)
    result = linear_heads_kl(hidden, weight, teacher_hidden, teacher_weight, valid, row_weight=decay)
    return result.loss, result.head_top1


def with_logits(kl, hidden, weight, teacher_hidden, teacher_weight, valid):
    """Compute the loss from both logits. `kl` takes logits and targets (1, n, V), and returns (1, n)."""
    with torch.no_grad():
        targets = (teacher_hidden @ teacher_weight.T)[None]
    total = 0.0
    hits = []
    for k, x in enumerate(hidden, 1):
        logits = F.linear(x[None], weight)[:, :-k]
        counts = valid[k - 1, :-k]
        total = total + DECAY ** (k - 1) * (kl(logits, targets[:, k:]) * counts).sum()
        same = logits.argmax(-1) == targets[:, k:].argmax(-1)
        hits.append((same & counts).sum())
    return total, torch.stack(hits)


def eager_kl(logits, targets):
    log_p = F.log_softmax(logits, -1, dtype=torch.float32)
    q = F.softmax(targets, -1, dtype=torch.float32)
    return F.kl_div(log_p, q, reduction="none").sum(-1)


def speculators_kl(folder):
    """Import the KL loss of speculators, with its kernels, from a folder with its unpacked wheel."""
    for name in ("speculators", "speculators.utils"):
        package = types.ModuleType(name)
        package.__path__ = [str(Path(folder, *name.split(".")))]
        sys.modules[name] = package
    from speculators.losses import kl_div_loss

    return kl_div_loss


def slice_kl(x, weight, teacher_x, teacher_weight, factor):
    """Compute the sum of factor * KL over a slice of rows, and its hits."""
    logits = F.linear(x, weight).float()
    targets = F.linear(teacher_x, teacher_weight).float()
    kl = F.kl_div(F.log_softmax(logits, -1), F.softmax(targets, -1), reduction="none").sum(-1)
    same = logits.argmax(-1) == targets.argmax(-1)
    return (kl * factor).sum(), (same & (factor > 0)).sum()


@functools.cache
def slice_gradient():
    """`slice_kl` with the gradients of the hidden states and the weight, compiled on a GPU."""
    gradient = torch.func.grad_and_value(slice_kl, argnums=(0, 1), has_aux=True)
    return torch.compile(gradient) if DEVICE == "cuda" else gradient


class SlicedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, teacher_hidden, teacher_weight, valid, *hidden):
        tokens, vocab = len(teacher_hidden), len(weight)
        size = max(1, SLICE_BYTES // (4 * vocab))
        dw = torch.zeros_like(weight, dtype=torch.float32)
        dx = [torch.zeros_like(x) for x in hidden]
        loss = torch.zeros((), device=weight.device)
        hits = torch.zeros(len(hidden), dtype=torch.int64, device=weight.device)
        for k, x in enumerate(hidden, 1):
            factor = valid[k - 1] * DECAY ** (k - 1)
            for start in range(0, tokens - k, size):
                end = min(start + size, tokens - k)
                rows = slice(start, end)
                ahead = slice(start + k, end + k)
                grads, (part, same) = slice_gradient()(
                    x[rows], weight, teacher_hidden[ahead], teacher_weight, factor[rows]
                )
                dx[k - 1][rows] = grads[0]
                dw += grads[1]
                loss += part
                hits[k - 1] += same
        ctx.save_for_backward(dw.to(weight.dtype), *dx)
        ctx.mark_non_differentiable(hits)
        return loss, hits

    @staticmethod
    def backward(ctx, g, _):
        dw, *dx = ctx.saved_tensors
        return dw * g, None, None, None, *[x * g for x in dx]


def in_slices(hidden, weight, teacher_hidden, teacher_weight, valid):
    return SlicedLoss.apply(weight, teacher_hidden, teacher_weight, valid, *hidden)


def way_of(arm, options):
    """Return the function of an arm, from the inputs to (loss, hits)."""
    if arm == OURS:
        return ours
    if arm == SLICES:
        return in_slices
    return functools.partial(with_logits, eager_kl if arm == PLAIN else speculators_kl(options.speculators))


def tflop_of(valid, width, vocab):
    """Count the TFLOP of the products for the rows that count."""
    steps, tokens = valid.shape
    teacher = torch.zeros(tokens, dtype=torch.bool, device=valid.device)
    for k in range(1, steps + 1):
        teacher[k:] |= valid[k - 1, :-k]
    return (3 * int(valid.sum()) + int(teacher.sum())) * 2 * width * vocab / 1e12


def measure(arm, options):
    """Return a row."""
    given = inputs_of(options)
    way = way_of(arm, options)
    trained = [*given["hidden"], given["weight"]]

    def step():
        loss, hits = way(**given)
        return loss.detach(), hits, *torch.autograd.grad(loss, trained)

    loss, hits, *grads = step()
    row = {"arm": arm, "loss": float(loss), "hits": hits.tolist()}
    row["grad_norms"] = [
        float(torch.stack([g.float().norm() for g in grads[:-1]]).norm()),
        float(grads[-1].float().norm()),
    ]
    if options.check and arm != OURS:
        row["apart"] = relative_error(grads, torch.autograd.grad(ours(**given)[0], trained))
    del grads
    row["ms"] = milliseconds(step, rep_ms=2000)
    gib = peak_gib(step)
    row["gib"] = gib if DEVICE == "cuda" else None
    _, rate = ceilings(given["weight"].dtype)
    row["tflop"] = tflop_of(given["valid"], options.width, options.draft_vocab)
    row["floor_ms"] = row["tflop"] * 1e12 / rate * 1e3
    row["matmul_tflops"] = rate / 1e12
    return row


def flag(rows):
    """Compare loss and gradient norms of every row with ours, with room for the rounding of bf16."""
    first = next((row for row in rows if row["arm"] == OURS and "loss" in row), None)
    for row in rows:
        row.pop("wrong", None)
        if first is None or row is first or "loss" not in row:
            continue
        wrong = difference(row, first, {"loss": 0.01, "grad_norms": 0.03})
        if wrong:
            row["wrong"] = wrong
        row["faster"] = row["ms"] / first["ms"]
        if row["gib"]:
            row["less"] = 1 - first["gib"] / row["gib"]


COLUMNS = {
    "arm": ("arm", ""),
    "ms": ("ms", ".1f"),
    "floor_ms": ("floor ms", ".1f"),
    "gib": ("GiB beyond the inputs", ".2f"),
    "loss": ("loss", ".4f"),
    "apart": ("gradients apart from ours", ".1e"),
    "faster": ("ours x faster", ".2f"),
    "less": ("ours less memory", ".0%"),
    "note": ("", ""),
}


def parsed(argv=None):
    parser = arguments(__doc__, "--arm")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--draft-vocab", type=int, default=32000)
    parser.add_argument("--eagle-steps", type=int, default=7)
    parser.add_argument("--counted", type=float, default=1.0, help="share of the rows that count, without the prompts")
    parser.add_argument("--speculators", help="folder with the unpacked wheel of speculators, for the arm of that name")
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="all, without speculators if its folder is not given")
    parser.add_argument("--check", action="store_true", help="compare every gradient with ours, which takes memory")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU can do")
    parser.add_argument("--minutes", type=float, default=5, help="stop an arm after so long")
    options = parser.parse_args(argv)
    if options.tiny:
        options.tokens, options.width, options.draft_vocab, options.eagle_steps = 96, 32, 200, 3
    if not 0 < options.counted <= 1:
        parser.error(f"--counted is {options.counted}; expected a share above 0 and up to 1")
    if options.arms is None:
        options.arms = [arm for arm in ARMS if arm != SPECULATORS or options.speculators]
    if SPECULATORS in (*options.arms, options.arm) and not options.speculators:
        parser.error("the arm speculators takes its kernels from a folder: name it with --speculators")
    return options


def main(argv=None):
    options = parsed(argv)
    if options.arm:
        run_arm(options, measure)
        return
    record = Record(
        "eagle_loss", f"{options.tokens}x{options.width}x{options.draft_vocab}", options.json, options.tiny, argv
    )
    rows = run_arms(options, record, flag)
    print_rows(rows, COLUMNS)
    record.say_where()


if __name__ == "__main__":
    main()
