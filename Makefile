# Every target starts from a machine that has only python3, pip and make: it makes .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: venv demo demo-model test test-models lint bench nightly clean

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

# Model code of others, in environments of its own: PaddleFormers 0.4.1 needs a huggingface_hub before 1, transformers 5 one
# after it, and PaddleFormers tells transformers that there is no torch. Its own dependencies would pin numpy below 2.
# Elsewhere than on a machine whose index has the CPU wheel, torch is several GB; PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
# makes it small. Not part of CI: both environments take 2 GB, and on two busy cores their making alone took 20 minutes.
.venv-paddle/.models: pyproject.toml
	$(MAKE) VENV=.venv-paddle .venv-paddle/.core
	.venv-paddle/bin/python -m pip --disable-pip-version-check -q install -e '.[models-paddle]'
	.venv-paddle/bin/python -m pip --disable-pip-version-check -q install --no-deps paddleformers==0.4.1
	@touch $@

.venv-torch/.models: pyproject.toml
	$(MAKE) VENV=.venv-torch .venv-torch/.core
	.venv-torch/bin/python -m pip --disable-pip-version-check -q install -e '.[models-torch]'
	@touch $@

demo: $(VENV)/.core
	$(BIN)/rr-dataset demo

demo-model: .venv-paddle/.models
	.venv-paddle/bin/rr-dataset demo --model

test: $(VENV)/.dev
	$(BIN)/python -m pytest -q

test-models: .venv-paddle/.models .venv-torch/.models
	.venv-paddle/bin/python -m pytest -q tests/models --ignore-glob '*_transformers.py'
	.venv-torch/bin/python -m pytest -q tests/models/test_*transformers.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.bench
	$(BIN)/python -m tests.benchmarks

nightly: $(VENV)/.dev
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest -q -m '' -o faulthandler_timeout=1800

clean:
	rm -rf $(VENV) .venv-tools .venv-paddle .venv-torch build dist *.egg-info .coverage* .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
