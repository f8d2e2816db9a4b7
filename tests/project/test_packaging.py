"""A wheel, an sdist and an editable install all find recipes/ and configs/, and carry both packages."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from checkout import ROOT

import liger_trainer

SHIPPED = {
    "recipes/quickstart.yaml",
    "recipes/data/alpaca_quickstart.jsonl",
    "recipes/data/preference_quickstart.jsonl",
    "recipes/llama3_8b/sft_alpaca.yaml",
    "configs/fsdp2.yaml",
}
CHECK = """
import site, sys
before = list(sys.path)
site.addsitedir(sys.argv[1])  # reads the .pth files of an editable install
# To the front: the environment that runs the tests may have an installation of its own.
sys.path[:] = [path for path in sys.path if path not in before] + before
import importlib.util, liger_trainer
from liger_trainer.paths import shipped
from liger_trainer.command.recipe.read import recipe_names
triton = importlib.util.find_spec("liger_triton").origin  # without importing torch
print(liger_trainer.__file__, triton, shipped("configs"), *recipe_names(), sep="\\n")
"""


def run(*argv, cwd):
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([str(word) for word in argv], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, and the wheel built from it, without network."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    return next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


def installed(target, cwd):
    """File of liger_trainer, file of liger_triton, configs folder, and names of recipes, as seen from `cwd`."""
    trainer, triton, configs, *names = run(sys.executable, "-c", CHECK, target, cwd=cwd).splitlines()
    assert {"quickstart", "llama3_8b/sft_alpaca", "llama3_8b/sft_alpaca_lora"} <= set(names)
    assert (Path(configs) / "fsdp2.yaml").is_file()
    return Path(trainer), Path(triton), Path(configs)


def pip_install(target, *what, cwd):
    pytest.importorskip("pip")
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--no-compile",
        "--target",
        target,
        *what,
        cwd=cwd,
    )


def test_sdist(built):
    with tarfile.open(built[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert (
        SHIPPED
        | {"pyproject.toml", "LICENSE", "README.md"}
        | {"liger_trainer/command/main.py", "kernels/liger_triton/rms_norm.py"}
        <= names
    )


def test_wheel(built, tmp_path):
    names = set(zipfile.ZipFile(built[1]).namelist())
    assert {f"liger_trainer/{name}" for name in SHIPPED} <= names
    assert {"liger_trainer/command/main.py", "liger_triton/rms_norm.py"} <= names
    texts = {"liger_trainer/trainers/model_card.md", "liger_trainer/data/chat_templates/chatml.jinja"}
    assert texts <= names, "files other than code"
    assert not {name for name in names if name.startswith(("kernels/", "tests/", "recipes/"))}
    metadata = next(name for name in names if name.endswith("entry_points.txt"))
    assert "liger-trainer = liger_trainer.command.main:main" in zipfile.ZipFile(built[1]).read(metadata).decode()


def test_plain_install(built, tmp_path):
    target = tmp_path / "site"
    pip_install(target, built[1], cwd=tmp_path)
    for path in installed(target, tmp_path):
        assert path.is_relative_to(target)


def test_editable_install(tmp_path):
    target = tmp_path / "site"
    pip_install(target, "--editable", ROOT, cwd=tmp_path)
    trainer, triton, configs = installed(target, tmp_path)
    assert trainer == ROOT / "liger_trainer" / "__init__.py"
    assert triton == ROOT / "kernels" / "liger_triton" / "__init__.py"
    assert configs == ROOT / "configs"


def test_triton_is_required_on_linux_only():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (triton,) = [line for line in project["dependencies"] if line.startswith("triton")]
    assert triton.endswith("sys_platform == 'linux'")


def test_the_version_is_in_one_place(built):
    """`liger_trainer.__version__` is the only one to edit. The names of images follow it."""
    version = liger_trainer.__version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" in project["dynamic"] and "version" not in project
    assert [path.name.split("-")[1] for path in built] == [f"{version}.tar.gz", version]
    assert "version" not in yaml.safe_load((ROOT / "CITATION.cff").read_text())
    tags = {}
    for path in [*(ROOT / "deploy").rglob("*"), *(ROOT / "docs").glob("*.md")]:
        if path.is_file() and path.suffix != ".pyc":
            tags |= dict.fromkeys(re.findall(r"liger-trainer:(\d[\w.]*)", path.read_text()), path.name)
    assert set(tags) == {version}, tags


def test_the_image_has_what_the_wheel_is_built_from():
    """The image could not be built if the Dockerfile left out a file that pyproject.toml names."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = pyproject["tool"]["hatch"]["build"]["targets"]["wheel"]
    named = [pyproject["project"]["readme"], *pyproject["project"]["license-files"], *wheel["force-include"]]
    named += [Path(folder).parts[0] for folder in wheel["packages"]]
    lines = (ROOT / "deploy" / "Dockerfile").read_text().splitlines()
    copied = {word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]}
    assert not set(named) - copied
