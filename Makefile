# `make demo` and `make test` do everything from a fresh clone, into .venv.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
PYTHON := $(VENV)/bin/python
PIP := $(PYTHON) -m pip install --quiet --disable-pip-version-check
ARGS ?=
# To test another version than the newest that pyproject.toml admits: make test VENV=.venv-oldest JAX=jax==0.11.2
JAX ?=

.PHONY: help demo test test-full hopper compile-kernels lint notebooks readme docs bench-cpu bench-cache bench-drafts clean

help: ## List the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/.runtime ## Watch a small MLA model write text
	@echo "Loading the demo model and compiling: about 15 seconds"
	@$(PYTHON) -m mla_jax generate --max-new-tokens 320 --temperature 0.6 --seed 3 $$'**HAMLET**  \nWhat is a king'

test: $(VENV)/.test ## Run the tests; ARGS="-k name" goes to pytest
	$(PYTHON) -m pytest -n 2 --dist worksteal $(ARGS)

test-full: $(VENV)/.test ## Run the long versions too: soak, statistics, large memory
	$(PYTHON) -m pytest -n 2 --full --timeout 3600 $(ARGS)

hopper: ## Compile the kernels for Hopper GPUs, without one, where ptxas is: registers and spills
	@if ! command -v ptxas > /dev/null; then echo "Kernels are not compiled: no CUDA toolkit (ptxas is not on the path)"; \
	else $(MAKE) --no-print-directory VENV=$(VENV)-hopper compile-kernels; fi

compile-kernels: $(VENV)/.hopper
	JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 $(PYTHON) -m pytest -n 2 \
	  tests/attention/mosaic_gpu/test_compiled.py $(ARGS)

lint: $(VENV)/.lint ## ruff and mypy
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

notebooks: $(VENV)/.notebooks ## Execute the notebooks in place; ARGS="fp8" only those with that in their name
	$(PYTHON) scripts/notebooks.py $(ARGS)

readme: $(VENV)/.runtime ## Refresh README's table of support, and its numbers from committed results
	$(PYTHON) -m scripts.readme
	$(PYTHON) -m scripts.architecture

docs: $(VENV)/.docs ## Build the API reference in build/docs; warnings are errors
	$(PYTHON) scripts/docs.py build/docs

bench-cpu: $(VENV)/.test ## Chunked XLA decode against torch's SDPA on this CPU; ARGS="--json FILE" keeps the result
	$(PYTHON) tests/benchmarks/xla_against_sdpa.py $(ARGS)

bench-cache: $(VENV)/.test ## What an FP8 cache costs the demo model, sound and broken; ARGS="--max-bytes 8192" is quicker
	$(PYTHON) tests/benchmarks/fp8_accuracy.py $(ARGS)

bench-drafts: $(VENV)/.test ## Tokens that the demo model commits per step with drafts (minutes)
	$(PYTHON) tests/benchmarks/accept_lengths.py $(ARGS)

clean: ## Remove .venv and what belongs to it
	rm -rf $(VENV) $(VENV)-hopper

# A stamp, not bin/python: that exists in a half-made environment too.
$(VENV)/.python:
	@python=$$(sh scripts/find-python) && echo "Setting up $(VENV) with $$python" && "$$python" -m venv --clear $(VENV)
	@$(PIP) --upgrade 'pip>=25.1'
	@touch $@

$(VENV)/.runtime: pyproject.toml | $(VENV)/.python
	@echo "Installing mla_jax and what it needs to run into $(VENV)"
	@$(PIP) --editable . $(JAX)
	@touch $@

$(VENV)/.test: $(VENV)/.runtime
	@echo "Installing what the tests need (torch and transformers among it: some GB, a few minutes) into $(VENV)"
	@$(PIP) --group test $(JAX)
	@touch $@

$(VENV)/.hopper: $(VENV)/.runtime
	@echo "Installing JAX's compiler for GPUs (400 MB) into $(VENV)"
	@$(PIP) --group hopper $(JAX)
	@touch $@

$(VENV)/.lint: $(VENV)/.runtime
	@echo "Installing what lint needs into $(VENV)"
	@$(PIP) --group lint $(JAX)
	@touch $@

$(VENV)/.notebooks: $(VENV)/.runtime
	@echo "Installing what the notebooks need into $(VENV)"
	@$(PIP) --editable '.[notebooks]' $(JAX)
	@touch $@

$(VENV)/.docs: $(VENV)/.runtime
	@echo "Installing what the API reference needs into $(VENV)"
	@$(PIP) --group docs $(JAX)
	@touch $@
