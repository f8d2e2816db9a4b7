"""The trainers on a GPU, where the Triton kernels run:

CUDA_VISIBLE_DEVICES=0 pytest tests/liger_trainer/trainers/test_gpu.py
"""

import copy
import gc

import pytest
import torch
from datasets import Dataset
from tiny_models import PARITY_SET, collate, ragged_rows, tiny_model, tiny_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from liger_trainer import LigerSFTConfig, LigerSFTTrainer, LigerTrainer, LigerTrainingArguments, apply_liger

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def run(trainer_class, args_class, model, tmp_path, **options):
    sft = issubclass(trainer_class, SFTTrainer)
    args = args_class(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **({"bf16": False, "gradient_checkpointing": False} | options),
    )
    rows = ragged_rows()
    if sft:
        extra = {"train_dataset": Dataset.from_list(rows), "processing_class": tiny_tokenizer()}
    else:
        extra = {"train_dataset": rows, "data_collator": collate}
    trainer = trainer_class(model=copy.deepcopy(model), args=args, **extra)
    trainer.train()
    steps = [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]
    return torch.tensor(steps, dtype=torch.float64), trainer


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("model_type", PARITY_SET)
def test_fp32_parity(model_type, checkpointing, tmp_path):
    model = tiny_model(model_type)
    options = {"gradient_checkpointing": checkpointing}
    for ours, stock in (
        ((LigerTrainer, LigerTrainingArguments), (Trainer, TrainingArguments)),
        ((LigerSFTTrainer, LigerSFTConfig), (SFTTrainer, SFTConfig)),
    ):
        want, _ = run(*stock, model, tmp_path, **options)
        got, _ = run(*ours, model, tmp_path, **options)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=0)


def test_bf16_parity_and_the_kernels_that_ran(tmp_path):
    from torch.profiler import ProfilerActivity, profile

    model = tiny_model("llama", dtype=torch.bfloat16)
    want, _ = run(SFTTrainer, SFTConfig, model, tmp_path, bf16=True)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        got, _ = run(LigerSFTTrainer, LigerSFTConfig, model, tmp_path, bf16=True)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=0)
    ran = {event.key for event in profiler.key_averages()}
    for kernel in ("_rms_norm_fwd_kernel", "_rms_norm_bwd_kernel", "_rope_kernel", "_gate_fwd_kernel", "_row_kernel"):
        assert any(kernel in name for name in ran), f"{kernel} did not run"


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_compiled_step(model_type):
    model = tiny_model(model_type).cuda().train()
    batch = {k: v.cuda() for k, v in collate(ragged_rows(4)).items()}
    apply_liger(model)
    want = model(**batch).loss
    want.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss = torch.compile(model, fullgraph=True)(**batch).loss
    loss.backward()
    torch.testing.assert_close(loss, want, rtol=1e-4, atol=0)
    for p, ref in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad, ref, rtol=1e-3, atol=1e-4 * ref.abs().max().item())


@pytest.fixture(scope="module")
def wide():
    """Two layers as wide as Llama 3 8B, and rows with activations above the limit for recomputing."""
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).train()
        ids = torch.randint(0, 32000, (2, 2560))
    return model, {"input_ids": ids, "labels": ids}


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def wide_pair(wide, request):
    """(stock, patched, batch) in one dtype, with the same weights."""
    stock = copy.deepcopy(wide[0]).to(request.param)
    patched = copy.deepcopy(stock)
    assert apply_liger(patched).skipped == {}
    return stock, patched, wide[1]


def gradients(model, batch):
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


def assert_close(got, want):
    """Relative error of each tensor. fp32 sums in another order, and bf16 rounds in other places."""
    limit = 1e-4 if want["lm_head.weight"].dtype == torch.float32 else 5e-2
    for name, reference in want.items():
        error = (got[name].double() - reference.double()).norm() / reference.double().norm()
        assert error <= limit, f"{name}: {error:.1e}"


def test_skipped_steps_leave_nothing(wide_pair):
    _, model, batch = wide_pair
    gradients(model, batch)
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        loss = model(**batch).loss
        del loss
        assert torch.cuda.memory_allocated() == before


def changed_in_place(model):
    model.model.layers[0].input_layernorm.register_forward_hook(lambda module, args, y: y.mul_(2))


def changed_before_the_down_projection(model):
    model.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda module, args: (args[0].mul_(2),))


def halved_logits(model):
    model.lm_head.register_forward_hook(lambda module, args, y: y * 0.5)


def halved_activation(model):
    model.model.layers[0].mlp.act_fn.register_forward_hook(lambda module, args, y: y * 0.5)


def kept_gate(model):
    model.kept = []
    model.model.layers[1].mlp.gate_proj.register_forward_hook(lambda module, args, y: model.kept.append(y))


def nothing(model):
    pass


@pytest.mark.parametrize(
    "hook",
    [nothing, changed_in_place, changed_before_the_down_projection, halved_logits, halved_activation, kept_gate],
)
def test_hooks_at_real_size(wide_pair, hook):
    stock, patched, batch = wide_pair
    for model in (stock, patched):
        hook(model)
    assert_close(gradients(patched, batch), gradients(stock, batch))
    if hook is kept_gate:
        error = (patched.kept[0].double() - stock.kept[0].double()).norm() / stock.kept[0].double().norm()
        assert error < 2e-2  # its gradient has not overwritten it


def test_two_backward_passes(wide_pair):
    """The second adds the same gradients again."""
    stock, patched, batch = wide_pair
    results = []
    for model in (stock, patched):
        model.zero_grad()
        hidden = model.model(input_ids=batch["input_ids"]).last_hidden_state.float()
        score = (hidden * torch.linspace(-1, 1, hidden[0].numel(), device="cuda").view_as(hidden[0])).mean()
        score.backward(retain_graph=True)
        score.backward()
        results.append({n: p.grad for n, p in model.model.named_parameters()})
    limit = 1e-4 if stock.dtype == torch.float32 else 5e-2
    for name, want in results[0].items():
        error = (results[1][name].double() - want.double()).norm() / want.double().norm()
        assert error <= limit, f"{name}: {error:.1e}"


def test_a_frozen_fp8_base(tmp_path):
    """Losses are near bf16's, frozen layers take half the memory, and converting makes no second copy of them."""
    from peft import LoraConfig, get_peft_model

    from liger_trainer.fp8.quantize_base import quantize_base
    from liger_triton.float8_cast import fault_of_device

    fault = fault_of_device(torch.device("cuda", torch.cuda.current_device()))
    if fault is not None:
        pytest.skip(fault)
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "vocab_size": 131}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}

    def made():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).to(torch.bfloat16)
        return get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))

    want, _ = run(LigerSFTTrainer, LigerSFTConfig, made(), tmp_path, bf16=True)
    got, trainer = run(LigerSFTTrainer, LigerSFTConfig, made(), tmp_path, bf16=True, fp8=True)
    torch.testing.assert_close(got[:, 0], want[:, 0], rtol=0.02, atol=0)
    assert len(trainer.liger_report["frozen_float8"].swapped) == 4 * 7
    del trainer
    gc.collect()  # otherwise the trainers' memory is freed while the layers are converted
    model = made().cuda()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    quantize_base(model)
    freed = before - torch.cuda.memory_allocated()
    layers = 4 * (512 * (512 + 256 + 256 + 512) + 3 * 512 * 1536)
    assert freed == pytest.approx(layers, rel=0.05)
    assert torch.cuda.max_memory_allocated() - before < 3 * 2 * 512 * 1536
