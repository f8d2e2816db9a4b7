"""Blocks of experts as one operation, and PEFT's LoRA on their parameters, compared with the models' own code."""

import copy
import functools

import architectures
import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from side_by_side import assert_same_step, model_of, step
from tiny_models import largest_difference, tiny_model
from transformers.integrations import moe

from liger_trainer import apply_liger
from liger_trainer.patching import experts as patterns
from liger_trainer.patching.core import probe
from liger_trainer.patching.core.binding import Binding

IMPLEMENTATIONS = ["eager", "grouped_mm", "batched_mm"]
PLAIN = ("sdpa", "kept", "fp32")
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def blocks(model):
    return [module for module in model.modules() if patterns.is_candidate(module)]


def with_implementation(name):
    def wrap(model):
        model.set_experts_implementation(name)
        return model

    return wrap


WAYS = ("kept", "checkpoint", "reentrant")
FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3")


@pytest.mark.parametrize(
    "model_type, checkpointing, implementation",  # each pair of values
    [(FAMILIES[i], WAYS[j], IMPLEMENTATIONS[(i + j) % 3]) for i in range(3) for j in range(3)],
)
def test_a_step(model_type, checkpointing, implementation):
    setting = ("eager" if model_type == "gpt_oss" else "sdpa", checkpointing, "fp32")
    want = step(model_of(setting, model_type, with_implementation(implementation)))
    model = model_of(setting, model_type, with_implementation(implementation))
    report = apply_liger(model)
    assert len(report["experts"].swapped) == len(blocks(model)) > 0 and not report["experts"].skipped
    assert all(implementation in variant for variant in report["experts"].swapped.values())
    assert_same_step(step(model), want, "fp32")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_another_gradient_at_the_limit_is_seen(implementation, monkeypatch):
    """`torch.minimum` passes half of the gradient there, and equals `clamp` everywhere else."""
    block = blocks(with_implementation(implementation)(tiny_model("gpt_oss")))[0]
    cuts = {"clamp": lambda g: g.clamp(max=block.limit), "minimum": lambda g: g.minimum(g.new_tensor(block.limit))}
    found = {}
    for name, cut in cuts.items():

        def gate(self, gate_up, cut=cut):
            g = cut(gate_up[..., ::2])
            u = gate_up[..., 1::2].clamp(min=-self.limit, max=self.limit)
            return (u + 1) * (g * torch.sigmoid(g * self.alpha))

        monkeypatch.setattr(type(block), "_apply_gate", gate)
        with probe.isolated():
            found[name], _ = patterns.prove(block)
    assert found["clamp"] is not None and found["minimum"] is None


def lora(parameters, **options):
    return LoraConfig(r=3, lora_alpha=5, target_parameters=parameters, init_lora_weights=False, **options)


def adapted(parameters=BOTH, **options):
    def wrap(model):
        torch.manual_seed(3)
        model = get_peft_model(model, lora(parameters, target_modules=["q_proj"], **options))
        return model

    return wrap


def count_calls(monkeypatch):
    """The LoRAs of each call of our operation."""
    seen, own = [], patterns.experts
    monkeypatch.setattr(patterns, "experts", lambda *args, **named: seen.append(named) or own(*args, **named))
    return seen


@pytest.mark.diagonal
@pytest.mark.parametrize("parameters", [BOTH, BOTH[:1], BOTH[1:]], ids=["both", "gate_up", "down"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_adapters_on_experts(model_type, parameters, monkeypatch):
    """Gradients equal PEFT's, for the adapters and for everything before them, without W + B A."""
    setting = ("eager" if model_type == "gpt_oss" else "sdpa", "kept", "fp32")
    wrap = adapted(parameters, rank_pattern={"down_proj": 2}, alpha_pattern={"down_proj": 7})
    want = step(model_of(setting, model_type, wrap))
    model = model_of(setting, model_type, wrap)
    report = apply_liger(model)
    assert not report["lora"].skipped and not report["experts"].skipped
    seen = count_calls(monkeypatch)
    assert_same_step(step(model), want, "fp32")
    given = {name for call in seen for name in ("gate_up_lora", "down_lora") if call[name] is not None}
    assert len(seen) == len(blocks(model)) and len(given) == len(parameters)


def test_adapters_of_a_rank_that_the_gpu_has_no_room_for(monkeypatch):
    """PEFT's code runs. An A100 has room for rank 128, an H100 for 256."""
    want = step(model_of(PLAIN, "qwen3_moe", adapted()))
    model = model_of(PLAIN, "qwen3_moe", adapted())
    apply_liger(model)
    seen = count_calls(monkeypatch)
    monkeypatch.setattr(patterns, "_fits", lambda rank, device: rank < 3)
    assert_same_step(step(model), want, "fp32")
    assert seen == []


def test_the_largest_rank_of_a_gpu(monkeypatch, caplog):
    gpu = torch.device("cuda", 0)
    most_rank_globals = patterns.most_rank.__globals__
    for kib, rank in ((64, 64), (99, 128), (163, 128), (227, 256)):  # T4, RTX 4090, A100, H100
        monkeypatch.setitem(most_rank_globals, "shared_memory", lambda device, kib=kib: (kib << 10) - 2048)
        assert patterns.most_rank(gpu) == rank
    assert patterns._fits(256, gpu)
    assert not caplog.text
    assert not patterns._fits(257, gpu)
    assert "LoRA of rank 257 on experts runs in PEFT's code" in caplog.text
    assert patterns._fits(1000, torch.device("cpu"))


def two_adapters(model):
    model = adapted()(model)
    torch.manual_seed(4)
    model.add_adapter("second", lora(BOTH, target_modules=["q_proj"]))
    return model


STATES = {
    "second": lambda model: model.set_adapter("second"),
    "both": lambda model: model.base_model.set_adapter(["default", "second"]),
    "merged": lambda model: model.merge_adapter(["default"]),
    "unmerged": lambda model: (model.merge_adapter(), model.unmerge_adapter()),
    "disabled": lambda model: model.base_model.disable_adapter_layers(),
}


@pytest.mark.parametrize("change", STATES.values(), ids=STATES)
def test_adapters_switched_after_the_swap(change):
    want = model_of(PLAIN, "qwen3_moe", two_adapters)
    got = model_of(PLAIN, "qwen3_moe", two_adapters)
    apply_liger(got)
    for model in (want, got):
        change(model)
        for name, p in model.named_parameters():
            p.requires_grad_("lora" in name)
    outcomes = [model(**batch_of(model)).logits for model in (got, want)]
    torch.testing.assert_close(*outcomes, rtol=1e-4, atol=1e-5)
    grads = []
    for logits, model in zip(outcomes, (got, want), strict=True):
        if logits.requires_grad:
            logits.square().sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], rtol=1e-3, atol=1e-4 * grads[1][name].abs().max().item())


def batch_of(model):
    torch.manual_seed(5)
    return {"input_ids": torch.randint(0, model.config.vocab_size, (2, 9))}


def hook_on_expert_block(model):
    blocks(model)[0].register_forward_hook(lambda module, args, out: 2 * out)


def hook_on_adapter(model):
    next(m for m in model.modules() if patterns.is_wrapper(m)).lora_A["default"].register_forward_hook(print)


def other_implementation(model):
    model.get_base_model().set_experts_implementation("eager")


def registered_again(model):
    moe.ALL_EXPERTS_FUNCTIONS.register("grouped_mm", doubled)


def doubled(self, *args):
    return 2 * moe.grouped_mm_experts_forward(self, *args)


def other_factors(model, monkeypatch):
    own = ParamWrapper.get_delta_factors

    def doubled_factors(self, name):
        left, right, scaling = own(self, name)
        return 2 * left, right, scaling

    monkeypatch.setattr(ParamWrapper, "get_delta_factors", doubled_factors)


def wrappers(model):
    """The outer and the inner wrapper of the first block."""
    return [module for module in model.modules() if patterns.is_wrapper(module)][:2]


def forward_on_inner_wrapper(model):
    inner, own = wrappers(model)[1], wrappers(model)[1].forward
    inner.forward = lambda *args: 2 * own(*args)


def factors_on_wrapper(model):
    """Factors set on this instance only."""
    inner, own = wrappers(model)[1], wrappers(model)[1].get_delta_factors
    inner.get_delta_factors = lambda name: (2 * own(name)[0], *own(name)[1:])


def another_activation(model):
    blocks(model)[0].act_fn = torch.nn.ReLU()


def another_gate(model):
    block = blocks(model)[0]
    block._apply_gate = lambda gate_up: 2 * type(block)._apply_gate(block, gate_up)


@pytest.mark.parametrize(
    "change",
    [
        hook_on_expert_block,
        hook_on_adapter,
        other_implementation,
        registered_again,
        another_activation,
        another_gate,
        other_factors,
        forward_on_inner_wrapper,
        factors_on_wrapper,
    ],
)
def test_user_changes_take_effect(change, monkeypatch):
    """A hook, another implementation, or another function of that name: loss and gradients equal stock's."""
    try:
        models = [model_of(PLAIN, "qwen3_moe", adapted()) for _ in range(2)]
        apply_liger(models[0])
        for model in models[: 1 if change is other_factors else 2]:
            change(*(model, monkeypatch)[: change.__code__.co_argcount])
        assert_same_step(step(models[0]), step(models[1]), "fp32")
    finally:
        moe.ALL_EXPERTS_FUNCTIONS.register("grouped_mm", moe.grouped_mm_experts_forward)


def test_a_scaling_that_is_trained_is_left_to_peft():
    """PEFT's code raises with one adapter. The kernel would leave the scaling without a gradient."""
    model = model_of(PLAIN, "qwen3_moe", adapted())
    apply_liger(model)
    wrappers(model)[0].scaling["default"] = torch.tensor(1.5, requires_grad=True)
    with pytest.raises(TypeError, match="baddbmm"):
        step(model)


@pytest.mark.parametrize("wrap", [None, adapted()], ids=["plain", "adapted"])
def test_a_gate_put_on_a_block_before_the_swap(wrap):
    models = [model_of(PLAIN, "qwen3_moe", wrap) for _ in range(2)]
    for model in models:
        another_gate(model)
    apply_liger(models[0])
    assert_same_step(step(models[0]), step(models[1]), "fp32")


@pytest.mark.parametrize("of", ["block", "wrapper"])
def test_a_forward_wrapped_by_the_user_runs(of, monkeypatch):
    """It may count tokens of experts, and no number would show if it were skipped."""
    model = model_of(PLAIN, "qwen3_moe", adapted() if of == "wrapper" else None)
    calls = []
    cls = ParamWrapper if of == "wrapper" else type(blocks(model)[0])
    own = cls.forward

    @functools.wraps(own)
    def counted(*args, **named):
        calls.append(1)
        return own(*args, **named)

    monkeypatch.setattr(cls, "forward", counted)
    report = apply_liger(model)
    calls.clear()
    step(model)
    assert len(calls) == (4 if of == "wrapper" else 2)
    kept = report["lora" if of == "wrapper" else "experts"].skipped
    assert set(kept.values()) == {f"the forward of {cls.__name__} is not code of transformers, PyTorch or PEFT"}


def test_weights_of_two_dtypes_are_left_to_the_model(monkeypatch):
    model = model_of(PLAIN, "qwen3_moe")
    apply_liger(model)
    blocks(model)[0].down_proj.data = blocks(model)[0].down_proj.data.bfloat16()
    seen = count_calls(monkeypatch)
    step(model)
    assert len(seen) == len(blocks(model)) - 1


def test_experts_can_be_switched_off_under_adapters(monkeypatch):
    model = model_of(PLAIN, "qwen3_moe", adapted())
    apply_liger(model, {"experts": False})
    seen = count_calls(monkeypatch)
    step(model)
    assert not seen


def test_copies_run_their_own_weights():
    model = tiny_model("qwen3_moe").train()
    apply_liger(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for block in blocks(twin):
            block.down_proj.mul_(2)
    assert all(Binding.of(block) is not None for block in blocks(twin))
    assert not torch.equal(twin(**batch_of(twin)).logits, model(**batch_of(model)).logits)


def test_frozen_experts_keep_no_weight_gradient():
    """Only the attention has adapters."""
    model = model_of(PLAIN, "qwen3_moe", lambda model: get_peft_model(model, LoraConfig(target_modules=["q_proj"])))
    apply_liger(model)
    _, grads = step(model)
    assert grads and not any("experts" in name for name in grads)


def test_another_layout_is_not_proven(monkeypatch):
    """Ranks with experts slowest in B, as one library had them for months, are another operation."""
    model = model_of(PLAIN, "qwen3_moe", adapted())
    monkeypatch.setattr(
        patterns, "_factors", lambda a, b, e: (a.unflatten(0, (e, -1)), b.unflatten(1, (e, -1)).movedim(1, 0))
    )
    report = apply_liger(model)
    assert set(report["lora"].skipped.values()) == {"it is not the weighted sum of experts with W + s B A"}


def test_an_implementation_of_the_users_is_left_alone():
    try:
        model = tiny_model("qwen3_moe")
        registered_again(model)
        report = apply_liger(model)
        assert len(report["experts"].skipped) == 2 and not report["experts"].swapped
    finally:
        moe.ALL_EXPERTS_FUNCTIONS.register("grouped_mm", moe.grouped_mm_experts_forward)


READ = [
    ("grouped_mm", "_grouped_linear"),
    ("grouped_mm", "_grouped_mm"),
    ("grouped_mm", "_can_use_grouped_mm"),
    ("batched_mm", "_batched_linear"),
    ("eager", "linear"),
]


@pytest.mark.diagonal
@pytest.mark.parametrize("adapters", [False, True], ids=["plain", "adapted"])
@pytest.mark.parametrize("implementation, name", READ)
def test_a_function_that_the_implementation_calls_is_guarded(implementation, name, adapters, monkeypatch):
    """If it is replaced after the swap, it runs as in stock, and the report says so."""
    models = []
    for _ in range(3):
        model = model_of(PLAIN, "qwen3_moe", adapted() if adapters else with_implementation(implementation))
        plain = model.get_base_model() if adapters else model
        plain.set_experts_implementation(implementation)
        models.append(model)
    report = apply_liger(models[0])
    assert report["experts"].swapped
    before = step(models[2])
    home = F if name == "linear" else moe
    own = getattr(home, name)
    seen = []

    def replaced(*args, **kwargs):
        seen.append(name)
        result = own(*args, **kwargs)
        return result if isinstance(result, bool) else 2 * result

    monkeypatch.setattr(home, name, replaced)
    got = step(models[0])
    assert seen, "it runs"
    want = step(models[1])
    assert_same_step(got, want, "fp32")
    assert name == "_can_use_grouped_mm" or abs(float(want[0]) - float(before[0])) > 1e-3
    skipped = report["lora" if adapters else "experts"].skipped
    reasons = [why for module, why in skipped.items() if ".experts" in module]
    assert len(reasons) >= 2 and all(f"{name} of " in why for why in reasons)


def test_a_function_that_was_replaced_before_is_not_proven(monkeypatch):
    own = moe._grouped_linear
    monkeypatch.setattr(moe, "_grouped_linear", lambda *args, **kwargs: own(*args, **kwargs))
    report = apply_liger(model_of(PLAIN, "qwen3_moe", with_implementation("grouped_mm")))
    assert not report["experts"].swapped and len(report["experts"].skipped) == 2


@pytest.mark.parametrize("adapters", [False, True], ids=["plain", "adapted"])
def test_the_report_follows_the_implementation(adapters, monkeypatch):
    """Another implementation runs the model's own code. Back on the proven one, ours runs again."""
    model = model_of(PLAIN, "qwen3_moe", adapted() if adapters else with_implementation("grouped_mm"))
    plain, operation = (model.get_base_model(), "lora") if adapters else (model, "experts")
    report = apply_liger(model)[operation]
    swapped = dict(report.swapped)
    names = {name for name, variant in swapped.items() if "grouped_mm" in variant}
    plain.set_experts_implementation("eager")
    with torch.no_grad():  # generation sets one for itself, for example
        model(**batch_of(plain))
    assert report.swapped == swapped
    step(model)
    assert names and {*report.skipped} == names
    assert all("'eager' now; it was 'grouped_mm'" in why for why in report.skipped.values())
    plain.set_experts_implementation("grouped_mm")
    seen, compute = [], patterns.Experts.compute
    monkeypatch.setattr(patterns.Experts, "compute", lambda *args, **kw: seen.append(1) or compute(*args, **kw))
    step(model)
    assert report.swapped == swapped and not report.skipped
    assert len(seen) == 2, "one for each block"


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [None, adapted()], ids=["plain", "adapted"])
def test_under_torch_compile(wrap):
    def of_one_layer(model):
        model.model.layers = model.model.layers[:1]  # two layers take half a minute to trace
        return wrap(model) if wrap else model

    want = step(model_of(PLAIN, "qwen3_moe", of_one_layer))
    model = model_of(PLAIN, "qwen3_moe", of_one_layer)
    apply_liger(model)
    inner = model.get_base_model() if wrap else model
    inner.compile(backend="aot_eager")
    assert_same_step(step(model), want, "fp32")


def test_under_deterministic_algorithms(monkeypatch):
    want = step(model_of(PLAIN, "qwen3_moe"))
    model = model_of(PLAIN, "qwen3_moe")
    apply_liger(model)
    torch.use_deterministic_algorithms(True)
    try:
        seen = count_calls(monkeypatch)
        assert_same_step(step(model), want, "fp32")
        assert len(seen) == len(blocks(model))
    finally:
        torch.use_deterministic_algorithms(False)


def set_implementation(model, implementation):
    """Set the implementation of all experts.

    transformers refuses "grouped_mm" for a whole model if the file of its class has no experts, as that of Kimi K2.5,
    which takes its decoder from another. It sets it by the names of the parts.
    """
    if model._can_set_experts_implementation():
        model.set_experts_implementation(implementation)
    else:
        model.set_experts_implementation(dict.fromkeys(model.config.sub_configs, implementation))


SAID = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # set by configs of mixtures


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True], ids=["plain", "adapted"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("model_type", architectures.MODEL_TYPES)
def test_every_model_type(model_type, implementation, adapters, monkeypatch):
    """Loss and gradients of a padded batch agree for each implementation, and with PEFT's adapters on all experts."""
    try:
        text = architectures.small_config(model_type).get_text_config()
    except Exception as error:  # noqa: BLE001 - a config that needs settings of its own
        pytest.skip(f"not built: {error}")
    if not any(hasattr(text, name) for name in SAID):
        pytest.skip("no mixture")
    model, reason = architectures.build(model_type)
    if model is None or not blocks(model):
        pytest.skip(f"no experts of transformers: {reason}")
    set_implementation(model, implementation)
    assert implementation in {module.config._experts_implementation for module in blocks(model)}
    if adapters:
        names = [name for name, module in model.named_modules() if patterns.is_candidate(module)]
        on = [f"{name}.{weight}" for name in names for weight in ("gate_up_proj", "down_proj")]
        torch.manual_seed(3)
        get_peft_model(model, lora(on, target_modules=[]))
    try:
        want, _ = architectures.step(model)
    except Exception as error:  # noqa: BLE001 - what stock cannot train is not ours to train
        pytest.skip(f"does not run: {error}")
    report = apply_liger(model)
    seen = count_calls(monkeypatch)
    got, _ = architectures.step(model)
    print(f"\n{model_type}, {implementation}: {len(seen)} of {len(blocks(model))} as one operation")
    assert largest_difference(got, want) <= architectures.LIMIT
    assert bool(seen) == bool(report["experts"].swapped)
    if adapters:
        assert bool(seen) == any("gate_up_lora" in named and named["gate_up_lora"] is not None for named in seen)
