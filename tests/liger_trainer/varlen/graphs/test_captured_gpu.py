"""Captured backbones on a GPU: bit-equal, with dropout, on 4-bit bases, and within a stated memory.

CUDA_VISIBLE_DEVICES=0 pytest -m gpu tests/liger_trainer/varlen/graphs/test_captured_gpu.py
"""

import copy
import itertools
import os

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from varlen_batches import captured_step

from liger_trainer import apply_liger
from liger_trainer.patching import rule_packages
from liger_trainer.varlen.graphs.graph_recorder import CudaGraphRecorder
from liger_trainer.varlen.graphs.step_graphs import StepGraphs, use_graphs

# Without it, cuBLAS may add in another order each time. PyTorch reads it at the first product on a GPU.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LENGTHS = (130, 1, 300, 81)  # together 512, which is a captured size, so no row fills it up


class TimelessRecorder(CudaGraphRecorder):
    """Reports that a replay is faster than Python."""

    def __init__(self, device):
        super().__init__(device)
        self.seconds = itertools.cycle([1.0, 0.5])

    def seconds_of(self, run):
        run()
        return next(self.seconds)


def model_of(dropout=0.0, checkpointing=False, lora=True, layers=3):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    if lora:
        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", lora_dropout=dropout))
        for name, p in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, std=0.05)
    model = model.to("cuda", torch.bfloat16)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    apply_liger(model)
    return model.train()


def batch(lengths=LENGTHS, seed=1):
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(3, 1000, (len(lengths), width), generator=generator)
    real = torch.arange(width) < torch.tensor(lengths)[:, None]
    labels = ids.masked_fill(~real, -100)
    labels[:, 0] = -100
    return {"input_ids": ids.cuda(), "attention_mask": real.long().cuda(), "labels": labels.cuda()}


def graphs_of(recorder=TimelessRecorder):
    graphs = StepGraphs(recorder)
    graphs.may_capture = True
    return graphs


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("lengths", [LENGTHS, (40,) * 11 + (72,), (512,)], ids=["rows", "many", "one"])
def test_equal_to_the_bit(lora, checkpointing, lengths, deterministic):
    """The batches fill a size. A single row runs SDPA when uncaptured, so it is compared with the graph of rows."""
    model, graphs = model_of(lora=lora, checkpointing=checkpointing), graphs_of()
    call = batch(lengths)
    want_loss, want = captured_step(model, call)
    captured_step(model, call, graphs)
    got_loss, got = captured_step(model, call, graphs)
    assert graphs.summary.replayed == 1, graphs.summary.to_dict()
    if len(lengths) == 1:
        torch.testing.assert_close(got_loss, want_loss, rtol=1e-3, atol=0)
        return
    assert torch.equal(got_loss, want_loss)
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        assert torch.equal(got[name], gradient), name


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
def test_each_step_draws_new_dropout_and_recomputation_repeats_it(checkpointing, deterministic):
    """From the same generator state, it is bit-equal to the uncaptured step, ten times with new numbers."""
    model, graphs = model_of(dropout=0.3, checkpointing=checkpointing), graphs_of()
    plain = copy.deepcopy(model)
    call, losses = batch(), []
    captured_step(model, call, graphs)
    for replay in range(10):
        torch.manual_seed(replay)
        want_loss, want = captured_step(plain, call)
        after_plain = torch.cuda.get_rng_state()
        torch.manual_seed(replay)
        got_loss, got = captured_step(model, call, graphs)
        losses.append(float(got_loss))
        assert torch.equal(torch.cuda.get_rng_state(), after_plain), replay
        assert torch.equal(got_loss, want_loss), replay
        for name, gradient in want.items():
            # Another mask would differ by a half. One recomputation out of ten differed in the last bit
            assert (got[name] - gradient).norm() <= 5e-3 * gradient.norm(), (replay, name)
    assert graphs.summary.replayed == 10, graphs.summary.to_dict()
    assert len(set(losses)) == 10


def test_two_forwards_with_dropout_before_a_backward(deterministic):
    """The first is replayed again for its backward pass, with the numbers that it drew."""
    model, graphs = model_of(dropout=0.3), graphs_of()
    plain = copy.deepcopy(model)
    captured_step(model, batch(), graphs)
    captured_step(model, batch(), graphs)
    results = []
    for one, within in ((model, graphs), (plain, None)):
        torch.manual_seed(3)
        one.zero_grad()
        with use_graphs(within):
            losses = [one(**batch(seed=seed), use_cache=False).loss for seed in (1, 2)]
        sum(losses).backward()
        results.append({name: p.grad.clone() for name, p in one.named_parameters() if p.grad is not None})
    for name, gradient in results[1].items():
        assert (results[0][name] - gradient).norm() <= 2e-2 * gradient.norm(), name


def test_twenty_steps_of_many_sizes():
    model, graphs = model_of(lora=False), graphs_of()
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-3) for one in (model, plain)]
    generator = torch.Generator().manual_seed(5)
    for number in range(20):
        lengths = tuple(torch.randint(1, 200, (6,), generator=generator).tolist())
        for one, within, optimizer in ((model, graphs, optimizers[0]), (plain, None, optimizers[1])):
            for micro in range(1 + number % 3):
                with use_graphs(within):
                    loss = one(**batch(lengths, seed=10 * number + micro), use_cache=False).loss
                loss.backward()
            torch.nn.utils.clip_grad_norm_(one.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if one is model:
                captured_loss = float(loss)
        assert abs(captured_loss - float(loss)) <= 0.02 * float(loss), number
    assert graphs.summary.replayed >= 30, graphs.summary.to_dict()


def test_quantized_bases():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = model_of(lora=False)
    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, child in list(parent.named_children()):
                if isinstance(child, torch.nn.Linear):
                    packed = bitsandbytes.nn.Linear4bit(
                        child.in_features,
                        child.out_features,
                        bias=False,
                        quant_type="nf4",
                        compute_dtype=torch.bfloat16,
                        compress_statistics=True,
                    )
                    packed.load_state_dict({"weight": child.weight.data.cpu()})
                    setattr(parent, name, packed.cuda())
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", exclude_modules="lm_head"))
    model = model.to("cuda")
    model.enable_input_require_grads()
    apply_liger(model)
    model.train()
    graphs, call = graphs_of(), batch()
    with torch.autocast("cuda", torch.bfloat16):
        _, want = captured_step(model, call)
        captured_step(model, call, graphs)
        _, got = captured_step(model, call, graphs)
    assert graphs.summary.replayed == 1, graphs.summary.to_dict()
    for name, gradient in want.items():
        assert (got[name] - gradient).norm() <= 2e-2 * gradient.norm() + 1e-6, name


def test_memory_comes_back():
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    model = model_of(lora=False)

    def free_after_captures():
        graphs = graphs_of()
        for seed in range(3):
            captured_step(model, batch((900, 700, 800), seed), graphs)
        assert graphs.summary.replayed == 2, graphs.summary.to_dict()
        graphs.release()
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    before = free_after_captures()  # the first ones load kernels, which take some hundred MiB and stay
    # cuBLAS keeps two workspaces of 32 MiB for the stream of the captures
    assert before - free_after_captures() < 96 << 20


def test_an_infinity_in_one_row_stays_in_its_row():
    """The filling row is finite, whatever the others are."""
    model, graphs = model_of(lora=False), graphs_of()
    call = batch((100, 200))
    captured_step(model, call, graphs)
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = float("inf")
    call["input_ids"][call["input_ids"] == 7] = 8
    call["input_ids"][0, 3] = 7
    with use_graphs(graphs):
        per_token = model(**call, use_cache=False, fused_lm_head=True).log_probs
    assert graphs.summary.replayed == 1, graphs.summary.to_dict()
    assert not torch.isfinite(per_token[0, 4:99]).all()
    assert torch.isfinite(per_token[1]).all()


def state_model_of(name, **config):
    torch.manual_seed(0)
    small = {"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **small, **heads, **config))
    model = model.to("cuda", torch.bfloat16)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    report = apply_liger(model)
    return model.train(), report


def gated_delta_net():
    pytest.importorskip("fla")
    if rule_packages._is_refused():
        pytest.skip("flash-linear-attention refuses to train with this Triton on this GPU")
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64}
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    return state_model_of("qwen3_5_text", **heads, linear_value_head_dim=64, head_dim=64, layer_types=kinds)


def short_convolutions():
    kinds = ["conv", "conv", "full_attention", "conv"]
    return state_model_of("lfm2", layer_types=kinds, block_auto_adjust_ff_dim=False)


@pytest.mark.parametrize("build", [short_convolutions, gated_delta_net])
def test_layers_that_keep_a_state(build):
    """One capture replays rows of any lengths. A table of offsets that stayed behind would mix their states."""
    model, report = build()
    plain, graphs = copy.deepcopy(model), graphs_of()
    rows = [LENGTHS, (260, 60, 192), (64, 64, 320, 64), (1, 500, 11), (90, 70, 300, 10)]
    for count, lengths in enumerate((*rows, *rows)):
        call = batch(lengths, seed=count)
        (got_loss, got), (want_loss, want) = captured_step(model, call, graphs), captured_step(plain, call)
        torch.testing.assert_close(got_loss, want_loss, rtol=1e-3, atol=0)
        for name, gradient in want.items():
            assert (got[name] - gradient).norm() <= 3e-2 * gradient.norm() + 1e-4, (lengths, name)
    summary = graphs.summary.to_dict()
    assert graphs.summary.replayed == 2 * len(rows) - 1, (summary, report)
    assert len(summary["sizes"]) == 1, summary
