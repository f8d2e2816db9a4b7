"""What is left behind by building trainers: in TRL's modules, in other threads, and in models that were refused."""

import threading

import pytest
import torch
import trl.trainer.distillation_trainer as trl_distillation
import trl.trainer.sft_trainer as trl_sft
from step_parity import assert_same_training, build
from tiny_models import collate, ragged_rows, tiny_model, tiny_tokenizer
from trainer_runs import Plain
from trl import SFTTrainer
from trl_trainers import STOCK, one, ours, rows_of

from liger_trainer import (
    LigerMedusaConfig,
    LigerMedusaTrainer,
    LigerSFTTrainer,
    LigerTrainer,
    LigerTrainingArguments,
    apply_liger,
)
from liger_trainer.head.calls import install_fused_head
from liger_trainer.head.find import has_fused_head, head_options
from liger_trainer.head.outputs import HeadOptions

NAMES = ("add_fused_lm_head", "BaseTunerLayer")


def test_a_class_between_ours_and_trls(tmp_path):
    """Its `__init__` would call TRL's own, with TRL's head. Before ours, it works."""

    class Between(SFTTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)

    class Wrong(LigerSFTTrainer, Between):
        pass

    class Right(Between, LigerSFTTrainer):
        pass

    config = ours("SFT")[1]
    with pytest.raises(TypeError, match="Between.__init__ comes between.*Put Between before the Liger trainer"):
        one("SFT", (Wrong, config), tmp_path)
    assert one("SFT", (Right, config), tmp_path).head_is_ours


def test_two_trainers_of_two_threads(tmp_path):
    stock = [getattr(trl_sft, name) for name in NAMES]
    barrier, trainers = threading.Barrier(2), {}

    def build(name):
        (tmp_path / name).mkdir()
        barrier.wait(30)
        trainers[name] = one("SFT", ours("SFT"), tmp_path / name)

    threads = [threading.Thread(target=build, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [getattr(trl_sft, name) for name in NAMES] == stock
    assert all(trainer.head_is_ours and trainer.liger_report["rope"].swapped for trainer in trainers.values())
    for trainer in trainers.values():
        assert "entropy" in head_options(trainer.model).outputs


def test_the_distillation_loss_leaves_trl_s_module_alone(tmp_path):
    names = ("ChunkedDivergenceFunction", "_use_triton", "_chunked_divergence_loss")
    stock = [getattr(trl_distillation, name) for name in names]
    trainer, seen = one("Distillation", ours("Distillation"), tmp_path), []
    trainer.model.register_forward_hook(lambda *_: seen.append([getattr(trl_distillation, name) for name in names]))
    trainer.teacher_model.model.register_forward_hook(
        lambda *_: seen.append([getattr(trl_distillation, name) for name in names])
    )
    trainer.train()
    assert len(seen) > 1 and all(globals_seen == stock for globals_seen in seen)


def bound(model):
    """What the modules of `model` have of their own, but for parameters, children and hooks."""
    others = {*torch.nn.Module().__dict__, "model_tags", "_is_accelerate_prepared"}  # of the stock trainers
    return {
        name: {key: value for key, value in vars(module).items() if key not in others}
        for name, module in model.named_modules()
    }


def refused(method, model, folder, ref_model=None, bf16=False):
    """Build a trainer that is refused when all its models are patched."""
    if method == "HF":
        args = LigerTrainingArguments(
            output_dir=str(folder), use_cpu=True, report_to="none", label_smoothing_factor=0.1, bf16=False
        )
        own = type("Own", (Plain, LigerTrainer), {})
        own(model=model, args=args, train_dataset=ragged_rows(4), data_collator=collate)
        return
    trainer_class, args_class = ours(method)
    rows = one(method, STOCK[method], folder).train_dataset
    kept = [name for name in ("prompt", "completion", "label", "chosen", "rejected") if name in rows.column_names]
    options = {"label_smoothing_factor": 0.1}
    given = {}
    if method == "SFT":
        trainer_class, kept = type("Own", (Plain, trainer_class), {}), rows.column_names
    if method in ("GRPO", "RLOO"):
        options |= {"num_generations": 2, "beta": 0.0}
        given = {"reward_funcs": lambda completions, **_: [0.0] * len(completions)}
    if method in ("DPO", "KTO", "Distillation"):
        given = {"teacher_model" if method == "Distillation" else "ref_model": ref_model}
    args = args_class(
        output_dir=str(folder), use_cpu=True, report_to="none", bf16=bf16, gradient_checkpointing=False, **options
    )
    trainer_class(
        model=model, args=args, train_dataset=rows.select_columns(kept), processing_class=tiny_tokenizer(), **given
    )


@pytest.mark.parametrize("patched", [False, True], ids=["plain", "patched-before"])
@pytest.mark.parametrize("method", ["HF", *STOCK])
def test_a_refused_trainer_leaves_its_models_as_they_were(method, patched, tmp_path):
    models = {"model": tiny_model("llama"), "ref_model": tiny_model("llama", seed=7)}
    if patched:
        for model in models.values():
            apply_liger(model, {"rope": False})
            install_fused_head(model, HeadOptions(0.5, False, ("log_probs", "entropy")))
    before = {name: bound(model) for name, model in models.items()}
    with pytest.raises(ValueError, match="label_smoothing_factor is 0.1"):
        refused(method, folder=tmp_path, **models)
    for name, model in models.items():
        after = bound(model)
        for module in before[name]:
            assert after[module].keys() == before[name][module].keys(), f"{name}: {module}"
            for key in ("forward", "_liger_head"):
                assert after[module].get(key) == before[name][module].get(key), f"{name}: {module}.{key}"
        assert has_fused_head(model) == patched
        assert head_options(model) == (HeadOptions(0.5, False, ("log_probs", "entropy")) if patched else None)


@pytest.mark.parametrize("patched", [False, True], ids=["plain", "patched-before"])
@pytest.mark.parametrize("stock_next", [False, True], ids=["ours-next", "stock-next"])
def test_after_a_refusal_under_mixed_precision(stock_next, patched, tmp_path):
    """accelerate wraps the reference while a trainer is built, and no model twice: its autocast must go on working."""
    model, reference = tiny_model("llama"), tiny_model("llama", seed=7)
    if patched:
        apply_liger(reference)
    classes = STOCK["DPO"] if stock_next else ours("DPO")
    options = {"bf16": True, "max_steps": 2}

    def trainer(model, reference):
        given = {"ref_model": reference}
        return build(*classes, model, tmp_path, rows_of("DPO"), trainer_options=given, **options)

    want = trainer(model, reference)
    with pytest.raises(ValueError, match="label_smoothing_factor is 0.1"):
        refused("DPO", model, tmp_path, reference, bf16=True)
    assert has_fused_head(reference) == patched
    assert_same_training(trainer(model, reference), want, rtol=0.0)


def test_a_refused_medusa_trainer_leaves_its_model_as_it_was(tmp_path):
    model = tiny_model("llama").requires_grad_(False)
    before = bound(model)
    args = LigerMedusaConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", bf16=False, medusa_stage=2)
    rows = one("SFT", STOCK["SFT"], tmp_path).train_dataset
    with pytest.raises(ValueError, match="all its parameters are frozen"):
        LigerMedusaTrainer(model, args, train_dataset=rows, processing_class=tiny_tokenizer())
    assert {name: kept.keys() for name, kept in bound(model).items()} == {name: b.keys() for name, b in before.items()}
