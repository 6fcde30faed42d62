# Each verb sets up what it needs. TORCH_INDEX chooses another index for torch, e.g.
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
PYTHON ?= python3.11
VENV ?= .venv
TORCH_INDEX ?=
RUN ?= runs/demo

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
TORCH := $(shell sed -n '/^torch==/p' constraints.txt)

.PHONY: help demo test lint types imports tests bench clean

help:  ## Show this help
	@grep -E '^[a-z]+: .*##|^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

# torch first and alone: its index may differ from that of the rest.
$(BIN)/.torch: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || python3 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	touch $@

$(BIN)/.demo: $(BIN)/.torch pyproject.toml
	$(PIP) --editable '.[rllib,plots]'
	touch $@

$(BIN)/.dev: $(BIN)/.torch pyproject.toml
	$(PIP) --editable '.[rllib,plots,evolve,analysis,atari,box2d,bullet,mujoco,dev]'
	touch $@

demo: $(BIN)/.demo  ## Install, train AdaPool for two minutes, evaluate it, render a video
	@test ! -e $(RUN) || { echo "$(RUN) exists: remove it, or choose another: make demo RUN=runs/other"; exit 2; }
	$(BIN)/marl-pool train --run-dir $(RUN) experiment=simple_centroid pooling=ada time_limit=120
	$(BIN)/marl-pool evaluate $(RUN)
	$(BIN)/marl-pool render $(RUN)

test: lint types imports tests  ## Lint, types, import rules, tests

lint: $(BIN)/.dev  ## ruff: format and rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(BIN)/.dev  ## mypy
	$(BIN)/mypy

imports: $(BIN)/.dev  ## Which room may know which
	$(BIN)/lint-imports --no-cache

tests: $(BIN)/.dev  ## pytest, the slow ones too
	$(BIN)/python -m pytest

bench: $(BIN)/.dev  ## The table of docs/benchmarks.md (leave the machine idle)
	$(BIN)/python scripts/benchmark.py --json benchmarks.json

clean:  ## Remove the environment and caches, never runs
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache
