"""Modules compute the formula, have liger-kernel's argument names and order, and drop no argument silently.

The signatures of liger-kernel 0.8.5 are written out here, so the tests run without it.
"""

import copy
import inspect
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from liger_triton import modules
from liger_triton.modules import (
    LigerCrossEntropyLoss,
    LigerFusedLinearCrossEntropyLoss,
    LigerGEGLUMLP,
    LigerLayerNorm,
    LigerRMSNorm,
    LigerSwiGLUMLP,
)

LOSS = {"ignore_index": -100, "lse_square_scale": 0.0, "label_smoothing": 0.0, "reduction": "mean", "softcap": None}
EXTRA = {"return_token_accuracy": False, "return_predicted_tokens": False}
SIGNATURES = {  # name: (arguments of the constructor and their defaults, in order; names of the inputs)
    "LigerRMSNorm": (
        {
            "hidden_size": None,
            "eps": 1e-6,
            "offset": 0.0,
            "casting_mode": "llama",
            "init_fn": "ones",
            "in_place": True,
            "row_mode": None,
            "elementwise_affine": True,
        },
        ["hidden_states"],
    ),
    "LigerLayerNorm": (
        {
            "hidden_size": None,
            "eps": 1e-6,
            "bias": False,
            "init_fn": "ones",
            "impl": None,
            "mode": None,
            "backend": None,
        },
        ["hidden_states"],
    ),
    "LigerSwiGLUMLP": ({"config": None, "intermediate_size": None}, ["x"]),
    "LigerGEGLUMLP": ({"config": None}, ["x"]),
    "LigerCrossEntropyLoss": ({"weight": None, **LOSS, "return_z_loss": False, **EXTRA}, ["_input", "target"]),
    "LigerFusedLinearCrossEntropyLoss": (
        {"ce_weight": None, **LOSS, "return_z_loss": False, "accum_dtype": None, "use_token_scaling": False, **EXTRA},
        ["lin_weight", "_input", "target", "bias"],
    ),
}
NOT_HERE = [  # class, an argument of liger-kernel without a counterpart, a value
    (LigerRMSNorm, "row_mode", False),
    (LigerLayerNorm, "impl", "cutedsl"),
    (LigerLayerNorm, "mode", "x"),
    (LigerLayerNorm, "backend", "cutile"),
    (LigerCrossEntropyLoss, "weight", torch.ones(3)),
    (LigerFusedLinearCrossEntropyLoss, "ce_weight", torch.ones(3)),
    (LigerFusedLinearCrossEntropyLoss, "use_token_scaling", True),
    *(
        (loss, name, True)
        for loss in (LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss)
        for name in ("return_z_loss", *EXTRA)
    ),
]


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_equal_liger_kernel_s(name):
    """The order matters because arguments may be passed by position. Defaults are the same too."""
    constructor, inputs = SIGNATURES[name]
    own = list(inspect.signature(getattr(modules, name).__init__).parameters.values())[1:]
    assert {p.name: None if p.default is p.empty else p.default for p in own} == constructor
    assert [p.name for p in own] == list(constructor)
    assert list(inspect.signature(getattr(modules, name).forward).parameters)[1:] == inputs


@pytest.mark.parametrize("owner, name, value", NOT_HERE, ids=lambda value: getattr(value, "__name__", None))
def test_an_argument_without_a_counterpart_is_named(owner, name, value):
    first = (8,) if owner in (LigerRMSNorm, LigerLayerNorm) else ()
    with pytest.raises(ValueError, match=f"{owner.__name__} has no {name}, got "):
        owner(*first, **{name: value})


def config(**values):
    return SimpleNamespace(**{"hidden_size": 20, "intermediate_size": 27, "hidden_act": "silu"} | values)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: LigerRMSNorm(8, casting_mode="bf16"), "casting_mode='bf16'; expected one of llama, gemma, none"),
        (lambda: LigerRMSNorm(8, init_fn="random"), "LigerRMSNorm got init_fn='random'; expected \"ones\""),
        (lambda: LigerRMSNorm(8, offset=1.0, elementwise_affine=False), "offset=1.0 and no weight"),
        (lambda: LigerLayerNorm(8, init_fn="random"), "LigerLayerNorm got init_fn='random'"),
        (lambda: LigerSwiGLUMLP(config(hidden_act="gelu")), "hidden_act='gelu'; expected one of silu, swish"),
        (lambda: LigerGEGLUMLP(config()), "with the activation 'silu'"),
        (lambda: LigerGEGLUMLP(config(hidden_act="gelu")), "Set hidden_act='gelu_pytorch_tanh'"),
        (lambda: LigerCrossEntropyLoss(reduction="avg"), "reduction is 'avg'"),
        (lambda: LigerFusedLinearCrossEntropyLoss(softcap=-1.0), "softcap is -1.0"),
        (
            lambda: LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float16)(
                torch.ones(3, 4), torch.ones(2, 4), torch.zeros(2, dtype=torch.long)
            ),
            "accum_dtype is torch.float16, lin_weight torch.float32",
        ),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def check_module(check_close, module, oracle, *inputs):
    """Run `check_close` on a module, with its parameters as further inputs."""
    names, parameters = zip(*module.named_parameters(), strict=True) if list(module.parameters()) else ((), ())

    def call(*given):
        own = dict(zip(names, given[len(inputs) :], strict=True))
        return torch.func.functional_call(module, own, given[: len(inputs)])

    def want(*given):
        return oracle(*given[: len(inputs)], **{n.split(".")[0]: p for n, p in zip(names, given[len(inputs) :])})  # noqa: B905

    return check_close(call, want, [*inputs, *(p.detach().clone().requires_grad_() for p in parameters)])


def rms(x, weight=None, offset=0.0, eps=1e-3):
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * (weight + offset)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"offset": 1.0, "casting_mode": "gemma", "init_fn": "zeros"}, {"elementwise_affine": False}]
)
def test_rms_norm(options, dtype, device, check_close):
    module = LigerRMSNorm(33, 1e-3, **options).to(device, dtype)
    if module.weight is not None:
        assert torch.equal(module.weight, torch.full_like(module.weight, 0.0 if "init_fn" in options else 1.0))
        torch.nn.init.normal_(module.weight)
    x = torch.randn(3, 7, 33, device=device).to(dtype).requires_grad_()
    check_module(check_close, module, lambda x, **own: rms(x, offset=options.get("offset", 0.0), **own), x)


@pytest.mark.parametrize("cast", ["llama", "gemma", "none"])
def test_rms_norm_returns_the_dtype_of_its_input(cast, device):
    """This holds with an fp32 weight too, as in liger-kernel and unlike transformers' LlamaRMSNorm."""
    x = torch.randn(5, 16, device=device).bfloat16().requires_grad_()
    module = LigerRMSNorm(16, casting_mode=cast).to(device)
    y = module(x)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype, module.weight.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("in_place", [True, False])
def test_in_place_changes_nothing(in_place, device):
    x = torch.randn(5, 16, device=device, requires_grad=True)
    dy = torch.randn(5, 16, device=device)
    kept = dy.clone()
    (got,) = torch.autograd.grad(LigerRMSNorm(16, in_place=in_place).to(device)(x), x, dy)
    (want,) = torch.autograd.grad(rms(x, eps=1e-6), x, dy)
    torch.testing.assert_close(got, want)
    assert torch.equal(dy, kept)


def test_layer_norm(device, check_close):
    torch.manual_seed(3)
    module = LigerLayerNorm(33, 1e-3, bias=True).to(device)
    torch.manual_seed(3)
    assert torch.equal(module.bias.cpu(), torch.randn(33)), "a random bias, as in liger-kernel"
    assert torch.equal(LigerLayerNorm(33).bias, torch.zeros(33)), "without bias=True it is zero, and trained"
    torch.nn.init.normal_(module.weight)
    x = (torch.randn(3, 7, 33, device=device) + 2).requires_grad_()
    check_module(check_close, module, lambda x, weight, bias: F.layer_norm(x, (33,), weight, bias, 1e-3), x)


@pytest.mark.parametrize(
    "mlp, act",
    [
        (LigerSwiGLUMLP(config()), F.silu),
        (LigerSwiGLUMLP(config(hidden_act="swish"), 31), F.silu),
        (LigerGEGLUMLP(config(hidden_act="gelu_pytorch_tanh")), lambda g: F.gelu(g, approximate="tanh")),
        (LigerGEGLUMLP(SimpleNamespace(hidden_size=20, intermediate_size=27)), lambda g: F.gelu(g, approximate="tanh")),
    ],
    ids=["swiglu", "swiglu-of-31", "geglu", "geglu-without-an-activation"],
)
def test_mlps(mlp, act, device, check_close):
    module = copy.deepcopy(mlp).to(device)
    assert [tuple(p.shape) for p in module.parameters()][2] == (20, module.intermediate_size)
    assert list(module.state_dict()) == ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]

    def oracle(x, gate_proj, up_proj, down_proj):
        return (act(x @ gate_proj.T) * (x @ up_proj.T)) @ down_proj.T

    check_module(check_close, module, oracle, torch.randn(3, 7, 20, device=device, requires_grad=True))


OPTIONS = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"label_smoothing": 0.1, "lse_square_scale": 1e-2, "softcap": 4.0, "ignore_index": 3},
]


def eager(logits, target, options):
    softcap, scale = options.get("softcap"), options.get("lse_square_scale", 0.0)
    z = softcap * torch.tanh(logits / softcap) if softcap else logits
    ignore_index = options.get("ignore_index", -100)
    reduction = options.get("reduction", "mean")
    rows = F.cross_entropy(
        z, target, ignore_index=ignore_index, label_smoothing=options.get("label_smoothing", 0.0), reduction="none"
    )
    kept = target != ignore_index
    rows = rows + scale * kept * z.logsumexp(-1).square()
    return {"none": rows, "sum": rows.sum(), "mean": rows.sum() / kept.sum()}[reduction]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_losses(options, device, check_close):
    target = torch.tensor([5, 3, 0, options.get("ignore_index", -100), 32, 7, 3], device=device)
    logits = torch.randn(7, 33, device=device, requires_grad=True)
    loss = LigerCrossEntropyLoss(**options)
    check_close(lambda z: loss(z, target), lambda z: eager(z, target, options), [logits])

    fused = LigerFusedLinearCrossEntropyLoss(**options)
    shapes = ((33, 20), (7, 20), (33,))
    inputs = [torch.randn(shape, device=device).requires_grad_() for shape in shapes]
    check_close(lambda w, x, b: fused(w, x, target, b), lambda w, x, b: eager(x @ w.T + b, target, options), inputs)


def test_all_rows_ignored(device):
    target = torch.full((4,), -100, device=device)
    weight = torch.randn(9, 8, device=device, requires_grad=True)
    x = torch.randn(4, 8, device=device)
    loss = LigerFusedLinearCrossEntropyLoss()(weight, x, target)
    loss.backward()
    assert loss.item() == 0 and not weight.grad.any()
    assert LigerCrossEntropyLoss()(x, target).item() == 0


@pytest.mark.parametrize("accum_dtype, accumulate", [(None, "fp32"), (torch.float32, "fp32"), (torch.bfloat16, "lean")])
def test_accum_dtype(accum_dtype, accumulate, monkeypatch):
    seen = {}
    monkeypatch.setattr(modules, "linear_cross_entropy", lambda *args, **options: seen.update(options))
    weight, x = torch.ones(9, 8).bfloat16(), torch.ones(4, 8).bfloat16()
    LigerFusedLinearCrossEntropyLoss(accum_dtype=accum_dtype)(weight, x, torch.zeros(4, dtype=torch.long))
    assert seen["accumulate"] == accumulate


def test_a_model_composed_of_them_is_copied_pickled_and_checkpointed(device):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.mlp = LigerRMSNorm(20), LigerSwiGLUMLP(config())
            self.after = LigerLayerNorm(20)
            self.head = torch.nn.Linear(20, 33, bias=False)
            self.loss = LigerFusedLinearCrossEntropyLoss()

        def forward(self, x, target, use_reentrant=None):
            def block(x):
                return self.after(x + self.mlp(self.norm(x)))

            if use_reentrant is not None:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=use_reentrant)
            else:
                x = block(x)
            return self.loss(self.head.weight, x.flatten(0, 1), target.flatten())

    def gradients(layer, use_reentrant=None):
        layer.zero_grad()
        torch.manual_seed(0)
        x = torch.randn(2, 5, 20, requires_grad=True)
        target = torch.randint(0, 33, (2, 5))
        layer(x.to(device), target.to(device), use_reentrant).backward()
        return [p.grad.clone() for p in layer.parameters()]

    layer = Layer().to(device)
    want = gradients(layer)
    for other in (copy.deepcopy(layer), copy.deepcopy(layer).train(False)):
        assert all(map(torch.equal, gradients(other), want))
    for use_reentrant in (True, False):
        assert all(map(torch.equal, gradients(layer, use_reentrant), want))
    for part in (layer.norm, layer.mlp, layer.after, layer.loss):
        pickled = pickle.loads(pickle.dumps(part))  # noqa: S301
        assert repr(pickled) == repr(part) and all(map(torch.equal, pickled.parameters(), part.parameters()))
