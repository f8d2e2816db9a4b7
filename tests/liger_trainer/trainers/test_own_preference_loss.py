"""The loss of preference pairs that docs/own_losses.md writes is the one that TRL has."""

import re

import pytest
from checkout import ROOT
from dpo_runs import build, train
from tiny_models import tiny_model

from liger_trainer import LigerDPOTrainer

PAGE = (ROOT / "docs" / "own_losses.md").read_text()


def trainer_of_the_page():
    (code,) = re.findall(
        r"```python\n(import torch\nfrom liger_trainer import LigerDPOTrainer\n.*?)```", PAGE, re.DOTALL
    )
    names = {}
    exec(code, names)
    return names["HingeDPOTrainer"]


def test_the_hinge_loss_of_the_page_trains_as_trl_s(tmp_path):
    model = tiny_model("llama")
    trl_logs, trl_gradients = train(build(LigerDPOTrainer, model, tmp_path, loss_type="hinge"))
    logs, gradients = train(build(trainer_of_the_page(), model, tmp_path))
    assert len(logs) == len(trl_logs) == 2
    for own, trl in zip(logs, trl_logs, strict=True):
        assert own["loss"] == pytest.approx(trl["loss"], rel=1e-5)
    assert gradients.keys() == trl_gradients.keys()
    for name, gradient in trl_gradients.items():
        assert (gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_the_hinge_loss_of_the_page_evaluates(tmp_path):
    trainer = build(trainer_of_the_page(), tiny_model("llama"), tmp_path)
    assert trainer.evaluate(trainer.train_dataset)["eval_loss"] > 0
