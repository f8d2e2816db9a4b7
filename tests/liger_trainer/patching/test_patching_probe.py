"""Recognition and proof: what each norm, MLP, gate and rotary function is taken for, and what is left alone."""

import json
import re
import time

import pytest
import torch
import torch.nn.functional as F
from checkout import ROOT
from tiny_models import NO_HEAD, tiny_model
from torch import nn
from transformers.activations import ACT2FN

from liger_trainer import LigerTrainingArguments
from liger_trainer.patching import OPERATIONS, apply_liger, check_config, mlps, norms, remove_liger, rotary_proof
from liger_trainer.patching.apply import CONFIG_KEYS
from liger_trainer.patching.core import guards, probe
from liger_trainer.patching.core.pattern import attempt
from liger_trainer.patching.core.report import LigerReport, compress


@pytest.fixture(autouse=True)
def modules_of_this_file_are_known(monkeypatch):
    """Accept this file's modules: its tests cover what modules compute, not what else their code might do."""
    monkeypatch.setattr(guards, "KNOWN", (*guards.KNOWN, __name__))


class Norm(nn.Module):
    """A norm with flaws that can be chosen one by one."""

    def __init__(self, n=96, eps=1e-6, offset=0.0, cast="llama", flaw=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))
        self.variance_epsilon = eps
        self.offset = offset
        self.cast = cast
        self.flaw = flaw

    def forward(self, x):
        wide = x.float()
        if self.flaw == "mean":
            wide = wide - 0.01 * wide.mean(-1, keepdim=True)
        variance = wide.pow(2).mean(-1, keepdim=True)
        if self.flaw == "eps outside":
            wide = wide / (variance.sqrt() + self.variance_epsilon)
        elif self.flaw == "other eps":
            wide = wide * torch.rsqrt(variance + 3 * self.variance_epsilon)
        else:
            wide = wide * torch.rsqrt(variance + self.variance_epsilon)
        if self.flaw == "detached":
            wide = wide + (wide.detach() - wide) * 0.01
        if self.flaw == "dropout":
            wide = F.dropout(wide, 0.1, self.training)
        if self.flaw == "clamp":
            wide = wide.clamp(-3.5, 3.5)
        if self.cast == "llama":
            return (self.weight + self.offset if self.offset else self.weight) * wide.to(x.dtype)
        if self.cast == "gemma":
            return ((self.weight.float() + self.offset) * wide).to(x.dtype)
        return self.weight * wide  # "fp32 out"


def proven(module, kind=norms):
    with probe.isolated():
        proof, reason = attempt(kind.prove, module)
    return proof and proof.variant, reason


def test_proofs_take_one_thread():
    """If the cores are busy, each product of a few numbers would wait for a thread of its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(before + 3)
    try:
        with pytest.raises(KeyError), probe.isolated():
            assert torch.get_num_threads() == 1
            raise KeyError
        assert torch.get_num_threads() == before + 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("n", [96, 4096])
@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-8])
@pytest.mark.parametrize("cast", ["llama", "gemma"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norm_variants(offset, cast, eps, n):
    norm, reason = proven(Norm(n, eps, offset, cast))
    assert reason is None
    assert (norm.operation, norm.offset, norm.cast, norm.eps) == ("rms_norm", offset, cast, eps)


@pytest.mark.parametrize("flaw", ["mean", "eps outside", "other eps", "detached", "dropout", "clamp"])
@pytest.mark.parametrize("cast", ["llama", "gemma"])
def test_wrong_norms_are_caught(cast, flaw):
    norm, reason = proven(Norm(cast=cast, flaw=flaw))
    assert norm is None and "none of the known norms" in reason


def test_a_norm_of_another_output_dtype_is_caught():
    assert proven(Norm(cast="fp32 out"))[0] is None


@pytest.mark.parametrize("n", [32, 4096])
def test_the_wrong_cast_is_told_apart_exactly(n):
    """Rounding a bf16 result wrongly changes a quarter to a third of the elements, far above the allowed 2 %."""
    module = Norm(n, cast="llama")
    with probe.isolated():
        cases = norms.Cases(module)
        right, wrong = (
            norms.build(norms.Norm("rms_norm", 0.0, cast, "weight", None, 1e-6)) for cast in ("llama", "gemma")
        )
        assert cases.agree(right) and not cases.agree(wrong)
        case, want = cases.cases[2], cases.wanted[2]
        assert probe.changed_share(cases._run(right, *case)[0], want[0]) < 0.005
        assert 0.2 < probe.changed_share(cases._run(wrong, *case)[0], want[0]) < 0.5
        assert norms.MAX_CHANGED < 0.1


@pytest.mark.parametrize(
    "module, variant",
    [
        (nn.LayerNorm(48), ("layer_norm", "weight", "bias", 1e-5)),
        (nn.LayerNorm(48, eps=1e-12, bias=False), ("layer_norm", "weight", None, 1e-12)),
        (nn.LayerNorm(48, elementwise_affine=False), ("layer_norm", None, None, 1e-5)),
    ],
    ids=["affine", "no-bias", "no-weight"],
)
def test_layer_norms(module, variant):
    norm, _ = proven(module)
    assert (norm.operation, norm.weight, norm.bias, norm.eps) == variant


class OpenNorm(Norm):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def test_norm_with_an_open_signature_is_left_alone():
    assert "open list of inputs" in proven(OpenNorm())[1]


def test_false_candidates_are_not_nominated():
    """1-D parameters and an eps do not make a norm. Nor does a name, if parameters or buffers say otherwise."""
    others = [ACT2FN["xielu"], nn.BatchNorm1d(8), nn.GroupNorm(2, 8), nn.Linear(8, 8), nn.RMSNorm(8)]
    assert not any(norms.is_candidate(module) for module in others)


class Different(nn.Module):
    """Two norms of one class and shape that differ in a scalar."""

    def __init__(self):
        super().__init__()
        self.a, self.b = Norm(eps=1e-5), Norm(eps=1e-6)
        self.c = Norm(cast="gemma")
        self.d = Norm(flaw="clamp")

    def forward(self, x):
        return self.d(self.c(self.b(self.a(x))))


def test_proof_is_per_instance_not_per_class():
    model = Different()
    report = apply_liger(model, NO_HEAD)
    assert report["rms_norm"].swapped == {"a": "cast=llama", "b": "cast=llama", "c": "cast=gemma"}
    assert list(report["rms_norm"].skipped) == ["d"]
    x = 1e-3 * torch.randn(4, 96)
    want = Different()(x)
    torch.testing.assert_close(model(x), want)


class MLP(nn.Module):
    def __init__(
        self, act="silu", flaw=None, limit=7.0, p=0.0, bias=False, names=("gate_proj", "up_proj", "down_proj")
    ):
        super().__init__()
        self.names = names
        self.flaw = flaw
        self.limit = limit
        gate, up, down = names
        self.add_module(gate, nn.Linear(16, 24, bias=False))
        self.add_module(up, nn.Linear(16, 24, bias=False))
        self.add_module(down, nn.Linear(24, 16, bias=False))
        self.act_fn = ACT2FN[act]
        self.drop = nn.Dropout(p)
        if flaw == "norm":
            self.inner_norm = Norm(24)

    def forward(self, x):
        gate, up, down = (getattr(self, name) for name in self.names)
        g = gate(x * 1.01 if self.flaw == "scaled input" else x)
        u = up(x)
        if self.flaw == "clamp on both sides":
            g, u = g.clamp(-self.limit, self.limit), u.clamp(-self.limit, self.limit)
        if self.flaw == "clamp of the gate":
            g = g.clamp(max=self.limit)
        if self.flaw == "half a gradient at the limit":
            g = torch.minimum(g, torch.tensor(self.limit, dtype=g.dtype))
            u = u.clamp(-self.limit, self.limit)
        if self.flaw == "detached":
            u = u.detach()
        y = self.drop(self.act_fn(g) * u)
        if self.flaw == "norm":
            y = self.inner_norm(y)
        if self.flaw == "plus a half":
            y = self.act_fn(g) * (u + 0.5)
        y = down(y)
        if self.flaw == "shifted output":
            y = y + 0.01
        return y * 1.01 if self.flaw == "scaled output" else y


@pytest.mark.parametrize(
    "act, activation",
    [("silu", "silu"), ("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh"), ("gelu_new", "gelu_tanh")],
)
@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
def test_mlp_variants(names, act, activation):
    mlp, _ = proven(MLP(act, names=names), mlps)
    assert mlp.gate.activation == activation
    assert (mlp.inner, mlp.down, mlp.gate_first) == (names[:2], names[2], True)


@pytest.mark.parametrize(
    "flaw",
    [
        "clamp on both sides",
        "clamp of the gate",
        "half a gradient at the limit",
        "detached",
        "norm",
        "plus a half",
        "scaled input",
        "scaled output",
        "shifted output",
    ],
)
def test_wrong_mlps_are_caught(flaw):
    model = nn.Sequential(MLP(flaw=flaw))
    report = apply_liger(model, {**NO_HEAD, "rms_norm": False})
    assert report["swiglu"].swapped == {} and list(report["swiglu"].skipped) == ["0"]
    assert "forward" not in model[0].__dict__


def test_clamps_of_10_are_seen():
    assert proven(MLP(flaw="clamp of the gate", limit=10.0), mlps)[0] is None


@pytest.mark.parametrize("act", ["relu", "quick_gelu", "tanh"])
def test_other_activations_are_left_alone(act):
    assert proven(MLP(act), mlps)[0] is None


def test_dropout_in_train_mode_is_seen():
    """This holds even if the model to be patched is in eval mode."""
    assert proven(MLP(p=0.1).eval(), mlps)[0] is None
    assert proven(MLP(p=0.0).eval(), mlps)[0] is not None


class FusedMLP(nn.Module):
    """One projection for gate and up, in either order, split in one of three ways."""

    def __init__(self, gate_first=True, cut="chunk"):
        super().__init__()
        self.input_linear, self.output_linear = nn.Linear(16, 48), nn.Linear(24, 16)
        self.gate_first = gate_first
        self.cut = cut
        self.activation = F.silu

    def forward(self, x):
        z = self.input_linear(x)
        if self.cut == "chunk":
            a, b = z.chunk(2, dim=-1)
        elif self.cut == "reshape":
            a, b = z.reshape(*z.shape[:-1], 2, -1).unbind(-2)
        else:
            a, b = z[..., ::2], z[..., 1::2]
        return self.output_linear(self.activation(a) * b if self.gate_first else self.activation(b) * a)


@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("cut", ["chunk", "reshape"])
def test_fused_projections(cut, gate_first):
    mlp, _ = proven(FusedMLP(gate_first, cut), mlps)
    assert (mlp.inner, mlp.down, mlp.gate_first) == (("input_linear",), "output_linear", gate_first)
    model = nn.Sequential(FusedMLP(gate_first, cut))
    x = torch.randn(3, 16)
    want = model(x)
    apply_liger(model, NO_HEAD)
    assert "forward" in model[0].__dict__
    torch.testing.assert_close(model(x), want)


def test_interleaved_gate_is_left_alone():
    assert proven(FusedMLP(cut="interleaved"), mlps)[0] is None


class UnequalMLP(MLP):
    """An adapter on one projection only; it returns fp32."""

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def test_projections_of_two_dtypes():
    model = nn.Sequential(UnequalMLP())
    apply_liger(model, NO_HEAD)
    model = model.bfloat16()
    model[0].gate_proj.register_forward_hook(lambda module, args, output: output.float())
    model[0].down_proj.float()
    x = torch.randn(5, 16, dtype=torch.bfloat16)
    got = model(x)
    remove_liger(model)
    torch.testing.assert_close(got, model(x), rtol=1e-5, atol=1e-6)


class RaisingNorm(Norm):
    def forward(self, x):
        raise AttributeError("needs a cache")


def test_a_module_that_raises_on_the_probe_is_left_alone():
    report = apply_liger(nn.ModuleList([RaisingNorm(), Norm()]), NO_HEAD)
    assert report["rms_norm"].skipped == {"0": "it raised AttributeError on random inputs: needs a cache"}
    assert list(report["rms_norm"].swapped) == ["1"]


def test_replaced_forward_is_left_alone():
    """A method that somebody set on the instance stays, and the report names its owner."""
    model = Different()
    model.a.forward = lambda x: x * 2
    report = apply_liger(model, NO_HEAD)
    assert "replaced on the instance" in report["rms_norm"].skipped["a"]
    remove_liger(model)
    assert torch.equal(model.a(torch.ones(1, 96)), 2 * torch.ones(1, 96))


# Rotary functions


def rotate_half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def rotate_pairs(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def rotary(rotate, flaw=None):
    def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        if flaw == "q only":
            return q * cos + rotate(q) * sin, k
        if flaw == "sin twice":
            return q * cos + rotate(q) * sin, k * cos + rotate(k) * 2 * sin
        if flaw == "detached":
            return q * cos + rotate(q.detach()) * sin, k * cos + rotate(k) * sin
        return q * cos + rotate(q) * sin, k * cos + rotate(k) * sin

    return apply_rotary_pos_emb


def proven_rotary(function):
    with probe.isolated():
        return rotary_proof.prove(function)


def test_half_and_interleaved_are_told_apart():
    """Name and signature are the same: only running them tells which form of cos each needs."""
    for rotate, layout, interleaved in ((rotate_half, "half", False), (rotate_pairs, "interleaved", True)):
        proofs, _ = proven_rotary(rotary(rotate))
        assert {p.layout for p in proofs} == {layout} and {p.size for p in proofs} == {"equal"}
        assert {(p.geometry.interleaved, p.geometry.cos_layout, p.geometry.cast) for p in proofs} == {
            (interleaved, layout, "promote")
        }
        assert {p.call[2] for p in proofs if p.call[:2] == (4, 3)} == {1, 2}


@pytest.mark.parametrize("flaw", ["q only", "sin twice", "detached"])
def test_wrong_rotary_functions_are_caught(flaw):
    assert proven_rotary(rotary(rotate_half, flaw))[0] == ()


@pytest.mark.parametrize(
    "where, name, text, layout",
    [
        ("llama", "apply_rotary_pos_emb", "half-rotate", "half"),
        ("modernbert_decoder", "apply_rotary_pos_emb", "half-rotate, fp32 inside", "half"),
        ("cohere", "apply_rotary_pos_emb", "interleaved, cos interleaved, fp32 inside", "interleaved"),
        ("glm4", "apply_rotary_pos_emb", "interleaved", None),
        ("ernie4_5", "apply_rotary_pos_emb", "interleaved, fp32 inside", None),
        ("gptj", "apply_rotary_pos_emb", "interleaved, one cos per pair", None),
        ("gpt_oss", "apply_rotary_pos_emb", "half-rotate, one cos per pair", None),
        ("deepseek_v3", "apply_rotary_pos_emb_interleave", "interleaved to half", None),
        ("deepseek_v2", "apply_rotary_emb", "interleaved, one cos per pair, fp32 inside", None),
        ("deepseek_v4", "apply_rotary_pos_emb", "interleaved, one cos per pair, last dims, fp32 inside", None),
        ("gemma4", "apply_rotary_pos_emb", "half-rotate", "half"),
        ("qwen2_5_vl", "apply_rotary_pos_emb_vision", "half-rotate, fp32 inside", "half"),
    ],
)
def test_rotary_functions_of_transformers(where, name, text, layout):
    import importlib

    modeling = importlib.import_module(f"transformers.models.{where}.modeling_{where}")
    proofs, reason = proven_rotary(getattr(modeling, name))
    assert reason is None
    assert text in {str(p.geometry) for p in proofs}
    assert layout in {p.layout for p in proofs}


def test_rotary_function_wrapped_as_a_module():
    """The `kernels` library leaves such a module: no name, and only its forward has more than `(*args, **kwargs)`."""

    class Wrapped(nn.Module):
        def forward(self, q, k, cos, sin, unsqueeze_dim=1):
            return rotary(rotate_half)(q, k, cos, sin, unsqueeze_dim)

    assert {str(p.geometry) for p in proven_rotary(Wrapped())[0]} == {"half-rotate"}


class Rotary(nn.Module):
    def __init__(self, interleaved=False, runs=True):
        super().__init__()
        self.interleaved, self.runs = interleaved, runs
        self.register_buffer("inv_freq", torch.rand(4), persistent=False)

    def forward(self, x, position_ids):
        if not self.runs:
            raise RuntimeError("needs more than it gets")
        angle = position_ids[..., None].float() * self.inv_freq
        angle = angle.repeat_interleave(2, -1) if self.interleaved else torch.cat((angle, angle), -1)
        return angle.cos(), angle.sin()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.cut = None

    def forward(self, q, k, cos, sin):
        if self.cut:
            cos, sin = cos[..., : self.cut], sin[..., : self.cut]
        return apply_rotary_pos_emb(q, k, cos, sin)


apply_rotary_pos_emb = rotary(rotate_half)


class Backbone(nn.Module):
    def __init__(self, **rotary):
        super().__init__()
        self.rotary_emb = Rotary(**rotary)
        self.layers = nn.ModuleList([Attention()])

    def forward(self, q, k):
        return self.layers[0](q, k, *self.rotary_emb(q, torch.arange(q.shape[2])[None]))


class Vision(nn.Module):
    """A tower with attention but no module that makes cos."""

    def __init__(self):
        super().__init__()
        self.attention = Attention()


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.language, self.vision = Backbone(), Vision()


def test_rotary_is_swapped_only_where_cos_was_seen_to_fit():
    """A half-rotate function with interleaved cos rotates no pair. The kernel reads half of cos and would differ."""
    swapped = apply_liger(Backbone(), NO_HEAD)["rope"].swapped
    assert swapped == {"layers.0": "apply_rotary_pos_emb: half-rotate"}
    for other in (Backbone(interleaved=True), Backbone(runs=False)):
        part = apply_liger(other, NO_HEAD)["rope"]
        assert part.swapped == {} and "nothing was seen to make cos that way" in part.skipped["layers.0"]
    part = apply_liger(Both(), NO_HEAD)["rope"]
    assert list(part.swapped) == ["language.layers.0"] and list(part.skipped) == ["vision.attention"]


def test_calls_that_were_not_proven_go_to_the_original(monkeypatch):
    """A slice of cos is no longer half-duplicated. The kernel reads half of it and must not see it."""
    from liger_trainer.patching import rotary as swapping

    seen, rope = [], swapping.rope_unchecked
    monkeypatch.setattr(swapping, "rope_unchecked", lambda *a, **k: seen.append(1) or rope(*a, **k))
    model = Backbone()
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8)
    want = model(q, k)
    apply_liger(model, NO_HEAD)
    for got, w in zip(model(q, k), want, strict=True):
        torch.testing.assert_close(got, w)
    assert seen == [1]

    attention = model.layers[0]
    attention.cut = 4
    cos, sin = torch.rand(1, 5, 8), torch.rand(1, 5, 8)
    q, k = q[..., :4], k[..., :4]
    got = attention(q, k, cos, sin)
    remove_liger(model)
    assert seen == [1]
    for g, w in zip(got, attention(q, k, cos, sin), strict=True):
        assert torch.equal(g, w)


def test_an_argument_of_unknown_meaning_goes_to_the_original():
    """position_ids is usually ignored, but not here. A call that passes it was not proven."""

    def apply_rotary(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
        if position_ids is not None:
            cos, sin = cos[:, position_ids], sin[:, position_ids]
        return rotary(rotate_half)(q, k, cos, sin, unsqueeze_dim)

    from liger_trainer.patching.rotary import replacement

    proofs, _ = proven_rotary(apply_rotary)
    plans = tuple((p, frozenset({8})) for p in proofs)
    ours = replacement(apply_rotary, rotary_proof.Signature.of(apply_rotary), plans)
    q = torch.randn(2, 3, 5, 8)
    k = torch.randn(2, 1, 5, 8)
    angle = torch.rand(1, 5, 4).repeat(1, 1, 2)
    backwards = torch.arange(4, -1, -1)
    for arguments in ((backwards,), (None,), ()):
        got = ours(q, k, angle, angle, *arguments)
        want = apply_rotary(q, k, angle, angle, *arguments)
        torch.testing.assert_close(got, want)


def test_probing_an_8b_model_takes_seconds():
    """Real sizes on meta: 32 layers, 65 norms of 4096. The limit is loose; it takes about half a second."""
    with torch.device("meta"):
        model = tiny_model(
            "llama",
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
        )
    start = time.perf_counter()
    report = apply_liger(model, NO_HEAD)
    assert time.perf_counter() - start < 5
    assert [len(report[name].swapped) for name in ("rms_norm", "rope", "swiglu")] == [65, 32, 32]
    assert "model.layers.*.input_layernorm x32: cast=llama" in str(report)


# Config and report


def test_check_config():
    default = dict.fromkeys(OPERATIONS, True) | {"rebuild_above_mib": 16}
    assert check_config(None) == default
    assert check_config({"varlen_attention": False}) == default | {"varlen_attention": False}
    assert check_config({"rebuild_above_mib": 0.5})["rebuild_above_mib"] == 0.5
    assert check_config({"rope": False})["rope"] is False


@pytest.mark.parametrize(
    "config, words",
    [
        ({"rmsnorm": False}, "unknown key 'rmsnorm'; did you mean 'rms_norm'?.*rms_norm, layer_norm, rope"),
        ({"cross_entropy": True}, "did you mean 'fused_linear_cross_entropy'"),
        ({"rebuild_above_mib": True}, "is True; expected a number of MiB, 0 or more"),
        ({"rebuild_above_mib": -1}, "is -1; expected a number of MiB"),
        ({"rebuild_above_mib": float("nan")}, "is nan; expected a number of MiB"),
        ({"rope": 0}, r"\['rope'\] is 0; expected True or False"),
        ({"rope": "no"}, "'no'; expected True or False"),
        (["rope"], "expected a dict"),
    ],
)
def test_bad_config(config, words):
    model = tiny_model("llama")
    with pytest.raises(ValueError, match=words):
        apply_liger(model, config)
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_not_a_model():
    with pytest.raises(ValueError, match="model is a str; expected a torch.nn.Module"):
        apply_liger("gpt2")


def test_each_operation_can_be_switched_off():
    for operation in ("rms_norm", "rope", "swiglu"):
        report = apply_liger(tiny_model("llama"), {**NO_HEAD, operation: False})
        assert not report[operation].enabled and report[operation].found == 0
        assert f"{operation} off" in report.one_line()
        assert all(report[name].swapped for name in ("rms_norm", "rope", "swiglu") if name != operation)


def test_strict():
    """All or nothing: the message names modules and reasons, and the model stays unpatched."""
    assert apply_liger(tiny_model("llama"), NO_HEAD, strict=True).skipped == {}
    model = tiny_model("qwen3_moe")
    for layer in model.model.layers:
        layer.mlp.experts._is_expert_parallel = True
    with pytest.raises(ValueError, match=r"strict=True(.|\n)*model.layers.\*.mlp.experts x2: its experts are spread"):
        apply_liger(model, NO_HEAD, strict=True)
    assert not any("forward" in m.__dict__ for m in model.modules())
    with pytest.raises(ValueError, match="nothing was recognised"):
        apply_liger(nn.Linear(2, 2), NO_HEAD, strict=True)


def test_report(tmp_path):
    model = tiny_model("qwen3_next")
    model.model.norm.forward = lambda x: x
    report = apply_liger(model, NO_HEAD)
    assert report.one_line().startswith("Qwen3NextForCausalLM: rms_norm 7/8, rope 1/1, swiglu 2/2, experts 2/2")
    assert "(kept: its forward was replaced on the instance" in report.one_line()
    text = str(report)
    assert "  + model.layers.*.input_layernorm x2: cast=gemma, offset=1" in text
    assert "  + model.layers.0.linear_attn.norm: cast=llama, times silu(gate)" in text
    assert "  - model.norm: its forward was replaced" in text
    report.to_json(tmp_path / "report.json")
    loaded = json.loads((tmp_path / "report.json").read_text())
    assert loaded == report.to_dict()
    norm = loaded["operations"]["rms_norm"]
    assert (norm["found"], norm["enabled"], norm["skipped"][0]["count"]) == (8, True, 1)
    assert loaded["operations"]["fused_linear_cross_entropy"]["enabled"] is False


def test_report_of_nothing():
    assert apply_liger(nn.Linear(2, 2), NO_HEAD).one_line().startswith("Linear: fused_linear_cross_entropy off")
    assert "nothing recognised" in LigerReport("X").one_line()


def test_compress():
    names = {"a.0.x": "t", "a.1.x": "t", "a.2.x": "u", "b": "t"}
    assert compress(names) == [("a.*.x", 2, "t"), ("a.2.x", 1, "u"), ("b", 1, "t")]


DOCS = ROOT / "docs"


@pytest.mark.parametrize(
    "text",
    [
        LigerTrainingArguments.__dataclass_fields__["liger_config"].metadata["help"],
        apply_liger.__doc__,
        (DOCS / "trainers.md").read_text(),
        (DOCS / "architecture.md").read_text(),
    ],
    ids=["help", "docstring", "trainers", "architecture"],
)
def test_every_key_of_liger_config_is_told(text):
    missing = [key for key in CONFIG_KEYS if not re.search(rf"\b{key}\b", text)]
    assert not missing


def test_the_docs_list_no_other_keys_of_liger_config():
    """docs/trainers.md and docs/architecture.md list each of `OPERATIONS` once."""
    listed = re.search(r"The parts of `liger_config` are (.*?)\.", (DOCS / "trainers.md").read_text(), re.DOTALL)
    assert sorted(re.findall(r"`(\w+)`", listed[1])) == sorted(OPERATIONS)
    table = (DOCS / "architecture.md").read_text().partition("its key in `liger_config`")[2].partition("\n\n")[0]
    keys = [key for line in table.splitlines() for key in re.findall(r"`(\w+)`", line.split(" | ")[0])]
    assert sorted(keys) == sorted(OPERATIONS)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen3_moe"])
def test_a_default_dtype_of_float64_changes_no_report(kind):
    model = tiny_model(kind).float()
    want = apply_liger(model).one_line()
    torch.set_default_dtype(torch.float64)
    try:
        assert apply_liger(model).one_line() == want
    finally:
        torch.set_default_dtype(torch.float32)
