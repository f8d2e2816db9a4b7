"""Every trainer has what its features' protocols say. mypy compares the protocols with what the features use."""

import inspect
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from tiny_models import collate, ragged_rows, tiny_model

from liger_trainer import LigerTrainer, LigerTrainingArguments
from liger_trainer.feature import Feature
from liger_trainer.trainers.features import FEATURES, FeatureArguments, FeaturedTrainer


def members_of(protocol):
    """The names that a protocol asks for: attributes with a hint, methods and properties."""
    bases = [base for base in protocol.__mro__ if getattr(base, "_is_protocol", False)]
    names = {name for base in bases for name in inspect.get_annotations(base)}
    methods = {name for base in bases for name in vars(base) if not name.startswith("_")}
    return sorted(names | methods)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    args = LigerTrainingArguments(output_dir=str(tmp_path_factory.mktemp("out")), report_to="none", use_cpu=True)
    return LigerTrainer(model=tiny_model("llama"), args=args, train_dataset=ragged_rows(), data_collator=collate)


@pytest.mark.parametrize("name", members_of(FeaturedTrainer))
def test_a_trainer_has_it(name, trainer):
    if name in ("_globalstep_last_logged", "_tr_loss"):
        trainer.train()  # transformers makes them when training starts
    assert hasattr(trainer, name)


@pytest.mark.parametrize("name", members_of(FeatureArguments))
def test_the_arguments_have_it(name, trainer):
    assert hasattr(trainer.args, name)


@pytest.mark.parametrize("feature", [type(feature) for feature in FEATURES], ids=lambda feature: feature.__name__)
def test_a_feature_says_what_it_reads_and_writes(feature):
    """By the protocols of its base, which its methods take: what is `Any` to mypy could read and write everything."""
    bases = [base for base in vars(feature).get("__orig_bases__", ()) if get_origin(base) is Feature]
    assert bases, f"{feature.__name__} does not name the protocols of its arguments and its trainer"
    arguments, its_trainer = get_args(bases[0])
    assert Any not in (arguments, its_trainer)
    for name in vars(Feature).keys() & vars(feature).keys():
        if inspect.isfunction(vars(feature)[name]):
            hints = get_type_hints(vars(feature)[name])
            assert hints.get("args", arguments) is arguments, name
            assert hints.get("trainer", its_trainer) is its_trainer, name
