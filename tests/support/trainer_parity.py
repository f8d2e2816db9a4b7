"""Train a stock trainer of TRL and ours side by side, and compare every gradient and every logged number.

`build` makes a trainer of any method, `build_pairs` one of ORPO or CPO and `build_dpo` one of DPO, the latter two with
rows of their own. `assert_same_training` trains two of them. `assert_same_step` compares the results of `step`, which
runs one batch without an optimizer. `Limits` says how far numbers may be apart.
"""

import ast
import copy
import dataclasses
import inspect
import math
import re

import torch
from datasets import Dataset
from parity import KeepGradients, LargestTensor, assert_same_gradients, without_times
from peft import LoraConfig
from tiny_models import VOCAB, ragged_rows, tiny_model, tiny_tokenizer
from transformers.trainer_utils import set_seed
from trl import DPOConfig
from trl.trainer.base_config import _BaseConfig

from liger_trainer import LigerDPOConfig, LigerDPOTrainer
from liger_trainer.trainers.base import LigerTrainerMixin

SPLITS = [(4, 1), (1, 4)]
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


def words(generator, low, high):
    length = int(torch.randint(low, high, (), generator=generator))
    return text_of(torch.randint(3, VOCAB, (length,), generator=generator).tolist())


def text_of(ids):
    return " ".join(f"w{i}" for i in ids)


def kto_rows(n=8, seed=4):
    """Prompts with one labelled completion each, two good ones for each bad one."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {"prompt": words(generator, 2, 8), "completion": " " + words(generator, 2, 9), "label": i % 3 != 1}
        for i in range(n)
    ]


def pair_rows(n=8, seed=4):
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "prompt": words(generator, 2, 8),
            "chosen": " " + words(generator, 2, 9),
            "rejected": " " + words(generator, 2, 9),
        }
        for _ in range(n)
    ]


def ragged_pairs(n=8):
    """Prompts, chosen and rejected of very unequal lengths."""
    ids = [row["input_ids"] for row in ragged_rows(2 * n, seed=5)]
    return [
        {"prompt": text_of(a[:3]), "chosen": " " + text_of(a[3:]), "rejected": " " + text_of(b)}
        for a, b in zip(ids[:n], ids[n:], strict=True)
    ]


def arguments(args_class, trainer_class, folder, split, **options):
    """The arguments that all these trainers share, and `options`."""
    return args_class(
        output_dir=str(folder / trainer_class.__name__),
        per_device_train_batch_size=split[0],
        gradient_accumulation_steps=split[1],
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **({"gradient_checkpointing": False, "bf16": False} | options),
    )


def build(trainer_class, args_class, model, folder, rows, split=(4, 1), trainer_options=None, **options):
    """A trainer with plain SGD, which passes an error in a gradient on as it is. Adam enlarges errors of tiny ones."""
    defaults = {"learning_rate": 0.1, "max_steps": 1, "optim": "sgd", "per_device_eval_batch_size": 4}
    defaults["max_grad_norm"] = 0.0
    args = arguments(args_class, trainer_class, folder, split, **(defaults | options))
    rows = Dataset.from_list(rows)
    given = {"processing_class": tiny_tokenizer(), "train_dataset": rows}
    given |= {name: copy.deepcopy(value) for name, value in (trainer_options or {}).items()}
    if "eval_strategy" in options:
        given.setdefault("eval_dataset", rows)
    trainer = trainer_class(model=copy.deepcopy(model), args=args, **given)
    if isinstance(trainer, LigerTrainerMixin) and trainer.model.get_output_embeddings() is not None:
        assert trainer.uses_fused_head == (trainer.args.use_liger and trainer.args.liger_config is None)
    return trainer


def build_pairs(
    trainer_class, args_class, model, folder, split=(4, 1), tokenizer=None, trainer_options=None, **options
):
    """A trainer of two steps over `pair_rows()`. TRL turns dropout off by default; it would draw other numbers."""
    defaults = {"learning_rate": 1e-2, "num_train_epochs": 1, "per_device_eval_batch_size": 3}
    args = arguments(args_class, trainer_class, folder, split, **(defaults | options))
    rows = Dataset.from_list(pair_rows())
    evaluates = args.eval_strategy != "no" or getattr(args, "precompute_ref_log_probs", False)
    trainer = trainer_class(
        model=model if isinstance(model, str) else copy.deepcopy(model),
        args=args,
        train_dataset=rows,
        eval_dataset=rows if evaluates else None,
        processing_class=tokenizer or tiny_tokenizer(),
        **(trainer_options or {}),
    )
    if trainer.eval_dataset is None:  # TRL would prepare the same rows a second time
        trainer.eval_dataset = trainer.train_dataset
    return trainer


def build_dpo(trainer_class, model, folder, split=(4, 1), rows=None, trainer_options=None, **options):
    """A trainer of two steps over `ragged_pairs()`. Without an adapter, its reference is another model."""
    args_class = LigerDPOConfig if issubclass(trainer_class, LigerDPOTrainer) else DPOConfig
    # Adam's first steps take the sign of a gradient, even of one that is only rounding.
    defaults = {"learning_rate": 0.1, "optim": "sgd", "max_grad_norm": 0.0, "max_length": 64, "num_train_epochs": 1}
    defaults["per_device_eval_batch_size"] = 4
    args = arguments(args_class, trainer_class, folder, split, **(defaults | options))
    given = {"processing_class": tiny_tokenizer()} | (trainer_options or {})
    if not hasattr(model, "peft_config") and "peft_config" not in given:
        given.setdefault("ref_model", tiny_model(model.config.model_type, seed=7))
    rows = Dataset.from_list(rows or ragged_pairs())
    return trainer_class(model=copy.deepcopy(model), args=args, train_dataset=rows, **given)


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


def moved(trainer, part="lora_B"):
    """`trainer` with random values in adapter weights named like `part`. LoRA starts with B = 0, as the reference."""
    generator = torch.Generator().manual_seed(11)
    for name, parameter in trainer.model.named_parameters():
        if part in name:
            parameter.data.normal_(0, 0.5, generator=generator)
    return trainer


def batch_of(trainer):
    return next(iter(trainer.get_train_dataloader()))


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


def assert_same_training(ours, stock, metrics=(), rtol=1e-5, loss_size=0.0, limits=LIMITS):
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


def assert_same_run(got, want, rtol=1e-5, limits=LIMITS):
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


def logps_of_logits(model, batch):
    """Sum of the log-probabilities of each completion, from real logits."""
    log_p = torch.log_softmax(model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits, -1)
    per_token = log_p[:, :-1].gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    return (per_token * batch["completion_mask"][:, 1:]).sum(1).chunk(2)


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
