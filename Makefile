# Each target does its own set-up in $(VENV) and is fast the second time.
#   make demo       the main job on data that is already here, in minutes
#   make test       the tests, without those marked `slow`
#   make lint       ruff and mypy
PY ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq -c constraints.txt
# A stamp is older than what it was made from when the set-up has to run again.
PARTS := pyproject.toml constraints.txt

.PHONY: demo test test-slow lint bench docs clean
.DEFAULT_GOAL := test

$(BIN)/python:
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Equipoise needs Python 3.11 or newer; $(PY) is `$(PY) --version 2>&1`. Give another one: make PY=python3.12"; exit 1; }
	$(PY) -m venv $(VENV)

$(VENV)/.core: $(PARTS) | $(BIN)/python
	@echo "Setting up $(VENV) (once)"
	@$(PIP) -e .
	@touch $@

$(VENV)/.dev: $(PARTS) | $(BIN)/python
	@echo "Setting up $(VENV) for development (once)"
	@$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.core

$(VENV)/.docs: $(PARTS) | $(BIN)/python
	@echo "Setting up $(VENV) for the documentation (once)"
	@$(PIP) -e '.[docs]'
	@touch $@ $(VENV)/.core

demo: $(VENV)/.core
	@$(BIN)/equipoise demo $(ARGS)

test: $(VENV)/.dev
	@$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-slow: $(VENV)/.dev
	@$(BIN)/python -m pytest -m slow $(ARGS)

lint: $(VENV)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/mypy

bench: $(VENV)/.core
	@$(BIN)/python bench/overhead.py $(ARGS)

docs: $(VENV)/.docs
	@$(BIN)/mkdocs build --strict --quiet
	@echo "Documentation: site/index.html"

# Run directories and the environment are the user's: they stay.
clean:
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage src/*.egg-info
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
