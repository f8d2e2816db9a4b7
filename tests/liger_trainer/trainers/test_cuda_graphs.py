"""The option `cuda_graphs`: its values, each reason why no step is captured, and where a user sees both.

`tests/liger_trainer/varlen/graphs/test_captured.py` tests what a captured step computes.
"""

import json
import logging

import pytest
from tiny_models import collate, ragged_rows
from trainer_parity import assert_same_numbers, run
from transformers import TrainingArguments
from varlen_batches import RerunRecorder, capture_on_cpu, model_of

from liger_trainer import LigerSFTConfig, LigerTrainer, LigerTrainingArguments
from liger_trainer.trainers import cuda_graphs
from liger_trainer.trainers.cuda_graphs import uncaptured_reason

ON_CPU = "it trains on cpu, and CUDA graphs need a CUDA GPU"


@pytest.mark.parametrize("args_class", [LigerTrainingArguments, LigerSFTConfig])
def test_values(args_class, tmp_path):
    def settled(**given):
        return args_class(output_dir=str(tmp_path), use_cpu=True, bf16=False, **given).cuda_graphs

    assert settled() == "auto"
    found = [settled(cuda_graphs=value) for value in ("auto", "Auto", "true", "True", True, "false", False)]
    assert found == ["auto", "auto", True, True, True, False, False]
    for wrong in ("yes", "on", "", None, 1):
        with pytest.raises(ValueError, match=f"cuda_graphs is {wrong!r}; expected auto, true or false"):
            settled(cuda_graphs=wrong)


def test_auto_on_a_cpu_trains_uncaptured_and_says_why(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="liger_trainer"):
        _, trainer = run(LigerTrainer, model_of(), tmp_path)
    assert trainer.captured_steps.off == ON_CPU
    written = json.loads((tmp_path / "LigerTrainer" / "liger_report.json").read_text())["cuda_graphs"]
    assert written == trainer.captured_steps.to_dict()
    assert written == {
        "off": ON_CPU,
        "sizes": [],
        "capture_seconds": 0.0,
        "calls_replayed": 0,
        "calls_not_captured": {},
    }
    assert [text for text in caplog.messages if "cuda_graphs" in text] == [
        f"cuda_graphs: steps are not captured, because {ON_CPU}."
    ]


def test_true_on_a_cpu_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=f"^cuda_graphs is true, but {ON_CPU}. Set cuda_graphs: auto, or false.$"):
        run(LigerTrainer, model_of(), tmp_path, cuda_graphs=True)


@pytest.mark.parametrize("options", [{"cuda_graphs": False}, {"use_liger": False}], ids=str)
def test_switched_off_nothing_is_said(options, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="liger_trainer"):
        _, trainer = run(LigerTrainer, model_of(), tmp_path, **options)
    assert trainer.captured_steps is None and "cuda_graphs" not in caplog.text
    assert trainer.liger_report is None or "cuda_graphs" not in trainer.liger_report.to_dict()


# Where steps can be captured


@pytest.mark.parametrize("split", [(8, 1), (4, 2)], ids=str)
def test_captured_steps_equal_uncaptured_ones_and_are_reported(split, tmp_path, monkeypatch, caplog):
    want, _ = run(LigerTrainer, model_of(), tmp_path, split=split, cuda_graphs=False)
    capture_on_cpu(monkeypatch)
    with caplog.at_level(logging.INFO, logger="liger_trainer"):
        got, trainer = run(LigerTrainer, model_of(), tmp_path, split=split, cuda_graphs="true")
    assert_same_numbers(got, want)
    written = json.loads((tmp_path / "LigerTrainer" / "liger_report.json").read_text())["cuda_graphs"]
    micro_batches = split[1]
    assert written["off"] is None and written["calls_replayed"] == micro_batches, "all of the second step"
    assert written["calls_not_captured"]["the first call of its kind"] == 1
    replayed = f"cuda_graphs: {micro_batches} of {2 * micro_batches} calls of the backbone replayed"
    assert f"{replayed}, {len(written['sizes'])} captures in" in caplog.text
    assert not [record for record in caplog.records if record.levelno > logging.INFO and "cuda" in record.message]


def test_true_warns_if_nothing_was_captured(tmp_path, monkeypatch, caplog):
    """`true` raises for reasons known in advance. Calls that cannot be captured show up only in training."""

    class Full(RerunRecorder):
        def make_room(self, size):
            return False

    for value, level in (("auto", logging.INFO), ("true", logging.WARNING)):
        capture_on_cpu(monkeypatch, Full)
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="liger_trainer"):
            run(LigerTrainer, model_of(), tmp_path, cuda_graphs=value)
        (told,) = (record for record in caplog.records if "calls of the backbone replayed" in record.message)
        assert told.levelno == level and "too little memory is left" in told.message


DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}


@pytest.mark.parametrize(
    ("model_type", "config", "reason"),
    [
        ("llama", DYNAMIC, "its rotary frequencies depend on the longest position"),
        ("qwen3_5_text", {}, "its layers keep a state, and run on as many rows as a batch has"),
    ],
    ids=["dynamic rope", "state"],
)
def test_a_model_of_which_no_call_can_be_captured(model_type, config, reason, tmp_path, monkeypatch):
    capture_on_cpu(monkeypatch)
    _, trainer = run(LigerTrainer, model_of(model_type, **config), tmp_path)
    assert reason in " ".join(trainer.captured_steps.uncaptured), trainer.captured_steps.to_dict()
    assert len(trainer.captured_steps.uncaptured) == 1, "it is known from the first call on"


def test_calls_that_do_not_run_on_real_tokens_are_counted_too(tmp_path, monkeypatch):
    """NEFTune's hook sees the embeddings."""
    capture_on_cpu(monkeypatch)
    _, trainer = run(LigerTrainer, model_of(), tmp_path, neftune_noise_alpha=5)
    ((reason, count),) = trainer.captured_steps.uncaptured.items()
    assert reason.endswith("on a Embedding would see rows without padding") and count == 2


class OwnLoss(LigerTrainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


def spread(trainer):
    trainer.model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}


REASONS = {
    "use_liger": (lambda t: setattr(t.args, "use_liger", False), "use_liger is false"),
    "deepspeed": (lambda t: setattr(t, "is_deepspeed_enabled", True), "several processes train"),
    "fsdp": (lambda t: setattr(t, "is_fsdp_enabled", True), "several processes train"),
    "gpus": (lambda t: setattr(t.args, "_n_gpu", 2), "spread over several devices"),
    "device map": (spread, "spread over several devices"),
    "compiled": (lambda t: setattr(t.args, "torch_compile", True), "torch_compile is set"),
    "optimizer": (lambda t: setattr(t.args, "optimizer_in_backward", True), "optimizer_in_backward steps weights"),
    "auto": (lambda t: setattr(t.args, "activation_checkpointing", "auto"), "activation_checkpointing is 'auto'"),
    "offload": (lambda t: setattr(t.args, "gradient_checkpointing_kwargs", {"offload": True}), "moved to the host"),
    "TRL's offload": (lambda t: setattr(t.args, "activation_offloading", True), "moved to the host"),
}


def trainer_of(tmp_path, trainer_class=LigerTrainer, model=None, **options):
    args = LigerTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **options)
    return trainer_class(
        model=model_of() if model is None else model, args=args, train_dataset=ragged_rows(), data_collator=collate
    )


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return trainer_of(tmp_path_factory.mktemp("trainer"))


@pytest.mark.parametrize("name", REASONS)
def test_reasons_that_are_known_before_training(name, trainer, monkeypatch):
    """Each reason alone, on a device that can capture. `true` raises with the same reason."""
    change, reason = REASONS[name]
    before = dict(vars(trainer.args))
    own = {key: getattr(trainer, key) for key in ("is_deepspeed_enabled", "is_fsdp_enabled")}
    assert uncaptured_reason(trainer) == ON_CPU
    monkeypatch.setattr(cuda_graphs, "CAPTURES_ON", ("cpu",))
    assert uncaptured_reason(trainer) is None
    change(trainer)
    try:
        found = uncaptured_reason(trainer)
        assert reason in found
        trainer.args.cuda_graphs = True
        with (
            pytest.raises(ValueError, match="cuda_graphs is true, but .*Set cuda_graphs: auto, or false") as caught,
            cuda_graphs.CudaGraphs().around_training(trainer),
        ):
            pass
        assert found in str(caught.value)
    finally:
        vars(trainer.args).clear()
        vars(trainer.args).update(before)
        vars(trainer).update(own)
        vars(trainer.model).pop("hf_device_map", None)


def test_reasons_of_a_class_and_of_a_model(tmp_path, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "CAPTURES_ON", ("cpu",))
    assert uncaptured_reason(trainer_of(tmp_path, OwnLoss)) == "OwnLoss overrides compute_loss"
    switched_off = trainer_of(tmp_path, liger_config={"varlen_attention": False})
    assert uncaptured_reason(switched_off) == "its model does not run on real tokens (varlen_attention)"


def test_stock_arguments_capture_nothing(tmp_path, monkeypatch):
    """They have no field to turn it off."""
    capture_on_cpu(monkeypatch)
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", max_steps=2, save_strategy="no")
    trainer = LigerTrainer(model=model_of(), args=args, train_dataset=ragged_rows(), data_collator=collate)
    trainer.train()
    assert trainer.uses_liger and trainer.captured_steps is None
