"""A stock trainer of TRL and ours run side by side: every gradient of every step, and every number logged."""

import ast
import copy
import dataclasses
import inspect
import math
import re

import torch
from datasets import Dataset
from parity import KeepGradients, assert_same_gradients, without_times
from peft import LoraConfig
from tiny_models import VOCAB, tiny_model, tiny_tokenizer
from transformers.trainer_utils import set_seed
from trl.trainer.base_config import _BaseConfig

from liger_trainer.trainers.base import LigerTrainerMixin


def words(generator, low, high):
    length = int(torch.randint(low, high, (), generator=generator))
    return " ".join(f"w{int(i)}" for i in torch.randint(3, VOCAB, (length,), generator=generator))


def kto_rows(n=8, seed=4):
    """Prompts with a completion each and its label, two good ones to a bad one."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {"prompt": words(generator, 2, 8), "completion": " " + words(generator, 2, 9), "label": i % 3 != 1}
        for i in range(n)
    ]


def build(trainer_class, args_class, model, folder, rows, split=(4, 1), trainer_options=None, **options):
    """A trainer of plain SGD, which hands an error in a gradient on as it is; Adam would enlarge that of a tiny one."""
    defaults = {
        "gradient_checkpointing": False,
        "bf16": False,
        "learning_rate": 0.1,
        "max_steps": 1,
        "optim": "sgd",
        "per_device_eval_batch_size": 4,
        "max_grad_norm": 0.0,
    }
    args = args_class(
        output_dir=str(folder / trainer_class.__name__),
        per_device_train_batch_size=split[0],
        gradient_accumulation_steps=split[1],
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **(defaults | options),
    )
    rows = Dataset.from_list(rows)
    given = {"processing_class": tiny_tokenizer(), "train_dataset": rows}
    given |= {name: copy.deepcopy(value) for name, value in (trainer_options or {}).items()}
    if "eval_strategy" in options:
        given.setdefault("eval_dataset", rows)
    trainer = trainer_class(model=copy.deepcopy(model), args=args, **given)
    if isinstance(trainer, LigerTrainerMixin) and trainer.model.get_output_embeddings() is not None:
        assert trainer.head_is_ours == (trainer.args.use_liger and trainer.args.liger_config is None)
    return trainer


def letters(completions, **columns):
    """A reward that hardly two completions have in common."""
    return [float(sum(map(ord, text)) % 11) for text in completions]


def with_reference(model, folder):
    """`model`, from whose folder TRL's trainers will load another one as its reference."""
    tiny_model(model.config.model_type, seed=7).save_pretrained(folder / "reference")
    model.config._name_or_path = str(folder / "reference")
    return model


def lora(**options):
    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "gate_proj", "down_proj"], **options)


def moved(trainer, part="lora_B"):
    """`trainer` with the adapter weights whose name has `part` drawn anew: LoRA starts as the reference, B at zero."""
    generator = torch.Generator().manual_seed(11)
    for name, parameter in trainer.model.named_parameters():
        if part in name:
            parameter.data.normal_(0, 0.5, generator=generator)
    return trainer


def trained(trainer):
    """Train from one seed; the logs without times, and the gradients of every step."""
    keep = KeepGradients()
    trainer.add_callback(keep)
    set_seed(trainer.args.seed)
    trainer.train()
    return [without_times(log) for log in trainer.state.log_history], keep.steps


def assert_same_training(ours, stock, metrics=(), rtol=1e-5, loss_size=0.0):
    """Every log and gradient agrees; the stock trainer logged `metrics`. `loss_size`: that of what the loss is a
    difference of. Returns what ours logged."""
    (got, got_grads), (want, want_grads) = trained(ours), trained(stock)
    assert len(got) == len(want) and len(got_grads) == len(want_grads) > 0
    assert set(metrics) <= want[0].keys(), want[0].keys()
    for ours_log, stock_log in zip(got, want, strict=True):
        assert_same_metrics(ours_log, stock_log, rtol, SMALLEST | dict.fromkeys(("loss", "train_loss"), loss_size))
    for got_step, want_step in zip(got_grads, want_grads, strict=True):
        assert_same_gradients(got_step, want_step, rtol)
    assert any(grad.norm() > 0 for grad in want_grads[0].values()), "nothing was learned: nothing was compared"
    return got


# What agrees to 1e-5 of another size than its own: means of thousands of logits of both signs; differences of
# log-probabilities of whole sequences, of a size of tens.
SMALLEST = {"logits/chosen": 0.01, "logits/rejected": 0.01} | dict.fromkeys(
    ("kl", "rewards/chosen", "rewards/rejected", "rewards/margins", "log_odds_chosen"), 1.0
)


def assert_same_metrics(got, want, rtol, smallest):
    assert got.keys() == want.keys()
    for name, value in want.items():
        if got[name] != value and not (math.isnan(got[name]) and math.isnan(value)):
            size = max(abs(value), smallest.get(name.removeprefix("eval_"), 0))
            assert abs(got[name] - value) <= rtol * size, f"{name}: {got[name]} against {value}"


def loss_types(trainer_class) -> list[str]:
    """What the source of `trainer_class` compares a loss type with."""
    found = re.findall(r"loss_type (?:==|!=|in|not in) (\[[^\]]*\]|\"\w+\")", inspect.getsource(trainer_class))
    values = [ast.literal_eval(text) for text in found]
    return sorted({name for value in values for name in (value if isinstance(value, list) else [value])})


def own_fields(args_class) -> set[str]:
    """The fields that a config of TRL has beside those of every config. A new one needs a test, or a word why not."""
    return {f.name for f in dataclasses.fields(args_class)} - {f.name for f in dataclasses.fields(_BaseConfig)}


# Of trainers that write their own completions: what has no part in scoring them.
WRITING = {
    "model_init_kwargs",
    "trust_remote_code",
    "num_generations",
    "num_generations_eval",
    "generation_batch_size",
    "ds3_gather_for_generation",
    "shuffle_dataset",
    "top_p",
    "top_k",
    "min_p",
    "generation_kwargs",
    "chat_template_kwargs",
    "repetition_penalty",
    "cache_implementation",
    "use_vllm",
    "vllm_mode",
    "vllm_model_impl",
    "vllm_enable_sleep_mode",
    "vllm_structured_outputs_regex",
    "vllm_server_base_url",
    "vllm_server_host",
    "vllm_server_port",
    "vllm_server_timeout",
    "vllm_group_port",
    "vllm_gpu_memory_utilization",
    "vllm_max_model_length",
    "vllm_tensor_parallel_size",
    "reward_weights",
    "max_tool_calling_iterations",
    "log_completions",
    "log_multimodal",
    "num_completions_to_print",
    "log_unique_prompts",
    "log_completions_hub_repo",
    "use_transformers_continuous_batching",
    "transformers_continuous_batching_config",
    "use_transformers_paged",
}
