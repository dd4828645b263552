# `make demo` and `make test` set up .venv by themselves, and again when pyproject.toml or constraints.txt change.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
TRITON := .venv/.triton
# All cases of the tests of all backends take hours in the interpreter: make test-triton TRITON_CASES=
TRITON_CASES := --one-case
C_FILES := $(wildcard src/lln/backends/cpu/src/*.[ch] tests/sanitize/*.c)

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-triton test-gpu lint sanitize format bench docs wheel clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 13

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv --clear .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY)  ## see moment matching, linear cost and training at work (five minutes; pictures in demo-results)
	$(BIN)/lln demo

test: $(READY)  ## run the tests, without the long sweeps
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m "not compiled and not slow"

test-slow: $(READY)  ## run the long sweeps, and build and install wheels
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m slow

$(TRITON): $(READY)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[triton]'
	@touch $@

test-triton: $(TRITON)  ## run the GPU kernels in an interpreter, and compile them for real GPUs (downloads 300 MB)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest --numprocesses 2 tests/gpu
	TRITON_INTERPRET=1 $(BIN)/python -m pytest --numprocesses 2 -k triton -m "not slow" $(TRITON_CASES) tests/test_*.py
	$(BIN)/python -m pytest -m compiled tests/gpu

test-gpu: $(READY)  ## run the GPU kernels on this machine's GPU
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and "torch finds no NVIDIA GPU; make test-triton needs none")'
	$(BIN)/python -m pytest -m "not compiled" tests/gpu
	LLN_TEST_DEVICE=cuda $(BIN)/python -m pytest -k triton tests/test_*.py

lint: $(READY)  ## check format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror $(C_FILES)
	$(BIN)/mypy

sanitize: $(READY)  ## run the C code under the address and undefined-behaviour sanitizers of gcc
	$(BIN)/python tests/sanitize/run.py

format: $(READY)  ## put the code into the format that lint checks
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(C_FILES)

bench: $(READY)  ## measure time and memory against torch's softmax attention
	$(BIN)/lln bench attention

docs: $(READY)  ## build the documentation site in site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: $(READY)  ## build the wheel with compiled code, and the source distribution, in dist/
	LLN_COMPILED=1 $(BIN)/hatchling build -t wheel -t sdist

clean:  ## remove what the other targets made
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis demo-results build dist site
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
