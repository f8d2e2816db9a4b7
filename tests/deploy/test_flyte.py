"""The Flyte workflow, run locally on two processes, and serialised for four machines."""

import importlib
import json
import sys

import pytest
from recipe_fixtures import ROOT, write_recipe

pytestmark = pytest.mark.slow
pytest.importorskip("flytekitplugins.kfpytorch", reason="needs the extra flyte: make test-deploy installs it")


@pytest.fixture
def workflow_of(monkeypatch):
    """The module deploy/flyte/workflow.py, loaded with some environment variables set."""

    def load(**env):
        for name, value in env.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.syspath_prepend(ROOT / "deploy" / "flyte")  # new processes get this one's path
        monkeypatch.delitem(sys.modules, "workflow", raising=False)
        return importlib.import_module("workflow")

    return load


def test_the_workflow_runs_locally_on_two_processes(folder, workflow_of):
    workflow = workflow_of(LIGER_NNODES=1, LIGER_NPROC=2, LIGER_CPU=1, LIGER_OUTPUT=folder / "out")
    recipe = write_recipe(folder, max_steps=None, num_train_epochs=1, dataset_name=None)
    model, report = workflow.fine_tune(
        rows=str(folder / "rows.jsonl"), recipe=str(recipe), options=["--logging_steps", "1"], eval_fraction=0.2
    )
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(model.download())
    with open(report.download()) as file:
        found = json.load(file)
    assert found["eval_rows"] == 4 and found["eval_loss"] > 0
    assert found["steps"] == 4 == len(found["train_loss"]), "16 rows, 2 at a time, in 2 processes"
    assert found["liger_report"]


def test_it_is_serialised_for_four_machines(workflow_of, monkeypatch):
    from flytekit.configuration import Image, ImageConfig, SerializationSettings

    for name in ("LIGER_NNODES", "LIGER_NPROC", "LIGER_CPU"):
        monkeypatch.delenv(name, raising=False)
    workflow = workflow_of()
    settings = SerializationSettings(
        image_config=ImageConfig(Image("default", "liger-trainer", "0.1.0")), project="p", domain="d", version="v"
    )
    custom = workflow.train.get_custom(settings)
    assert workflow.train.task_type == "pytorch"
    assert custom["workerReplicas"]["replicas"] == 4
    elastic = custom["elasticConfig"]
    assert (elastic["minReplicas"], elastic["maxReplicas"], elastic["nprocPerNode"]) == (4, 4, 8)
    assert elastic["maxRestarts"] == 3 and elastic["rdzvBackend"] == "c10d"
    container = workflow.train.get_container(settings)
    assert {str(entry.value) for entry in container.resources.requests} == {"8", "512Gi"}
    assert workflow.train.get_extended_resources(settings).shared_memory is not None, "for NCCL"
