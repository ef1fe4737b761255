# Two commands are all the set-up there is: `make serve` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
ARGS   ?=

.DEFAULT_GOAL := help
.PHONY: help serve chat test test-all lint format cross clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

serve: $(VENV)/.installed  ## Install, fetch the default model and serve it on http://127.0.0.1:8000 (ARGS="--port 9000")
	@$(BIN)/enginehouse serve $(ARGS)

chat: $(VENV)/.installed  ## Talk to the default model in this terminal
	@$(BIN)/enginehouse chat $(ARGS)

test: $(VENV)/.dev  ## Install and run the tests (ARGS="-k kv_cache")
	@$(BIN)/python -m pytest $(ARGS)

test-all: $(VENV)/.dev  ## Also the slow tests
	@$(BIN)/python -m pytest -m 'not peer' $(ARGS)

lint: $(VENV)/.dev  ## ruff, mypy --strict, import rules
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

format: $(VENV)/.dev  ## Format and mend what can be mended
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

cross: $(VENV)/.cross  ## Build the kernels for Linux and macOS on Arm too, and run the Arm ones in an emulator
	@$(BIN)/python scripts/cross_compile.py

clean:  ## Remove the virtual environment and tool caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

# Interpreters older than 3.11 are told so, instead of failing somewhere in pip.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("Enginehouse needs Python 3.11 or newer, this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12 ...") if sys.version_info < (3, 11) else None'
	@echo "Making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing Enginehouse"
	@$(PIP) install --progress-bar on -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing Enginehouse and its development tools"
	@$(PIP) install --progress-bar on -c constraints.txt -e . $$($(BIN)/python scripts/dev_requirements.py)
	@touch $@ $(VENV)/.installed

$(VENV)/.cross: pyproject.toml constraints.txt | $(VENV)/.dev
	@echo "Installing the cross compiler"
	@$(PIP) install --progress-bar on -c constraints.txt -e '.[compiler]'
	@touch $@
