"""The manifests, the Dockerfile and the job files: parsed by their own tools, and their commands by ours."""

import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from checkout import ROOT

from liger_trainer.command.recipe.accelerate_file import apply_config, preserve_environment
from liger_trainer.command.recipe.read import find_recipe
from liger_trainer.command.recipe.shipped_files import find_shipped

DEPLOY = ROOT / "deploy"
RUNTIME = DEPLOY / "kubeflow" / "runtime.yaml"
JOB = DEPLOY / "kubeflow" / "train_job.yaml"
ROWS = ("per_device_train_batch_size", "gradient_accumulation_steps")
BIN = Path(sys.executable).parent


def entry_words(path):
    """The words after `liger_trainer` in the command of a job file."""
    text = path.read_text()
    if path == JOB:
        trainer = yaml.safe_load(text)["spec"]["trainer"]
        words = [*trainer["command"], *trainer["args"]]
    else:
        text = yaml.safe_load(text)["run"] if path.suffix == ".yaml" else text
        words = shlex.split(re.search(r"torchrun \\\n(?:.*\\\n)*.*\n?", text)[0].replace("\\\n", " "), comments=True)
    return words, words[words.index("liger_trainer") + 1 :]


@pytest.mark.parametrize(
    "path", [JOB, *DEPLOY.glob("slurm/*"), *DEPLOY.glob("skypilot/*")], ids=lambda p: p.parent.name
)
def test_the_command_of_a_job_is_one_of_ours(path, monkeypatch):
    """Its recipe and its accelerate config exist, its options are valid, and its sizes are its machines' sizes."""
    words, (train, recipe, *options) = entry_words(path)
    assert words[0] == "torchrun" and train == "train"
    values = dict(pair.split("=") if "=" in pair else pair for pair in _pairs(options))
    assert values["--resume_from_checkpoint"] == "auto"
    assert find_recipe(recipe).is_file()
    find_shipped(values["--accelerate_config"])
    machines, processes = _machines(path)
    with preserve_environment():
        apply_config(path, values["--accelerate_config"])
        import os

        sizes = [os.environ[f"PARALLELISM_CONFIG_{name}_SIZE"] for name in ("DP_REPLICATE", "DP_SHARD")]
    assert sizes == [str(machines), str(processes)]
    ours = yaml.safe_load(find_recipe(recipe).read_text())
    sizes = {key: (ours[key], int(values.get(f"--{key}", ours[key]))) for key in ROWS}
    recipes = math.prod(recipe_size for recipe_size, _ in sizes.values())
    jobs = math.prod(job_size for _, job_size in sizes.values())
    assert jobs * machines * processes == recipes * 8, "a step has as many rows as on the recipe's 8 GPUs"


def _pairs(options):
    rest = iter(options)
    return [word if "=" in word else (word, next(rest)) for word in rest]


def _machines(path):
    if path == JOB:
        trainer = yaml.safe_load(path.read_text())["spec"]["trainer"]
        return trainer["numNodes"], trainer["numProcPerNode"]
    text = path.read_text()
    if path.suffix == ".yaml":
        task = yaml.safe_load(text)
        return task["num_nodes"], int(task["resources"]["accelerators"].partition(":")[2])
    machines, gpus = (int(re.search(rf"#SBATCH --{name}=(\d+)", text)[1]) for name in ("nodes", "gpus-per-node"))
    assert f"--nproc_per_node {gpus}" in text
    return machines, gpus


def test_no_reserved_variable_is_set():
    for path in (RUNTIME, JOB):
        assert not re.findall(r"name: (PET_\w+|MASTER_\w+|WORLD_SIZE|RANK)", path.read_text())


def test_the_container_of_the_runtime_is_the_one_that_kubeflow_sets_variables_in():
    (job,) = yaml.safe_load(RUNTIME.read_text())["spec"]["template"]["spec"]["replicatedJobs"]
    labels = job["template"]["metadata"]["labels"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    assert job["name"] == container["name"] == "node"
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert yaml.safe_load(JOB.read_text())["spec"]["runtimeRef"]["name"] == "liger-trainer"


def paths_of(value, here=()):
    """Every path to a leaf, and the leaf."""
    if isinstance(value, dict):
        return {path: leaf for key, part in value.items() for path, leaf in paths_of(part, (*here, key)).items()}
    if isinstance(value, list):
        return {path: leaf for i, part in enumerate(value) for path, leaf in paths_of(part, (*here, i)).items()}
    return {here: value}


@pytest.mark.parametrize("path, kind", [(RUNTIME, "ClusterTrainingRuntime"), (JOB, "TrainJob")])
def test_kubeflow_reads_a_manifest_without_losing_a_path(path, kind):
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="make test-deploy installs it")
    manifest = yaml.safe_load(path.read_text())
    assert manifest["kind"] == kind
    read = getattr(models, f"TrainerV1alpha1{kind}").from_dict(manifest).to_dict()
    lost = {
        path: leaf
        for path, leaf in paths_of(manifest).items()
        if leaf not in ({}, []) and paths_of(read).get(path) != leaf
    }
    assert not lost


def test_the_job_template_is_valid_kubernetes(tmp_path):
    pytest.importorskip("kubernetes_validate", reason="make test-deploy installs it")
    (job,) = yaml.safe_load(RUNTIME.read_text())["spec"]["template"]["spec"]["replicatedJobs"]
    trainer = yaml.safe_load(JOB.read_text())["spec"]["trainer"]
    whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"} | job["template"]["metadata"]}
    whole["spec"] = job["template"]["spec"]
    pod = whole["spec"]["template"]["spec"]
    pod["restartPolicy"] = "Never"  # Kubernetes requires it and JobSet adds it
    (container,) = pod["containers"]
    container |= {"command": trainer["command"], "args": trainer["args"], "resources": trainer["resourcesPerNode"]}
    container["env"] = [*container["env"], *trainer["env"]]
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(whole))
    command = [BIN / "kubernetes-validate", "--strict", tmp_path / "job.yaml"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    container["imagee"] = container.pop("image")
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(whole))
    assert subprocess.run(command, capture_output=True).returncode != 0, "a misspelling is found"


def test_hadolint_has_nothing_to_say_of_the_dockerfile():
    if not (BIN / "hadolint").exists():
        pytest.skip("hadolint is missing: make test-deploy installs it")
    done = subprocess.run([BIN / "hadolint", DEPLOY / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_the_image_is_pinned_and_not_root():
    text = (DEPLOY / "Dockerfile").read_text()
    assert re.search(r"^USER 1000$", text, re.M) and "constraints.txt" in text
    for line in (DEPLOY / "constraints.txt").read_text().splitlines():
        assert line.startswith("#") or re.fullmatch(r"[\w-]+==[\d.]+", line), line
    for copied in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.M):
        assert all((ROOT / name).exists() for name in copied.split()), copied


def test_the_sbatch_file_is_bash():
    done = subprocess.run(["bash", "-n", *DEPLOY.glob("slurm/*")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
