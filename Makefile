# make demo | test | check | bench | proto | sim | docs       one command per gate; setup included
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
SHELL  := /bin/bash

.PHONY: demo test check bench proto sim docs clean

# Debian's python3 has no ensurepip without python3-venv, so the pip outside installs the one inside.
$(VENV)/.ready: requirements.txt pyproject.toml
	$(PYTHON) -m venv --clear --without-pip $(VENV)
	$(PYTHON) -m pip --python $(BIN)/python install --quiet --disable-pip-version-check pip==26.3 setuptools==84.2.1
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

# The demo runs a real transformer; its environment adds torch to the one above.
$(VENV)/.ready-demo: $(VENV)/.ready requirements-demo.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements-demo.txt
	touch $@

demo: $(VENV)/.ready-demo
	$(BIN)/python -m examples.demo

test: $(VENV)/.ready
	$(BIN)/python -m pytest -q $(ARGS)

check: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tests.generated --check

# Regenerates what is generated: wire stubs, the state diagram, the API reference.
proto docs: $(VENV)/.ready
	$(BIN)/python -m tests.generated --write

bench: $(VENV)/.ready
	$(BIN)/python -m bench $(ARGS)

# make sim SEEDS=50000
SEEDS ?= 2000
sim: $(VENV)/.ready
	$(BIN)/python -m tests.sim --seeds $(SEEDS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
