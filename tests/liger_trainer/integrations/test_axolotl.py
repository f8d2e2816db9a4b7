"""Axolotl's plugin manager loads the plugin, its config takes the options, and the model that it patches trains.

Axolotl pins older versions of transformers and TRL, and its own trainers cannot be imported beside newer ones. So a
stock Trainer trains here.
"""

import pytest
from tiny_models import collate, ragged_rows, tiny_model
from transformers import Trainer, TrainingArguments

from liger_trainer.head.find import has_fused_head

pytest.importorskip("axolotl.integrations.base", reason="axolotl is not installed")
PLUGIN = "liger_trainer.integrations.axolotl.LigerTrainerPlugin"


@pytest.fixture
def manager():
    from axolotl.integrations.base import PluginManager

    found = PluginManager.get_instance()
    found.register(PLUGIN)
    yield found
    found.plugins.clear()


def config(**keys):
    """A config as Axolotl validates it, with the options of the plugins that are loaded."""
    from axolotl.integrations.config import merge_input_args
    from axolotl.utils.dict import DictDefault

    _, whole = merge_input_args()
    values = {"base_model": "model", "datasets": [{"path": "rows.jsonl", "type": "alpaca"}], "micro_batch_size": 1,
              "gradient_accumulation_steps": 1, "learning_rate": 0.01, "plugins": [PLUGIN]}  # fmt: skip
    return DictDefault(whole.model_fields["use_liger"].default is True and values | keys)


def test_it_patches_the_model_that_axolotl_has_loaded(manager, tmp_path):
    model = tiny_model("llama")
    manager.post_model_load(config(liger_config={"rope": False}), model)
    assert has_fused_head(model)
    args = TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=4, logging_steps=1, report_to="none",
        use_cpu=True, disable_tqdm=True, remove_unused_columns=False, save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(model=model, args=args, train_dataset=ragged_rows(8), data_collator=collate)
    trainer.train()
    assert len([log for log in trainer.state.log_history if "loss" in log]) == 2


def test_switched_off_it_patches_nothing(manager):
    model = tiny_model("llama")
    manager.post_model_load(config(use_liger=False), model)
    assert not has_fused_head(model)


def test_options_are_typed(manager):
    from pydantic import ValidationError

    from liger_trainer.integrations.axolotl import LigerTrainerArgs

    assert [one.rpartition(".")[2] for one in manager.get_input_args()] == ["LigerTrainerArgs"]
    for wrong in ({"liger_config": {"ropes": False}}, {"use_liger": "perhaps"}, {"liger_rms_norm": True}):
        with pytest.raises(ValidationError, match="ropes|use_liger|liger_rms_norm"):
            LigerTrainerArgs(**wrong)
    LigerTrainerArgs(liger_rms_norm=True, use_liger=False)
