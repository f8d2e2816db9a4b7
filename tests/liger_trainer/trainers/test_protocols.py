"""Trainers have every attribute that the protocols of our functions name.

The type checker reads transformers and TRL as `Any`, so it finds a field that no protocol names, but not one that a new
release has renamed.
"""

import functools
import typing

import pytest
from tiny_models import text_rows, tiny_model
from trainer_parity import build, one, ours

from liger_trainer import LigerTrainer, LigerTrainingArguments
from liger_trainer.command.rows.chat_template import TemplatedTrainer
from liger_trainer.command.rows.counts import CountedTrainer
from liger_trainer.command.rows.images import ImageTrainer
from liger_trainer.command.rows.preview import ShownTrainer
from liger_trainer.command.run.saving import RunTrainer, SavesWithManifest
from liger_trainer.command.run.summary import SummarizedTrainer
from liger_trainer.trainers.init_checks import CollatingTrainer, OwnLossTrainer, PredictingTrainer, UnpatchedTrainer
from liger_trainer.trainers.model_card import DescribedTrainer
from liger_trainer.trainers.online.beside_generation import EngineTrainer
from liger_trainer.trainers.online.old_policy import PolicyTrainer
from liger_trainer.trainers.online.reused_log_probs import ReusingTrainer
from liger_trainer.trainers.online.rows import GeneratingTrainer
from liger_trainer.trainers.online.sorted_rows import SortingTrainer
from liger_trainer.trainers.packed_images import PackingTrainer
from liger_trainer.trainers.router_loss import RoutedTrainer
from liger_trainer.verify.observed import RecordedTrainer
from liger_trainer.verify.sixteen_bits import PatchedTrainer

EVERY = (UnpatchedTrainer, OwnLossTrainer, PredictingTrainer, CollatingTrainer, RecordedTrainer, PatchedTrainer)
OF_ROWS = (CountedTrainer, ShownTrainer, ImageTrainer, RunTrainer, SummarizedTrainer)
ONLINE = (GeneratingTrainer, PolicyTrainer, ReusingTrainer, SortingTrainer, EngineTrainer)
PROTOCOLS = {
    "Trainer": (*EVERY, RoutedTrainer),
    "SFT": (*EVERY, *OF_ROWS, PackingTrainer, TemplatedTrainer, DescribedTrainer),
    "DPO": (*EVERY, *OF_ROWS),
    "KTO": (*EVERY, *OF_ROWS),
    "GRPO": (*EVERY, *ONLINE),
    "RLOO": (*EVERY, *ONLINE),
    "Distillation": (*EVERY, GeneratingTrainer),
}
# Set by a run of the command, right before training.
OF_A_RUN = set(SavesWithManifest.__annotations__)
# Only exist once `Trainer.train` runs, or are set by the chat template of a recipe.
LATER = {"current_gradient_accumulation_steps", "chat_template"}


def members(protocol):
    """The names that `protocol` and its protocol bases declare, with their annotations (None for methods)."""
    found = {}
    for owner in reversed(protocol.__mro__):
        if getattr(owner, "_is_protocol", False) and owner is not typing.Protocol:
            methods = {name: None for name in vars(owner) if callable(vars(owner)[name]) and not name.startswith("__")}
            properties = {name: None for name, value in vars(owner).items() if isinstance(value, property)}
            found |= methods | properties | owner.__annotations__
    return {name: kind for name, kind in found.items() if name != "_abc_impl"}


@functools.cache
def trainer_of(method, folder):
    if method == "Trainer":
        return build(LigerTrainer, LigerTrainingArguments, tiny_model("llama"), folder, text_rows(8))
    return one(method, ours(method), folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    yield tmp_path_factory.mktemp("trainers")
    trainer_of.cache_clear()


@pytest.mark.parametrize(
    "method, protocol",
    [
        pytest.param(method, protocol, id=f"{method}-{protocol.__name__}")
        for method, protocols in PROTOCOLS.items()
        for protocol in protocols
    ],
)
def test_a_trainer_has_what_a_protocol_names(method, protocol, folder):
    trainer = trainer_of(method, folder)
    names = members(protocol)
    assert names, "the protocol names something"
    missing = [name for name in names if not hasattr(trainer, name) and name not in OF_A_RUN | LATER]
    arguments = names.get("args")
    if getattr(arguments, "_is_protocol", False):
        missing += [f"args.{name}" for name in members(arguments) if not hasattr(trainer.args, name)]
    assert not missing, f"{type(trainer).__name__} has no {', '.join(missing)}"
