# make demo    a first report, on this machine's CPU
# make test    the whole test suite with its line coverage; fails below 90 %
# make quick   without the slow tests
# make check   lint, format, types
#
# make ray-tests    those of replicas on a Ray cluster, made up on this machine; installs Ray
#
# make compiled     by mypyc and a C compiler: modules of the loop, scheduler, cache bookkeeping, router and simulator, which
#                   Python then takes instead of their sources, and which do the same in two thirds of the time or less.
#                   Where a source is edited, mini_infer says so and stops, until they are made again or taken away:
# make interpreted
#
# Each sets up .venv by itself. PYTHON chooses the interpreter (3.10 or later), WORKERS how many processes share the tests
# (up to 2 GB each): by default one more than two cores, since tests wait, too.
PYTHON ?= python3
WORKERS ?= 3
VENV := .venv
BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev

unexport PYTHONDONTWRITEBYTECODE  # modules are compiled once, and not in every process that a test starts

.PHONY: demo test quick check ray-tests setup clean compiled interpreted

setup: $(DEV_STAMP)

demo: $(RUN_STAMP)
	$(BIN)/python run.py experiment=quickstart

# Kernels are interpreted on every machine alike; experiments/gpu_tests.py is for compiled ones.
test quick ray-tests: export CUDA_VISIBLE_DEVICES :=

test: $(DEV_STAMP)
	$(BIN)/python -m slipcover --json --out .coverage.json -m pytest --numprocesses $(WORKERS) --dist worksteal
	$(BIN)/python -m slipcover --merge .coverage.json --out .coverage.json --skip-covered --fail-under 90

quick: $(DEV_STAMP)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m "not slow"

ray-tests: $(DEV_STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,ray]'
	$(BIN)/python -m pytest -m ray tests/serving/test_ray_engine.py

check: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

compiled: $(DEV_STAMP) interpreted
	$(BIN)/python ops/compile.py

interpreted:
	rm -rf build
	find mini_infer -name '*.so' -delete
	rm -f mini_infer/.compiled

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "Python 3.10 or later is needed; choose one with: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
	  || { echo "This Python cannot make a virtual environment (on Debian and Ubuntu: apt install python3-venv)"; exit 1; }

$(RUN_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	@touch $@

$(DEV_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(RUN_STAMP)

clean: interpreted
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage* outputs multirun
