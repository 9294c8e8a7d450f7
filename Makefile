# Every target does its own set-up, from a bare clone on.
#   make test VENV=/somewhere    uses or makes another environment
VENV ?= .venv
BIN = $(VENV)/bin
export VENV

.DEFAULT_GOAL := help
.PHONY: help install install-suites demo check test test-rest test-all test-long suites canary models soak bench gpu \
	predictor dist docs clean

help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

install: ## set up everything into $(VENV), building the extension; fast when done before
	@.ci/install

install-suites: # and what only test-rest needs: other projects' tests and tools
	@.ci/install suites

demo: install ## a real chat through one prefill and one decode instance
	@HF_HUB_OFFLINE=1 $(BIN)/python examples/demo.py

check: install ## style, types, layering, budgets, language: seconds
	@.ci/check

test: install ## check, unit tests, native tests, one end-to-end pass: at most 10 minutes
	@.ci/test quick

test-rest: install-suites ## what test-all has beyond test: faults, fuzzing, sanitizers, wheel, vLLM 0.31, suites
	@.ci/test rest

test-all: install-suites ## test and test-rest: about 50 minutes on two cores
	@.ci/test quick rest

test-long: install ## every model runner, form of request, kind of fault, soak: what test-all leaves out; an hour
	@.ci/test long

suites: install-suites ## tests of vLLM and openai-python, schemathesis, load generators, through us
	@$(BIN)/python -m tests.suites.run --more

canary: install ## try VERSION of vLLM, by default the newest: contract and engine tests
	@.ci/vllm "$(or $(VERSION),newest)" contract harness

models: ## a tiny model per family, through us and stock: the table of README.md; hours, or FAMILIES="..."
	@.ci/install models
	@HF_HUB_OFFLINE=1 $(BIN)/python -m tests.models.run $(FAMILIES)

soak: install ## break a cluster under load again and again, and check its guarantees
	@HF_HUB_OFFLINE=1 $(BIN)/python -m examples.benchmarks.soak \
		"$$($(BIN)/python examples/smollm2.py --dtype float32)" -- --dtype float32

bench: install ## this package and a stock server under the same load, with the demo's model
	@HF_HUB_OFFLINE=1 $(BIN)/vllm-tetri bench "$$($(BIN)/python examples/smollm2.py --dtype float32)" \
		-- --dtype float32 --max-model-len 2048

gpu: install ## prove it on a GPU: STAGES="A B C", GPU=INDEX; DEVICE=cpu checks the steps on a CPU
	@HF_HUB_OFFLINE=1 $(BIN)/python -m tests.gpu.run $(STAGES) --device $(or $(DEVICE),cuda) \
		$(if $(GPU),--gpu $(GPU)) $(if $(OUTPUT),--output $(OUTPUT))

predictor: install ## a length predictor for the demo's model, from PROMPTS="FILES": hours
	@PROMPTS="$(PROMPTS)" examples/predictor/recipe.sh

dist: install ## an sdist, and a wheel per CPython found (VERSIONS="3.11 3.12 3.13"), into dist/
	@.ci/dist $(VERSIONS)

docs: install ## the docs as a site in build/site, links checked, and man pages in build/man
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## remove what was built here, but not $(VENV)
	rm -rf build dist .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find vllm_tetri tests examples -name __pycache__ -prune -exec rm -rf {} +
	find vllm_tetri -name '*.so' -delete
