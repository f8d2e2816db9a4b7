"""Axolotl's plugin manager loads the plugin, its config takes the options, and the patched model trains.

Axolotl pins older versions of transformers and TRL, and its trainers cannot be imported with newer ones. A stock
Trainer trains here. `axolotl train` itself runs only with Axolotl's versions: `pip install axolotl pytest
pytest-timeout`, and `pytest -m "" tests/liger_trainer/integrations/test_axolotl.py` with the checkout in PYTHONPATH.
"""

import os
import re
import subprocess
import sys

import pytest
import yaml
from tiny_models import collate, ragged_rows, tiny_model, tiny_tokenizer
from transformers import Trainer, TrainingArguments

from liger_trainer.head.module import has_fused_head

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
    """A config after Axolotl's validation, with the options of the loaded plugins."""
    from axolotl.integrations.config import merge_input_args
    from axolotl.utils.dict import DictDefault

    _, whole = merge_input_args()
    values = {
        "base_model": "model",
        "datasets": [{"path": "rows.jsonl", "type": "alpaca"}],
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "learning_rate": 0.01,
        "plugins": [PLUGIN],
    }
    return DictDefault(whole.model_fields["use_liger"].default is True and values | keys)


def test_it_patches_the_model_that_axolotl_has_loaded(manager, tmp_path):
    model = tiny_model("llama")
    manager.post_model_load(config(liger_config={"rope": False}), model)
    assert has_fused_head(model)
    args = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=4,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        save_strategy="no",
    )
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


LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True}
KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")


@pytest.mark.parametrize(
    "given, left_off", [({}, True), ({"lora_o_kernel": True}, False), ({"use_liger": False}, False)]
)
def test_axolotl_does_not_switch_its_kernels_for_adapters_on(given, left_off, manager):
    """Axolotl does so if none of the options is set. If a config asks for them itself, that is an error here too."""
    from axolotl.utils.dict import DictDefault

    cfg = DictDefault(LORA | given)
    manager.plugins[PLUGIN].register(cfg)
    assert [cfg[name] for name in KERNELS] == [given.get(name) if given else False for name in KERNELS]


def losses_of_axolotl(folder, **keys):
    """Run `axolotl train` for two steps. Return the logged losses."""
    rows = [f'{{"instruction": "w{i} w4", "input": "", "output": "w{2 * i} w{3 * i}"}}' for i in range(5, 21)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    config = {
        "base_model": str(folder / "model"),
        "output_dir": str(folder / "out"),
        "sequence_len": 64,
        "seed": 1,
        "datasets": [{"path": str(folder / "rows.jsonl"), "ds_type": "json", "type": "alpaca"}],
        "dataset_prepared_path": str(folder / "prepared"),
        "dataset_num_proc": 1,
        "special_tokens": {"pad_token": "<pad>"},
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
        "learning_rate": 0.01,
        "optimizer": "adamw_torch",
        "lr_scheduler": "constant",
        "bf16": False,
        "attn_implementation": "sdpa",
        "save_strategy": "no",
        "logging_steps": 1,
        "plugins": [PLUGIN],
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config | keys))
    variables = {"PYTHONPATH": os.pathsep.join(sys.path), "AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "axolotl.cli.train", str(folder / "run.yaml")]
    run = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert ("fused_linear_cross_entropy 1/1" in run.stdout + run.stderr) == (keys.get("use_liger") is not False)
    return re.findall(r"'(loss|grad_norm)': '([0-9.e-]+)'", run.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_axolotl_trains_with_it(adapter, tmp_path):
    pytest.importorskip(
        "axolotl.core.trainers", reason="Axolotl's trainers need its own versions", exc_type=ImportError
    )
    tiny_model("llama").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    keys = {}
    if adapter:  # Axolotl does not seed an adapter's first weights
        losses_of_axolotl(tmp_path, **LORA)
        keys = LORA | {"lora_model_dir": str((tmp_path / "out").rename(tmp_path / "adapter"))}
    off = dict.fromkeys(KERNELS, False) if adapter else {}
    want = losses_of_axolotl(tmp_path, use_liger=False, **keys, **off)
    assert len(want) == 4 and losses_of_axolotl(tmp_path, **keys) == want
