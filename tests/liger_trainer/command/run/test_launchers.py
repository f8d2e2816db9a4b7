"""One entry under every launcher: `accelerate_config`, and a refusal before loading if processes would train apart."""

import os
import re
import sys

import pytest
import yaml
from launching import PROCESSES
from recipe_fixtures import command, losses, run_elsewhere, write_recipe

from liger_trainer.command.recipe.accelerate_file import apply_config, preserve_environment
from liger_trainer.errors import RecipeError
from liger_trainer.paths import shipped

TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone")
ENTRY = ("-m", "liger_trainer", "train")


def accelerate(folder, config, **keys):
    """Return the command line that launches with a shipped config after changing `keys` in it."""
    values = yaml.safe_load((shipped("configs") / f"{config}.yaml").read_text())
    path = folder / "accelerate.yaml"
    path.write_text(yaml.safe_dump(values | {"mixed_precision": "no"} | keys))
    return ("-m", "accelerate.commands.launch", "--config_file", path)


def refused(folder, *launch, recipe=None, **env):
    """Return stderr of the entry point under `launch`, after checking that it trained and loaded nothing."""
    recipe = recipe or write_recipe(folder)
    done = run_elsewhere(sys.executable, *launch, *ENTRY, recipe, cwd=folder, **env)
    assert done.returncode != 0 and not (folder / "out").exists(), done.stdout
    assert "Summary" not in done.stdout and "Loading weights" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("liger-trainer: error: ")]
    assert len(set(lines)) == 1, done.stderr  # each process says the same
    return lines[0]


@pytest.mark.slow
def test_accelerate_launch_ignores_pet_nnodes(folder):
    line = refused(folder, *accelerate(folder, "single_gpu", use_cpu=True), PET_NNODES="2", PET_NODE_RANK="0")
    assert "PET_NNODES is 2, but this run has 1 machine" in line and "torchrun" in line


@pytest.mark.slow
def test_fsdp_on_a_cpu_host_is_ddp(folder):
    recipe = write_recipe(folder, accelerate_config="configs/fsdp2.yaml", use_cpu=True)
    line = refused(folder, *TORCHRUN, recipe=recipe)
    assert "asks for FSDP, but accelerate has MULTI_CPU" in line


@pytest.mark.slow
def test_torchrun_without_a_gpu_and_without_use_cpu_in_a_script(tmp_path):
    done = run_elsewhere(sys.executable, *TORCHRUN, PROCESSES / "trains_apart.py", tmp_path, cwd=tmp_path)
    assert done.returncode != 0 and "WORLD_SIZE is 2" in done.stderr, done.stderr
    assert "trained" not in done.stdout


@pytest.mark.slow
def test_a_recipe_with_its_own_accelerate_config(folder, capsys):
    """Under torchrun, a recipe with the DDP config trains like one process with all rows of a step."""
    (folder / "ddp.yaml").write_text((shipped("configs") / "ddp.yaml").read_text())
    recipe = write_recipe(folder, accelerate_config="ddp.yaml", max_steps=3, use_cpu=True)
    done = run_elsewhere(sys.executable, *TORCHRUN, *ENTRY, recipe, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Summary") == 1
    assert "mixed_precision: bf16 of accelerate's config has no effect" in done.stderr, "the recipe says bf16: false"
    together = losses(folder / "out")
    options = (
        "--output_dir",
        folder / "alone",
        "--per_device_train_batch_size",
        "4",
        "--accelerate_config",
        "single_gpu",
    )
    code, _, err = command(capsys, "train", recipe, *options)
    assert code == 0, err
    assert together.keys() == losses(folder / "alone").keys()
    for step, loss in losses(folder / "alone").items():
        assert together[step] == pytest.approx(loss, rel=1e-4)


def test_accelerate_config_sets_what_accelerate_launch_would(tmp_path, monkeypatch):
    """Compare shipped configs with the variables that `accelerate launch` itself sets for a process."""
    recipe = tmp_path / "recipe.yaml"
    for name in ("single_gpu", "fsdp2_machines"):  # these two need no DeepSpeed; the others are parts of the second
        path = shipped("configs") / f"{name}.yaml"
        with preserve_environment():
            apply_config(recipe, path.stem)
            mine = {k: v for k, v in os.environ.items() if k.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_"))}
        seen = run_elsewhere(
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            "--config_file",
            path,
            "--num_processes",
            "1",
            "--num_machines",
            "1",
            "--main_process_port",
            "0",
            PROCESSES / "shown_environment.py",
            cwd=tmp_path,
        )
        theirs = dict(re.findall(r"^(\w+)=(.*)$", seen.stdout, re.M))
        theirs.pop("ACCELERATE_USE_CPU", None)  # false with one process
        assert mine == theirs, path.name
        assert not [k for k in os.environ if k.startswith("FSDP_")], "put back"


def test_accelerate_config_is_found_and_shown(folder, capsys, monkeypatch):
    (folder / "mine.yaml").write_text((shipped("configs") / "single_gpu.yaml").read_text())
    path = write_recipe(folder, accelerate_config="mine.yaml")
    code, out, err = command(capsys, "train", path, "--dry_run")
    assert code == 0 and f"accelerate_config: {folder / 'mine.yaml'}" in out, err
    assert "ACCELERATE_MIXED_PRECISION" not in os.environ
    path = write_recipe(folder, accelerate_config="single_gpu")
    assert "accelerate_config: single_gpu" in command(capsys, "train", path, "--dry_run")[1]
    for name, said in {
        "fsdp3": "did you mean fsdp2",
        "recipe.yaml": "accelerate cannot use",
        "tpu.yaml": "distributed_type is 'XLA'",
    }.items():
        (folder / "tpu.yaml").write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: XLA\n")
        code, _, err = command(capsys, "train", path, "--dry_run", "--accelerate_config", name)
        assert code == 2 and said.lower() in err.lower(), err
    code, _, err = command(capsys, "train", path, "--dry_run", "--fsdp", "true")
    assert code == 2 and "accelerate_config and fsdp each say how" in err


def test_the_launcher_and_the_recipe_disagree(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(RecipeError, match="ACCELERATE_USE_DEEPSPEED to false, but the launcher has set it to true"):
        apply_config(tmp_path / "recipe.yaml", "fsdp2")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "false")
    monkeypatch.setenv("FSDP_VERSION", "1")
    with pytest.raises(RecipeError, match="FSDP_VERSION to 2, but the launcher has set it to 1"):
        apply_config(tmp_path / "recipe.yaml", "fsdp2")
    assert "ACCELERATE_USE_FSDP" not in os.environ
    monkeypatch.setenv("FSDP_VERSION", "2")
    with preserve_environment():
        assert apply_config(tmp_path / "recipe.yaml", "fsdp2") == "FSDP"
