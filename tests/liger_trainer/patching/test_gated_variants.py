"""Norms with a gate, clamped and scaled gates, and other variants of single families: which ones are swapped."""

import copy
import functools
import pickle

import pytest
import torch
import torch.nn.functional as F
from tiny_models import NO_HEAD, largest_difference, step, tiny_model, whole_batch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.activations import ACT2FN

from liger_trainer.patching import apply_liger, experts, mlps, norms, remove_liger
from liger_trainer.patching.core import guards, probe
from liger_trainer.patching.core.binding import Binding
from liger_trainer.patching.core.pattern import attempt
from liger_triton import reference


@pytest.fixture(autouse=True)
def modules_of_this_file_are_known(monkeypatch):
    """Accept this file's modules: its tests cover what modules compute, not what else their code might do."""
    monkeypatch.setattr(guards, "KNOWN", (*guards.KNOWN, __name__))


def proven(module, kind):
    with probe.isolated():
        proof, reason = attempt(kind.prove, module)
    return proof and proof.variant, reason


class GatedNorm(nn.Module):
    """A gated norm with a form and flaws that can be chosen one by one."""

    def __init__(self, n=48, first=False, act="silu", cast="llama", group_size=None, flaw=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))
        self.variance_epsilon = 1e-6
        self.first = first
        self.act = act
        self.cast = cast
        self.flaw = flaw
        self.group_size = group_size

    def forward(self, hidden_states, gate=None):
        x = hidden_states.float()
        factor = 1.0 if gate is None else ACT2FN[self.act](gate.float())
        if self.flaw == "detached gate" and gate is not None:
            factor = factor.detach()
        if self.flaw == "dropped gate":
            factor = 1.0
        if self.flaw == "gate of one":
            factor = factor + 0.01
        if self.flaw == "gate alone" and gate is None:
            return hidden_states
        x = x * factor if self.first else x
        x = x.unflatten(-1, (-1, self.group_size or x.shape[-1]))
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        x = x.flatten(-2)
        if self.cast == "llama":
            x = self.weight * x.to(hidden_states.dtype)
        else:
            x = self.weight.float() * x
        if self.first:
            return x if self.cast == "llama" else x.to(hidden_states.dtype)
        return x if gate is None else (x * factor).to(hidden_states.dtype)


@pytest.mark.parametrize("group_size", [None, 12])
@pytest.mark.parametrize("cast", ["llama", "gemma"])
@pytest.mark.parametrize("act", ["silu", "sigmoid"])
@pytest.mark.parametrize("first", [True, False])
def test_norms_with_a_gate(first, act, cast, group_size):
    norm, reason = proven(GatedNorm(first=first, act=act, cast=cast, group_size=group_size), norms)
    assert reason is None
    assert (norm.gate_first, norm.activation, norm.cast, norm.eps) == (first, act, cast, 1e-6)
    assert (norm.gate, norm.group) == ("gate", group_size)


@pytest.mark.parametrize(
    "module",
    [
        *(GatedNorm(flaw=flaw) for flaw in ("detached gate", "dropped gate", "gate of one")),
        *(GatedNorm(act=act, first=first) for act in ("gelu", "relu") for first in (True, False)),
    ],
    ids=lambda m: m.flaw or f"{m.act}-{m.first}",
)
def test_other_norms_with_a_gate_are_left_alone(module):
    """ "gate alone" computes the same with a gate, but something else without one, and its gate is optional."""
    norm, reason = proven(module, norms)
    assert norm is None and "2 inputs (hidden_states, gate)" in reason


def test_without_its_gate_it_may_be_no_norm():
    """Calls without a gate run its own code, the others ours."""
    holder, module = patched_norm(flaw="gate alone")
    x = torch.randn(3, 48)
    assert module(x) is x and not torch.equal(module(x, x), x)


def test_a_norm_of_two_inputs_is_not_taken_for_a_plain_one():
    """On x alone, GatedNorm computes a plain RMSNorm. Swapping it for that would drop the gate."""
    norm, _ = proven(GatedNorm(), norms)
    assert norm.gate == "gate"


def patched_norm(**options):
    module = nn.Sequential(GatedNorm(**options))[0]
    holder = nn.ModuleList([module])
    report = apply_liger(holder, NO_HEAD)
    assert list(report["rms_norm"].swapped) == ["0"]
    return holder, module


@pytest.mark.parametrize("first", [True, False])
def test_calls_of_every_form(first, monkeypatch):
    """With or without a gate, by name or by position. Unproven calls run the norm's own code."""
    _, module = patched_norm(first=first)
    own = GatedNorm(first=first)
    x, gate = torch.randn(2, 3, 48), torch.randn(2, 3, 48)
    kernel, ran = reference.gated_rms_norm, []
    monkeypatch.setattr(reference, "gated_rms_norm", lambda *args, **options: ran.append(1) or kernel(*args, **options))
    for args, named, ours in (
        ((x, gate), {}, True),
        ((x,), {"gate": gate}, True),
        ((x,), {}, False),
        ((x, None), {}, False),
        ((x,), {"gate": None}, False),
        ((), {"hidden_states": x, "gate": gate}, False),
        ((x, gate[:, :1]), {}, False),
    ):
        ran.clear()
        torch.testing.assert_close(module(*args, **named), own(*args, **named))
        assert bool(ran) == ours, (len(args), list(named))
    for args, named in (((x, gate), {"gate": gate}), ((x, gate, gate), {}), ((x,), {"other": gate})):
        with pytest.raises(TypeError):
            module(*args, **named)


@pytest.mark.parametrize("way", ["plain", "deepcopy", "pickle", "reentrant", "not reentrant", "twice", "removed"])
def test_a_patched_norm_trains_as_its_own(way):
    holder, module = patched_norm(first=True, group_size=12)
    torch.nn.init.normal_(module.weight)
    if way == "deepcopy":
        holder = copy.deepcopy(holder)
        with torch.no_grad():
            module.weight.zero_()  # the copy has its own weights
    elif way == "pickle":
        holder = pickle.loads(pickle.dumps(holder))  # noqa: S301
        apply_liger(holder, NO_HEAD)
    elif way == "removed":
        remove_liger(holder)
        assert "forward" not in module.__dict__
    module = holder[0]
    own = GatedNorm(first=True, group_size=12)
    own.load_state_dict(module.state_dict())
    inputs = [torch.randn(4, 48).requires_grad_() for _ in range(2)]

    def gradients(norm, use_reentrant=None):
        y = norm(*inputs) if use_reentrant is None else checkpoint(norm, *inputs, use_reentrant=use_reentrant)
        leaves = [*inputs, norm.weight]
        if use_reentrant:
            y.sin().sum().backward()
            found = [t.grad.clone() for t in leaves]
            for t in leaves:
                t.grad = None
            return found
        first = torch.autograd.grad(y.sin().sum(), leaves, retain_graph=way == "twice")
        if way == "twice":
            assert all(map(torch.equal, first, torch.autograd.grad(y.sin().sum(), leaves)))
        return first

    got = gradients(module, {"reentrant": True, "not reentrant": False}.get(way))
    for a, b in zip(got, gradients(own), strict=True):
        torch.testing.assert_close(a, b)


def test_a_hook_sees_what_it_changes():
    """A large result is recomputed for the backward pass, except where a hook may have changed it."""
    holder, module = patched_norm()
    apply_liger(holder, NO_HEAD | {"rebuild_above_mib": 0})
    head = nn.Linear(48, 4)
    x, gate = torch.randn(5, 48), torch.randn(5, 48)
    want = GatedNorm()(x, gate).sum(0).detach()
    (without,) = torch.autograd.grad(head(module(x, gate)).sum(), head.weight)
    torch.testing.assert_close(without[0], want)

    def double(module, args, y):
        y.data.mul_(2.0)

    module.register_forward_hook(double)
    (hooked,) = torch.autograd.grad(head(module(x, gate)).sum(), head.weight)
    torch.testing.assert_close(hooked[0], 2 * want)


# MLPs and experts


class MLP(nn.Module):
    def __init__(self, limit=7.0, alpha=1.0, up_offset=0.0, gate_multiplier=1.0, down_multiplier=1.0, p=0.0):
        super().__init__()
        self.gate_proj = nn.Linear(16, 24)
        self.up_proj = nn.Linear(16, 24)
        self.down_proj = nn.Linear(24, 16)
        self.swiglu_limit = limit
        self.swiglu_alpha = alpha
        self.up_offset = up_offset
        self.gate_multiplier = gate_multiplier
        self.down_multiplier = down_multiplier
        self.residual_dropout = p

    def forward(self, x, layer_idx=None):
        x = x if layer_idx is None else x + layer_idx
        gate, up = self.gate_proj(x) * self.gate_multiplier, self.up_proj(x)
        if self.swiglu_limit is not None:
            gate, up = gate.clamp(max=self.swiglu_limit), up.clamp(-self.swiglu_limit, self.swiglu_limit)
        y = self.down_proj(gate * torch.sigmoid(gate * self.swiglu_alpha) * (up + self.up_offset))
        return F.dropout(y * self.down_multiplier, self.residual_dropout, self.training)


MLPS = {
    "clamped": ({}, "silu, clamped by swiglu_limit: gate_proj, up_proj, down_proj"),
    "limit-of-10": ({"limit": 10.0}, "silu, clamped by swiglu_limit: gate_proj, up_proj, down_proj"),
    "gpt-oss": (
        {"alpha": 1.702, "up_offset": 1.0},
        "silu, clamped by swiglu_limit, sigmoid times swiglu_alpha, up + 1: gate_proj, up_proj, down_proj",
    ),
    "falcon-h1": (
        {"limit": None, "gate_multiplier": 0.3, "down_multiplier": 0.7},
        "silu, gate times gate_multiplier: gate_proj, up_proj, down_proj, times down_multiplier",
    ),
    "down-alone": (
        {"limit": None, "down_multiplier": 0.7},
        "silu: gate_proj, up_proj, down_proj, times down_multiplier",
    ),
    "seed-oss": ({"limit": None, "p": 0.1}, "silu: gate_proj, up_proj, down_proj, dropout by residual_dropout"),
}


def results(module, x, *more):
    """Value and gradients in training mode, from one seed."""
    x = x.clone().requires_grad_()
    torch.manual_seed(4)
    y = module.train()(x, *more)
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], torch.linspace(-1, 1, y.numel()).view_as(y))]


@pytest.mark.parametrize("options, variant", MLPS.values(), ids=MLPS)
def test_mlps(options, variant):
    model = nn.Sequential(MLP(**options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(20)  # so that many clamped values are cut off
    x = torch.randn(5, 7, 16)
    want, other = results(model[0], x), results(model[0], x, 3)
    report = apply_liger(model, NO_HEAD)
    assert report["swiglu"].swapped == {"0": variant}
    for got, expected in ((results(model[0], x), want), (results(model[0], x, 3), other)):
        for a, b in zip(got, expected, strict=True):
            assert (a - b).abs().max() <= 1e-6 * b.abs().max()
    if options.get("p"):
        assert (want[0] == 0).float().mean() > 0.05
        model.eval()
        got = model(x)
        remove_liger(model)
        torch.testing.assert_close(got, model(x), rtol=1e-5, atol=1e-5)


def test_attributes_changed_after_patching_are_used():
    """A limit that changes after patching, for example by a schedule, is followed."""
    model = nn.Sequential(MLP())
    apply_liger(model, NO_HEAD)
    model[0].swiglu_limit = 0.05
    x = torch.randn(5, 16)
    got = model(x)
    remove_liger(model)
    torch.testing.assert_close(got, model(x))


class CastsToLast(nn.Module):
    """As in T5 and its relatives, the last projection may stay in fp32."""

    def __init__(self):
        super().__init__()
        self.wi_0 = nn.Linear(16, 24)
        self.wi_1 = nn.Linear(16, 24)
        self.wo = nn.Linear(24, 16)

    def forward(self, x):
        y = F.silu(self.wi_0(x)) * self.wi_1(x)
        if isinstance(self.wo.weight, torch.Tensor) and y.dtype != self.wo.weight.dtype:
            y = y.to(self.wo.weight.dtype)
        return self.wo(y)


def test_a_cast_to_the_last_projection():
    """The cast does nothing if all dtypes agree. Otherwise the MLP keeps its own code."""
    model = nn.Sequential(CastsToLast())
    x = torch.randn(5, 16)
    want = results(model[0], x)
    assert apply_liger(model, NO_HEAD)["swiglu"].swapped == {"0": "silu: wi_0, wi_1, wo"}
    torch.testing.assert_close(results(model[0], x), want, rtol=1e-5, atol=1e-6)
    mixed = CastsToLast().bfloat16()
    mixed.wo.float()
    mlp, why = proven(mixed, mlps)
    assert mlp is None and "weights are bfloat16 and float32" in why


class DropoutInside(MLP):
    """Its dropout has a known name, but in another place."""

    def forward(self, x):
        y = F.silu(self.gate_proj(x)) * F.dropout(self.up_proj(x), self.residual_dropout, self.training)
        return self.down_proj(y)


class FactorInside(MLP):
    """Its factor has a known name, but precedes the projection and leaves the bias alone."""

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x) * self.down_multiplier)


class OtherClamp(MLP):
    def forward(self, x):
        gate = self.gate_proj(x).clamp(-self.swiglu_limit, self.swiglu_limit)
        return self.down_proj(F.silu(gate) * self.up_proj(x).clamp(-self.swiglu_limit, self.swiglu_limit))


class UsesItsSecondInput(MLP):
    def forward(self, x, scale):
        return super().forward(x * scale)


@pytest.mark.parametrize(
    "module, reason",
    [
        (DropoutInside(p=0.1), "it is not down"),
        (FactorInside(down_multiplier=0.7), "it is not down"),
        (OtherClamp(), "it is not down"),
        (MLP(up_offset=0.5), "it is not down"),
        (UsesItsSecondInput(), "its forward takes 2 inputs (x, scale)"),
    ],
)
def test_other_mlps_are_left_alone(module, reason):
    mlp, why = proven(module, mlps)
    assert mlp is None and reason in why


def expert_block(cut, flaw=None):
    """A GPT-OSS block with another gate. `grouped_mm` calls it; the eager forward has its own."""

    def gate_of(self, gate_up):
        gate, up = (gate_up[..., ::2], gate_up[..., 1::2]) if cut == "pairs" else gate_up.chunk(2, dim=-1)
        gate, up = (up, gate) if flaw == "up first" else (gate, up)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        if flaw == "in training" and self.training:
            gate = 2 * gate
        return (up + (0.9 if flaw == "offset" else 1)) * (gate * torch.sigmoid(gate * self.alpha))

    model = tiny_model("gpt_oss")
    model.set_experts_implementation("grouped_mm")
    block = next(module for module in model.modules() if experts.is_candidate(module)).eval()
    block.__class__ = type("Experts", (type(block),), {"_apply_gate": gate_of})
    return block


@pytest.mark.parametrize("cut", ["pairs", "halves"])
def test_experts(cut):
    proof, reason = experts.prove(expert_block(cut))
    assert reason is None and proof.variant.interleaved == (cut == "pairs")
    gate = proof.variant.gate
    assert (gate.limit, gate.alpha, gate.up_offset) == ("limit", "alpha", 1.0)


@pytest.mark.parametrize("cut", ["pairs", "halves"])
@pytest.mark.parametrize("flaw", ["up first", "offset", "in training"])
def test_other_experts_are_left_alone(flaw, cut):
    proven, reason = experts.prove(expert_block(cut, flaw))
    assert proven is None and "it is not the weighted sum" in reason


# Norms of single families


class T5Norm(nn.Module):
    def __init__(self, n=48):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(n)), 1e-6

    def forward(self, x):
        y = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            y = y.to(self.weight.dtype)
        return self.weight * y


class UnweightedNorm(nn.Module):
    eps = 1e-6

    def __init__(self):
        super().__init__()
        self.eps = 1e-6

    def forward(self, x):
        return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps).to(x.dtype)


class LayerNorm1P(nn.LayerNorm):
    def forward(self, x):
        if torch.is_autocast_enabled(x.device.type):
            return F.layer_norm(
                x.bfloat16(), x.shape[-1:], (self.weight + 1).bfloat16(), self.bias.bfloat16(), self.eps
            )
        return F.layer_norm(x, x.shape[-1:], self.weight + 1, self.bias, self.eps)


class GroupedNorm(nn.Module):
    def __init__(self, n=48, group_size=12):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n))
        self.group_size = group_size
        self.eps = 1e-6

    def forward(self, x):
        y = x.float().unflatten(-1, (-1, self.group_size))
        y = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)).flatten(-2)
        return (y * (1.0 + self.weight.float())).type_as(x)


class ImageLayerNorm(nn.LayerNorm):
    def __init__(self, n):
        super().__init__(n, eps=1e-6)
        self.data_format = "channels_first"

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def test_a_channels_first_norm_is_left_alone():
    report = apply_liger(nn.Sequential(ImageLayerNorm(48)), NO_HEAD)
    assert not report["layer_norm"].found


@pytest.mark.parametrize(
    "module, operation, variant",
    [
        (T5Norm(), "rms_norm", "cast=t5"),
        (UnweightedNorm(), "rms_norm", "cast=rstd, no weight"),
        (LayerNorm1P(48), "layer_norm", "offset=1, bias"),
        (GroupedNorm(), "rms_norm", "cast=gemma, offset=1, groups of 12"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_of_single_families(dtype, module, operation, variant):
    model = nn.Sequential(copy.deepcopy(module)).to(dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 3, 48).to(dtype)
    want = model(x)
    report = apply_liger(model, NO_HEAD)
    assert report[operation].swapped == {"0": variant}
    got = model(x)
    assert got.dtype == want.dtype and got.stride() == want.stride()
    torch.testing.assert_close(
        got, want, rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-2 * (dtype != torch.float32)
    )


def test_calls_of_these_norms_for_which_nothing_was_proven():
    """They run the norm's own code: T5's in bf16 on fp32 rows, 1 + w under autocast."""
    models = [nn.Sequential(m) for m in (T5Norm().bfloat16(), LayerNorm1P(48))]
    for model in models:
        apply_liger(model, NO_HEAD)
        assert "forward" in model[0].__dict__
    x = torch.randn(3, 48)
    assert models[0](x).dtype == torch.bfloat16 and torch.equal(models[0](x), T5Norm().bfloat16()(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(models[1](x), LayerNorm1P(48)(x)) and models[1](x).dtype == torch.bfloat16
    assert not any(Binding.of(model[0]).fallback_active for model in models)


# Forwards under a decorator


def rotate_half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class RotaryEmbedding(nn.Module):
    def forward(self, x, position_ids):
        angles = position_ids[..., None].float() * torch.arange(1, 5) / 7
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def twice(forward):
    @functools.wraps(forward)
    def call(*args):
        forward(*args)
        return forward(*args)

    return call


class Indexer(nn.Module):
    @torch.no_grad()
    def forward(self, q, k, cos, sin):
        return apply_rotary_pos_emb(q, k, cos, sin)


class WithGrad(Indexer):
    @torch.enable_grad()
    def forward(self, q, k, cos, sin):
        return apply_rotary_pos_emb(q, k, cos, sin)


class Twice(Indexer):
    @torch.no_grad()
    @twice
    def forward(self, q, k, cos, sin):
        return apply_rotary_pos_emb(q, k, cos, sin)


def test_rope_under_no_grad(monkeypatch):
    """The kernel runs without gradient, as before. Forwards under other decorators keep their code."""
    model = nn.ModuleDict({"rotary_emb": RotaryEmbedding(), "a": Indexer(), "b": WithGrad(), "c": Twice()})
    q, k = (torch.randn(2, 3, 5, 8, requires_grad=True) for _ in range(2))
    cos, sin = model["rotary_emb"](q, torch.arange(5)[None])
    want = model["a"](q, k, cos, sin)
    for _ in range(2):
        report = apply_liger(model, NO_HEAD)
    assert report["rope"].swapped == {"a": "apply_rotary_pos_emb: half-rotate"}
    assert report["rope"].skipped == dict.fromkeys("bc", "its forward is decorated")
    kernel, ran = reference.rope, []
    monkeypatch.setattr(reference, "rope", lambda *args, **options: ran.append(1) or kernel(*args, **options))
    for got, expected in zip(model["a"](q, k, cos, sin), want, strict=True):
        torch.testing.assert_close(got, expected)
        assert not got.requires_grad
    assert ran == [1]
    other = copy.deepcopy(model)
    assert torch.equal(other["a"](q, k, cos, sin)[0], model["a"](q, k, cos, sin)[0]) and len(ran) == 3
    assert pickle.loads(pickle.dumps(model["a"]))(q, k, cos, sin)[0].equal(want[0])  # noqa: S301
    remove_liger(model)
    assert "forward" not in model["a"].__dict__


def test_a_gated_norm_that_is_two_percent_off_is_seen(monkeypatch):
    """The control, for both orders of norm and gate."""
    for model_type in ("qwen3_next", "bamba"):
        model = tiny_model(model_type)
        want = step(model, whole_batch())
        apply_liger(model, NO_HEAD)
        assert largest_difference(step(model, whole_batch()), want) < 1e-5
        own = reference.gated_rms_norm
        with monkeypatch.context() as patch:
            patch.setattr(
                reference,
                "gated_rms_norm",
                lambda x, gate, *args, own=own, **options: own(
                    x, gate * torch.linspace(0.98, 1.0, gate.shape[-1]), *args, **options
                ),
            )
            assert largest_difference(step(model, whole_batch()), want) > 1e-3
