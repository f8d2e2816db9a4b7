"""`apply_liger` on whole models: the same loss and gradients, and everything else untouched."""

import copy
import io
import pickle
import random
import types

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import NO_HEAD, largest_difference, step, tiny_model, whole_batch
from transformers import AutoModelForCausalLM

from liger_trainer.patching import apply_liger, remove_liger
from liger_trainer.patching.core.binding import Binding
from liger_triton import reference

# Per model: modules expected to be swapped, per operation. Nothing is left alone.
SWAPPED = {
    "llama": {"rms_norm": 5, "rope": 2, "swiglu": 2},
    "qwen3": {"rms_norm": 9, "rope": 2, "swiglu": 2},
    "qwen3_moe": {"rms_norm": 9, "rope": 2, "experts": 2},
    "gemma2": {"rms_norm": 9, "rope": 2, "geglu": 2},
    "gemma3_text": {"rms_norm": 13, "rope": 2, "geglu": 2},
    "gemma4_text": {"rms_norm": 18, "rope": 2, "geglu": 2},
    "cohere2": {"layer_norm": 3, "rope": 2, "swiglu": 2},
    "granite": {"rms_norm": 5, "rope": 2, "swiglu": 2},
    "glm4": {"rms_norm": 9, "rope": 2, "swiglu": 2},
    "deepseek_v3": {"rms_norm": 9, "rope": 2, "swiglu": 2, "experts": 1},
    "gpt_oss": {"rms_norm": 5, "rope": 2, "experts": 2},
    "qwen3_next": {"rms_norm": 8, "rope": 1, "swiglu": 2, "experts": 2},
    "bamba": {"rms_norm": 6, "rope": 1, "swiglu": 2},
    "nemotron": {"layer_norm": 5, "rope": 2},
    "seed_oss": {"rms_norm": 5, "rope": 2, "swiglu": 2},
    "phi": {"layer_norm": 3, "rope": 2},
    "qwen2_5_vl": {"rms_norm": 8, "rope": 3, "swiglu": 3},
}
KERNELS = ("rms_norm", "layer_norm", "rope", "swiglu", "geglu", "experts")


def attributes(model):
    """Every module's `__dict__`, without tensors and children, which are compared by their results.

    A patched method is compared by what it runs, because a second patching makes a new one.
    """
    found = {}
    for name, module in model.named_modules():
        values = {key: value for key, value in vars(module).items() if key != "_parameters"}
        for key, value in values.items():
            if isinstance(value, Binding):
                values[key] = (value.slot, value.function, value.previous)
        found[name] = values
    return found


@pytest.fixture
def calls(monkeypatch):
    """Counts runs of each kernel (on the CPU: of its twin); `calls.spoil(name)` makes one slightly wrong."""
    # the experts' twin calls their gate's
    counts = dict.fromkeys(KERNELS, 0)
    running = []

    def watch(name, factor=1.0):
        own = getattr(reference, name)

        def twin(x, *args, **kwargs):
            counts[name] += not running
            if factor != 1.0:
                x = x * torch.linspace(factor, 1.0, x.shape[-1], device=x.device, dtype=x.dtype)
            running.append(name)
            try:
                return own(x, *args, **kwargs)
            finally:
                running.pop()

        monkeypatch.setattr(reference, name, twin)

    def spoil(name):
        watch(name, 0.98)

    return types.SimpleNamespace(counts=counts, watch=lambda: [watch(name) for name in KERNELS], spoil=spoil)


@pytest.mark.parametrize("model_type", SWAPPED)
def test_same_loss_and_gradients(model_type, calls):
    """Compares patched with unpatched and counts kernels. The control: a kernel that is 2 % off must show."""
    model, other = tiny_model(model_type), tiny_model(model_type)
    want = step(model, whole_batch())
    before = attributes(model)
    report = apply_liger(model, NO_HEAD)
    assert {name: len(part.swapped) for name, part in report.operations.items() if part.swapped} == SWAPPED[model_type]
    assert report.skipped == {}

    calls.watch()
    assert largest_difference(step(model, whole_batch()), want) < 1e-5
    assert {name for name, n in calls.counts.items() if n} == SWAPPED[model_type].keys()
    ran = dict(calls.counts)
    loss, grads = step(
        other, whole_batch()
    )  # the same Python module, unpatched: bit for bit as before, and without kernels
    assert torch.equal(loss, want[0]) and all(torch.equal(grads[name], g) for name, g in want[1].items())
    assert calls.counts == ran
    for name in SWAPPED[model_type]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, name, getattr(reference, name))
            calls.spoil(name)
            assert largest_difference(step(model, whole_batch()), want) > 1e-3, name

    remove_liger(model)
    assert attributes(model) == before
    loss, grads = step(model, whole_batch())
    assert torch.equal(loss, want[0]) and all(torch.equal(grads[name], g) for name, g in want[1].items())


def test_modules_of_python_are_untouched():
    """Classes and globals of transformers' modules are the same objects after patching, and after removal."""
    import transformers.models.llama.modeling_llama as modeling

    def state():
        return dict(vars(modeling)), {k: dict(vars(v)) for k, v in vars(modeling).items() if isinstance(v, type)}

    model = tiny_model("llama")
    step(model, whole_batch())
    before = state()
    apply_liger(model, NO_HEAD)
    step(model, whole_batch())
    assert state() == before
    remove_liger(model)
    assert state() == before


def test_nothing_left_behind_by_the_probe():
    """In any context, there are no gradients, no changed buffers, and the random states of torch and Python stay."""
    model = tiny_model("gemma3_text")
    state = {name: tensor.clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    for context in (
        torch.no_grad(),
        torch.inference_mode(),
        torch.autocast("cpu", torch.bfloat16),
        torch.device("meta"),
    ):
        torch.manual_seed(11)
        rng, python_rng = torch.get_rng_state(), random.getstate()
        with context:
            report = apply_liger(model, NO_HEAD)
        assert len(report["rms_norm"].swapped) == 13 and len(report["rope"].swapped) == 2, context
        assert torch.equal(torch.get_rng_state(), rng) and random.getstate() == python_rng
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(t, state[name]) for name, t in (*model.named_parameters(), *model.named_buffers()))


def test_on_meta():
    """A model without storage is patched like any other, and trains once it has weights."""
    with torch.device("meta"):
        model = tiny_model("llama")
    report = apply_liger(model, NO_HEAD)
    assert {name: len(part.swapped) for name, part in report.operations.items() if part.swapped} == SWAPPED["llama"]


def test_16_bit_model():
    """In bf16, the loss agrees up to bf16 rounding, and norms are bit-equal."""
    model = tiny_model("gemma2").bfloat16()
    loss, grads = step(model, whole_batch())
    apply_liger(model, {**NO_HEAD, "rope": False, "geglu": False})
    got, got_grads = step(model, whole_batch())
    assert torch.equal(got, loss)
    apply_liger(model, NO_HEAD)
    got, _ = step(model, whole_batch())
    assert abs(got - loss) < 0.02 * loss


def test_twice_is_once():
    """The second call changes nothing. Another config removes what it switches off."""
    model = tiny_model("llama")
    want, before = step(model, whole_batch()), attributes(model)
    first = apply_liger(model, NO_HEAD)
    patched = attributes(model)
    assert str(apply_liger(model, NO_HEAD)) == str(first)
    assert attributes(model) == patched
    apply_liger(model, {**NO_HEAD, "rope": False})
    assert "forward" not in model.model.layers[0].self_attn.__dict__
    assert largest_difference(step(model, whole_batch()), want) < 1e-5
    remove_liger(model)
    remove_liger(model)
    assert attributes(model) == before


def test_deepcopy_follows_its_own_weights():
    """A copied reference model must not read the weights of the policy that keeps training."""
    model = tiny_model("llama")
    apply_liger(model, NO_HEAD)
    want, _ = step(model, whole_batch())
    reference_model = copy.deepcopy(model)
    for module in reference_model.modules():
        assert getattr(module.__dict__.get("forward"), "__self__", module) is module
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    assert torch.equal(step(reference_model, whole_batch())[0], want)
    remove_liger(model)
    assert torch.equal(step(reference_model, whole_batch())[0], want)


def test_pickle_and_torch_save():
    """A pickled patched model loads, computes the same, and can be patched and unpatched again."""
    model = tiny_model("qwen3_moe")
    want = step(model, whole_batch())
    apply_liger(model, NO_HEAD)
    loaded = pickle.loads(pickle.dumps(model))
    assert largest_difference(step(loaded, whole_batch()), want) < 1e-5
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    report = apply_liger(loaded, NO_HEAD)
    assert report.skipped == {} and len(report["rms_norm"].swapped) == 9
    assert largest_difference(step(loaded, whole_batch()), want) < 1e-5


def test_saved_model_loads_unpatched(tmp_path):
    model = tiny_model("gemma2")
    keys = list(model.state_dict())
    apply_liger(model, NO_HEAD)
    assert list(model.state_dict()) == keys
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert largest_difference(step(loaded, whole_batch()), step(model, whole_batch())) < 1e-5


@pytest.mark.parametrize("patch_first", [True, False])
@pytest.mark.parametrize("model_type", ["llama", "glm4", "gemma2"])
def test_peft(model_type, patch_first):
    """LoRA with dropout on every linear layer. Projections are called as modules in their order, so masks agree."""

    def build(patched):
        model = tiny_model(model_type)
        config = LoraConfig(target_modules="all-linear", r=2, lora_dropout=0.3, init_lora_weights=False)
        if patched and patch_first:
            apply_liger(model, NO_HEAD)
        torch.manual_seed(5)
        model = get_peft_model(model, config).train()
        if patched and not patch_first:
            report = apply_liger(model, NO_HEAD)
            projections = 12 if model_type == "glm4" else 14  # gate and up are one projection here
            swapped = {n: len(p.swapped) for n, p in report.operations.items() if p.swapped}
            assert swapped == SWAPPED[model_type] | {"lora": projections}
        torch.manual_seed(6)
        return step(model, whole_batch())

    want = build(False)
    assert len(want[1]) >= 14
    # Stock in fp32 differs by 5e-5 from stock in float64, because these adapters are large.
    assert largest_difference(build(True), want) < (1e-5 if patch_first else 1e-4)


def test_patch_wrap_patch_merge():
    """Patched, wrapped, patched again, merged, unpatched: always the same model."""
    model = tiny_model("llama")
    want = step(model, whole_batch())
    apply_liger(model, NO_HEAD)
    wrapped = get_peft_model(model, LoraConfig(target_modules="all-linear", r=2))
    report = apply_liger(wrapped, NO_HEAD)
    assert {n: len(p.swapped) for n, p in report.operations.items() if p.swapped} == SWAPPED["llama"] | {"lora": 14}
    merged = wrapped.merge_and_unload()
    remove_liger(merged)
    for parameter in merged.parameters():
        parameter.requires_grad_()
    assert largest_difference(step(merged, whole_batch()), want) < 1e-5
    assert not any("forward" in module.__dict__ for module in merged.modules())


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("model_type", ["llama", "gemma4_text", "qwen3_moe"])
def test_gradient_checkpointing(model_type, reentrant, calls):
    """Recomputation enters at the layer, and must run the kernels of the first pass."""
    model = tiny_model(model_type).train()
    want = step(model, whole_batch())
    apply_liger(model, NO_HEAD)
    calls.watch()
    step(model, whole_batch())
    once = calls.counts["rope"]
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert largest_difference(step(model, whole_batch()), want) < 1e-5
    assert calls.counts["rope"] == 3 * once


def test_fsdp2(tmp_path):
    """Patched before and after sharding: the proof does not read shards, and training steps agree."""
    from torch import distributed
    from torch.distributed.fsdp import fully_shard

    want, _ = step(tiny_model("gemma2"), whole_batch())
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for before in (True, False):
            model = tiny_model("gemma2")
            if before:
                apply_liger(model, NO_HEAD)
            mesh = distributed.init_device_mesh("cpu", (1,))
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            if not before:
                report = apply_liger(model, NO_HEAD)
                assert {n: len(p.swapped) for n, p in report.operations.items() if p.swapped} == SWAPPED["gemma2"]
            loss, grads = step(model, whole_batch())
            torch.testing.assert_close(loss, want, rtol=1e-5, atol=0)
            assert all(torch.isfinite(g.full_tensor()).all() for g in grads.values()) and len(grads) > 20
    finally:
        distributed.destroy_process_group()


def test_generate():
    model = tiny_model("gemma3_text").eval()
    arguments = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    want = model.generate(whole_batch(2, 5)["input_ids"], **arguments)
    apply_liger(model, NO_HEAD)
    assert torch.equal(model.generate(whole_batch(2, 5)["input_ids"], **arguments), want)


def test_hidden_states_attentions_and_router_logits():
    """transformers records these by hooks that it chooses by class."""
    model = tiny_model("qwen3_moe").eval()
    ask = {"output_hidden_states": True, "output_attentions": True, "output_router_logits": True}
    want = model(input_ids=whole_batch()["input_ids"], **ask)
    apply_liger(model, NO_HEAD)
    got = model(input_ids=whole_batch()["input_ids"], **ask)
    for field in ("hidden_states", "attentions", "router_logits"):
        assert len(got[field]) == len(want[field]) > 0
        for a, b in zip(got[field], want[field], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_hooks_of_the_user_still_fire():
    model = tiny_model("llama")
    apply_liger(model, NO_HEAD)
    seen = []
    for module in (model.model.norm, model.model.layers[0].mlp, model.model.layers[0].mlp.up_proj):
        module.register_forward_hook(lambda module, args, output: seen.append(module))
    model(input_ids=whole_batch()["input_ids"])
    assert len(seen) == 3


@pytest.mark.parametrize("model_type", ["llama", "phi", "cohere2"])
def test_autocast_of_fp32_weights(model_type):
    """Norms see fp32; q and k are bf16 while cos is fp32. Every module returns its original's dtype."""
    model = tiny_model(model_type)

    def run():
        seen = []

        def note(module, args, output):
            seen.append((type(module).__name__, output.dtype))

        handles = [m.register_forward_hook(note) for m in model.modules() if list(m.parameters(recurse=False))]
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=whole_batch()["input_ids"], labels=whole_batch()["input_ids"]).loss.detach()
        for handle in handles:
            handle.remove()
        return loss, seen

    want, dtypes = run()
    apply_liger(model, NO_HEAD)
    got, got_dtypes = run()
    assert got_dtypes == dtypes
    assert abs(got - want) < 5e-3 * want


@pytest.mark.parametrize("model_type", ["cohere2", "gemma2"])  # more cases are in `test_compile.py`
def test_torch_compile_traces_the_whole_model(model_type):
    torch._dynamo.reset()
    model = tiny_model(model_type, num_hidden_layers=1).eval()
    want = model(input_ids=whole_batch()["input_ids"], use_cache=False).logits
    apply_liger(model, NO_HEAD)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    got = compiled(input_ids=whole_batch()["input_ids"], use_cache=False).logits
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_globals_of_a_patched_attention_are_renewed(monkeypatch):
    """Another library may replace functions in the modeling module before `apply_liger` is called, first or again."""
    import transformers.models.llama.modeling_llama as modeling

    model = tiny_model("llama")
    apply_liger(model, NO_HEAD)
    seen = []
    own = modeling.eager_attention_forward
    monkeypatch.setattr(modeling, "eager_attention_forward", lambda *a, **k: seen.append(1) or own(*a, **k))
    apply_liger(model, NO_HEAD)
    model(input_ids=whole_batch()["input_ids"])
    assert len(seen) == 2


def test_under_accelerate_hooks():
    """With a device_map, a module's forward is accelerate's. What it calls is swapped, and restored."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module

    model = tiny_model("llama")
    want = step(model, whole_batch())
    hooked = (model.model.norm, model.model.layers[0].mlp, model.model.layers[1].self_attn)
    for module in hooked:
        add_hook_to_module(module, AlignDevicesHook("cpu"))
    report = apply_liger(model, NO_HEAD)
    assert report.skipped == {} and all("_old_forward" in m.__dict__ for m in hooked)
    assert all(m.__dict__["_old_forward"].__func__ is not type(m).forward for m in hooked)
    assert largest_difference(step(model, whole_batch()), want) < 1e-5
    remove_liger(model)
    assert all(m.__dict__["_old_forward"] == types.MethodType(type(m).forward, m) for m in hooked)
    remove_hook_from_module(model, recurse=True)
    assert largest_difference(step(model, whole_batch()), want) == 0
