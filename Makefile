# One command on a fresh machine: `make demo`. Everything it installs goes into .venv.

PYTHON ?= python3
VENV ?= .venv
DEMO ?= full
TARGET ?= wheel
RUNS ?= runs
TORCH := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)
# Where torch is installed from. Empty: decided below, from pip's own answer. Set it to force an index.
TORCH_INDEX ?=
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
# Two test processes with one thread each: what the tiers' limits are stated for.
WORKERS ?= 2
BIN := $(VENV)/bin

# `$(call within,SECONDS)` ends a tier that takes longer, where the system has timeout(1).
within = $(if $(shell command -v timeout),timeout $(1))

export TARGET

.PHONY: help venv demo test test-slow soak lint types clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

venv: $(VENV)/.installed ## install the project with everything its tests need into .venv

# torch first: on Linux, PyPI's build carries several GB of CUDA. Without an NVIDIA GPU we take pip's plain answer only
# when that is a CPU build already, and pytorch.org's CPU index otherwise.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "eyas needs Python 3.11 or newer: make PYTHON=...")'
	@echo 'installing into $(VENV): torch first, then everything else; a few minutes, mostly without a word'
	@$(PYTHON) -m venv $(VENV)
	@index='$(TORCH_INDEX)'; \
	if [ -z "$$index" ] && [ "$$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null 2>&1 \
	  && $(BIN)/pip install --dry-run --ignore-installed --quiet --report - $(TORCH) 2>/dev/null \
	     | grep -q '"name": "nvidia-\|"name": "cuda-'; \
	then index='$(TORCH_CPU_INDEX)'; fi; \
	set -x; $(BIN)/pip install --quiet $${index:+--index-url "$$index"} $(TORCH)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

demo: venv ## SmolLM2 and 500 chats to a served draft and its acceptance length; DEMO=quick for a short one
	$(BIN)/python examples/demo.py --config examples/demo$(if $(filter quick,$(DEMO)),-quick).toml --runs $(RUNS)

test test-slow soak: export OMP_NUM_THREADS ?= 1

test: venv ## the fast tier: unit, golden, property, contracts, one Ray path, tiny end to end (<= 8 minutes)
	$(call within,480) $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --durations=10

test-slow: venv ## seeded kills, one real-model run, documented commands
	$(call within,1500) $(BIN)/python -m pytest -q -m slow --durations=10

soak: venv ## 30 kills, 100 corruptions, peers: before an issue is resolved
	$(BIN)/python -m pytest -q -m soak --durations=10

lint: venv ## ruff and the import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: venv ## mypy, strict on the contract and the front door
	$(BIN)/mypy

clean: ## remove the environment and every tool's cache; runs/ stays
	rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
