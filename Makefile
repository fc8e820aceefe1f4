# Two commands from a bare machine: `make demo` and `make test`. Both make their own virtual environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
NATIVE := CMakeLists.txt $(wildcard csrc/cpu/*.cpp csrc/cpu/*.h csrc/cpu/arch/*.cpp csrc/cpu/arch/*.h)

.DEFAULT_GOAL := help
.PHONY: help demo test lint unit format kernels clean

help:
	@echo "make demo     set everything up, then run a real model end to end"
	@echo "make test     set everything up, then lint, types, import contracts and the whole test suite"
	@echo "make kernels  rebuild the C++ kernels after a change in csrc/"
	@echo "make format   format the Python code"

$(READY): pyproject.toml $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	@touch $@

demo: $(READY)
	$(BIN)/tokenmill doctor
	$(BIN)/tokenmill pull smollm2
	$(BIN)/tokenmill inspect smollm2
	$(BIN)/tokenmill run smollm2 "Explain in two sentences why the sky is blue." --max-tokens 96
	$(BIN)/tokenmill bench latency smollm2 --input-len 128 --output-len 32 --batch-size 1
	$(BIN)/tokenmill bench throughput smollm2 --num-prompts 16 --input-len 128 --output-len 32 --range-ratio 0.5
	$(BIN)/tokenmill optimize smollm2 --target-cost -60% --max-quality-loss 1% --minutes 4 --input-len 64 --output-len 32 \
	  --concurrency 4 --quality-tokens 8192 --out demo/optimize
	@$(BIN)/python -c "import json; r = json.load(open('demo/optimize/results.json')); \
	  print(f\"\nsaving:       {r['cost_reduction']:.1%} of the cost of a token, against {r['baseline']['name']}\"); \
	  print(f\"quality loss: {r['quality_loss'] or 0:+.2%} of perplexity\"); \
	  print('report:       demo/optimize/report.html'); print('serve it:    ', r['launch_lines']['tokenmill'])"

test: lint unit

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

unit: $(READY)
	$(BIN)/python -m pytest

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

kernels:
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	@touch $(READY)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
