# The testbed from a checkout: everything happens in .venv, nothing needs root.
PYTHON ?= python3
NAME ?= quickstart
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help scenario paper check test test-live test-kernel nightly bench lint doctor clean

help:
	@echo 'make scenario [NAME=quickstart] [ARGS="--set key=value"]   run a scenario (see testbed list)'
	@echo 'make doctor      check what this host lacks'
	@echo 'make test        all tests but the nightly ones; make test-live only those that build networks'
	@echo 'make test-kernel   lanes and live tests under a stock Debian kernel in QEMU (no root, a minute or two)'
	@echo 'make lint        ruff and mypy --strict'
	@echo 'make nightly     the tests that take minutes'
	@echo 'make paper       the evaluation of the paper, simulated at its size: paper beside ours'
	@echo 'make check       explore small clusters in every order of events'
	@echo 'make bench       speed and memory, each against a reference in the same run'
	@echo 'make clean       remove .venv and caches; run folders stay'

scenario: $(VENV)/run.stamp
	@$(BIN)/testbed run $(NAME) $(ARGS)

paper: $(VENV)/run.stamp
	@$(BIN)/testbed paper all $(ARGS)

check: $(VENV)/run.stamp
	@$(BIN)/testbed check $(ARGS)

doctor: $(VENV)/run.stamp
	@$(BIN)/testbed doctor

test: $(VENV)/dev.stamp
	@$(BIN)/python -m pytest -m 'not live and not nightly' --numprocesses auto tests
	@$(BIN)/python -m pytest -m 'live and not nightly' tests

test-live: $(VENV)/dev.stamp
	@$(BIN)/python -m pytest -m 'live and not nightly' tests

test-kernel: $(VENV)/dev.stamp
	@$(BIN)/python -m tests.kernel $(ARGS)

nightly: $(VENV)/dev.stamp
	@$(BIN)/python -m pytest -m nightly tests

bench: $(VENV)/dev.stamp
	@$(BIN)/python -m tests.bench

lint: $(VENV)/dev.stamp
	@$(BIN)/ruff check .
	@$(BIN)/mypy

clean:
	rm -rf $(VENV) .cache build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@command -v $(PYTHON) >/dev/null 2>&1 || { echo "error: $(PYTHON) is not there: install Python 3.11 or newer, or name one with PYTHON=..." >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $$($(PYTHON) --version) is older than 3.11: install a newer one and name it with PYTHON=python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { v=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'); echo "error: $(PYTHON) has no venv module: install it (Debian, Ubuntu: apt install python$$v-venv)" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV)

# Editable, so that a changed source needs no new install; the stamp depends on what does.
$(VENV)/run.stamp: pyproject.toml | $(VENV)/bin/python
	@echo "installing into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input --editable .
	@touch $@

$(VENV)/dev.stamp: pyproject.toml | $(VENV)/bin/python
	@echo "installing into $(VENV), tools for tests included ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input --editable '.[dev]'
	@touch $@ $(VENV)/run.stamp
