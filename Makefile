# Needs only make and Python >= 3.11: each target makes the virtual environment VENV when it is not
# there, and installs into it again only when pyproject.toml has changed.
VENV ?= .venv
# Empty: the first usable one.
PYTHON ?=
# Where `make quickstart` writes.
OUT ?= runs/quickstart
# Two workers: two cores are what a small machine has, and each holds a JAX. By file, since a file's
# tests share what they compile.
PYTEST_ARGS ?= -n 2 --dist loadfile

# For example --preset 100m --dtype bfloat16; see benchmarks/speed.py.
BENCH_ARGS ?=

BIN := $(VENV)/bin

.PHONY: help install install-test quickstart test test-all test-smoke check format bench docs-figures clean

help:
	@echo 'make quickstart    train, resume, sample and export a small model (minutes, CPU)'
	@echo 'make test          all tests but the slow ones'
	@echo 'make test-all      all tests'
	@echo 'make test-smoke    a few core tests'
	@echo 'make check         ruff (lint and format) and mypy'
	@echo 'make format        let ruff format and fix'
	@echo 'make bench         measure speed on this machine'
	@echo 'make docs-figures  draw the figures of docs/ again'
	@echo 'make clean         remove $(VENV) and caches'

$(BIN)/python:
	@python=$$(sh .ci/find-python 3.11 $(PYTHON)) && "$$python" -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo 'Installing into $(VENV) (once; a few minutes) …'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.installed-test: pyproject.toml | $(BIN)/python
	@echo 'Installing into $(VENV) (once; a few minutes) …'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $(VENV)/.installed $@

install: $(VENV)/.installed
install-test: $(VENV)/.installed-test

quickstart: install
	$(BIN)/laneformer quickstart --out $(OUT)

test: install-test
	$(BIN)/pytest $(PYTEST_ARGS) -m 'not slow'

test-all: install-test
	$(BIN)/pytest $(PYTEST_ARGS)

test-smoke: install-test
	$(BIN)/pytest $(PYTEST_ARGS) -m smoke

bench: install
	$(BIN)/python benchmarks/speed.py $(BENCH_ARGS)

# The cells that docs/ablation.md repeats with a quieter start.
QUIET = base.model.residual_init_scale=0.1 learning_rates=[5.0e-3] \
	'cells={dense: {broadcast_delay: .inf}, delay 2: {broadcast_delay: 2}, \
	"delay 2, no exchange": {broadcast_delay: 2, use_comm: false}, ladder: {ladder_residual: true}}'

docs-figures: install
	$(BIN)/laneformer latency --figures docs/latency
	$(BIN)/laneformer ablate ablation/lanes --out docs/ablation --phase report
	$(BIN)/laneformer ablate ablation/lanes --out docs/ablation/quiet --phase report $(QUIET)

check: install-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install-test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
