# `make demo` and `make test` set up everything they need; only Python 3.10+, pip and make must be there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
PEERS := .venv-peers
DATA ?= ../shared/data

.PHONY: demo test bench bench-cpu bench-drafters lint clean

demo: $(VENV)/installed
	$(BIN)/specflow demo

test: $(VENV)/installed-dev $(VENV)/installed-parity
	$(BIN)/specflow models fetch smollm2-135m
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

bench: $(VENV)/installed
	$(BIN)/python benchmarks/spine.py
	$(BIN)/python benchmarks/tuning.py

# About 20 minutes on 2 quiet cores, and once before that 15 for the peers' environment.
bench-cpu: $(VENV)/installed $(PEERS)/installed.json
	$(BIN)/python -m pip install --quiet --constraint requirements.lock --editable '.[openvino]'
	$(BIN)/specflow models fetch smollm2-135m
	$(BIN)/python benchmarks/cpu.py

# Hours on 2 cores; DATA is a folder of evaluation sets (smoke, mt_bench, humaneval, gsm8k), each with a dev.jsonl.
bench-drafters: $(VENV)/installed
	$(BIN)/specflow models fetch smollm2-135m
	$(BIN)/python benchmarks/drafters.py --data $(DATA)

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

# Other people's implementations to compare with; tests skip what cannot be installed (Python 3.10, no such wheel).
$(VENV)/installed-parity: pyproject.toml requirements.lock | $(VENV)/installed-dev
	$(BIN)/python -m pip install --quiet --constraint requirements.lock --editable '.[parity]'
	-$(BIN)/python -m pip install --quiet --no-deps dflash==0.1.0 speculators==0.9.0 hs-connectors==0.9.0
	-$(BIN)/python -m pip install --quiet --no-deps onnxruntime-genai==0.18.0 # it asks for a second onnxruntime
	touch $@

# Engines to measure against, apart from ours, because they pin what we use; one that fails to install says why.
$(PEERS)/installed.json: benchmarks/cpu_peers/install.py requirements.lock
	$(PYTHON) -m venv $(PEERS)
	$(PYTHON) benchmarks/cpu_peers/install.py $(PEERS)/bin/python requirements.lock $@

clean:
	rm -rf $(VENV) $(PEERS)
