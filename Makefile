# Each verb sets up what it needs. TORCH_INDEX chooses another index for torch, e.g.
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
PYTHON ?= python3.11
VENV ?= .venv
TORCH_INDEX ?=
RUN ?= runs/demo
# COVERAGE=1 measures branch coverage while a share of the tests runs (tests/conftest.py);
# `make coverage` reports it.
COVERAGE ?=
# The minor version of Ray for `make test-ray`.
RAY ?= 2.58
# The version of Stable-Baselines3 for `make test-sb3`.
SB3 ?= 2.7.0

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PYTEST := $(BIN)/python -m $(if $(COVERAGE),coverage run -m )pytest --durations=40 --durations-min=5
PAIR := -n 2 --dist worksteal
# A file's slow tests share a run, and a worker's files a cluster. Without reordering, as
# xdist would leave files with few tests, which take longest, to the end. Three, since
# most of them wait for processes that they start.
FILES := -n 3 --dist loadfile --no-loadscope-reorder
HIGHWAY := $(shell sed -n '/^highway-env==/p' constraints.txt)
TORCH := $(shell sed -n '/^torch==/p' constraints.txt)

# Hundreds of processes of the tests import the package, and keep what the first compiles.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-all test-ray test-sb3 test-benchmarl fast lint types imports quick slow sanitize coverage dist pages docs bench clean

help:  ## Show this help
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

# A kernel of other sources is not used, so it is built again when they change.
KERNEL := CMakeLists.txt $(wildcard marl_pool/compiled/native/src/*.[ch]pp)

# torch first and alone: its index may differ from that of the rest.
$(BIN)/.torch: constraints.txt
	@echo "Installing torch and the rest into $(VENV), without output: minutes, 3 GB or more."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || python3 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	touch $@

$(BIN)/.demo: $(BIN)/.torch pyproject.toml $(KERNEL)
	$(PIP) --editable '.[rllib,plots]'
	touch $@

$(BIN)/.dev: $(BIN)/.torch pyproject.toml $(KERNEL)
	$(PIP) --editable '.[rllib,plots,evolve,analysis,atari,box2d,bullet,mujoco,play,zoo,dev]'
	$(PIP) --no-deps $(HIGHWAY)  # its pygame is the pygame-ce that is there
	touch $@

demo: $(BIN)/.demo  ## Install, train AdaPool for a million steps, evaluate it, render a video
	@test ! -e $(RUN) || { echo "$(RUN) exists: remove it, or choose another: make demo RUN=runs/other"; exit 2; }
	$(BIN)/marl-pool train --run-dir $(RUN) experiment=simple_centroid pooling=ada total_steps=1_000_000
	$(BIN)/marl-pool evaluate $(RUN)
	$(BIN)/marl-pool render $(RUN)

# mypy runs on one core: beside the tests it takes half the time.
test: lint imports  ## What guards a merge: lint, types, import rules, quick tests
	$(MAKE) --jobs=2 types quick

sanitize: $(BIN)/.dev  ## The kernels' tests where every access out of bounds ends the process
	$(PYTEST) -m slow tests/compiled/test_kernel_memory.py -k out_of_bounds

# In one run each: a property's many examples begin with its few.
test-all slow: export HYPOTHESIS_PROFILE = thorough
test-all: test slow  ## The slow tests too, and each property with many examples

test-ray: $(BIN)/.dev  ## Trainings and their ends with another minor version of Ray: RAY=2.58
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --upgrade --target $(VENV)/ray-$(RAY)/site-packages 'ray==$(RAY).*'
	PYTHONPATH=$(CURDIR)/$(VENV)/ray-$(RAY)/site-packages $(BIN)/python -c \
	  "import ray; assert ray.__version__.startswith('$(RAY).'), ray.__version__"
	PYTHONPATH=$(CURDIR)/$(VENV)/ray-$(RAY)/site-packages $(BIN)/python -m pytest $(FILES) \
	  tests/training/test_cluster.py tests/training/test_interrupt.py tests/adapters/test_rllib.py

test-sb3: $(BIN)/.dev  ## Its adapter with another version of Stable-Baselines3: SB3=2.7.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --upgrade --target $(VENV)/sb3-$(SB3) stable-baselines3==$(SB3) sb3-contrib==$(SB3)
	PYTHONPATH=$(CURDIR)/$(VENV)/sb3-$(SB3) $(BIN)/python -c \
	  "import stable_baselines3 as sb3; assert sb3.__version__ == '$(SB3)', sb3.__version__"
	PYTHONPATH=$(CURDIR)/$(VENV)/sb3-$(SB3) $(BIN)/python -m pytest $(FILES) tests/adapters/test_sb3.py

# BenchMARL 1.5 needs a TorchRL older than 0.12, so these versions lie beside the others.
test-benchmarl: $(BIN)/.dev  ## The adapter of BenchMARL, with the versions that it needs
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --upgrade --target $(VENV)/benchmarl benchmarl==1.5.2 gym gym-notices==0.0.8 importlib_metadata \
	  orjson pyglet==1.5.27 pyvers==0.2.3 six tensordict==0.11.0 torchrl==0.11.1 tqdm vmas==1.5.2 zipp
	PYTHONPATH=$(CURDIR)/$(VENV)/benchmarl $(BIN)/python -m pytest -n 0 tests/adapters/test_benchmarl.py

fast: $(BIN)/.dev  ## Unit tests that neither train, nor run a command or a simulator
	$(PYTEST) $(PAIR) -m "fast and not slow"

lint: $(BIN)/.dev  ## ruff: format and rules; names and prose; files of deploy/
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python scripts/words.py
	$(BIN)/yamllint --strict deploy
	$(BIN)/shellcheck deploy/slurm.sh
	$(BIN)/hadolint deploy/Dockerfile

types: $(BIN)/.dev  ## mypy
	$(BIN)/mypy

imports: $(BIN)/.dev  ## Which room may know which
	$(BIN)/lint-imports --no-cache

quick: $(BIN)/.dev  ## pytest, without the slow tests; TESTS=tests/pooling for some
	$(PYTEST) $(PAIR) -m "not slow" $(TESTS)

slow: $(BIN)/.dev  ## pytest: the slow tests
	$(PYTEST) $(FILES) -m slow

coverage: $(BIN)/.dev  ## Report what was measured: files below 80 %, then the total, at least 92 %
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --sort=cover --fail-under=0 | awk 'NR <= 2 || $$NF + 0 < 80'
	$(BIN)/coverage report --format=total --fail-under=92

dist: $(BIN)/.dev  ## Wheels with and without the kernel, and sdist, checked and each tried alone
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m build --wheel --config-setting wheel.cmake=false --outdir dist
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist dist/*-linux_*.whl
	rm dist/*-linux_*.whl
	$(BIN)/twine check --strict dist/*
	for wheel in dist/*.whl; do $(BIN)/python scripts/try_wheel.py $$wheel || exit 1; done

pages: $(BIN)/.dev  ## Write what is made of docstrings: tables, pages of environments, demos, the rooms
	$(BIN)/python scripts/component_tables.py
	$(BIN)/python scripts/env_pages.py
	$(BIN)/python scripts/refresh_demos.py
	$(BIN)/python scripts/rooms.py

docs: $(BIN)/.dev  ## The site, in docs/_build; warnings are errors
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -b html docs docs/_build
	@echo "Open docs/_build/index.html."

bench: $(BIN)/.dev  ## The table of docs/benchmarks.md (leave the machine idle)
	$(BIN)/python scripts/benchmark.py --json benchmarks.json

clean:  ## Remove the environment and caches, never runs
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache .coverage .coverage.*
