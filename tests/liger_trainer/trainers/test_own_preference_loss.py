"""docs/own_losses.md shows a hinge loss for DPO. It trains like TRL's."""

import re

import pytest
from checkout import ROOT
from tiny_models import assert_same_gradients, tiny_model
from trainer_parity import build_dpo, trained

from liger_trainer import LigerDPOTrainer

PAGE = (ROOT / "docs" / "own_losses.md").read_text()
EXAMPLE = re.compile(r"```python\n(import torch\nfrom liger_trainer import LigerDPOTrainer\n.*?)```", re.DOTALL)


def trainer_of_the_page():
    (code,) = EXAMPLE.findall(PAGE)
    names = {}
    exec(code, names)
    return names["HingeDPOTrainer"]


def losses(logs):
    return [log["loss"] for log in logs if "loss" in log]


def test_the_hinge_loss_of_the_page_trains_like_trl_s(tmp_path):
    model = tiny_model("llama")
    trl_logs, trl_gradients = trained(build_dpo(LigerDPOTrainer, model, tmp_path, loss_type="hinge"))
    logs, gradients = trained(build_dpo(trainer_of_the_page(), model, tmp_path))
    assert len(losses(logs)) == 2
    assert losses(logs) == pytest.approx(losses(trl_logs), rel=1e-5)
    assert_same_gradients(gradients[0], trl_gradients[0])


def test_the_hinge_loss_of_the_page_evaluates(tmp_path):
    trainer = build_dpo(trainer_of_the_page(), tiny_model("llama"), tmp_path)
    assert trainer.evaluate(trainer.train_dataset)["eval_loss"] > 0
