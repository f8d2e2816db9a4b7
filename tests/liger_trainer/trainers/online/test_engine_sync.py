"""TRL's `sync_weights` sends the right weights to vLLM, as a stand-in loads them, and leaves the base unchanged."""

import pytest
import torch
from engine_stand_in import Engine, shapes_of
from peft import IA3Config, LoraConfig, get_peft_model
from tiny_models import tiny_model
from trainer_parity import build, letters
from trl import GRPOConfig, GRPOTrainer

from liger_trainer import LigerGRPOConfig, LigerGRPOTrainer

OURS, STOCK = (LigerGRPOTrainer, LigerGRPOConfig), (GRPOTrainer, GRPOConfig)
PROMPTS = [{"prompt": "w4 w5 w6"}] * 8


@pytest.fixture
def engine(monkeypatch, tmp_path):
    """Has trainers sync with an engine of the tiny Llama's checkpoint."""
    monkeypatch.setattr(Engine, "shapes", shapes_of(tiny_model("llama"), tmp_path / "checkpoint"))
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", Engine)


def one(classes, folder, mode="colocate", dtype=torch.bfloat16, config=None, model=None, **options):
    model = model or tiny_model("llama", dtype=dtype)
    given = {"reward_funcs": letters} | ({"peft_config": config} if config is not None else {})
    options = {"num_generations": 2, "max_completion_length": 4} | options
    options |= {"use_vllm": True, "vllm_mode": mode}
    return build(*classes, model, folder, PROMPTS, trainer_options=given, **options)


def lora(**options):
    return LoraConfig(**{"r": 4, "target_modules": "all-linear", "init_lora_weights": False} | options)


def parameters(trainer):
    return {name: x.detach().clone() for name, x in trainer.model.named_parameters()}


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert torch.equal(got[name], x), name


ADAPTERS = {
    "lora": lora(),
    "rslora": lora(use_rslora=True),
    "dora": lora(use_dora=True),
    "attention": lora(target_modules=["q_proj", "v_proj"]),
    "saved": lora(modules_to_save=["lm_head"]),
    "embeddings": lora(target_modules=["q_proj", "embed_tokens"]),
    "ia3": IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False),
}


@pytest.mark.parametrize("mode", ["colocate", "server"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_the_engine_gets_what_trl_merges_and_the_base_stays(name, mode, engine, tmp_path):
    torch.manual_seed(3)
    stock = one(STOCK, tmp_path, mode, config=ADAPTERS[name])
    torch.manual_seed(3)
    trainer = one(OURS, tmp_path, mode, config=ADAPTERS[name])
    trainer.model.load_state_dict(stock.model.state_dict())
    before = parameters(trainer)
    places = {name: x.data_ptr() for name, x in trainer.model.named_parameters()}
    # A server first gets the names. For these TRL merges once more, and drifts once.
    stock.vllm_generation._weight_metadata = []
    want = {name: x.clone() for name, x in stock.vllm_generation._iter_named_params()}
    assert want.keys() == Engine.shapes.keys()
    for _ in range(3):
        trainer.vllm_generation.sync_weights()
        assert_equal(trainer.vllm_generation.loads.loaded, want)
    assert_equal(parameters(trainer), before)
    assert {name: x.data_ptr() for name, x in trainer.model.named_parameters()} == places
    plain = {key.removeprefix("base_model.model.").replace(".base_layer", ""): x for key, x in before.items()}
    assert any(not torch.equal(x, plain[key]) for key, x in want.items() if key in plain)


def test_trl_s_own_sync_moves_the_base(engine, tmp_path):
    """If this fails, TRL has changed, and `exact_sync.py` may go."""
    torch.manual_seed(3)
    stock = one(STOCK, tmp_path, config=lora())
    before = parameters(stock)
    stock.vllm_generation.sync_weights()
    assert any(not torch.equal(x, before[name]) for name, x in stock.model.named_parameters())


def test_the_merged_weights_are_base_and_adapter(engine, tmp_path):
    """By the formula, in fp32."""
    trainer = one(OURS, tmp_path, dtype=torch.float32, config=lora())
    trainer.vllm_generation.sync_weights()
    loaded = trainer.vllm_generation.loads.loaded
    layer = trainer.model.base_model.model.model.layers[1].mlp.down_proj
    delta = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * layer.scaling["default"]
    want = layer.base_layer.weight + delta
    torch.testing.assert_close(loaded["model.layers.1.mlp.down_proj.weight"], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_a_full_training_sends_every_weight(mode, engine, tmp_path):
    trainer = one(OURS, tmp_path, mode, dtype=torch.float32, max_steps=2)
    trainer.train()
    trainer.vllm_generation.sync_weights()
    assert_equal(trainer.vllm_generation.loads.loaded, parameters(trainer))


def test_a_training_leaves_the_base_as_it_was(engine, tmp_path):
    """Three steps with a sync before each; the engine has the weights of the policy that it writes for."""
    trainer = one(OURS, tmp_path, config=lora(), max_steps=3)
    before = {name: x for name, x in parameters(trainer).items() if "lora_" not in name}
    trainer.train()
    after = parameters(trainer)
    assert_equal({name: after[name] for name in before}, before)
    assert trainer.old_policy.left_out == 3
    assert trainer._last_loaded_step == 2


def test_an_adapter_on_the_head_is_sent_too(engine, tmp_path):
    """TRL refuses to train it."""
    trainer = one(OURS, tmp_path, dtype=torch.float32, config=lora(target_modules=["q_proj", "lm_head"]))
    before = parameters(trainer)
    trainer.vllm_generation.sync_weights()
    loaded = trainer.vllm_generation.loads.loaded
    assert not torch.equal(loaded["lm_head.weight"], before["base_model.model.lm_head.base_layer.weight"])
    assert_equal(parameters(trainer), before)


def test_layers_that_share_weights_keep_trl_s_way(engine, tmp_path, monkeypatch):
    model = tiny_model("llama", tie_word_embeddings=True)
    Engine.shapes = {name: list(x.shape) for name, x in model.named_parameters()}
    model = get_peft_model(model, lora(target_modules=["q_proj", "embed_tokens"]))
    stock, trainer = (one(classes, tmp_path, model=model) for classes in (STOCK, OURS))
    for each in (stock, trainer):
        each.vllm_generation.sync_weights()
    assert_equal(trainer.vllm_generation.loads.loaded, stock.vllm_generation.loads.loaded)


def test_a_merge_that_fails_leaves_the_layer_as_it_was(engine, tmp_path, monkeypatch):
    trainer = one(OURS, tmp_path, config=lora())
    before = parameters(trainer)
    layer = trainer.model.base_model.model.model.layers[0].self_attn.q_proj
    stock = layer.merge

    def fails():
        stock()
        raise RuntimeError("out of memory")

    monkeypatch.setattr(layer, "merge", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.vllm_generation.sync_weights()
    assert_equal(parameters(trainer), before)
    assert layer.merged_adapters == []


def test_a_layer_that_gets_a_new_parameter_gets_its_own_back(engine, tmp_path, monkeypatch):
    """Drift as 4-bit layers do when they are merged."""
    trainer = one(OURS, tmp_path, dtype=torch.float32, config=lora())
    layer = trainer.model.base_model.model.model.layers[0].self_attn.q_proj
    own, values = layer.base_layer.weight, layer.base_layer.weight.detach().clone()

    def merge():
        layer.base_layer.weight = torch.nn.Parameter(own.detach() + 1, requires_grad=False)

    monkeypatch.setattr(layer, "merge", merge)
    trainer.vllm_generation.sync_weights()
    loaded = trainer.vllm_generation.loads.loaded
    assert torch.equal(loaded["model.layers.0.self_attn.q_proj.weight"], values + 1)
    assert layer.base_layer.weight is own and torch.equal(own, values)


def test_use_liger_false_is_trl_s_sync(engine, tmp_path):
    trainer = one(OURS, tmp_path, config=lora(), use_liger=False)
    assert "_iter_named_params" not in vars(trainer.vllm_generation)
