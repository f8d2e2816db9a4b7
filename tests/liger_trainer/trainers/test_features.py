"""Every trainer has what its features' protocols say. mypy compares the protocols with what the features use."""

import inspect

import pytest
from tiny_models import collate, ragged_rows, tiny_model

from liger_trainer import LigerTrainer, LigerTrainingArguments
from liger_trainer.trainers.features import FeatureArguments, FeaturedTrainer


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
