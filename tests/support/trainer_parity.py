"""Train a stock trainer and ours side by side, and compare every gradient and every logged number.

A test gets its trainers from one of these:

- `run`: two steps of `Trainer` or `SFTTrainer` with Adam, and the numbers that each step logged.
- `build`: a trainer of any class on given rows, with plain SGD.
- `build_pairs` and `build_dpo`: one of ORPO or CPO, and one of DPO, on rows of their own.
- `one`: a trainer of any TRL method (`STOCK`, or `ours(method)`) with rows, a reference and a reward.

`assert_same_training` trains two of them. `assert_same_step` compares the results of `step`, which runs one batch
without an optimizer. `Limits` says how far numbers may be apart.
"""

import ast
import copy
import dataclasses
import inspect
import itertools
import math
import re

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tiny_models import (
    LargestTensor,
    assert_same_gradients,
    collate,
    pair_rows,
    ragged_pairs,
    ragged_rows,
    text_rows,
    tiny_model,
    tiny_tokenizer,
    words,
)
from transformers import TrainingArguments
from transformers.trainer_utils import set_seed
from trl import DPOConfig, SFTConfig, SFTTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.trainer.base_config import _BaseConfig

import liger_trainer
from liger_trainer import (
    LigerDPOConfig,
    LigerDPOTrainer,
    LigerSFTConfig,
    LigerTrainingArguments,
)
from liger_trainer.trainers.base import LigerTrainerMixin
from liger_trainer.verify.observed import KeepGradients

SPLITS = [(8, 1), (4, 2), (1, 8)]
LLAMA_AND_SLOWLY_QWEN3 = ["llama", pytest.param("qwen3", marks=pytest.mark.slow)]
OFTEN = [("llama", "full", "plain"), ("llama", "lora", "checkpointing"), ("gemma2", "full", "plain")]
CELLS = [  # marked slow: rarely used combinations
    pytest.param(*cell, marks=() if cell in OFTEN else pytest.mark.slow)
    for cell in itertools.product(("llama", "qwen3", "gemma2", "granite"), ("full", "lora"), ("plain", "checkpointing"))
]
# Adam's first steps take the sign of a gradient, even of one that is only rounding.
SGD = {"learning_rate": 0.1, "optim": "sgd", "max_grad_norm": 0.0, "per_device_eval_batch_size": 4}
SFT_METRICS = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens")

PAIR_SPLITS = [(4, 1), (1, 4)]
LORA = ["q_proj", "v_proj", "gate_proj", "down_proj"]
WORDS = 4096  # the vocabulary of `assert_no_logits`
CHUNK_BYTES = 8 * 4 * WORDS  # eight rows of logits at a time, in fp32


@dataclasses.dataclass
class Limits:
    """How far two trainings may be apart.

    Attributes:
        sizes (`dict`): For a metric, the smallest number that its error is relative to, or the names of other metrics
            whose largest value is that number. A difference of two numbers agrees to a part of those numbers, not of
            itself.
        floor (`float`): The error of a gradient is relative to its norm, or to this part of the largest gradient's.
        steps (`int` or `None`): How many steps' gradients are compared. Unset: all.
        finite (`bool`): No metric may be NaN or infinite.
        zeros (`bool`): A gradient may be zero, as of A in a LoRA that starts with B = 0.
    """

    sizes: dict
    floor: float = 1e-3
    steps: int | None = None
    finite: bool = False
    zeros: bool = True


# Means of thousands of logits of both signs, and differences of log-probabilities of whole sequences, of a size of tens
LIMITS = Limits(
    {"logits/chosen": 0.01, "logits/rejected": 0.01}
    | dict.fromkeys(("kl", "rewards/chosen", "rewards/rejected", "rewards/margins", "log_odds_chosen"), 1.0)
)
# Adam enlarges errors in the steps after the first.
PAIR_LIMITS = Limits(
    {
        "rewards/margins": ("rewards/chosen", "rewards/rejected"),
        "log_odds_chosen": ("logps/chosen", "logps/rejected"),
        "logits/chosen": 1e-3,
        "logits/rejected": 1e-3,
    },
    floor=0.0,
    steps=1,
    finite=True,
    zeros=False,
)
# Differences of sums of log-probabilities near -80, and means of logits that cancel, are right to 1e-7 of them.
REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
DPO_LIMITS = Limits(dict.fromkeys((*REWARDS, "logits/chosen", "logits/rejected"), 0.2), floor=0.0, steps=1, finite=True)


def arguments(args_class, trainer_class, folder, split, **options):
    """The arguments that all these trainers share, and `options`."""
    shared = {
        "output_dir": str(folder / trainer_class.__name__),
        "per_device_train_batch_size": split[0],
        "gradient_accumulation_steps": split[1],
        "gradient_checkpointing": False,
        "bf16": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return args_class(**(shared | options))


def trainer_on(rows, trainer_class, args, model, given):
    """A trainer of a copy of `model`. With an evaluation, it has the same rows."""
    rows = Dataset.from_list(rows)
    given = {"processing_class": tiny_tokenizer(), "train_dataset": rows} | given
    if args.eval_strategy != "no":
        given.setdefault("eval_dataset", rows)
    return trainer_class(model=copy.deepcopy(model), args=args, **given)


def run(
    trainer_class, model, folder, split=(8, 1), rows=None, eval_rows=None, train=True, trainer_options=None, **options
):
    """Train two steps of 8 rows with `Trainer` or `SFTTrainer`, stock or ours.

    Returns the metrics of every step and the trainer. These are the loss and the gradient norm, or `SFT_METRICS`.
    Without `train`, the metrics are None.
    """
    is_sft = issubclass(trainer_class, SFTTrainer)
    is_ours = issubclass(trainer_class, LigerTrainerMixin)
    rows = rows or ragged_rows()
    given = trainer_options or {}
    options = {"num_train_epochs": 1, "learning_rate": 1e-2} | options
    if is_sft:
        options.setdefault("max_length", 64)
        args = arguments(LigerSFTConfig if is_ours else SFTConfig, trainer_class, folder, split, **options)
        trainer = trainer_on(rows, trainer_class, args, model, given)
        reuse_rows(trainer)
    else:
        options.setdefault("remove_unused_columns", False)
        args_class = LigerTrainingArguments if is_ours else TrainingArguments
        args = arguments(args_class, trainer_class, folder, split, **options)
        given = {"train_dataset": rows, "eval_dataset": eval_rows, "data_collator": collate} | given
        trainer = trainer_class(model=copy.deepcopy(model), args=args, **given)
    if not train:
        return None, trainer
    trainer.train()
    names = SFT_METRICS if is_sft else ("loss", "grad_norm")
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return torch.tensor([[log[name] for name in names] for log in logs], dtype=torch.float64), trainer


def reuse_rows(trainer):
    """Evaluate on the training rows. TRL would prepare the same rows a second time, which takes as long as a step."""
    if trainer.eval_dataset is None:
        trainer.eval_dataset = trainer.train_dataset


def assert_same_numbers(got, want, rtol=1e-5):
    """Compare two results of `run`, number by number."""
    torch.testing.assert_close(got, want, rtol=rtol, atol=0)


def build(trainer_class, args_class, model, folder, rows, split=(4, 1), trainer_options=None, **options):
    """A trainer with plain SGD, which passes an error in a gradient on as it is. Adam enlarges errors of tiny ones."""
    options = SGD | {"max_steps": 1} | options
    args = arguments(args_class, trainer_class, folder, split, **options)
    trainer = trainer_on(rows, trainer_class, args, model, copy.deepcopy(trainer_options or {}))
    if isinstance(trainer, LigerTrainerMixin) and trainer.model.get_output_embeddings() is not None:
        assert trainer.uses_fused_head == (trainer.args.use_liger and trainer.args.liger_config is None)
    return trainer


def build_pairs(trainer_class, args_class, model, folder, split=(4, 1), trainer_options=None, **options):
    """A trainer of two steps over `pair_rows()`. TRL turns dropout off by default; it would draw other numbers."""
    options = {"learning_rate": 1e-2, "num_train_epochs": 1, "per_device_eval_batch_size": 3} | options
    args = arguments(args_class, trainer_class, folder, split, **options)
    given = dict(trainer_options or {})
    if getattr(args, "precompute_ref_log_probs", False):
        given["eval_dataset"] = Dataset.from_list(pair_rows())
    trainer = trainer_on(pair_rows(), trainer_class, args, model, given)
    reuse_rows(trainer)
    return trainer


def build_dpo(trainer_class, model, folder, split=(4, 1), rows=None, trainer_options=None, **options):
    """A trainer of two steps over `ragged_pairs()`. Without an adapter, its reference is another model."""
    args_class = LigerDPOConfig if issubclass(trainer_class, LigerDPOTrainer) else DPOConfig
    options = SGD | {"max_length": 64, "num_train_epochs": 1} | options
    args = arguments(args_class, trainer_class, folder, split, **options)
    given = dict(trainer_options or {})
    if not hasattr(model, "peft_config") and "peft_config" not in given:
        given.setdefault("ref_model", tiny_model(model.config.model_type, seed=7))
    return trainer_on(rows or ragged_pairs(), trainer_class, args, model, given)


def letters(completions, **columns):
    """A reward that differs for almost every completion."""
    return [float(sum(map(ord, text)) % 11) for text in completions]


def with_reference(model, folder):
    """`model`, changed so that TRL's trainers load another model as its reference."""
    tiny_model(model.config.model_type, seed=7).save_pretrained(folder / "reference")
    model.config._name_or_path = str(folder / "reference")
    return model


def lora(**options):
    return LoraConfig(r=4, lora_alpha=8, target_modules=LORA, **options)


def with_lora(model, targets):
    """`model` with a LoRA on `targets`; no part of the LoRA is zero."""
    torch.manual_seed(3)
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, lora_dropout=0.0))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # B starts at zero, which would hide a missing gradient of A
            torch.nn.init.normal_(parameter, std=0.1)
    return model


class Plain:
    """The stock loss, written as a user's own. It must get whatever the stock trainer adds to its loss."""

    def token_loss(self, outputs, inputs):
        return -outputs.log_probs


def moved(trainer, part="lora_B"):
    """`trainer` with random values in adapter weights named like `part`. LoRA starts with B = 0, as the reference."""
    generator = torch.Generator().manual_seed(11)
    for name, parameter in trainer.model.named_parameters():
        if part in name:
            parameter.data.normal_(0, 0.5, generator=generator)
    return trainer


# Each method's trainer and config
STOCK = {
    method: (getattr(trl, f"{method}Trainer"), getattr(trl, f"{method}Config"))
    for method in ("SFT", "DPO", "KTO", "GRPO", "RLOO", "Distillation")
}
STOCK |= {"ORPO": (ORPOTrainer, ORPOConfig), "CPO": (CPOTrainer, CPOConfig)}


def ours(method):
    """Our trainer and its config, for a key of `STOCK`."""
    return getattr(liger_trainer, f"Liger{method}Trainer"), getattr(liger_trainer, f"Liger{method}Config")


def method_rows(method):
    """Eight rows that the trainers of `method` take."""
    generator = torch.Generator().manual_seed(4)
    if method == "SFT":
        return text_rows(8)
    if method in ("DPO", "ORPO", "CPO"):
        return pair_rows()
    rows = [{"prompt": words(generator, 2, 6)} for _ in range(8)]
    if method == "KTO":
        return [row | {"completion": f" w{i + 3} w9", "label": i % 3 != 1} for i, row in enumerate(rows)]
    return rows


def one(method, classes, folder, model=None, **options):
    """One trainer, `STOCK[method]` or `ours(method)`, with everything it needs: rows, a reference, a reward."""
    given = {}
    if method in ("GRPO", "RLOO"):
        options = {"num_generations": 2, "max_completion_length": 6} | options
        given = {"reward_funcs": letters}
    if method == "Distillation":
        options = {"max_completion_length": 6} | options
        given = {"teacher_model": tiny_model("llama", seed=7)}
    if method in ("DPO", "KTO"):
        given = {"ref_model": tiny_model("llama", seed=7)}
    if method == "RLOO":
        options["beta"] = 0.0  # otherwise it would load a reference
    model = model or tiny_model("llama")
    return build(*classes, model, folder, method_rows(method), trainer_options=given, **options)


def batch_of(trainer):
    return next(iter(trainer.get_train_dataloader()))


def logged_values(trainer, name):
    """The values of `name` in the logs of a trainer."""
    return [log[name] for log in trainer.state.log_history if name in log]


def without_times(log):
    return {name: value for name, value in log.items() if "time" not in name and "_per_second" not in name}


def trained(trainer):
    """Train from one seed. Return the logs without times, and the gradients of every step."""
    keep = KeepGradients()
    trainer.add_callback(keep)
    set_seed(trainer.args.seed)
    trainer.train()
    return [without_times(log) for log in trainer.state.log_history], keep.steps


def logged(trainer):
    """Train. Return every logged number but the times."""
    return trained(trainer)[0]


def step(trainer, batch=None, upstream=lambda loss, model: loss):
    """Loss, metrics and gradients of one batch, without an optimizer."""
    batch = batch_of(trainer) if batch is None else batch
    trainer.model.train()
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, batch)
    upstream(loss, trainer.model).backward()
    metrics = {name: values[-1] for name, values in trainer._stored_metrics["train"].items()}
    grads = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    return {"loss": loss.item()} | metrics, grads


# Of two ways to compute a step in fp32. Usually they differ by less than 1e-5; on processors with AMX by up to 1.5e-5.
RTOL = 2e-5


def assert_same_training(ours, stock, metrics=(), rtol=RTOL, loss_size=0.0, limits=LIMITS):
    """Train both. Every log and gradient agrees, and the stock trainer logged `metrics`. Return our logs.

    A loss that is a difference of larger numbers is compared relative to `loss_size`.
    """
    got, want = trained(ours), trained(stock)
    assert set(metrics) <= want[0][0].keys(), want[0][0].keys()
    if loss_size:
        sizes = limits.sizes | dict.fromkeys(("loss", "train_loss"), loss_size)
        limits = dataclasses.replace(limits, sizes=sizes)
    assert_same_run(got, want, rtol, limits)
    return got[0]


def assert_same_run(got, want, rtol=RTOL, limits=LIMITS):
    """Compare two results of `trained`."""
    (got_logs, got_grads), (want_logs, want_grads) = got, want
    for got_log, want_log in zip(got_logs, want_logs, strict=True):
        assert_same_metrics(got_log, want_log, rtol, limits)
    assert len(got_grads) == len(want_grads) > 0
    for got_step, want_step in zip(got_grads[: limits.steps], want_grads[: limits.steps], strict=True):
        compare_gradients(got_step, want_step, rtol, limits)
    assert any(grad.norm() > 0 for grad in want_grads[0].values()), "nothing was learned: nothing was compared"


def assert_same_step(got, want, rtol=1e-5, limits=PAIR_LIMITS):
    """Compare two results of `step`."""
    assert_same_metrics(got[0], want[0], rtol, limits)
    compare_gradients(got[1], want[1], rtol, limits)


def compare_gradients(got, want, rtol, limits):
    assert_same_gradients(got, want, rtol, limits.floor)
    zeros = [name for name, grad in want.items() if not grad.any()]
    assert limits.zeros or not zeros, f"{zeros} are zero: nothing was compared"


def assert_same_metrics(got, want, rtol=1e-5, limits=PAIR_LIMITS):
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert math.isfinite(value) or not limits.finite, f"{name} is {value}"
        both_nan = math.isnan(got[name]) and math.isnan(value)
        if got[name] != value and not both_nan:
            error = abs(got[name] - value)
            assert error <= rtol * size_of(name, want, limits.sizes), f"{name}: {got[name]} against {value}"


def size_of(name, log, sizes):
    """The number that an error of metric `name` is relative to."""
    least = sizes.get(name.removeprefix("eval_"), 0)
    if isinstance(least, tuple):
        prefix = "eval_" if name.startswith("eval_") else ""
        least = max(abs(log[prefix + other]) for other in least)
    return max(abs(log[name]), least)


def assert_no_logits(ours, stock):
    """Our largest tensor is the head's weight of 32 columns, for a model with `WORDS` and chunks of `CHUNK_BYTES`."""
    batch = batch_of(stock)
    labels = sum(int((batch[f"{kind}_labels"] != -100).sum()) for kind in ("chosen", "rejected"))
    tokens = 8 * max(batch["chosen_input_ids"].shape[1], batch["rejected_input_ids"].shape[1])
    assert tokens > labels > 32
    with LargestTensor() as largest:
        step(ours, batch)
        ours.prediction_step(ours.model, batch, prediction_loss_only=False)
    assert largest.numel == 32 * WORDS
    with LargestTensor() as control:
        step(stock, batch)
    assert control.numel >= tokens * WORDS


def assert_head_is_ours(trainer):
    assert isinstance(trainer, LigerTrainerMixin) and trainer.uses_fused_head


def loss_types(trainer_class) -> list[str]:
    """The loss types that the source of `trainer_class` compares with."""
    found = re.findall(r"loss_type (?:==|!=|in|not in) (\[[^\]]*\]|\"\w+\")", inspect.getsource(trainer_class))
    names = set()
    for text in found:
        value = ast.literal_eval(text)
        names |= set(value) if isinstance(value, list) else {value}
    return sorted(names)


def own_fields(args_class) -> set[str]:
    """The fields of a TRL config that not every config has. A new one needs a test, or a reason why not."""
    return {f.name for f in dataclasses.fields(args_class)} - {f.name for f in dataclasses.fields(_BaseConfig)}


# Options for writing completions, which have no part in scoring them.
WRITING = set(
    """
    model_init_kwargs trust_remote_code num_generations num_generations_eval generation_batch_size
    ds3_gather_for_generation shuffle_dataset top_p top_k min_p generation_kwargs chat_template_kwargs
    repetition_penalty cache_implementation use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode
    vllm_structured_outputs_regex vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout
    vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size reward_weights
    max_tool_calling_iterations log_completions log_multimodal num_completions_to_print log_unique_prompts
    log_completions_hub_repo use_transformers_continuous_batching transformers_continuous_batching_config
    use_transformers_paged
    """.split()
)
