# `make` lists the targets. They work on a bare machine with Python 3.11 and a C compiler, without root. A target that
# needs more says so.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Modules of tests that run side by side.
TEST_WORKERS ?= 2
# Worker side only: the tests that adopt an engine's tensors. `make venv TORCH=` goes without, and they are skipped.
TORCH ?= torch

PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
# What the daemon and its clients need, and nothing else: neither torch nor the tools of tests and linters.
DEMO_VENV := build/demo-venv
DEMO_READY := $(DEMO_VENV)/.ready
PYTHON_IS_NEW_ENOUGH = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, $(PYTHON) is " + sys.version.split()[0])'
C_SOURCES := $(wildcard kvoffloadd/native/*.[ch])
# Those of vLLM, SGLang and remote stores want a venv of their own: see docs/benchmarks/vllm.md, sglang.md and remote.md.
BENCHMARKS := copy disk engines layouts lookup recovery rpc submit
# The Python of the GPU machine, and what is given to the script: `make gpu-check GPU_CHECK="--soft --quick"`.
GPU_PYTHON ?= 3.12
GPU_CHECK ?=
GPU_VENV := build/gpu-venv
# Each in a folder of its own, for tests that put one before what the venv has.
BINDINGS_READY := $(patsubst %,build/cuda-bindings-%/.ready,$(shell sed -n 's/^cuda-bindings==//p' requirements-bindings.lock))
# Of `make install`. BINARY: the command that the units run; pip installs it, see docs/OPERATIONS.md.
PREFIX ?= /usr/local
SYSCONFDIR ?= /etc
BINARY ?= $(PREFIX)/bin/kvoffloadd
UNITDIR := $(PREFIX)/lib/systemd/system
TMPFILESDIR := $(PREFIX)/lib/tmpfiles.d
CONFFILE := $(SYSCONFDIR)/kvoffloadd/kvoffloadd.toml
MANDIR := $(PREFIX)/share/man/man1
UNITS := kvoffloadd@.service kvoffloadd@.socket
# `make release VERSION=1.2.3`.
VERSION =
# `make dist DIST=--quick` builds and checks, and tries the wheel in one Python.
DIST =
DIST_VENV := build/dist-venv
DIST_READY := $(DIST_VENV)/.ready
VLLM_VENV := build/vllm-venv
VLLM_READY := $(VLLM_VENV)/.ready
VLLM_NEXT := build/vllm-0.33
SGLANG_VENV := build/sglang-venv
SGLANG_READY := $(SGLANG_VENV)/.ready
SGLANG_PIP := $(SGLANG_VENV)/bin/python -m pip --disable-pip-version-check --no-input
# `make demo-remote DEMO_REMOTE="--engine valkey"`.
DEMO_REMOTE ?=
# `make soak-remote SOAK_REMOTE="--engine valkey --seconds 300"`.
SOAK_REMOTE ?=
# `make soak-threads SOAK_THREADS="--times 3 tests/test_lanes.py"`.
SOAK_THREADS ?=
# `make soak-claims SOAK_CLAIMS_S=3600`.
SOAK_CLAIMS_S ?= 600
REMOTE_VENV := build/remote-venv
REMOTE_READY := $(REMOTE_VENV)/.ready
REMOTE_PIP := $(REMOTE_VENV)/bin/python -m pip --disable-pip-version-check --no-input
PEERS_LMCACHE := build/peers-lmcache-venv
PEERS_MOONCAKE := build/peers-mooncake-venv
# What `make bench-peers` is given: `make bench-peers PEERS="--quick --only kvoffloadd lmcache"` writes no page.
PEERS ?= --write docs/benchmarks/peers.md
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check --no-input

.PHONY: help venv demo demo-remote test test-slow test-vllm test-hosts test-sglang test-remote test-service soak soak-threads soak-claims soak-remote mutants lint shape bench bench-peers dist release gpu-bundle gpu-check install uninstall clean
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(READY) ## make .venv with all that tests and scripts need

# Made anew, not mended, when what goes into it has changed: a venv that has lived through two lock files is neither.
$(READY): pyproject.toml requirements-dev.lock $(C_SOURCES)
	@$(PYTHON_IS_NEW_ENOUGH)
	@echo "venv: making $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)
	@echo "venv: installing kvoffloadd and its tools (some minutes; torch is up to 3 GB, TORCH= leaves it out)"
	@$(PIP) install -qq --constraint requirements-dev.lock --editable '.[dev,uvloop]' $(TORCH)
	@touch $@
	@echo "venv: ready"

demo: $(DEMO_READY) ## two workers, a chat larger than the memory tier, a worker and the daemon killed: every byte verified
	@$(DEMO_VENV)/bin/python -m kvoffloadd demo

$(DEMO_READY): pyproject.toml requirements-dev.lock $(C_SOURCES)
	@$(PYTHON_IS_NEW_ENOUGH)
	@echo "demo: making $(DEMO_VENV) (some ten seconds)"
	@$(PYTHON) -m venv --clear $(DEMO_VENV)
	@$(DEMO_VENV)/bin/python -m pip --disable-pip-version-check --no-input install -qq --constraint requirements-dev.lock --editable .
	@touch $@

demo-remote: $(REMOTE_READY) ## two hosts that share a store, one of them killed with all it has: every byte verified
	@$(REMOTE_VENV)/bin/python -m scripts demo_remote $(DEMO_REMOTE)

test: $(READY) $(BINDINGS_READY) ## the tests that take up to a second each; some minutes
	@$(BIN)/python -m pytest -q -n $(TEST_WORKERS) --dist loadfile

test-slow: $(READY) $(BINDINGS_READY) ## the others that need nothing else: daemons killed, disks that fail, every script
	@$(BIN)/python -m pytest -q -n $(TEST_WORKERS) --dist loadfile \
		-m "slow and not soak and not vllm and not sglang and not service and not remote"

# Without the C++ that the wheels carry along, which is three quarters of them.
build/cuda-bindings-%/.ready: requirements-bindings.lock $(READY)
	@rm -rf $(@D)
	@$(PIP) install -qq --no-deps --no-compile --target $(@D) cuda-bindings==$*
	@find $(@D) -name '*.cpp' -delete
	@touch $@

test-vllm: $(VLLM_READY) $(VLLM_NEXT)/.ready ## the tests with a real vLLM on the CPU, in a venv of its own
	@$(VLLM_VENV)/bin/python -m pytest -q -m vllm tests/vllm --ignore=tests/vllm/test_hosts.py
	@VLLM_TARGET_DEVICE=cpu PYTHONPATH=$(CURDIR)/$(VLLM_NEXT):$(CURDIR) \
		$(VLLM_VENV)/bin/python -m pytest -q -m vllm tests/vllm/test_rounds.py tests/vllm/test_kills.py \
		tests/vllm/test_layouts.py tests/vllm/test_multiconnector.py tests/vllm/test_one_flag.py

# It links to the venv's kernels, so it is made anew with it.
$(VLLM_NEXT)/.ready: $(VLLM_READY) scripts/vllm/python.py
	@$(VLLM_VENV)/bin/python -m scripts vllm_python $(VLLM_NEXT)
	@touch $@

# torch with its dependencies, which differ between its builds; all else exactly as written down.
$(VLLM_READY): pyproject.toml requirements-vllm.lock $(C_SOURCES)
	@echo "test-vllm: making $(VLLM_VENV) (2 GB, some minutes)"
	@$(PYTHON) -m venv --clear $(VLLM_VENV)
	@$(VLLM_PIP) install -qq --constraint requirements-vllm.lock torch
	@$(VLLM_PIP) install -qq --no-deps --requirement requirements-vllm.lock
	@$(VLLM_PIP) uninstall -qq --yes triton
	@$(VLLM_PIP) install -qq --no-deps --editable .
	@touch $@

test-hosts: $(VLLM_READY) $(REMOTE_READY) ## two real vLLM engines that share a remote store; hosts of their own as root
	@$(VLLM_VENV)/bin/python -m pytest -q -rs -m vllm tests/vllm/test_hosts.py

test-sglang: $(SGLANG_READY) ## the tests with a real SGLang on the CPU, in a venv of its own
	@$(SGLANG_VENV)/bin/python -m pytest -q -m sglang tests/sglang

# As above; the wheel is the one for GPUs, see tests/sglang/shim.
$(SGLANG_READY): pyproject.toml requirements-sglang.lock $(C_SOURCES)
	@echo "test-sglang: making $(SGLANG_VENV) (3 GB, some minutes)"
	@$(PYTHON) -m venv --clear $(SGLANG_VENV)
	@$(SGLANG_PIP) install -qq --constraint requirements-sglang.lock torch
	@$(SGLANG_PIP) install -qq --no-deps --requirement requirements-sglang.lock
	@$(SGLANG_PIP) install -qq --no-deps --editable .
	@touch $@

test-remote: $(REMOTE_READY) ## the tests with real remote stores, in a venv of its own; some need root, or are skipped
	@$(REMOTE_VENV)/bin/python -m pytest -q -rs -m remote tests/remote

$(REMOTE_READY): pyproject.toml requirements-remote.lock $(C_SOURCES)
	@$(PYTHON_IS_NEW_ENOUGH)
	@echo "test-remote: making $(REMOTE_VENV) (250 MB, half a minute)"
	@$(PYTHON) -m venv --clear $(REMOTE_VENV)
	@$(REMOTE_PIP) install -qq --no-deps --requirement requirements-remote.lock
	@$(REMOTE_PIP) install -qq --no-deps --editable .
	@touch $@

test-service: $(READY) $(REMOTE_READY) ## the tests in a container with a systemd of its own; needs root, systemd-nspawn and debootstrap
	@$(BIN)/python -m pytest -q -m service --ignore tests/service/test_remote_units.py tests/service
	@$(REMOTE_VENV)/bin/python -m pytest -q -rs -m service tests/service/test_remote_units.py

soak: $(READY) ## the tests that take minutes, a stress run with kills of workers and daemon, hostile peers
	@$(BIN)/python -m pytest -q -m soak
	@$(BIN)/python -m scripts stress --seconds 300 --workers 4 --kill-workers --kill-daemon
	@$(BIN)/python -m scripts stress --seconds 120 --workers 4 --kill-workers --kill-daemon --warm
	@$(BIN)/python -m scripts stress_holes --seconds 120 --kill-workers --kill-daemon
	@$(BIN)/python -m scripts hostile --seconds 300

soak-threads: $(READY) ## the tests of what threads drain, 20 times beside busy loops, with threads switched all the time
	@$(BIN)/python -m scripts threads $(SOAK_THREADS)

soak-claims: $(READY) ## claims at random against a model, with kills, restarts and clears, for ten minutes; see SOAK_CLAIMS_S
	@KVOFFLOADD_CLAIMS_S=$(SOAK_CLAIMS_S) $(BIN)/python -m pytest -q -s -m soak tests/e2e/test_random_claims.py

soak-remote: $(REMOTE_READY) ## two hosts that share a real store, everything on them killed at random, for 20 minutes; see SOAK_REMOTE
	@$(REMOTE_VENV)/bin/python -m scripts soak $(SOAK_REMOTE)

mutants: $(READY) ## break the core on purpose, place by place, and see that tests notice (half an hour)
	@$(BIN)/python -m scripts mutants

lint: $(READY) ## ruff, mypy --strict, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

shape: $(READY) ## how many hands a store and a load pass through, circles of modules, sizes
	@$(BIN)/python -m scripts shape

bench: $(READY) ## run the benchmarks; results go to docs/benchmarks/
	@mkdir -p docs/benchmarks
	@set -e; for name in $(addprefix bench_,$(BENCHMARKS)); do \
		echo "bench: $$name"; \
		$(BIN)/python -m scripts $$name --json > docs/benchmarks/$$name.json.part; \
		mv docs/benchmarks/$$name.json.part docs/benchmarks/$$name.json; \
	done

bench-peers: $(READY) $(VLLM_READY) $(PEERS_LMCACHE)/.ready $(PEERS_MOONCAKE)/.ready ## beside LMCache, vLLM's tiering and Mooncake Store (an hour); writes docs/benchmarks/peers.md
	@$(BIN)/python -m scripts peers $(PEERS)

# torch with its dependencies, as above.
$(PEERS_LMCACHE)/.ready: requirements-peers-lmcache.lock
	@echo "bench-peers: making $(PEERS_LMCACHE) (2 GB, some minutes)"
	@$(PYTHON) -m venv --clear $(PEERS_LMCACHE)
	@$(PEERS_LMCACHE)/bin/python -m pip --disable-pip-version-check --no-input install -qq --constraint $< torch
	@$(PEERS_LMCACHE)/bin/python -m pip --disable-pip-version-check --no-input install -qq --no-deps --requirement $<
	@touch $@

$(PEERS_MOONCAKE)/.ready: requirements-peers-mooncake.lock
	@echo "bench-peers: making $(PEERS_MOONCAKE)"
	@$(PYTHON) -m venv --clear $(PEERS_MOONCAKE)
	@$(PEERS_MOONCAKE)/bin/python -m pip --disable-pip-version-check --no-input install -qq --no-deps --requirement $<
	@touch $@

dist: $(DIST_READY) ## build wheel and source package into dist/, check them, use each in every Python at hand (some minutes)
	@$(DIST_VENV)/bin/python -m scripts dist $(DIST)

$(DIST_READY): requirements-dist.lock
	@$(PYTHON_IS_NEW_ENOUGH)
	@echo "dist: making $(DIST_VENV) (half a minute)"
	@$(PYTHON) -m venv --clear $(DIST_VENV)
	@$(DIST_VENV)/bin/python -m pip --disable-pip-version-check --no-input install -qq --no-deps --requirement $<
	@touch $@

release: $(DIST_READY) ## set the version, close the changelog's section, commit and tag; pushes nothing: make release VERSION=1.2.3
	@$(DIST_VENV)/bin/python -m scripts release "$(VERSION)"

gpu-bundle: ## download what gpu-check needs on a machine without a network, to gpu-bundle/
	@$(PYTHON) -m scripts gpu_bundle gpu-bundle --python-version $(GPU_PYTHON)

gpu-check: ## on a machine with a GPU, without a network: GPU tests and benchmarks; results go to OUT or build/gpu-check
	@$(PYTHON) -m scripts.gpu.environment $(GPU_VENV) gpu-bundle
	@$(GPU_VENV)/bin/python -m scripts gpu_check $(GPU_CHECK)

install: ## units, tmpfiles.d, the manual page and a config file, below DESTDIR; PREFIX, SYSCONFDIR, BINARY
	@for unit in $(UNITS); do \
		install -d "$(DESTDIR)$(UNITDIR)" && \
		sed -e 's,/usr/local/bin/kvoffloadd,$(BINARY),' -e 's,/etc/kvoffloadd/kvoffloadd.toml,$(CONFFILE),' \
			"config/$$unit" > "$(DESTDIR)$(UNITDIR)/$$unit" && \
		chmod 644 "$(DESTDIR)$(UNITDIR)/$$unit" || exit 1; \
	done
	@install -D -m 644 config/tmpfiles.d/kvoffloadd.conf "$(DESTDIR)$(TMPFILESDIR)/kvoffloadd.conf"
	@install -D -m 644 kvoffloadd/cli/generated/kvoffloadd.1 "$(DESTDIR)$(MANDIR)/kvoffloadd.1"
	@if cmp -s config/kvoffloadd.toml "$(DESTDIR)$(CONFFILE)"; then \
		true; \
	elif [ -e "$(DESTDIR)$(CONFFILE)" ]; then \
		install -m 644 config/kvoffloadd.toml "$(DESTDIR)$(CONFFILE).new"; \
		echo "install: kept $(DESTDIR)$(CONFFILE); this version's is beside it, as kvoffloadd.toml.new"; \
	else \
		install -D -m 644 config/kvoffloadd.toml "$(DESTDIR)$(CONFFILE)"; \
	fi
	@if [ -z "$(DESTDIR)" ] && [ ! -x "$(BINARY)" ]; then \
		echo "install: $(BINARY) is not there yet: pip install it, or say BINARY=/where/it/is/kvoffloadd"; \
	fi
	@echo "install: then systemctl daemon-reload, systemd-tmpfiles --create, systemctl enable --now kvoffloadd@USER"

uninstall: ## remove what `make install` installed, but for the config
	rm -f $(foreach unit,$(UNITS),"$(DESTDIR)$(UNITDIR)/$(unit)") "$(DESTDIR)$(TMPFILESDIR)/kvoffloadd.conf"
	rm -f "$(DESTDIR)$(MANDIR)/kvoffloadd.1" "$(DESTDIR)$(CONFFILE).new"
	@echo "uninstall: $(DESTDIR)$(CONFFILE), disk roots and /var/lib/kvoffloadd are still there"

clean: ## remove .venv and everything built
	rm -rf $(VENV) build gpu-bundle dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage kvoffloadd/native/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
