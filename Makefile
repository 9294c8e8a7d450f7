# Every target does its own set-up, from a bare clone on.
#   make test VENV=/somewhere    uses or makes another environment
VENV ?= .venv
BIN = $(VENV)/bin
export VENV

.DEFAULT_GOAL := help
.PHONY: help install demo check test test-rest test-all soak bench predictor clean

help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

install: ## set up everything into $(VENV), building the extension; fast when done before
	@.ci/install

demo: install ## a real chat through one prefill and one decode instance
	@HF_HUB_OFFLINE=1 $(BIN)/python examples/demo.py

check: install ## style, types, layering, budgets, language: seconds
	@.ci/check

test: install ## check, unit tests, native tests, one end-to-end pass: at most 10 minutes
	@.ci/test quick

test-rest: install ## what test-all has beyond test: faults, hosts, soak, fuzzing, sanitizers, wheel
	@.ci/test rest

test-all: install ## test and test-rest: at most 45 minutes
	@.ci/test quick rest

soak: install ## break a cluster under load again and again, and check its guarantees
	@HF_HUB_OFFLINE=1 $(BIN)/python -m examples.benchmarks.soak \
		"$$($(BIN)/python examples/smollm2.py --dtype float32)" -- --dtype float32

bench: install ## this package and a stock server under the same load, with the demo's model
	@HF_HUB_OFFLINE=1 $(BIN)/vllm-tetri bench "$$($(BIN)/python examples/smollm2.py --dtype float32)" \
		-- --dtype float32 --max-model-len 2048

predictor: install ## a length predictor for the demo's model, from PROMPTS="FILES": hours
	@PROMPTS="$(PROMPTS)" examples/predictor/recipe.sh

clean: ## remove what was built here, but not $(VENV)
	rm -rf build dist .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find vllm_tetri tests examples -name __pycache__ -prune -exec rm -rf {} +
	find vllm_tetri -name '*.so' -delete
