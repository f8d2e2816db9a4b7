"""The list of features, which arguments and trainers walk."""

import dataclasses

from liger_trainer import LigerTrainingArguments
from liger_trainer.trainers.features import FEATURES, FeatureFields


def test_arguments_have_the_fields_of_all_features():
    fields = {
        field.name
        for feature in FEATURES
        if feature.fields is not object
        for field in dataclasses.fields(feature.fields)
    }
    assert fields == {field.name for field in dataclasses.fields(FeatureFields)}
    assert fields <= {field.name for field in dataclasses.fields(LigerTrainingArguments)}
