# Every target does its own set-up, from a bare clone on.
#   make test VENV=/somewhere    uses or makes another environment
VENV ?= .venv
BIN = $(VENV)/bin
export VENV

.DEFAULT_GOAL := help
.PHONY: help install demo test check test-python test-native bench bench-quick predictor clean

help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

install: ## set up everything into $(VENV), building the extension; fast when done before
	@.ci/install

demo: install ## a real chat through one prefill and one decode instance
	@HF_HUB_OFFLINE=1 $(BIN)/python examples/demo.py

test: check test-python test-native ## everything that must pass

check: install ## style, types, layering: seconds
	@.ci/check

test-python: install ## Python tests, with real vLLM instances
	@HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q -m "not slow and not gpu"

test-native: install ## C++ tests: plain, ASan with UBSan, TSan
	@.ci/test-native

bench: install ## KV transfer beside memcpy and plain sockets
	@$(BIN)/vllm-tetri bench transfer

bench-quick: install ## all experiments but a predictor's, small, and a report: a quarter of an hour on two cores
	@.ci/bench-quick

predictor: install ## a length predictor for the demo's model, from PROMPTS="FILES": hours
	@PROMPTS="$(PROMPTS)" .ci/predictor

clean: ## remove what was built here, but not $(VENV)
	rm -rf build dist .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find vllm_tetri tests examples -name __pycache__ -prune -exec rm -rf {} +
	find vllm_tetri -name '*.so' -delete
