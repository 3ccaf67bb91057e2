# Everything works on a fresh machine that has only Python 3.11+ and make.
#   make train     set up, then train a small GPT on four processes
#   make test      set up, then the whole suite, in two processes side by side (JOBS=1: one after the other)
#   make check     what a contributor runs before a commit: format, lint, types, import contracts, fast tests
#   make campaign  hours of kills and mixes; writes its figures to tests/campaign/
#   make compiled  tests of what needs C++ operators of DeepSpeed, which are compiled first (minutes; libaio's headers)
#   make horovod   build Horovod in an environment of its own (minutes; kept for the next time) and run its tests
#   make bench     measurements: make bench ARGS=overhead (or memory, start, zero); nothing else should run meanwhile
#   make pictures  draw docs/images/ again from a run
PYTHON ?= python3
VENV ?= .venv
HOROVOD_VENV ?= .venv-horovod
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ARGS ?=
JOBS ?= 2

.PHONY: train test check lint fast campaign compiled horovod bench pictures clean

train: $(READY)
	$(BIN)/python -m framework +strategy=fsdp +pp=gpipe $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not campaign and not compiled_ops and not horovod" $(ARGS)

check: lint fast

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fast: $(READY)
	$(BIN)/python -m pytest -m "not campaign and not compiled_ops and not horovod and not slow" tests/unit tests/contract $(ARGS)

campaign: $(READY)
	$(BIN)/python -m pytest -m campaign --timeout 0 $(ARGS)
	$(BIN)/python tools/mix_docs.py
	$(BIN)/python tools/model_docs.py

compiled: $(READY)
	$(BIN)/python -m pytest -m compiled_ops --timeout 1800 $(ARGS)

horovod:
	PYTHON=$(PYTHON) HOROVOD_VENV=$(HOROVOD_VENV) sh tools/horovod_recipe.sh
	$(HOROVOD_VENV)/bin/python -m pytest -m horovod $(ARGS)

bench: $(READY)
	$(BIN)/python tools/bench.py $(ARGS)

pictures: $(READY)
	rm -rf runs/pictures
	$(BIN)/python tools/screenshot.py docs/images/terminal.svg -- \
	    $(BIN)/python -m framework +strategy=fsdp +pp=gpipe run_dir=runs/pictures $(ARGS)
	cp runs/pictures/loss.png docs/images/loss.png

$(READY): pyproject.toml setup.py constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"Python 3.11 or newer is needed, this is {sys.version}"'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch setuptools wheel
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,deepspeed]"
	touch $(READY)

clean:
	rm -rf $(VENV) $(HOROVOD_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache runs multirun
