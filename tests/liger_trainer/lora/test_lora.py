"""PEFT's LoRA layers in a patched model equal stock in values and gradients, whatever is done to the adapters."""

import copy
import pickle

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import assert_same_step, collate, ragged_rows, step, tiny_model
from torch import nn

from liger_trainer import apply_liger, remove_liger
from liger_trainer.lora import layers as lora
from liger_trainer.lora.layers import LoRA
from liger_trainer.patching import mlps
from liger_trainer.patching.core import pattern

LAYERS = 14  # two layers of seven projections


def peft_model(dtype=torch.float32, **options):
    model = tiny_model("llama", dtype=dtype)
    torch.manual_seed(3)
    config = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False} | options
    return get_peft_model(model, LoraConfig(**config)).train()


def only_lora(model, mlp=False):
    """Swap each LoRA layer by itself, or the whole MLP too."""
    config = dict.fromkeys(("rms_norm", "rope", "swiglu", "fused_linear_cross_entropy"), False)
    return apply_liger(model, config | {"swiglu": mlp, "rebuild_above_mib": 0})


def test_a_proof_seeds_no_generator_of_a_gpu(monkeypatch):
    """Otherwise a layer's draws in training would depend on the proof's seed instead of the user's."""
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    model = peft_model(lora_dropout=0.1)
    seeded.clear()
    state = torch.get_rng_state()
    only_lora(model, mlp=True)
    assert not seeded and torch.equal(torch.get_rng_state(), state)


def compared_with_stock(change=lambda model: None, before=False, rtol=1e-5, mlp=False, **options):
    """Assert that a patched model's step equals stock; return its report. `change` is applied to both models."""
    stock, model = peft_model(**options), peft_model(**options)
    change(stock)
    if before:
        change(model)
    report = only_lora(model, mlp)
    if not before:
        change(model)
    assert_same_step(step(model), step(stock), rtol, floor=0)
    return report["lora"]


@pytest.fixture
def calls(monkeypatch):
    """The layers that computed their adapter by our function."""
    seen = []

    def counted(x, weight, bias, **options):
        if x.shape[-1] > 8:  # skip proofs
            seen.append(weight)
        return own(x, weight, bias, **options)

    def counted_mlp(x, *projections, **options):
        seen.extend(weight for weight, _, adapter in projections if adapter is not None)
        return own_mlp(x, *projections, **options)

    own, own_mlp = lora.lora_linear, mlps.lora_mlp
    monkeypatch.setattr(lora, "lora_linear", counted)
    monkeypatch.setattr(mlps, "lora_mlp", counted_mlp)
    return seen


@pytest.mark.diagonal
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"use_rslora": True, "lora_alpha": 3}, id="rslora"),
        pytest.param({"lora_dropout": 0.3}, id="dropout"),
        pytest.param({"bias": "all"}, id="bias"),
        pytest.param({"rank_pattern": {"q_proj": 2, "down_proj": 7}}, id="mixed-ranks"),
        pytest.param({"modules_to_save": ["lm_head"]}, id="modules-to-save"),
        pytest.param({"target_modules": ["q_proj", "up_proj"]}, id="some-layers"),
        pytest.param({"target_modules": ["embed_tokens", "q_proj"]}, id="embeddings"),
        pytest.param({"init_lora_weights": "pissa"}, id="pissa"),
    ],
)
@pytest.mark.parametrize("mlp", [False, True], ids=["layers", "mlp"])
def test_same_step(mlp, options, calls):
    report = compared_with_stock(mlp=mlp, **options)
    expected = 2 * sum(name != "embed_tokens" for name in options.get("target_modules", range(7)))
    assert len(report.swapped) == len(calls) == expected and not report.skipped


@pytest.mark.diagonal
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["kept", "checkpoint", "reentrant"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["plain", "autocast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_settings(dtype, autocast, checkpointing):
    """Everything is swapped. 16-bit stock is only a 16-bit reference; the distances to fp32 are compared below."""
    models = [peft_model(dtype), peft_model(dtype)]
    for model in models:
        if checkpointing is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
            model.enable_input_require_grads()
    assert len(apply_liger(models[0], {"rebuild_above_mib": 0})["lora"].swapped) == LAYERS
    rtol = 0.1 if torch.bfloat16 in (dtype, autocast) else 1e-5
    assert_same_step(step(models[0], autocast=autocast), step(models[1], autocast=autocast), rtol, floor=0)


@pytest.mark.diagonal
@pytest.mark.parametrize("dropout", [0.0, 0.3], ids=["", "dropout"])
@pytest.mark.parametrize("adapter", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_error_against_float64_is_at_most_stock_s(dtype, autocast, adapter, dropout):
    """One 16-bit layer with wider adapters, early in training, when B and the gradients are small in fp16.

    Compares outputs and every gradient.
    """
    results, small = {}, 1e-3 if dtype == torch.float16 else 1.0
    for name in ("ours", "stock", "exact"):
        layer = peft_model(dtype, lora_dropout=dropout).base_model.model.model.layers[0].mlp.down_proj
        layer.lora_A.to(adapter), layer.lora_B.to(adapter)
        layer.scaling["default"] = 0.3
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        b.data *= small
        torch.manual_seed(0)
        x = torch.randn(64, layer.in_features).to(dtype)
        dy = (small * torch.randn(64, layer.out_features)).to(dtype)
        x.requires_grad_()
        if name == "ours":
            only_lora(nn.Sequential(layer))
        torch.manual_seed(1)
        if name == "exact":
            kept = layer.lora_dropout["default"](torch.ones_like(x, dtype=adapter)) != 0
            a, b = (t.detach().double().requires_grad_() for t in (a, b))
            x, dy = x.detach().double().requires_grad_(), dy.double()
            y = x @ layer.base_layer.weight.double().t() + 0.3 / (1 - dropout) * (x * kept) @ a.t() @ b.t()
        else:
            with torch.autocast("cpu", dtype=dtype, enabled=autocast):
                y = layer(x)
        results[name] = [y, *torch.autograd.grad(y, (x, a, b), dy)]
    for ours, stock, exact in zip(*results.values(), strict=True):
        assert ours.dtype == stock.dtype
        errors = [(t.double() - exact).norm() for t in (ours, stock)]
        assert errors[0] <= 1.5 * errors[1] or errors[0] <= 1e-5 * exact.norm()


def disable(model):
    model.base_model.disable_adapter_layers()
    model.base_model.model.lm_head.weight.requires_grad_()


def second(model):
    torch.manual_seed(5)
    config = LoraConfig(r=2, target_modules="all-linear", lora_alpha=16, init_lora_weights=False)
    model.add_adapter("second", config)


def both(model):
    second(model)
    model.base_model.set_adapter(["default", "second"])


def switch(model):
    second(model)
    model.set_adapter("second")


def deleted(model):
    switch(model)
    model.delete_adapter("default")


def merged(model):
    model.merge_adapter()
    model.base_model.model.lm_head.weight.requires_grad_()


def unmerged(model):
    model.merge_adapter()
    model.unmerge_adapter()


def scaled(model):
    for module in model.modules():
        if hasattr(module, "scale_layer"):
            module.scale_layer(0.5)


def trained_scaling(model):
    layer = model.base_model.model.model.layers[0].mlp.down_proj
    layer.scaling["default"] = layer.own_scaling = nn.Parameter(torch.tensor(2.0))


def dropout_of_all(model):
    """Stock computes zeros, and 1 / (1 - p) is infinite."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 1.0


def dora(model):
    torch.manual_seed(5)
    model.add_adapter("dora", LoraConfig(r=2, target_modules="all-linear", use_dora=True, init_lora_weights=False))
    model.set_adapter("dora")


@pytest.mark.diagonal
@pytest.mark.parametrize("before, mlp", [(True, False), (False, False), (False, True)], ids=["before", "after", "mlp"])
@pytest.mark.parametrize(
    "change, ours",
    [
        (disable, False),
        (second, True),
        (both, True),
        (switch, True),
        (deleted, True),
        (merged, False),
        (unmerged, True),
        (scaled, True),
        (dora, False),
    ],
)
def test_adapters_that_change(change, ours, before, mlp, calls):
    """Added, switched, disabled, merged or removed, before patching or after. Ours runs where the layer is plain."""
    compared_with_stock(change, before, 1e-4 if change in (merged, unmerged) else 1e-5, mlp)
    assert bool(calls) == ours


@pytest.mark.parametrize("mlp", [False, True], ids=["layers", "mlp"])
def test_a_scaling_that_is_trained_gets_its_gradient(mlp, calls):
    compared_with_stock(trained_scaling, mlp=mlp)
    assert len(calls) == LAYERS - (3 if mlp else 1) + (2 if mlp else 0)


def test_a_dropout_of_everything(calls):
    compared_with_stock(dropout_of_all, lora_dropout=0.5)
    assert not calls


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}], ids=["dora", "lora-bias"])
def test_variants_keep_their_code(options, calls):
    report = compared_with_stock(**options)
    assert not calls and not report.swapped and len(report.skipped) == LAYERS


def test_several_dropouts_keep_their_code(calls):
    def change(model):
        torch.manual_seed(5)
        config = LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.2, init_lora_weights=False)
        model.add_adapter("second", config)
        model.base_model.set_adapter(["default", "second"])

    compared_with_stock(change)
    assert not calls


def test_disabled_for_a_while(calls):
    """DPO's reference: the base answers inside the context, and the adapter is active again afterwards."""
    stock, model = peft_model().eval(), peft_model().eval()
    only_lora(model)
    batch = collate(ragged_rows(4))
    for m in (stock, model):
        with m.disable_adapter(), torch.no_grad():
            m.off = m(**batch).logits
    assert not calls
    torch.testing.assert_close(model.off, stock.off, rtol=0, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, stock(**batch).logits, rtol=1e-5, atol=1e-5)
    assert len(calls) == LAYERS


def part(name):
    def of(model):
        layer = model.base_model.model.model.layers[0].mlp.up_proj
        return {"layer": layer, "base": layer.base_layer}.get(name) or layer._modules[name]["default"]

    return of


def halve(module, args, output):
    return output * 0.5


HOOKS = {
    "forward": lambda module: module.register_forward_hook(halve),
    "pre": lambda module: module.register_forward_pre_hook(lambda module, args: (args[0] + 0.1,)),
    "backward": lambda module: module.register_full_backward_hook(lambda module, g, _: (g[0] * 0.5,)),
    "replaced": lambda module: setattr(module, "forward", lambda x: type(module).forward(module, x) * 0.5),
}


@pytest.mark.diagonal
@pytest.mark.parametrize("before, mlp", [(True, False), (False, True)], ids=["before", "after-mlp"])
@pytest.mark.parametrize("where", ["base", "lora_A", "lora_B", "lora_dropout"])
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_on_parts_are_honoured(hook, where, before, mlp, calls):
    report = compared_with_stock(lambda model: HOOKS[hook](part(where)(model)), before, mlp=mlp)
    assert len(calls) == LAYERS - 1
    (name,), (reason,) = report.skipped, report.skipped.values()
    assert name.endswith("layers.0.mlp.up_proj") and "a part of the layer" in reason


@pytest.mark.diagonal
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("layer", ["self_attn.q_proj", "mlp.gate_proj"])
@pytest.mark.parametrize("where", ["base_layer", "lora_A.default"])
def test_a_hook_on_a_part_that_changes_the_input_behind_autograd(where, layer, before):
    """The layer's input is then not recomputed for the backward pass, because that would undo the change."""

    def change(model):
        module = model.base_model.model.model.layers[1].get_submodule(f"{layer}.{where}")

        def halve_in_place(module, args):
            args[0].data.mul_(0.5)

        module.register_forward_pre_hook(halve_in_place)

    stock, model = peft_model(), peft_model()
    change(stock)
    if before:
        change(model)
    apply_liger(model, {"rebuild_above_mib": 0})
    if not before:
        change(model)
    assert_same_step(step(model), step(stock), floor=0)


@pytest.mark.parametrize("change", [torch.Tensor.relu_, lambda y: y.mul_(2.0)], ids=["relu", "mul"])
@pytest.mark.parametrize("name", ["self_attn.q_proj", "mlp.up_proj", "mlp"])
def test_results_may_be_changed_in_place(name, change):
    results = []
    for patched in (True, False):
        model = peft_model()
        if patched:
            only_lora(model, mlp=True)
        x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
        y = change(model.base_model.model.model.layers[0].get_submodule(name)(x))
        results.append([y, *torch.autograd.grad(y.square().sum(), x)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.diagonal
@pytest.mark.parametrize("mlp", [False, True], ids=["layer", "mlp"])
@pytest.mark.parametrize("hook", ["forward", "pre", "backward"])
def test_hooks_on_the_layer_run_with_ours(hook, mlp, calls):
    compared_with_stock(lambda model: HOOKS[hook](part("layer")(model)), mlp=mlp)
    assert len(calls) == LAYERS


def test_hooks_that_gather_weights(calls):
    """Hooks of accelerate's `device_map` and of DeepSpeed run when the part is called, so the layer calls it."""
    stock, model = peft_model(), peft_model()
    report = only_lora(model)

    def gather(module, args):
        module.gathered = True

    gather.__module__ = "deepspeed.runtime.zero"
    part("lora_B")(model).register_forward_pre_hook(gather)
    assert_same_step(step(model), step(stock), floor=0)
    assert part("lora_B")(model).gathered and len(report["lora"].skipped) == 1


def test_a_subclass_of_the_layer_is_left_alone(calls):
    class Quantised(type(part("layer")(peft_model()))):
        pass

    def change(model):
        part("layer")(model).__class__ = Quantised

    report = compared_with_stock(change, before=True)
    assert len(report.swapped) == LAYERS - 1
    (reason,) = report.skipped.values()
    assert reason.startswith("its base is a Linear, and ") and reason.endswith("Quantised has its own code for it")


def test_a_base_other_than_a_plain_linear_layer_keeps_peft_s_code(calls):
    class Quantised(nn.Linear):
        def forward(self, x):
            return super().forward(x).round(decimals=2)

    def change(model):
        part("base")(model).__class__ = Quantised

    report = compared_with_stock(change, before=True)
    assert list(report.skipped.values()) == ["its base is a Quantised, not a linear layer"]


def test_a_proof_finds_another_formula(monkeypatch):
    layer = part("layer")(peft_model())
    assert lora.prove(layer) == (("lora", LoRA(("default",), False), lora.forward), None)

    own = type(layer).forward
    monkeypatch.setattr(type(layer), "forward", lambda self, x: own(self, x) * 1.001)
    assert lora.prove(layer) == (None, "it is not x W^T + b + the sum of s (x A^T) B^T")


def test_switched_off(calls):
    model = peft_model()
    report = apply_liger(model, {"lora": False})
    step(model)
    assert not calls and not report["lora"].swapped and not report["lora"].enabled


def test_wrong_inputs_raise_what_stock_raises():
    stock, model = peft_model(), peft_model()
    only_lora(model)
    for x in (torch.ones(2, 3), torch.ones(2, 64, dtype=torch.float64), torch.ones(2, 64, dtype=torch.int64)):
        errors = []
        for m in (stock, model):
            with pytest.raises(RuntimeError) as error:
                part("layer")(m)(x)
            errors.append(str(error.value))
        assert errors[0] == errors[1]


def test_mixed_batches_of_adapters(calls):
    """PEFT gives each row its own adapter by `adapter_names`."""
    stock, model = peft_model().eval(), peft_model().eval()
    only_lora(model)
    x = torch.randn(2, part("layer")(model).in_features)
    got, want = (part("layer")(m)(x, adapter_names=["default", "__base__"]) for m in (model, stock))
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert not calls


def test_the_head_s_adapter_stays_in_the_fused_loss():
    model = peft_model(target_modules=["lm_head", "q_proj"])
    report = apply_liger(model)
    assert len(report["lora"].swapped) == report["lora"].found == 2
    assert report["fused_linear_cross_entropy"].swapped
    assert_same_step(step(model), step(peft_model(target_modules=["lm_head", "q_proj"])), floor=0)
    assert len(apply_liger(model)["lora"].swapped) == 2 and not apply_liger(model)["lora"].skipped


def test_copies_pickles_and_removal(calls):
    model = peft_model()
    want = step(peft_model())
    before = {name: dict(m.__dict__) for name, m in model.named_modules()}
    only_lora(model)
    assert_same_step(step(copy.deepcopy(model)), want, floor=0)
    assert len(calls) == LAYERS
    assert_same_step(step(pickle.loads(pickle.dumps(model))), want, floor=0)
    assert len(calls) == LAYERS  # an unpickled model is unpatched
    remove_liger(model)
    assert_same_step(step(model), want, 0, floor=0)
    assert len(calls) == LAYERS
    assert {name: dict(m.__dict__).keys() for name, m in model.named_modules()} == {
        n: d.keys() for n, d in before.items()
    }


def test_merging_saving_and_loading_are_peft_s(tmp_path):
    stock, model = peft_model(), peft_model()
    only_lora(model)
    assert model.state_dict().keys() == stock.state_dict().keys()
    for m, folder in ((stock, "stock"), (model, "ours")):
        m.save_pretrained(tmp_path / folder)
    files = [(tmp_path / folder / "adapter_model.safetensors").read_bytes() for folder in ("stock", "ours")]
    assert files[0] == files[1]
    batch = collate(ragged_rows(4))
    got, want = (m.merge_and_unload().eval()(**batch).logits for m in (model, stock))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_compiled_models_trace_the_layer_s_own_code():
    stock, model = peft_model(), peft_model()
    only_lora(model)
    x = torch.randn(3, part("layer")(model).in_features)
    torch._dynamo.reset()
    got = torch.compile(part("layer")(model), fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(got, part("layer")(stock)(x))


def test_layers_of_one_shape_share_one_proof(monkeypatch):
    """PEFT's layers know their names, but must not be proven one by one: a model of 32 layers would take minutes."""
    proven = []
    attempt = pattern.attempt
    monkeypatch.setattr(pattern, "attempt", lambda prove, module: proven.append(prove) or attempt(prove, module))
    apply_liger(peft_model())
    assert proven.count(lora.prove) <= 5, "q and o, k and v, gate and up, down"
    assert [getattr(prove, "func", None) for prove in proven].count(mlps.prove) == 1


@pytest.mark.parametrize("more_than_there_is, ours", [(0, 14), (1, 2), (2**35, 0)])
def test_calls_with_little_to_do_run_peft_s_code(more_than_there_is, ours, calls, monkeypatch):
    """The host sets their pace. Only the input of `down` is wider and has more to do."""
    model, stock = peft_model(), peft_model()
    width = model.config.hidden_size
    only_lora(model, mlp=True)
    work = collate(ragged_rows(4))["input_ids"].numel() * width * width
    monkeypatch.setattr(lora, "LEAST_WORK", work + more_than_there_is)
    assert_same_step(step(model), step(stock), floor=0)
    assert len(calls) == ours


def test_under_autocast_every_call_is_ours(calls, monkeypatch):
    """PEFT's code casts every factor there. That launches more kernels than ours, however few tokens there are."""
    model = peft_model()
    only_lora(model, mlp=True)
    monkeypatch.setattr(lora, "LEAST_WORK", 2**60)
    step(model, autocast=torch.bfloat16)
    assert len(calls) == 14
