"""Runs a few training steps of a small model, with the stock trainer or with ours, and keeps the results."""

import copy
import dataclasses
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stderr
from dataclasses import dataclass, field
from typing import Any

import datasets
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PrinterCallback, set_seed

from liger_trainer.head.module import output_head
from liger_trainer.medusa.trainer import LigerMedusaTrainer
from liger_trainer.patching.core.hooks import as_of_a_user
from liger_trainer.patching.core.report import OPERATIONS
from liger_trainer.trainers.base import stock_class
from liger_trainer.verify.medusa import PlainMedusaTrainer
from liger_trainer.verify.observed import KeepGradients, Recorder, Tensors, copies, optimizer_states
from liger_trainer.verify.small import long_rows, pseudo_random_reward, small_rows, small_tokenizer, write_model
from liger_triton.sizes import chunks_of_at_most

HEAD = "fused_linear_cross_entropy"
MAX_LENGTH = 256  # tokens, which are bytes here
LONG = 384  # tokens of a long row: more than 256, so that it takes several blocks of 128 or 256
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adafactor", "rmsprop", "adagrad")  # need no other package
BF16_EPS = torch.finfo(torch.bfloat16).eps / 2  # a number's largest relative error in bf16
CHUNK_ROWS = 8  # of logits, where a head is cut into chunks

# Options that every run sets to these values, whatever the recipe says.
_FIXED_OPTIONS = {
    "max_steps": 2,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 0.05,
    # SGD passes an error in a gradient on unchanged. Adam's first steps only keep the sign, even of a rounding error.
    "optim": "sgd",
    "warmup_steps": 0,
    "logging_steps": 1,
    "save_strategy": "no",
    "eval_strategy": "no",
    "report_to": "none",
    "bf16": False,
    "fp16": False,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "max_length": MAX_LENGTH,
    "max_completion_length": 8,
    "num_generations": 2,
    "mask_truncated_completions": False,
    "logging_nan_inf_filter": False,
    "cuda_graphs": "false",  # captured steps have their own check
    "skip_checks": ["all"],  # the rates and lengths of these runs are not the user's
}
# Prefixes of recipe keys that are ignored: they do not change what a step computes, they need another machine, or they
# draw noise in the shape of a batch.
_LEFT_OUT = (
    "accelerator_config",
    "auto_find",
    "chat_template_path",
    "dataloader_",
    "dataset_num_proc",
    "ddp_",
    "deepspeed",
    "eval_",
    "fp8",
    "fsdp",
    "generation_batch",
    "greater_is_better",
    "host_memory",
    "hub_",
    "include_",
    "jit_",
    "load_best",
    "log_completions",
    "logging_",
    "medusa_init",
    "memory_budget",
    "metric_for",
    "model_init_kwargs",
    "neftune",
    "num_train_epochs",
    "optim",
    "output_dir",
    "parallelism",
    "push_",
    "resume_",
    "reward_weights",
    "run_name",
    "sample_",
    "save_",
    "steps_per_generation",
    "teacher_model",
    "tf32",
    "torch_compile",
    "train_mtp",
    "mtp_targets",
    "use_cpu",
    "use_vllm",
    "vllm_",
    "warmup",
)


@dataclass
class Setup:
    """The training to verify."""

    trainer: type  # a class of `liger_trainer`
    arguments: type  # its config class
    config: Any  # the model's config; its weights are not read
    rows: list[dict[str, Any]]  # a few, in the form that the trainer takes
    options: dict[str, Any] = field(default_factory=dict)  # values of the trainer's config, unless defaults
    peft_config: Any = None
    model_init: dict[str, Any] = field(default_factory=dict)  # such as `attn_implementation`
    teacher: Any = None  # the teacher's config
    rewards: int = 0  # number of reward functions
    trainer_arguments: dict[str, Any] = field(default_factory=dict)  # such as a `data_collator`
    seed: int = 0  # of all weights

    @property
    def stock(self) -> type:
        """The TRL or transformers class that the trainer extends."""
        return stock_class(self.trainer)

    @property
    def is_medusa(self) -> bool:
        return issubclass(self.trainer, LigerMedusaTrainer)

    @property
    def generates(self) -> bool:
        """Return whether the trainer generates the completions that it trains on."""
        return self.stock.__name__ in ("GRPOTrainer", "RLOOTrainer", "DistillationTrainer")

    @property
    def packs(self) -> bool:
        return bool(self.options.get("packing") or self.options.get("padding_free"))


@dataclass
class Run:
    """The result of a training: its logs, the gradients of each step, and the parameters before and after."""

    trainer: Any  # ours or a stock one, of any kind that a recipe names
    logs: list[dict[str, float]]  # of the steps
    gradients: list[Tensors]
    before: Tensors
    after: Tensors
    states: Tensors  # of the optimizer, at the end
    recorder: Recorder | None = None

    @property
    def updates(self) -> Tensors:
        return {name: self.after[name] - value for name, value in self.before.items()}


class Bench:
    """Builds the small models of a setup in an empty folder, and runs trainers on them."""

    def __init__(self, setup: Setup, folder: str) -> None:
        self.setup = setup
        self.folder = folder
        self.tokenizer = small_tokenizer(*(setup.options.get(key) for key in ("eos_token", "pad_token")))
        first = len(self.tokenizer.all_special_ids)
        tokens = range(first, len(self.tokenizer))
        self.rows = datasets.Dataset.from_list(small_rows(setup.rows, tokens))
        self.long_rows = datasets.Dataset.from_list(long_rows(setup.rows, tokens))
        self.path = os.path.join(folder, "model")
        self.teacher = os.path.join(folder, "teacher")
        for path, config, seed in ((self.path, setup.config, 0), (self.teacher, setup.teacher, 1)):
            if config is not None:
                write_model(config, len(self.tokenizer), setup.seed + seed, path)
                self.tokenizer.save_pretrained(path)

    def model(self, adapter: bool = True, dropout: float = 0.0) -> nn.Module:
        """Return the small model as transformers and PEFT build it, unpatched."""
        set_seed(self.setup.seed)
        init = self.setup.model_init | (self.dropouts() if dropout else {})
        model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32, **init)
        if adapter and self.setup.peft_config is not None:
            from peft import get_peft_model

            model = get_peft_model(model, self._adapter(dropout))
        return model

    def _adapter(self, dropout: float = 0.0) -> Any:
        """Return the setup's adapter config with this dropout rate; by default 0, since masks depend on padding."""
        adapter = copy.deepcopy(self.setup.peft_config)
        for name in _dropouts(adapter):
            setattr(adapter, name, dropout)
        return adapter

    def routers_draw(self) -> bool:
        """Return whether the model's routers draw random numbers, even without effect."""
        return any("jitter" in name for name in AutoConfig.from_pretrained(self.path).to_dict())

    def dropouts(self) -> dict[str, float]:
        """Return the dropout fields of the model's config, each with a rate that has a visible effect."""
        config = AutoConfig.from_pretrained(self.path).to_dict()
        return {name: 0.2 for name, value in config.items() if _drops_activations(name) and isinstance(value, float)}

    def build(
        self, kind: str, trainer_arguments: dict[str, Any] | None = None, dropout: float = 0.0, **options: Any
    ) -> Any:
        """Build a trainer: `"ours"`; `"stock"`; or `"plain"`, which is ours unpatched and with real logits.

        `trainer_arguments` are further arguments of the trainer, and `options` further fields of its config. With
        `dropout`, the model and its adapter drop out activations.
        """
        setup = self.setup
        model_init = setup.model_init | (self.dropouts() if dropout else {})
        trainer_class = setup.trainer
        args_class = setup.arguments
        if kind == "stock":
            trainer_class = setup.stock
            args_class = stock_class(setup.arguments)
        elif kind == "plain" and setup.is_medusa:
            trainer_class = PlainMedusaTrainer

        # The config: the recipe's values, then the ones that every run has, then the ones of this run.
        values = {key: value for key, value in setup.options.items() if not key.startswith(_LEFT_OUT)} | _FIXED_OPTIONS
        if setup.options.get("max_length", 0) is None:
            values["max_length"] = None
        if "activation_checkpointing" in values:  # `auto` would measure a GPU
            values["gradient_checkpointing"] = str(values.pop("activation_checkpointing")).lower() != "false"
        values |= options | {"use_cpu": not torch.cuda.is_available()}
        values.setdefault("output_dir", os.path.join(self.folder, "out"))
        if kind == "plain":
            values["liger_config"] = {name: name == HEAD for name in OPERATIONS}
        elif kind == "ours":  # treat small tensors as a GPU run treats large ones
            values["liger_config"] = {"rebuild_above_mib": 0} | (values.get("liger_config") or {})

        # The trainer's arguments: rows, model, adapter, teacher and rewards.
        trainer_arguments = (
            {"train_dataset": self.rows, "processing_class": self.tokenizer}
            | setup.trainer_arguments
            | (trainer_arguments or {})
        )
        if setup.stock is transformers.Trainer:
            trainer_arguments["model"] = self.model(dropout=dropout)
        else:
            values["model_init_kwargs"] = {"dtype": "float32"} | model_init
            trainer_arguments |= {"model": self.path, "peft_config": self._adapter(dropout)}
        if setup.teacher is not None:
            trainer_arguments["teacher_model"] = self.teacher
        if setup.rewards:
            trainer_arguments["reward_funcs"] = [pseudo_random_reward] * setup.rewards

        # The stock config lacks our fields, and some trainers lack fields of the others.
        known = {f.name for f in dataclasses.fields(args_class) if f.init}
        set_seed(setup.seed)
        args = args_class(**{k: v for k, v in values.items() if k in known})
        if args.n_gpu > 1:  # then Trainer would use nn.DataParallel
            args._n_gpu = 1
        trainer = trainer_class(args=args, **trainer_arguments)
        trainer.remove_callback(PrinterCallback)
        if kind == "plain":  # then the head gives real logits
            head: Any = output_head(trainer.model)
            head.register_forward_hook(_look)
        return trainer

    def run(
        self,
        kind: str,
        disturbed: bool = True,
        collate: Callable | None = None,
        resume: str | None = None,
        recorder: KeepGradients | None = None,
        nudge: int = 0,
        **options: Any,
    ) -> Run:
        """Build a trainer of `kind` with `options` and train it, from the checkpoint `resume` if given.

        `disturbed` changes the trained weights first, so that an adapter has an effect and the policy differs from its
        reference. `nudge` is the seed of another change, about as large as a bf16 rounding. `collate` maps the
        trainer's collator to another.
        """
        trainer = self.build(kind, **options)
        if disturbed:
            _disturb(trainer.model, self.setup.seed)
        if nudge:
            _nudge(trainer.model, nudge)
        if collate is not None:
            trainer.data_collator = collate(trainer.data_collator)
        keep = KeepGradients() if recorder is None else recorder
        if isinstance(keep, Recorder):
            keep.attach(trainer)
        else:
            trainer.add_callback(keep)
        before = copies(trainer.model)
        set_seed(self.setup.seed)
        trainer.train(resume_from_checkpoint=resume)
        logs = [log for log in trainer.state.log_history if "loss" in log]
        states = optimizer_states(trainer.optimizer, trainer.model)
        recorder = keep if isinstance(keep, Recorder) else None
        return Run(trainer, logs, keep.steps, before, copies(trainer.model), states, recorder)


def _dropouts(adapter: Any) -> list[str]:
    """Return the dropout fields of an adapter's config, for activations or ranks."""
    names = vars(adapter) if adapter is not None else {}
    return [name for name, value in names.items() if "dropout" in name and isinstance(value, float)]


def _drops_activations(name: str) -> bool:
    return "drop" in name and "layerdrop" not in name and "layer_drop" not in name


def in_chunks() -> AbstractContextManager[None]:
    """Context manager: a head computes its logits for a few rows at a time."""
    return chunks_of_at_most(CHUNK_ROWS)


def _disturb(model: nn.Module, seed: int) -> None:
    """Change each trained weight by 5 %, and give adapters and weights of zeros random values."""
    generator = torch.Generator().manual_seed(seed + 2)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not p.requires_grad:
                continue
            drawn = torch.randn(p.shape, generator=generator).to(p)
            if not p.any() or "lora_" in name:
                p.copy_(0.5 * drawn / p.shape[-1] ** 0.5)
            else:
                p.mul_(1 + 0.05 * drawn)


def _nudge(model: nn.Module, seed: int) -> None:
    """Change each trained weight by about as much as rounding it to bf16 would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                drawn = torch.randn(p.shape, generator=generator).to(p)
                p.mul_(1 + BF16_EPS * drawn)


@as_of_a_user
def _look(*_: Any) -> None:
    """Do nothing. A head with a user's hook is not fused."""


class OtherOrder(TorchDispatchMode):
    """Context manager: matrix products sum their terms in the opposite order."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm", "addmm", "baddbmm"):
            *rest, a, b = args
            args = (*rest, a.flip(-1), b.flip(-2))
        return func(*args, **(kwargs or {}))


@contextmanager
def quiet() -> Iterator[None]:
    """Context manager: hides warnings, progress bars and logs of the dozen trainings."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
