"""The cost of an import: no Triton, no GPU, and for `liger_triton` neither transformers nor TRL."""

import os
import subprocess
import sys
import time

from checkout import ROOT
from recipe_fixtures import write_model, write_recipe, write_rows

NO_TRITON = "import sys; sys.modules['triton'] = None\n"  # as if it were not installed


def python(code, *argv, cwd):
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, argv)],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_liger_trainer_without_triton_or_gpu_in_under_5_s(tmp_path):
    start = time.perf_counter()
    python(NO_TRITON + "import liger_trainer", cwd=tmp_path)
    assert time.perf_counter() - start < 5


def test_command_loads_torch_only_to_train(tmp_path):
    """`liger-trainer recipes` answers at once, and `train` can set OpenMP's policy before torch reads it."""
    loaded = python(
        "import sys; from liger_trainer.command.main import main; main(['recipes']); print(*sys.modules)", cwd=tmp_path
    )
    assert not {"torch", "transformers", "trl", "pyarrow", "datasets"} & set(loaded.split())


HEAVY = {"torch", "transformers", "trl", "peft", "pyarrow", "datasets", "pandas"}
COMMANDS = (
    "train",
    "recipes",
    "fit",
    "verify",
    "compare",
    "doctor",
    "merge",
    "chat",
    "evaluate",
    "export",
    "medusa-eval",
    "eagle-eval",
)


def test_no_help_loads_a_large_library(tmp_path):
    """All in one process: what one of them loads stays loaded."""
    code = (
        "import sys\nfrom liger_trainer.command.main import main\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n        main([name, '--help'])\n    except SystemExit as end:\n        assert end.code == 0, name\n"
        "print()\nprint(*{name.partition('.')[0] for name in sys.modules})"
    )
    loaded = set(python(code, *COMMANDS, cwd=tmp_path).splitlines()[-1].split())
    assert "yaml" in loaded
    assert not HEAVY & loaded


def test_commands_about_a_model_load_no_trainer(tmp_path):
    """TRL, datasets and pandas take a second, and neither of these needs rows."""
    write_model(tmp_path / "model")
    code = (
        "import sys\nfrom liger_trainer.command.main import main\n"
        "assert main(['doctor', 'model']) == 0\n"
        "assert main(['chat', 'model']) == 0\n"  # without a line to answer
        "assert 'transformers' in sys.modules and 'peft' not in sys.modules\n"
        "assert main(['merge', 'model', 'merged']) == 2\n"  # which is no adapter
        "print()\nprint(*{name.partition('.')[0] for name in sys.modules})"
    )
    loaded = set(python(code, cwd=tmp_path).splitlines()[-1].split())
    assert {"transformers", "peft"} <= loaded and not {"trl", "datasets", "pandas"} & loaded


def test_liger_triton_pulls_in_neither_transformers_nor_trl(tmp_path):
    loaded = python("import liger_triton, sys; print(*sys.modules)", cwd=tmp_path).split()
    assert "torch" in loaded
    assert not {"transformers", "trl", "datasets", "liger_trainer"} & set(loaded)


def test_kernels_run_without_triton(tmp_path):
    code = (
        "import torch, liger_triton as k\n"
        "x = torch.randn(3, 8, requires_grad=True); k.rms_norm(x, torch.ones(8), 1e-6).sum().backward()\n"
        "print(x.grad.shape)"
    )
    assert "torch.Size([3, 8])" in python(NO_TRITON + code, cwd=tmp_path)


def test_training_without_triton(tmp_path):
    write_model(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl")
    code = "from liger_trainer.command.main import main; sys.exit(main(['train', sys.argv[1], '--max_steps', '1']))"
    out = python(NO_TRITON + code, write_recipe(tmp_path), cwd=tmp_path)
    assert "rms_norm" in out and "steps    1" in out
