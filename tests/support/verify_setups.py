"""Inputs for `liger_trainer.verify`: a config of any model type, a few rows, and a trainer.

`assert_found` puts a bug into a trainer while `verify` runs. Constants name the checks of `verify`.
"""

import pytest
from peft import LoraConfig
from transformers import AutoConfig, DataCollatorForSeq2Seq, Trainer

import liger_trainer
from liger_trainer.head.deferred import DeferredLogits
from liger_trainer.verify import Setup, verify
from liger_trainer.verify.small import small_tokenizer


def texts(n):
    return [f"word{i} and {i * 7 % 13} more about {i * 3} things that are said here, number {i}" for i in range(n)]


def rows_of(method, n=24):
    one, other = texts(n), texts(n)[::-1]
    if method in ("SFT", "Medusa"):
        return [{"prompt": a, "completion": " it is " + b} for a, b in zip(one, other, strict=True)]
    if method in ("DPO", "ORPO", "CPO"):
        return [
            {"prompt": a, "chosen": " yes " + b[:30], "rejected": " no " + b[5:50]}
            for a, b in zip(one, other, strict=True)
        ]
    if method == "KTO":
        return [
            {"prompt": a, "completion": " so " + b[:30], "label": i % 2 == 0}
            for i, (a, b) in enumerate(zip(one, other, strict=True))
        ]
    if method == "":
        return [
            {"input_ids": list(range(i, i + 12 + i % 7)), "labels": [-100] * 3 + list(range(i + 3, i + 12 + i % 7))}
            for i in range(n)
        ]
    return [{"prompt": text} for text in one]


def setup_of(method, model_type="llama", config=None, **parts):
    """A setup of `Liger{method}Trainer`. `config` sets fields of the model's config, `parts` fields of the setup."""
    trainer = getattr(liger_trainer, f"Liger{method}Trainer")
    names = {"Medusa": "LigerMedusaConfig", "": "LigerTrainingArguments"}
    arguments = getattr(liger_trainer, names.get(method, f"Liger{method}Config"))
    model = AutoConfig.for_model(model_type, **(config or {}))
    if method in ("GRPO", "RLOO"):
        parts = {"rewards": 1, "options": {"beta": 0.1}} | parts
    if method == "Distillation":
        parts.setdefault("teacher", AutoConfig.for_model(model_type))
    if method == "":
        parts.setdefault(
            "trainer_arguments", {"data_collator": DataCollatorForSeq2Seq(small_tokenizer(), padding=True)}
        )
    return Setup(trainer, arguments, model, rows_of(method), **parts)


def lora(*names, **options):
    names = names or ("q_proj", "v_proj", "gate_proj", "up_proj", "down_proj")
    return LoraConfig(r=4, lora_alpha=16, target_modules=list(names), task_type="CAUSAL_LM", **options)


def failed(*args, **parts):
    """The names of the failed checks, with their messages."""
    report = verify(setup_of(*args, **parts))
    return {check.name: check.detail for check in report.checks if check.verdict == "FAILED"}


LOSSES = "losses and gradient norm"
GRADIENTS = "gradients"
UPDATES = "updates of weights"
TRAINS = "what trains"
NORMS = "norms in 16 bits"
PACKED = "packed rows = separate rows"
PADDED = "padded rows = unpadded rows"
SPLIT = "accumulation 1 x 4 = 4 x 1"
REFERENCE = "reference model"
MERGED = "adapter merged = applied"
RESUMED = "saved and resumed = uninterrupted"
LOGGED = "every logged number"
CHUNKS = "head in chunks = in one"
LEFT = "padding on the left"
DROPOUT = "dropout drawn once"
ADAM_LOGS = "Adam, 2 epochs: logs"
ADAM_GRADIENTS = "Adam, 2 epochs: gradients"
ADAM_WEIGHTS = "Adam, 2 epochs: weights, states"
SEEN = "Adam, 2 epochs: what is seen"
EVALUATION = "evaluation"
UNCHANGED = "evaluation changes nothing"
SAVED = "model as saved"
GATES = "gates in 16 bits"
HEAD = "head in 16 bits"
BF16 = "training in bf16"


def in_the_head(**changes):
    """Call the fused loss with other arguments than it should get."""

    def seed(patch):
        stock = DeferredLogits.fused

        def fused(self, function, *args, **kwargs):
            return stock(self, lambda hidden, **own: function(hidden, **(own | changes)), *args, **kwargs)

        patch.setattr(DeferredLogits, "fused", fused)

    return seed


def once_built(module, name, faulty):
    """Replace a function of ours by `faulty` while a trainer trains, but not during the earlier proofs."""

    def seed(patch):
        stock = getattr(module, name)
        init = Trainer.__init__
        train = Trainer.train
        built = []

        def initialised(self, *args, **kwargs):
            built.clear()
            init(self, *args, **kwargs)

        def trained(self, *args, **kwargs):
            built.append(True)
            train(self, *args, **kwargs)

        patch.setattr(Trainer, "__init__", initialised)
        patch.setattr(Trainer, "train", trained)
        patch.setattr(module, name, lambda *a, **k: faulty(stock, *a, **k) if built else stock(*a, **k))

    return seed


def of_a_trainer(cls, name, faulty):
    """Replace a method by `faulty(stock method, self, ...)`."""

    def seed(patch):
        stock = getattr(cls, name)
        patch.setattr(cls, name, lambda self, *args, **kwargs: faulty(stock, self, *args, **kwargs))

    return seed


def cases(seeds, quick=None):
    """The parameters of `assert_found` for each seed; those that do not start with `quick` are slow."""
    return [
        pytest.param(*seeded, id=name, marks=() if quick and name.startswith(quick) else pytest.mark.slow)
        for name, seeded in seeds.items()
    ]


def setups(seeds):
    """Each setup of the seeds, once."""
    found = {}
    for _, what, parts, _ in seeds.values():
        found.setdefault(str((what, parts)), (what, parts))
    return list(found.values())


def assert_found(seed, what, parts, found_by, monkeypatch):
    seed(monkeypatch)
    assert found_by <= failed(*what, **parts).keys()


def assert_clean(what, parts):
    assert failed(*what, **parts) == {}
