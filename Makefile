# One target for each thing CI does; `make demo` and `make test` are the two to know.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := demo

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What the package runs on is written in pyproject.toml; what we develop on is newer.
DEVELOP_ON := torch>=2.14

.PHONY: demo test test-long test-slow lint format types wheel-test clean

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pdp-fx needs Python 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[demo]' '$(DEVELOP_ON)'
	touch $@

$(VENV)/develop.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[test,dev]' '$(DEVELOP_ON)'
	touch $@ $(VENV)/demo.stamp

demo: $(VENV)/demo.stamp
	$(BIN)/python -m pdp_fx demo --out out

test: $(VENV)/develop.stamp
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-long: $(VENV)/develop.stamp
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "long and not slow"

test-slow: $(VENV)/develop.stamp
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow

lint: $(VENV)/develop.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: $(VENV)/develop.stamp
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: $(VENV)/develop.stamp
	$(BIN)/pyright --pythonpath $(BIN)/python

wheel-test: $(VENV)/develop.stamp
	$(BIN)/python -m pytest -m slow tests/test_packaging.py

clean:
	rm -rf $(VENV) build dist out *.egg-info .pytest_cache .ruff_cache .hypothesis
