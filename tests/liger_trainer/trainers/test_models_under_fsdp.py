"""The devices on which TRL's trainers place models they load themselves, if FSDP will shard them."""

import importlib
import types

import pytest
import trl

from liger_trainer.trainers import trl as ours

MODULES = ["sft_trainer", "dpo_trainer", "kto_trainer", "reward_trainer", "grpo_trainer", "rloo_trainer"]


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_a_loaded_model_is_not_spread_over_gpus_under_fsdp(name, sharded, monkeypatch):
    module = importlib.import_module(f"{trl.__name__}.trainer.{name}")
    stand_in = types.SimpleNamespace(create_model_from_path=lambda path, **kwargs: (path, kwargs))
    assert callable(module.create_model_from_path)  # TRL still has the name
    monkeypatch.setattr(ours, "is_fsdp_enabled", lambda: sharded)
    replaced = ours._for_fsdp(stand_in)
    assert set(replaced) <= set(ours._for_fsdp(module))
    create = replaced["create_model_from_path"]
    assert create("model", dtype="auto") == ("model", {"dtype": "auto"} | ({"device_map": None} if sharded else {}))
    assert create("model", device_map="cuda:1") == ("model", {"device_map": "cuda:1"})
