# Start with `make demo` or `make test`: both create a virtual environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
NATIVE := CMakeLists.txt $(wildcard csrc/cpu/*.cpp csrc/cpu/*.h csrc/cpu/arch/*.cpp csrc/cpu/arch/*.h)

# One test worker per core, but no more than four: a worker holds up to 6 GiB. Each computes with one thread (tests/conftest.py).
JOBS := $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2)
WORKERS ?= $(if $(filter 1 2 3,$(JOBS)),$(JOBS),4)
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-clients test-ray lint size unit sanitize format kernels clean docs

help:
	@echo "make demo     set everything up, then run a real model end to end"
	@echo "make test     set everything up, then lint, types, import contracts, sizes and the test suite"
	@echo "make test-all the same with the tests marked slow: full-size versions of checks that the suite runs on smaller sizes"
	@echo "make test-clients  install the clients of other projects apart and drive the server with them (part of test-all)"
	@echo "make test-ray install Ray apart and test fleets on a cluster of this machine (part of test-all)"
	@echo "make sanitize run the C++ tests under the address, undefined-behaviour and thread sanitizers"
	@echo "make size     lines by folder against their budgets (part of make lint)"
	@echo "make kernels  rebuild the C++ kernels after a change in csrc/"
	@echo "make format   format the Python code"
	@echo "make docs     build the documentation site into site/"

$(READY): pyproject.toml $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	@touch $@

# The loop twice, in about seven minutes: on a source in full precision, then on one that is stored in four bits.
DEMO_LOAD := --target-cost -60% --max-quality-loss 1% --input-len 64 --output-len 32 --concurrency 4 --quality-tokens 8192

demo: $(READY)
	$(BIN)/tokenmill doctor
	$(BIN)/tokenmill pull smollm2
	$(BIN)/tokenmill inspect smollm2
	$(BIN)/tokenmill run smollm2 "Explain in two sentences why the sky is blue." --max-tokens 96
	$(BIN)/tokenmill bench latency smollm2 --input-len 128 --output-len 32 --batch-size 1
	$(BIN)/tokenmill bench throughput smollm2 --num-prompts 16 --input-len 128 --output-len 32 --range-ratio 0.5
	$(BIN)/tokenmill optimize stories15m $(DEMO_LOAD) --minutes 4 --rivals none --out demo/stories15m
	$(BIN)/tokenmill optimize smollm2 $(DEMO_LOAD) --minutes 4 --rivals none --out demo/smollm2
	@$(BIN)/python tools/demo_summary.py demo/stories15m demo/smollm2

# Lint and types run beside the tests, which often wait for a process or a port.
test: $(READY)
	$(MAKE) --no-print-directory -j 2 lint unit

test-all: $(READY)
	$(MAKE) --no-print-directory -j 2 lint unit MARKS="-m ''"
	$(MAKE) --no-print-directory test-clients
	$(MAKE) --no-print-directory test-ray MARKS="-m ''"

# The packages are heavy and want versions of their own: an environment beside the project's, where the server runs.
test-clients: $(READY)
	TOKENMILL_SERVER_PYTHON=$(CURDIR)/$(BIN)/python $$($(BIN)/python tools/client_venv.py) -m pytest tests/clients

# The same: Ray is heavy. One process: the tests share a cluster and kill what runs on it.
test-ray: $(READY)
	$$($(BIN)/python tools/ray_venv.py) -m pytest tests/fleet $(MARKS)

lint: $(READY) size
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

size: $(READY)
	$(BIN)/python tools/size_report.py

# Tests start hundreds of processes of Python: each would compile all modules where bytecode is not kept.
unit: export PYTHONDONTWRITEBYTECODE :=
unit: $(READY)
	$(PYTEST) $(MARKS)

# Needs a compiler and cmake (this environment's, or the system's), not the package. One build for addresses and undefined
# behaviour, of everything; one for data races, of the pool and its test alone.
# Addresses are not randomized where that is allowed: older thread sanitizers cannot place their shadow on some kernels.
CONFIGURE := cmake -S . -DTOKENMILL_MODULE=OFF -DTOKENMILL_TESTS=ON
PLAIN_ADDRESSES := $(shell setarch $$(uname -m) -R true 2>/dev/null && echo setarch $$(uname -m) -R)

sanitize: export PATH := $(CURDIR)/$(BIN):$(PATH)
sanitize:
	$(CONFIGURE) -B build/sanitize -DTOKENMILL_SANITIZE=address,undefined
	cmake --build build/sanitize --parallel $(JOBS)
	ctest --test-dir build/sanitize --parallel $(JOBS) --output-on-failure
	$(CONFIGURE) -B build/sanitize-thread -DTOKENMILL_SANITIZE=thread
	cmake --build build/sanitize-thread --parallel $(JOBS) --target pool_test
	$(PLAIN_ADDRESSES) build/sanitize-thread/pool_test

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

kernels:
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	@touch $(READY)

# With every warning an error: a dead link, a page outside the navigation, a name that the API reference cannot find.
docs: $(READY)
	$(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
