"""Fields that the argument classes add to the stock ones."""

import pytest

from liger_trainer import LigerMedusaConfig, LigerSFTConfig, LigerTrainingArguments


@pytest.mark.parametrize("args_class", [LigerTrainingArguments, LigerSFTConfig, LigerMedusaConfig])
def test_defaults_that_spare_waiting_for_the_gpu(args_class, tmp_path, monkeypatch):
    """Ours differ from the stock ones only with use_liger, and explicit values stay."""

    def made(**options):
        args = args_class(output_dir=str(tmp_path), use_cpu=True, report_to="none", **options)
        return args.logging_nan_inf_filter, args.accelerator_config.non_blocking

    assert made() == (True, False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert made() == (True, True)
    assert made(accelerator_config={"even_batches": False}) == (True, True)
    assert made(accelerator_config={"non_blocking": False}, logging_nan_inf_filter=False) == (False, False)
    if args_class is not LigerMedusaConfig:
        assert made(use_liger=False) == (True, False)
