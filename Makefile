# `make demo` and `make test` set up everything they need; only Python 3.10+, pip and make must be there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2

.PHONY: demo test bench lint clean

demo: $(VENV)/installed
	$(BIN)/specflow demo

test: $(VENV)/installed-dev
	$(BIN)/specflow models fetch smollm2-135m
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

bench: $(VENV)/installed
	$(BIN)/python benchmarks/spine.py

lint: $(VENV)/installed-dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml requirements.lock | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --constraint requirements.lock --editable .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --constraint requirements.lock --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV)
