# `make` lists the targets. All of them work on a bare machine with Python 3.11 and a C compiler; nothing needs root.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Worker side only: the tests that adopt an engine's tensors. `make venv TORCH=` goes without, and they are skipped.
TORCH ?= torch

PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
C_SOURCES := $(wildcard kvoffloadd/device/*.c)
BENCHMARKS := $(wildcard scripts/bench_*.py)
# The Python of the GPU machine, and what is given to scripts/gpu_check.py: `make gpu-check GPU_CHECK="--soft --quick"`.
GPU_PYTHON ?= 3.12
GPU_CHECK ?=
GPU_VENV := build/gpu-venv

.PHONY: help venv demo test soak lint bench gpu-bundle gpu-check clean
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(READY) ## make .venv with all that tests and scripts need

# Made anew, not mended, when what goes into it has changed: a venv that has lived through two lock files is neither.
$(READY): pyproject.toml requirements-dev.lock $(C_SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, $(PYTHON) is " + sys.version.split()[0])'
	@echo "venv: making $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)
	@echo "venv: installing kvoffloadd and its tools (a minute or two)"
	@$(PIP) install -qq --constraint requirements-dev.lock --editable '.[dev,uvloop]' $(TORCH)
	@touch $@
	@echo "venv: ready"

demo: $(READY) ## two workers, a chat workload larger than the memory tier, one killed: every byte verified
	@$(BIN)/python scripts/demo.py

test: $(READY) ## the tests
	@$(BIN)/python -m pytest -q

soak: $(READY) ## the tests that take minutes, and a stress run with kills of workers and daemon
	@$(BIN)/python -m pytest -q -m soak
	@$(BIN)/python scripts/stress.py --seconds 300 --workers 4 --kill-workers --kill-daemon

lint: $(READY) ## ruff, mypy --strict, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: $(READY) ## run scripts/bench_*.py; results go to docs/benchmarks/
	@mkdir -p docs/benchmarks
	@set -e; for script in $(BENCHMARKS); do \
		name=$$(basename $$script .py); \
		echo "bench: $$name"; \
		$(BIN)/python $$script --json > docs/benchmarks/$$name.json.part; \
		mv docs/benchmarks/$$name.json.part docs/benchmarks/$$name.json; \
	done

gpu-bundle: ## download what gpu-check needs on a machine without a network, to gpu-bundle/
	@$(PYTHON) scripts/gpu_bundle.py gpu-bundle --python-version $(GPU_PYTHON)

gpu-check: ## on a machine with a GPU, without a network: GPU tests and benchmarks; results go to OUT or build/gpu-check
	@$(PYTHON) scripts/_gpu_environment.py $(GPU_VENV) gpu-bundle
	@$(GPU_VENV)/bin/python scripts/gpu_check.py $(GPU_CHECK)

clean: ## remove .venv and everything built
	rm -rf $(VENV) build gpu-bundle dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage kvoffloadd/device/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
