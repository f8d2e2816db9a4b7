"""Twenty steps of every trainer compared with stock: recomputing, overwriting gates, SDPA and checkpointing together.

The same test runs at two sizes: tiny on the CPU, with a rebuild limit of 0; and two layers as wide as Llama 3 8B on a
GPU, with the users' limit and Triton's kernels:

    CUDA_VISIBLE_DEVICES=0 pytest -s -m gpu tests/liger_trainer/trainers/test_twenty_steps.py

In fp32, every logged loss and gradient norm agrees with stock's to 1e-4. In bf16, ours and stock round differently, so
both are compared with stock in fp32 from the same weights: ours may be twice as far off as stock's worst.
"""

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from trainer_parity import STOCK as OF_TRL
from transformers import DataCollatorForSeq2Seq, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer
from transformers import TrainingArguments as StockArguments
from transformers.trainer_utils import set_seed

import liger_trainer
from liger_trainer.memory import rebuild
from liger_trainer.varlen import unpad_plan

STOCK = {"Trainer": (Trainer, StockArguments)} | OF_TRL
SIZES = {  # vocabulary, hidden, intermediate, heads, tokens of a completion, steps
    "tiny": (131, 32, 48, 4, 12, 3),
    "8b-width": (128256, 4096, 14336, 32, 560, 20),
}
LOGS_PADDING = ("ORPO", "CPO")  # TRL logs the mean of the logits at every position, so padding is computed
CHECKPOINTED = ("SFT", "DPO")  # the others keep their activations, so backward rebuilds tensors


def model_of(size, dtype, seed=0):
    vocab, hidden, wide, heads, length, _ = SIZES[size]
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=wide,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        max_position_embeddings=8 * length,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="sdpa",
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    with torch.device("cuda" if size != "tiny" else "cpu"):
        model = LlamaForCausalLM(config)
    return model.to(torch.bfloat16).to(dtype)  # values of one precision, in both


def tokenizer_of(size):
    vocab = SIZES[size][0]
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, vocab)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def rows_of(name, size, n):
    vocab, *_, length, _ = SIZES[size]
    generator = torch.Generator().manual_seed(3)

    def ids(low, high):
        count = int(torch.randint(low, high + 1, (), generator=generator))
        return torch.randint(3, vocab, (count,), generator=generator).tolist()

    def text(low, high):
        return " " + " ".join(f"w{i}" for i in ids(low, high))

    if name == "Trainer":
        rows = [ids(length - 5, length) for _ in range(n)]
        return [{"input_ids": row, "labels": [-100] * 3 + row[3:]} for row in rows]
    if name in ("GRPO", "RLOO", "Distillation"):
        return [{"prompt": text(4, 8)} for _ in range(n)]
    rows = []
    for i in range(n):
        prompt = text(3, 6)
        one = text(length - 5, length)
        other = text(length // 2, length)
        if name == "SFT":
            rows.append({"prompt": prompt, "completion": one})
        elif name == "KTO":
            rows.append({"prompt": prompt, "completion": one, "label": i % 2 == 0})
        else:
            rows.append({"prompt": prompt, "chosen": one, "rejected": other})
    return rows


def written(vocab, length):
    """Replace `generate` by a continuation that depends only on the prompt, because two samplings could diverge."""

    def generate(input_ids=None, **_):
        seeds = input_ids.sum(-1).tolist()
        more = [
            torch.randint(3, vocab, (length,), generator=torch.Generator().manual_seed(seed + 7 * i))
            for i, seed in enumerate(seeds)
        ]
        return torch.cat([input_ids, torch.stack(more).to(input_ids)], dim=1)

    return generate


def reward(completions, **columns):
    return [float(sum(map(ord, text)) % 11) for text in completions]


def logged(name, ours, size, dtype, folder, varlen, packed):
    """Loss and gradient norm (2, steps) of one training from one seed. For ours, everything must be swapped."""
    vocab, *_, length, steps = SIZES[size]
    trainer_class, args_class = STOCK[name]
    options = {}
    if ours:
        trainer_class = getattr(liger_trainer, f"Liger{trainer_class.__name__}")
        args_class = getattr(liger_trainer, f"Liger{args_class.__name__}")
        options["liger_config"] = {"varlen_attention": varlen} | ({"rebuild_above_mib": 0} if size == "tiny" else {})
    if name in ("GRPO", "RLOO"):
        options |= {"num_generations": 2, "beta": 0.04}
    if name in ("GRPO", "RLOO", "Distillation"):
        options["max_completion_length"] = length
    elif name != "Trainer":
        options["max_length"] = 4 * length
    pairs = name in ("DPO", "ORPO", "CPO")
    args = args_class(
        output_dir=str(folder),
        per_device_train_batch_size=2 if pairs else 4,
        max_steps=steps,
        learning_rate=1e-5,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=size == "tiny",
        bf16=dtype == torch.bfloat16,
        gradient_checkpointing=name in CHECKPOINTED,
        **options,
    )
    model = model_of(size, dtype)
    rows = rows_of(name, size, 4 * steps)
    tokenizer = tokenizer_of(size)
    model.config._name_or_path = str(folder / "reference")
    given = {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer}
    if name == "Trainer":
        given["data_collator"] = DataCollatorForSeq2Seq(tokenizer)
    elif name in ("DPO", "KTO"):
        given["ref_model"] = model_of(size, dtype, seed=7)
    elif name in ("GRPO", "RLOO"):
        given["reward_funcs"] = reward
        model_of(size, dtype, seed=7).save_pretrained(folder / "reference")
    elif name == "Distillation":
        given["teacher_model"] = model_of(size, dtype, seed=7)
    trainer = trainer_class(model=model, args=args, **given)
    packed.clear()  # by the proof
    if name in ("GRPO", "RLOO", "Distillation"):
        trainer.model.generate = written(vocab, length)
    if ours:
        assert trainer.liger_report.skipped == {} and trainer.uses_fused_head
    set_seed(0)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return torch.tensor([[log[key] for log in logs] for key in ("loss", "grad_norm")], dtype=torch.float64)


def compare(name, size, folder, monkeypatch, varlen=False):
    packed, own_packed = [], unpad_plan.UnpadPlan.unpad
    monkeypatch.setattr(
        unpad_plan.UnpadPlan, "unpad", lambda self, *given: packed.append(self) or own_packed(self, *given)
    )
    made, get = [], rebuild._Rebuilt.get
    monkeypatch.setattr(rebuild._Rebuilt, "get", lambda self, shape: made.append(shape) or get(self, shape))
    stock, ours, stock_16, ours_16 = (
        logged(name, is_ours, size, dtype, folder / f"{dtype}{is_ours}", varlen, packed)
        for dtype in (torch.float32, torch.bfloat16)
        for is_ours in (False, True)
    )
    assert stock.shape == ours.shape == stock_16.shape == ours_16.shape == (2, SIZES[size][-1])
    for i, (what, least) in enumerate((("loss", 0.05), ("gradient norm", 0.0))):  # a loss may be a difference, near 0
        scale = max(stock[i].abs().max().item(), least)
        off = (ours[i] - stock[i]).abs().max().item()
        off_16, stock_off_16 = ((x[i] - stock[i]).abs().max().item() for x in (ours_16, stock_16))
        print(
            f"\n{name}, {size}: {what} {stock[i, 0]:.5f} to {stock[i, -1]:.5f}; fp32 off by {off:.1e}, bf16 by "
            f"{off_16:.1e} (stock by {stock_off_16:.1e})",
            end="",
        )
        assert scale > 0 and off <= 1e-4 * scale
        assert off_16 <= 2 * stock_off_16 + 1e-3 * scale
    print(f"; {len(made)} tensors rebuilt")
    assert bool(made) == (name not in CHECKPOINTED)
    assert bool(packed) == (varlen and name not in LOGS_PADDING)


QUICK = ("Trainer", "SFT", "DPO", "GRPO")
VARLEN = pytest.mark.parametrize("varlen", [False, True], ids=["padded", "varlen"])


@pytest.mark.parametrize("varlen", [pytest.param(False, marks=pytest.mark.slow), True], ids=["padded", "varlen"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in STOCK]
)
def test_on_the_cpu(name, varlen, tmp_path, monkeypatch):
    compare(name, "tiny", tmp_path, monkeypatch, varlen)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@VARLEN
@pytest.mark.parametrize("name", STOCK)
def test_at_the_width_of_8b(name, varlen, tmp_path, monkeypatch):
    compare(name, "8b-width", tmp_path, monkeypatch, varlen)
