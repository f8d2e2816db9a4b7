"""The losses for users' own loops equal the loss code of TRL's trainers on random log-probabilities."""

import inspect
import os
import re
import subprocess
import sys
import types

import pytest
import torch
from checkout import ROOT
from tiny_models import VOCAB, LargestTensor, pair_rows, tiny_model, tiny_tokenizer
from trl import DPOTrainer, KTOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.utils import FusedCausalLMOutput

import liger_trainer
from liger_trainer.losses import cpo_loss, dpo_loss, kto_loss, linear_loss, orpo_loss, sequence_logprobs, simpo_loss

PAIRS = 7
DOCS = (ROOT / "docs" / "own_loop.md").read_text().partition("## Preference losses")[2]


def random_logps(n, seed, scale=20.0):
    """Log-probabilities from near 0 to -scale, in fp64, with gradients."""
    generator = torch.Generator().manual_seed(seed)
    return (-scale * torch.rand(n, PAIRS, dtype=torch.float64, generator=generator) ** 2).requires_grad_()


def trainer_like(**fields):
    """The attributes of `self` that TRL's loss methods read."""
    accelerator = types.SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x, gather=lambda x: x)
    return types.SimpleNamespace(accelerator=accelerator, **fields)


def assert_same(loss, want, leaf, rtol=1e-6):
    """Compare the value, and the gradient of 3.7 times the value."""
    torch.testing.assert_close(loss.double(), want.double(), rtol=rtol, atol=1e-9)
    (got_grad,) = torch.autograd.grad(3.7 * loss, leaf, retain_graph=True)
    (want_grad,) = torch.autograd.grad(3.7 * want, leaf)
    torch.testing.assert_close(got_grad, want_grad, rtol=rtol, atol=1e-9)


def stock_dpo(chosen, rejected, ref_chosen, ref_rejected, lengths, **options):
    """TRL's `_compute_loss` on sequence log-probs: a completion's first token has all of it, the others 0."""
    width = int(lengths.max()) + 1
    mask = (torch.arange(width) > 0) & (torch.arange(width) <= lengths.view(-1, 1))

    def outputs(chosen, rejected):
        log_probs = torch.zeros(2 * PAIRS, width - 1, dtype=torch.float64)
        log_probs[:, 0] = torch.cat([chosen, rejected])
        blank = torch.zeros_like(log_probs)
        return FusedCausalLMOutput(log_probs=log_probs, entropy=blank, mean_logits=blank, is_top1=blank.bool())

    defaults = {"loss_weights": [1.0], "ld_alpha": None, "label_smoothing": 0.0, "beta": 0.1}
    stock = trainer_like(
        model=types.SimpleNamespace(training=False),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        use_weighting=False,
        _metrics={"eval": Metrics()},
        _total_train_tokens=0,
        **(defaults | options),
    )
    inputs = {
        "input_ids": torch.zeros(2 * PAIRS, width, dtype=torch.long),
        "completion_mask": mask.long(),
        "attention_mask": mask.long(),
        "ref_chosen_logps": ref_chosen,
        "ref_rejected_logps": ref_rejected,
    }
    loss = DPOTrainer._compute_loss(stock, lambda **_: outputs(chosen, rejected), inputs, False)
    return loss, {name: values[-1] for name, values in stock._metrics["eval"].items()}


class Metrics(dict):
    def __missing__(self, name):
        return self.setdefault(name, [])


@pytest.mark.parametrize("beta", [0.1, 0.9])
@pytest.mark.parametrize(
    "loss_type, smoothing",
    [
        ("sigmoid", 0.0),
        ("robust", 0.0),
        ("robust", 0.2),
        ("hinge", 0.0),
        ("ipo", 0.0),
        ("apo_zero", 0.0),
        ("apo_down", 0.0),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_dpo(seed, loss_type, smoothing, beta):
    leaf = random_logps(4, seed)
    lengths = torch.randint(1, 9, (2 * PAIRS,), generator=torch.Generator().manual_seed(seed))
    options = {"beta": beta, "label_smoothing": smoothing}
    want, metrics = stock_dpo(*leaf, lengths, loss_types=[loss_type], **options)
    # In "ipo", TRL divides by the length of the whole mask. A function of log-probs gets averages instead.
    per = lengths.double().chunk(2) if loss_type == "ipo" else (1.0, 1.0)
    inputs = [leaf[0] / per[0], leaf[1] / per[1], leaf[2] / per[0], leaf[3] / per[1]]
    loss, got = dpo_loss(*inputs, loss_type=loss_type, **options)
    policy = torch.autograd.grad(want, leaf, retain_graph=True)[0][:2]
    torch.testing.assert_close(torch.autograd.grad(loss, leaf, retain_graph=True)[0][:2], policy, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=1e-9)
    assert torch.equal(torch.autograd.grad(loss, leaf)[0][2:], torch.zeros(2, PAIRS).double()), "of the reference"
    if loss_type != "ipo":
        assert {k: v.item() for k, v in got.items()} == pytest.approx({k: metrics[k] for k in got}, rel=1e-6)


def test_conservative_dpo_is_cpo_against_the_reference():
    """TRL's DPO has no smoothed "sigmoid". TRL's CPO has one, on log-probs where DPO has log-ratios."""
    leaf = random_logps(4, 2)
    stock = trainer_like(alpha=0.0, loss_type="sigmoid", beta=0.3, label_smoothing=0.15)
    want, *_ = CPOTrainer.cpo_loss(stock, leaf[0] - leaf[2].detach(), leaf[1] - leaf[3].detach())
    loss, _ = dpo_loss(*leaf, beta=0.3, label_smoothing=0.15)
    assert_same(loss, want.mean(), leaf)


@pytest.mark.parametrize(
    "loss_type, smoothing, alpha",
    [
        ("sigmoid", 0.0, 0.0),
        ("sigmoid", 0.2, 0.0),
        ("hinge", 0.0, 0.0),
        ("ipo", 0.0, 0.0),
        ("simpo", 0.0, 0.0),
        ("simpo", 0.2, 0.0),
        ("simpo", 0.0, 0.25),
        ("simpo", 0.2, -0.5),
    ],
)
def test_cpo_and_simpo(loss_type, smoothing, alpha):
    leaf = random_logps(2, 3, scale=4.0)
    stock = trainer_like(alpha=alpha, loss_type=loss_type, beta=0.4, label_smoothing=smoothing, simpo_gamma=0.7)
    losses, chosen_rewards, rejected_rewards = CPOTrainer.cpo_loss(stock, *leaf)
    nll = leaf.square().mean()
    if loss_type == "simpo":
        loss, got = simpo_loss(*leaf, beta=0.4, gamma=0.7, alpha=alpha, label_smoothing=smoothing)
        want = losses.mean()
    else:
        loss, got = cpo_loss(*leaf, nll, beta=0.4, cpo_alpha=0.6, loss_type=loss_type, label_smoothing=smoothing)
        want = losses.mean() + 0.6 * nll  # as in CPOTrainer.get_batch_loss_metrics
    assert_same(loss, want, leaf)
    torch.testing.assert_close(got["rewards/chosen"], chosen_rewards.mean())
    torch.testing.assert_close(got["rewards/rejected"], rejected_rewards.mean())


@pytest.mark.parametrize("seed", [4, 5])
def test_orpo(seed):
    leaf = random_logps(2, seed, scale=5.0)
    nll = leaf.square().mean()
    losses, chosen_rewards, _, log_odds_ratio, log_odds = ORPOTrainer.odds_ratio_loss(trainer_like(beta=0.3), *leaf)
    loss, got = orpo_loss(*leaf.float(), nll, beta=0.3)  # TRL computes in fp32
    assert_same(loss, nll - losses.mean(), leaf, rtol=1e-5)
    for name, want in {
        "nll_loss": nll,
        "log_odds_ratio": log_odds_ratio,
        "log_odds_chosen": log_odds,
        "rewards/chosen": chosen_rewards.mean(),
        "logps/rejected": leaf[1].mean(),
    }.items():
        torch.testing.assert_close(got[name].double(), want.detach().double(), rtol=1e-5, atol=1e-7, msg=name)


def test_orpo_is_finite_where_a_probability_rounds_to_one():
    """TRL's gradient is NaN there."""
    for x in (0.0, -1e-9, -0.6931472, -0.6931471, -200.0):
        leaf = torch.tensor([[x, -1.0], [-0.5, x]], requires_grad=True)
        loss, _ = orpo_loss(*leaf, torch.zeros(()))
        loss.backward()
        assert torch.isfinite(loss) and torch.isfinite(leaf.grad).all(), x
    leaf = torch.tensor([[-1e-9], [-1.0]], requires_grad=True)
    assert (
        torch.autograd.grad(ORPOTrainer.odds_ratio_loss(trainer_like(beta=1.0), *leaf)[0].mean(), leaf)[0].isnan().any()
    )


@pytest.mark.parametrize("kl", [0.7, -0.7])
@pytest.mark.parametrize("desirable", ["some", "all", "none"])
def test_kto(desirable, kl):
    leaf = random_logps(2, 6)
    label = {"some": torch.arange(PAIRS) % 3 != 0, "all": torch.ones(PAIRS), "none": torch.zeros(PAIRS)}[desirable]
    label = label.bool()
    log_probs = torch.stack([leaf[0], torch.zeros(PAIRS)], 1)
    blank = torch.zeros_like(log_probs)
    outputs = FusedCausalLMOutput(log_probs=log_probs, entropy=blank, mean_logits=blank)
    stock = trainer_like(
        model=types.SimpleNamespace(training=False),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        calculate_KL=True,
        _compute_kl_logps=lambda model, batch: torch.full((PAIRS,), kl),
        loss_type="kto",
        beta=0.3,
        desirable_weight=1.5,
        undesirable_weight=0.8,
        _metrics={"eval": Metrics()},
        _total_train_tokens=0,
    )
    inputs = {
        "input_ids": torch.zeros(PAIRS, 3, dtype=torch.long),
        "completion_mask": torch.ones(PAIRS, 3).long(),
        "attention_mask": torch.ones(PAIRS, 3),
        "label": label,
        "ref_logps": leaf[1].detach(),
        "ref_KL_logps": torch.zeros(PAIRS),
    }
    want = KTOTrainer._compute_loss(stock, lambda **_: outputs, inputs, False)
    loss, got = kto_loss(leaf[0], leaf[1], label, kl, beta=0.3, desirable_weight=1.5, undesirable_weight=0.8)
    (want_grad,) = torch.autograd.grad(3.7 * want, leaf)
    (got_grad,) = torch.autograd.grad(3.7 * loss, leaf)
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(got_grad, want_grad)
    for name, values in stock._metrics["eval"].items():
        if name in got:
            assert got[name].item() == pytest.approx(values[-1], rel=1e-6), name
    assert {"kl", "rewards/margins"} <= got.keys()


ALL = {
    "dpo": lambda **options: dpo_loss(*random_logps(4, 7), **options),
    "cpo": lambda **options: cpo_loss(*random_logps(2, 7), torch.tensor(2.0), **options),
    "simpo": lambda **options: simpo_loss(*random_logps(2, 7), **options),
    "orpo": lambda **options: orpo_loss(*random_logps(2, 7), torch.tensor(2.0), **options),
    "kto": lambda **options: kto_loss(*random_logps(2, 7), torch.arange(PAIRS) > 2, 0.1, **options),
}


@pytest.mark.parametrize("name", ALL)
def test_reductions_metrics_and_bad_options(name):
    losses, metrics = ALL[name](reduction="none")
    assert losses.shape == (PAIRS,)
    torch.testing.assert_close(ALL[name](reduction="sum")[0], losses.sum())
    torch.testing.assert_close(ALL[name]()[0], losses.mean())
    assert all(value.ndim == 0 and not value.requires_grad for value in metrics.values())
    assert {"rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected"} <= metrics.keys()
    with pytest.raises(ValueError, match="reduction is 'avg'; expected 'mean', 'sum' or 'none'"):
        ALL[name](reduction="avg")
    with pytest.raises(ValueError, match="beta is 0; expected a positive number"):
        ALL[name](beta=0)


BAD = {
    "unknown": (lambda: ALL["dpo"](loss_type="sppo"), "loss_type is 'sppo'; expected one of sigmoid, robust, hinge"),
    "another's": (lambda: ALL["cpo"](loss_type="robust"), "loss_type is 'robust'; expected one of sigmoid, hinge, ipo"),
    "useless": (lambda: ALL["dpo"](loss_type="hinge", label_smoothing=0.1), "'hinge' ignores it"),
    "useless apo": (lambda: ALL["dpo"](loss_type="apo_down", label_smoothing=0.1), "'apo_down' ignores it"),
    "range": (lambda: ALL["simpo"](label_smoothing=0.5), r"label_smoothing is 0.5; expected a probability in \[0, 0.5"),
    "shapes": (lambda: simpo_loss(torch.zeros(3), torch.zeros(4)), r"chosen_logps \(3,\) .* rejected_logps \(4,\)"),
    "tokens": (lambda: simpo_loss(*torch.zeros(2, 3, 4)), "sequence_logprobs"),
    "integers": (lambda: simpo_loss(*torch.zeros(2, 3).long()), "expected one floating-point log-probability"),
    "nll": (lambda: orpo_loss(*torch.zeros(2, 3), torch.zeros(2)), r"chosen_nll has shape \(2,\); expected \(\) or"),
    "desirable": (lambda: kto_loss(*torch.zeros(2, 3), torch.ones(3), 0.0), "expected .* torch.bool"),
    "kl": (lambda: kto_loss(*torch.zeros(2, 3), torch.ones(3).bool(), torch.zeros(3)), "take its mean"),
    "mask": (
        lambda: sequence_logprobs(torch.zeros(2, 3), torch.ones(2, 4)),
        r"log_probs is \(2, 3\) and mask \(2, 4\)",
    ),
}


@pytest.mark.parametrize("call, message", BAD.values(), ids=BAD)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_half_precision_is_computed_in_fp32():
    leaf = random_logps(4, 8).detach()
    want, _ = dpo_loss(*leaf.bfloat16().double())
    got, metrics = dpo_loss(*leaf.bfloat16())
    assert got.dtype == torch.float32 and metrics["rewards/chosen"].dtype == torch.float32
    torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=0)


def test_sequence_logprobs():
    log_probs = torch.tensor([[-1.0, -2.0, torch.nan], [-3.0, -4.0, -5.0], [-1.0, -1.0, -1.0]])
    mask = torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 0]])
    assert sequence_logprobs(log_probs, mask).tolist() == [-3.0, -9.0, 0.0]
    assert sequence_logprobs(log_probs, mask.bool(), average=True).tolist() == [-1.5, -4.5, 0.0]


@pytest.mark.parametrize("frozen", [False, True])
def test_linear_loss(frozen):
    """A user's function of log-probs and entropy equals itself on real logits in fp64, without a (T, V) tensor."""
    torch.manual_seed(0)
    hidden = torch.randn(3, 5, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4001, 16, dtype=torch.float64, requires_grad=not frozen)
    bias = torch.randn(4001, dtype=torch.float64, requires_grad=not frozen)
    target = torch.randint(0, 4001, (3, 5))
    target[0, 2:] = -100
    mask = target != -100

    def loss_fn(log_probs, entropy):
        kept = (1 - log_probs.exp()) ** 2 * log_probs.sin() * mask
        return kept.sum() * 3.7 + 0.2 * entropy.square().sum(), {"kept": kept.detach()}

    leaves = [hidden] if frozen else [hidden, weight, bias]
    log_p = torch.log_softmax(hidden @ weight.T + bias, -1)
    chosen = log_p.gather(-1, target.clamp(min=0)[..., None])[..., 0] * mask
    want, _ = loss_fn(chosen, -(log_p.exp() * log_p).sum(-1) * mask)
    want_grads = torch.autograd.grad(want, leaves)
    with LargestTensor() as largest:
        single = [x.detach().float().requires_grad_(x.requires_grad) for x in (hidden, weight, bias)]
        loss, metrics = linear_loss(
            single[0], single[1], target, loss_fn, single[2], outputs=("log_probs", "entropy"), chunk_rows=2
        )
        grads = torch.autograd.grad(loss, single[: len(leaves)])
    assert largest.numel <= weight.numel() + 4001 and metrics["kept"].shape == target.shape
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=0)
    for got, ref in zip(grads, want_grads, strict=True):
        assert (got.double() - ref).norm() / ref.norm() < 1e-5


def test_linear_loss_without_a_gradient_is_refused():
    hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(11, 8)
    with pytest.raises(ValueError, match="no gradient flows from it to log_probs"):
        linear_loss(hidden, weight, torch.arange(4), lambda log_probs: log_probs.detach().sum())
    with pytest.raises(ValueError, match="no gradient flows from it to log_probs"):
        linear_loss(hidden, weight, torch.arange(4), lambda log_probs: log_probs.sum().item())
    with torch.no_grad():  # evaluation
        linear_loss(hidden, weight, torch.arange(4), lambda log_probs: log_probs.sum())


def examples():
    return re.findall(r"```python\n(.*?)```", DOCS, flags=re.S)


def pair_batches(steps):
    tokenizer, rows = tiny_tokenizer(), pair_rows()
    texts = [(row["prompt"], row[kind]) for kind in ("chosen", "rejected") for row in rows]
    ids = [tokenizer(prompt + completion)["input_ids"] for prompt, completion in texts]
    start = [len(tokenizer(prompt)["input_ids"]) for prompt, _ in texts]
    width = max(map(len, ids))
    labels = [[-100] * s + row[s:] + [-100] * (width - len(row)) for s, row in zip(start, ids, strict=True)]
    batch = {
        "input_ids": torch.tensor([row + [0] * (width - len(row)) for row in ids]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids]),
        "labels": torch.tensor(labels),
    }
    return [batch] * steps


def test_the_loop_of_the_docs_trains():
    namespace = {}
    exec(examples()[0], namespace)
    model = tiny_model("llama", vocab_size=4096)
    reference = tiny_model("llama", vocab_size=4096)
    batches = pair_batches(8)
    with LargestTensor() as largest:
        steps = list(namespace["train"](model, reference, batches, torch.optim.SGD(model.parameters(), lr=0.05)))
    assert largest.numel < batches[0]["input_ids"].numel() * 4096
    assert steps[0][0] == pytest.approx(torch.tensor(2.0).log().item(), rel=1e-5)  # no margin yet
    assert steps[-1][0] < 0.6 < 0.9 <= steps[-1][1]


def test_the_function_of_the_docs():
    hidden = torch.randn(2, 6, 16, requires_grad=True)
    namespace = {"torch": torch, "hidden": hidden, "head": torch.nn.Linear(16, VOCAB, bias=False)}
    namespace["labels"] = torch.randint(0, VOCAB, (2, 6))
    exec(examples()[1], namespace)
    p = torch.softmax(namespace["head"](hidden[:, :-1]), -1).gather(-1, namespace["labels"][:, 1:, None])
    torch.testing.assert_close(namespace["loss"], -torch.log(1 - p).mean(), rtol=1e-5, atol=0)


def test_the_losses_need_neither_transformers_nor_trl():
    code = "import sys, liger_trainer as l; l.losses.dpo_loss; print(*{'transformers', 'trl'} & set(sys.modules))"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stdout.strip(), done.stdout + done.stderr


def test_docs_list_every_function():
    names = set(liger_trainer.losses.__all__)
    page = DOCS
    assert all(f"| `{name}`" in page for name in names)
    assert all(inspect.getdoc(getattr(liger_trainer.losses, name)) for name in names)
