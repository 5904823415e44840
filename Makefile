# make demo   a fresh machine to answers, plain and drafted   make test   ruff, mypy and the tests
# make demo PROMPT='...' asks that instead
# make clean  removes .venv and everything built          PYTHON=python3.12 make ... picks the interpreter

PYTHON ?= python3
MODEL ?= smollm2
PROMPT ?=

VENV := .venv
BIN := $(VENV)/bin
# What an installed package is made of; Python sources are not listed because the install is editable.
BUILD := pyproject.toml constraints.txt $(wildcard setup.py MANIFEST.in src/paceline/models/native/*.cpp src/paceline/models/native/*.h)

.PHONY: demo test clean

demo: $(VENV)/.installed-demo
	$(BIN)/paceline pull $(MODEL)
	$(BIN)/paceline demo --model $(MODEL) $(if $(PROMPT),"$(PROMPT)")

test: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src
	$(BIN)/python -m pytest

$(VENV)/.installed-demo: EXTRA := gguf
$(VENV)/.installed-dev: EXTRA := dev
$(VENV)/.installed-demo $(VENV)/.installed-dev: $(BUILD) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$(EXTRA)]'
	@touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
	find src -name '*.so' -delete
