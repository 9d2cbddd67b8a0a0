# Every target starts from a machine that has only python3, pip and make: it makes .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: venv demo test lint bench nightly clean

venv: $(VENV)/.dev

# python3 -m venv needs ensurepip, which Debian ships apart; virtualenv, kept to a folder of its own, does without.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("rr_dataset needs Python 3.10 or later, this is " + sys.version.split()[0] + "; try: make PYTHON=python3.12")'
	@rm -rf $(VENV)
	@if $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then \
	    $(PYTHON) -m venv $(VENV); \
	else \
	    $(PYTHON) -m pip install -q --target .venv-tools virtualenv \
	    && PYTHONPATH=.venv-tools $(PYTHON) -m virtualenv -q $(VENV); \
	fi || { rm -rf $(VENV); echo "No virtual environment: install python3-venv (Debian: apt-get install python3-venv) or pip" >&2; exit 1; }
	@touch $@

$(VENV)/.core: $(VENV)/.made pyproject.toml
	$(PIP) install -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.made pyproject.toml
	$(PIP) install -e '.[dev]'
	@touch $@ $(VENV)/.core

$(VENV)/.bench: $(VENV)/.dev
	$(PIP) install -e '.[bench]'
	@touch $@

demo: $(VENV)/.core
	$(BIN)/rr-dataset demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest -q

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.bench
	$(BIN)/python -m tests.benchmarks

nightly: $(VENV)/.dev
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest -q -m '' -o faulthandler_timeout=1800

clean:
	rm -rf $(VENV) .venv-tools build dist *.egg-info .coverage* .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
