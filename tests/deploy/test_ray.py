"""Ray Train on a local cluster of two workers: one training, which survives the death of a worker."""

import json
import sys

import pytest
from recipe_fixtures import ROOT, losses, run_elsewhere, write_recipe

pytestmark = pytest.mark.slow
pytest.importorskip("ray.train", reason="needs the extra ray: make test-deploy installs it")
SCRIPT = ROOT / "deploy" / "ray" / "train.py"


def train(folder, recipe, **env):
    return run_elsewhere(
        sys.executable,
        SCRIPT,
        "--cpu",
        "--workers",
        2,
        "--retries",
        1,
        "--storage",
        folder / "ray",
        recipe,
        cwd=folder,
        RAY_TMPDIR="/tmp",
        **env,
    )


def test_two_workers_are_one_training(folder):
    recipe = write_recipe(folder, max_steps=None, num_train_epochs=1)
    done = train(folder, recipe)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(losses(folder / "out")) == [1, 2, 3, 4, 5], "20 rows, 2 at a time, by 2 workers"


def test_a_worker_that_dies_is_replaced_and_the_run_goes_on(folder):
    (folder / "dies.py").write_text(
        "import os\n"
        "from transformers import TrainerCallback, trainer\n"
        "class Die(TrainerCallback):\n"
        "    def on_step_begin(self, args, state, control, **kwargs):\n"
        "        mark = os.path.join(args.output_dir, '..', 'died')\n"
        "        if args.process_index == 1 and state.global_step == 5 and not os.path.exists(mark):\n"
        "            open(mark, 'w').close()\n"
        "            os._exit(9)\n"
        "trainer.DEFAULT_CALLBACKS.append(Die)\n"
        "def reward(completions, **kwargs):\n"
        "    return [0.0 for _ in completions]\n"
    )
    recipe = write_recipe(folder, max_steps=8, save_strategy="steps", save_steps=2)
    script = folder / "script.py"
    script.write_text(
        SCRIPT.read_text().replace(
            "    import ray.train\n",
            "    import sys; sys.path.insert(0, config['folder']); import dies\n    import ray.train\n",
            1,
        )
    )
    done = run_elsewhere(
        sys.executable,
        script,
        "--cpu",
        "--workers",
        2,
        "--retries",
        1,
        "--storage",
        folder / "ray",
        recipe,
        cwd=folder,
        RAY_TMPDIR="/tmp",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "died").exists()
    assert sorted(losses(folder / "out")) == list(range(1, 9))
    assert "resumed at step 4" in done.stdout + done.stderr
    assert json.loads((folder / "out" / "trainer_state.json").read_text())["global_step"] == 8
