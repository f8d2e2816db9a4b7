"""Runs of `training.py` and `scaling.py`: models by shape, a trainer for every arm, one measured run."""

import importlib
import os
import tempfile
import time
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import _trainers
import preferences
import torch
from _cases_bases import BASES
from _flop import flop_of_layers, flop_of_products, flop_per_token
from _measure import DEVICE
from _memory_kinds import MemoryKinds
from _models import MODELS, spread_attention
from _processes import release
from _rows import pairs_of, sft_rows, tokens_of

# "+ Liger" stands for use_liger_kernel=True, "+ compile" for torch_compile=True, "+ compile_layers" for the same with
# accelerate's use_regional_compilation. "- varlen" and "- float8" stand for liger_config={"varlen_attention": False}
# and {"float8": False}, "- graphs" for cuda_graphs="false", "- shared" for share_prompts=False, "- host" for auto
# without host memory, and "- in_backward" for the ordinary step when --optimizer_in_backward is set. "+ fp8" needs
# torchao. For ours it is fp8=True. accelerate leaves other trainers' fp8 layers untrained on one GPU, so torchao
# converts the same layers before the trainer is built. "+ rowwise" is fp8_recipe="rowwise".
ARMS = {
    "sft": (
        "LigerSFTTrainer",
        "LigerSFTTrainer - varlen",
        "LigerSFTTrainer - graphs",
        "LigerSFTTrainer + fp8",
        "LigerSFTTrainer + fp8 + rowwise",
        "LigerSFTTrainer + fp8 - float8",
        "LigerSFTTrainer + fp8 + compile",
        "LigerTrainer",
        "LigerTrainer - varlen",
        "LigerTrainer - in_backward",
        "LigerTrainer - host",
        "LigerTrainer + fp8",
        "LigerTrainer + fp8 - float8",
        "Trainer",
        "Trainer + Liger",
        "SFTTrainer",
        "SFTTrainer + Liger",
        "SFTTrainer + Liger + fp8",
        "SFTTrainer + compile + fp8",
        "SFTTrainer + compile_layers + fp8",
        "SFTTrainer + Liger + compile_layers + fp8",
        "Trainer + compile",
        "LigerTrainer + compile",
    ),
    "dpo": (
        "LigerDPOTrainer",
        "LigerDPOTrainer - shared",
        "LigerDPOTrainer - graphs",
        "LigerDPOTrainer - graphs - shared",
        "LigerDPOTrainer - varlen",
        "DPOTrainer",
        "DPOTrainer + Liger",
    ),
}
STOCK = ("Trainer", "SFTTrainer", "DPOTrainer")
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


@dataclass
class Run:
    """The settings of one training run, the same in all its processes."""

    model: str
    batch: int  # rows, or pairs for DPO, of one process
    length: int  # tokens of a row, or of each sequence in a pair; the maximum for real rows
    trainer: str = "sft"
    steps: int = 14
    skip: int = 4  # steps before the clock starts, to warm up allocator, cuBLAS and Triton
    layers: int | None = None  # instead of the model's own number
    data: str | None = None
    checkpointing: bool = False
    auto: bool = False  # our trainers choose the checkpointed layers
    memory_budget: float | None = None  # GiB, for that choice
    optimizer_in_backward: bool = False  # of our trainers; none clips gradients then
    lora: int | None = None  # rank; on every linear layer but the head, or only on attention in a mixture of experts
    nf4: bool = False  # with lora: the frozen layers are 4-bit, with double quantisation
    mxfp4: bool = False  # with lora: the experts of gpt-oss keep their checkpoint's 4-bit form
    offload: bool = False  # with checkpointing: the layers' inputs wait on the host, in our trainers
    lora_experts: bool = False  # on the parameters of experts, in addition to attention
    teacher: str | None = None  # the shape of a second, larger model in distillation; unset: the student's shape
    autocast: bool = True  # bf16=True multiplies PEFT's fp32 adapters in bf16; without it they run in fp32
    vocab: int | None = None  # instead of the model's own
    workers: int = 0
    # Wait like the stock trainer: for the batch to reach the GPU, and for each loss, to see if it is finite
    waits: bool = True
    processes: int = 1
    rows: str = "full"  # a kind of `_rows.py`
    prompt: int = preferences.RANDOM_PROMPT  # tokens of the prompts of random pairs


def build(run, dtype=torch.bfloat16, seed=0):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    model_type, shape = MODELS[run.model]
    shape = shape | ({"vocab_size": run.vocab} if run.vocab else {})
    shape = shape | ({"num_hidden_layers": run.layers} if run.layers else {})
    kind = _trainers.KINDS.get(run.trainer)
    model_class = AutoModelForCausalLM
    if kind is not None and kind.is_classifier:
        shape = shape | {"num_labels": 1, "pad_token_id": 0}
        model_class = AutoModelForSequenceClassification
    config = AutoConfig.for_model(model_type, **shape, use_cache=False)
    torch.manual_seed(seed)
    with torch.device("meta" if run.mxfp4 else DEVICE):
        model = model_class.from_config(config, dtype=dtype)
    if run.mxfp4:
        return in_mxfp4(model)
    spread_attention(model)
    return in_nf4(model) if run.nf4 else model


def in_mxfp4(model):
    """`model`, a gpt-oss on the meta device, with random weights. Its experts never exist in 16 bits."""
    from liger_trainer.base_weights.mxfp4 import pack_experts

    pack_experts(model)
    model.to_empty(device=DEVICE)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(DEVICE)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.fill_(1)
        elif parameter.is_floating_point():
            parameter.data.normal_(std=0.02)
        elif name.endswith("_blocks"):
            parameter.random_(0, 256)
        else:
            parameter.fill_(120)  # times 2^-7: a standard deviation of 0.02
    return model


def in_nf4(model):
    """`model` with all linear layers but the head as `load_in_4bit` loads them, with double quantisation."""
    for name, linear in list(model.named_modules()):
        if type(linear) is not torch.nn.Linear or linear is model.get_output_embeddings():
            continue
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, BASES["bitsandbytes NF4, double"](linear))
        linear.weight = None
    model.is_loaded_in_4bit = True
    release()
    return model


def tokenizer_of():
    """A tokenizer for TRL's trainers. They need one even if the rows are token ids."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(WordLevel({"<pad>": 0, "</s>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>")


def classes_of(arm):
    """(trainer class, arguments class)."""
    import transformers
    import trl

    import liger_trainer

    name = arm.split(" ")[0]
    if name.startswith("Liger"):
        module = liger_trainer
    else:
        module = trl if hasattr(trl, name) else transformers
    if name in ("CPOTrainer", "ORPOTrainer"):
        method = name.removesuffix("Trainer").lower()
        module = importlib.import_module(f"trl.experimental.{method}")
    config = {"Trainer": "TrainingArguments"}.get(name.removeprefix("Liger"))
    if config is None:
        config = name.removesuffix("Trainer") + "Config"
    elif name.startswith("Liger"):
        config = "Liger" + config
    return getattr(module, name), getattr(module, config)


def make_trainer(arm, run, callbacks, **more):
    """The trainer of `arm`. `more` are further fields of its arguments, in addition to those from `run` and `arm`."""
    kind = _trainers.KINDS.get(run.trainer)
    stock_class, args_class = classes_of(arm)
    is_trl = any(base.__module__.startswith("trl.") for base in stock_class.__mro__)
    model = build(run)
    options = more | switch_options(arm, model)
    inputs = {}
    if run.rows != "full":
        options["train_sampling_strategy"] = "sequential"
    if is_trl:
        if "max_length" in args_class.__dataclass_fields__:
            options.setdefault("max_length", run.length)  # the rows are cut already
        inputs["processing_class"] = tokenizer_of()
    given = rows_for(arm, run, kind, stock_class, is_trl, model.config.get_text_config().vocab_size)
    options |= given.options | run_options(arm, run)
    inputs |= given.inputs
    if run.lora:
        lora = lora_of(run, model, kind)
        if is_trl:
            inputs["peft_config"] = lora
        else:
            model = with_adapter(model, lora, run)
    offloads = run.offload and arm.startswith("Liger")
    args = args_class(
        output_dir=tempfile.mkdtemp(),
        max_steps=run.steps,
        per_device_train_batch_size=run.batch,
        logging_steps=5,
        logging_first_step=True,
        dataloader_num_workers=run.workers,
        learning_rate=1e-5,
        bf16=DEVICE == "cuda" and run.autocast,
        optim="adamw_torch_fused",
        report_to="none",
        save_strategy="no",
        gradient_checkpointing_kwargs={"use_reentrant": False} | ({"offload": True} if offloads else {}),
        use_cpu=DEVICE == "cpu",
        disable_tqdm=True,
        lr_scheduler_type="constant",
        remove_unused_columns=False,
        dataloader_drop_last=True,
        **options,
    )
    trainer_class = counting(stock_class, kind is not None and kind.online, **given.methods)
    return trainer_class(model=model, args=args, train_dataset=given.rows, callbacks=callbacks, **inputs)


def switch_options(arm, model):
    """The fields that the switches in the name of `arm` set. Stock trainers with "fp8" get their layers converted."""
    options = {}
    switches = set(arm.split(" ")[1:])
    if "Liger" in switches:
        options["use_liger_kernel"] = True
    if {"compile", "compile_layers"} & switches:
        options["torch_compile"] = True
    if "compile_layers" in switches:
        os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "true"
    if "fp8" in switches:
        if arm.startswith("Liger"):
            from liger_trainer.command.run.launch import load_on_every_process

            options |= {"fp8": True, "fp8_recipe": "rowwise"} if "rowwise" in switches else {"fp8": True}
            load_on_every_process(True, None, None)  # each has made the model
        else:
            in_float8(model)
    off = {"varlen": "varlen_attention", "float8": "float8"}.keys() & switches
    if off:
        options["liger_config"] = {"varlen_attention" if name == "varlen" else name: False for name in off}
    if "graphs" in switches:
        options["cuda_graphs"] = "false"
    if "shared" in switches:
        options["share_prompts"] = False
    return options


class Given(NamedTuple):
    """The rows of a trainer and what they ask for: fields of its arguments, inputs of its class, and methods."""

    rows: Any
    options: dict[str, Any]
    inputs: dict[str, Any]
    methods: dict[str, Any]


def rows_for(arm, run, kind, stock_class, is_trl, vocab):
    """The rows of `run`, for a trainer of TRL's `kind` (None for SFT, DPO and Trainer)."""
    from datasets import Dataset

    if run.trainer == "dpo":
        # The rows are token ids, and TRL's DPOTrainer has no option for that.
        methods = {"_prepare_dataset": lambda self, dataset, *args: dataset}
        rows = Dataset.from_list(pairs_of(run, vocab))
        inputs = {} if run.lora else {"ref_model": build_frozen(arm, run)}
        return Given(rows, {}, inputs, methods)
    if kind is not None:
        return rows_of_kind(arm, run, kind, stock_class, vocab)
    rows, collator = sft_rows(run, vocab, tokenizer_of())
    if not is_trl:
        return Given(rows, {}, {"data_collator": collator}, {})
    options = {"dataset_kwargs": {"skip_prepare_dataset": True}, "packing": run.rows == "packed"}
    return Given(Dataset.from_list(rows), options, {}, {})


def rows_of_kind(arm, run, kind, stock_class, vocab):
    """The rows of a trainer in `_trainers.KINDS`, with the frozen models and the reward that it needs."""
    from datasets import Dataset

    rows, made_of = _trainers.rows_of(run, vocab)
    options = kind.options(run)
    inputs = {}
    if kind.frozen == "teacher_model":
        inputs["teacher_model"] = build_frozen(arm, replace(run, model=run.teacher or run.model), seed=1)
    elif kind.frozen and not run.lora:
        inputs[kind.frozen] = build_frozen(arm, run)
    if kind.loads_reference and not run.lora:
        _trainers.load_reference(stock_class, lambda: build_frozen(arm, run))
    if "num_generations" in options:
        inputs["reward_funcs"] = _trainers.prefer_the_first
    return Given(Dataset.from_list(rows), options, inputs, kind.methods(stock_class, made_of))


def run_options(arm, run):
    """The fields for memory and for waiting on the GPU that `run` asks for."""
    options = {}
    if run.auto and arm.startswith("Liger"):
        options |= {"activation_checkpointing": "auto", "memory_budget": run.memory_budget}
        options["host_memory_budget"] = 0 if arm.endswith("- host") else None
    else:
        options["gradient_checkpointing"] = run.checkpointing
    if run.optimizer_in_backward:
        options["max_grad_norm"] = 0.0
        if arm.startswith("Liger") and not arm.endswith("- in_backward"):
            options["optimizer_in_backward"] = True
    if not run.waits:
        options |= {"accelerator_config": {"non_blocking": True}, "logging_nan_inf_filter": False}
    return options


def lora_of(run, model, kind):
    """The config of the adapter."""
    from peft import LoraConfig, TaskType

    experts = ["experts.gate_up_proj", "experts.down_proj"] if run.lora_experts else None
    # On a mixture of experts, PEFT's "all-linear" includes the experts and the router.
    modules = ATTENTION if any(n.endswith(".experts") for n, _ in model.named_modules()) else "all-linear"
    # Without its task, PEFT's "all-linear" is the head of a classifier too.
    task = TaskType.SEQ_CLS if kind is not None and kind.is_classifier else None
    return LoraConfig(
        r=run.lora, lora_alpha=2 * run.lora, target_modules=modules, target_parameters=experts, task_type=task
    )


def with_adapter(model, lora, run):
    """`model` with an adapter, for `Trainer`, which takes no config of one."""
    from peft import get_peft_model

    model = get_peft_model(model, lora)
    if run.checkpointing:
        model.enable_input_require_grads()
    return model


def build_frozen(arm, run, seed=0):
    """The reference or the teacher of a trainer. TRL patches the policy alone, so Liger's layers are put in here."""
    model = build(run, seed=seed)
    if arm.endswith("+ Liger"):
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model, fused_linear_cross_entropy=False)
    return model


def in_float8(model):
    """Convert all linear layers of `model` except the first and the last, as accelerate does for fp8."""
    from accelerate.utils.ao import convert_model_to_fp8_ao
    from torchao.float8 import Float8LinearConfig

    convert_model_to_fp8_ao(model, config=Float8LinearConfig())


def counting(stock_class, online=False, **methods):
    """`stock_class` with other `methods`, and with the token counts of each batch in its attribute `counted`.

    A trainer that is `online` gets prompts, and counts in its `methods`.
    """

    def training_step(self, model, inputs, *args, **kwargs):
        if not online:
            self.counted.append(tokens_of(inputs))
        return stock_class.training_step(self, model, inputs, *args, **kwargs)

    return type(stock_class.__name__, (stock_class,), methods | {"counted": [], "training_step": training_step})


def clock_of(run):
    """A callback that records the time, in seconds, at the end of step `run.skip` and of the last step."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        start = end = None

        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == run.skip == 0:
                self.start = self.now()

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == run.skip:
                self.start = self.now()
            if state.global_step == state.max_steps:
                self.end = self.now()

        @staticmethod
        def now():
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter()

    return Clock()


def timed_steps(trainer, run, clock):
    """Train. Return tokens/s, ms per step, peak memory in GiB, and the length that attention costs per token.

    Tokens are counted without padding, in the batches trained on while the clock ran: `step_tokens` for each of these
    steps. `padding` is the share of padding in all positions.
    """
    trainer.train()
    seconds = clock.end - clock.start
    shared = int(os.environ.get("PARALLELISM_CONFIG_CP_SIZE", 1))  # processes that have a part of each row
    tokens, squares, positions = zip(*(map(int, step) for step in trainer.counted[run.skip : run.steps]), strict=True)
    return {
        "tokens_per_s": sum(tokens) / seconds / shared,
        "step_tokens": tokens,
        "padding": 1 - sum(tokens) / sum(positions),
        "ms": seconds / (run.steps - run.skip) * 1e3,
        "gib": torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else None,
    }, sum(squares) / sum(tokens)


def train(arm, run, callbacks=()):
    """Train as `run` says. Return a row: the row of `timed_steps`, first losses, FLOP per token."""
    clock, kinds = clock_of(run), MemoryKinds()
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trainer = make_trainer(arm, run, [clock, kinds, *callbacks])
    kinds.watch(trainer)
    if run.nf4 and DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()  # of quantising
    timed, length = timed_steps(trainer, run, clock)
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    row = {"arm": arm} | timed
    row |= {
        "gib_by_kind": kinds.gib,
        "losses": losses[:3],
        "flop_per_token": flop_per_token(trainer.model, run, length),
        "flop_per_token_of_products": flop_of_products(trainer.model, run),
        "flop_per_token_of_layers_forward": flop_of_layers(trainer.model),
        "layers": trainer.model.config.get_text_config().num_hidden_layers,
    }
    report = getattr(trainer, "liger_report", None)
    if report is not None:
        from liger_trainer.trainers.shared_prompts import shared_prompts_of

        row["patched"], shared = report.one_line(), shared_prompts_of(trainer.model)
        if shared is not None:
            row["shared_prompts"] = shared.to_dict()
    captured = getattr(trainer, "captured_steps", None)
    if captured is not None:
        row["captured"] = captured.to_dict()
    chosen = getattr(trainer, "checkpointing", None)
    if chosen is not None:  # it has reset torch's peak counter
        row["chosen"], row["gib"] = chosen.to_dict(), max(row["gib"] or 0, chosen.highest / 2**30)
    trainer.accelerator.free_memory()
    return row


def flag_losses(rows, stock_arms=STOCK, name="losses", first_alone=False):
    """Add a note to every row with losses unlike the stock trainer's, if that ran.

    The first may differ by 1 %; later ones, which bf16 has driven apart, by 5 %. Another field, `name`, may differ by 5
    and 10 %, and so may the loss of a reward model: 16 numbers in bf16 decide it, not thousands of log-probabilities.
    With `first_alone`, later ones are not compared.
    """
    few_numbers = name != "losses" or any(row.get("method") == "reward" for row in rows)
    first, later = (0.05, 0.10) if few_numbers else (0.01, 0.05)
    stock = next((row[name] for row in rows if row["arm"] in stock_arms and row.get(name)), None)
    for row in rows:
        if stock is None or not row.get(name):
            continue
        pairs = list(zip(row[name], stock, strict=True))
        if first_alone:
            pairs = pairs[:1]
        for k, (got, want) in enumerate(pairs):
            if not abs(got - want) <= (later if k else first) * abs(want):
                row["note"] = f"WRONG {'LOSS' if name == 'losses' else name}: {got:.4f}, stock {want:.4f}"
                break


def flag_tokens(rows):
    """Add a note to every row that has another number of tokens per step than the first."""
    first = next((row["step_tokens"] for row in rows if "step_tokens" in row), None)
    for row in rows:
        if row.get("step_tokens", first) != first:
            got, want = next(pair for pair in zip(row["step_tokens"], first, strict=True) if pair[0] != pair[1])
            row["note"] = f"OTHER ROWS: a step of {got} tokens, of the first trainer {want}"


def check_arms(parser, trainer, arms):
    for arm in arms:
        if arm not in ARMS[trainer]:
            parser.error(f"--arms has {arm!r}; expected, for --trainer {trainer}: {', '.join(ARMS[trainer])}")
