# The two commands that matter: `make release` and `make test`. Everything lives in .venv/, models/,
# .pypto-deploy/ and the cache below; `make clean` removes them.

# The first Python that runs and is 3.11 or 3.12 (pypto has wheels for no newer one); a version manager's shim may not run.
PYTHON ?= $(shell for p in python3.12 python3.11 python3; do \
  $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null && echo $$p && break; done)
# PyPI's torch for Linux is a CUDA build of several GB; set TORCH_INDEX to PyTorch's index of CPU wheels to avoid it.
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
STORE ?= .pypto-deploy
# Verified programs, PyPTO's calculator and the native executor are kept per user, for all checkouts.
CACHE := $(or $(PYPTO_DEPLOY_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/pypto-deploy)
# Where the calculator goes when that folder cannot be written.
FALLBACK := $(or $(TMPDIR),/tmp)/pypto-deploy-$(shell id -u)
MODEL ?= models/SmolLM2-135M-Instruct
export PYPTO_DEPLOY_STORE = $(STORE)

.PHONY: release test check programs serve clean setup sample

release: $(MODEL)/config.json
	$(BIN)/pypto-deploy release $(MODEL) --name smollm2-135m \
	  --ask "What is the capital of France?" \
	  --ask "Write one sentence about the sea." \
	  --ask "What is 2 + 3?"

test: check $(MODEL)/config.json
	@# One torch thread each: two that share a core wait for each other at many times the cost.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Every program of one model of each family, verified at its small shape through all passes; a table, and 1 if one fails.
programs: $(VENV)/.installed
	$(BIN)/pypto-deploy programs verify --small

serve: $(VENV)/.installed
	$(BIN)/pypto-deploy serve champion

setup: $(VENV)/.installed

sample: $(MODEL)/config.json

$(MODEL)/config.json: | $(VENV)/.installed
	$(BIN)/pypto-deploy sample-model $(MODEL)

$(VENV)/.installed: pyproject.toml constraints.txt scripts/prerequisites.sh
	PYTHON=$(PYTHON) sh scripts/prerequisites.sh
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip --version >/dev/null || $(PYTHON) -m venv --clear $(VENV)
	@# torch first and alone: whatever asks for it later is then content with this build
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	  $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) $(STORE) $(CACHE) $(FALLBACK) models build output *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find quantize kernels serving tasks flows tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
