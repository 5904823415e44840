# make demo   a fresh machine to answers, plain and drafted   make test   the gate: ruff, mypy and all tests
# make demo PROMPT='...' asks that instead                    make quick  ruff and the core's tests, in under a minute
# make wheel  dist/: any Python >= 3.10 on Linux, no compiler  make clean  removes .venv and everything built
# make docs-check   every command of README and guides, for real, on smollm2 (half an hour on two cores)
# make sanitize     native kernels and readers of model files under ASan and UBSan
# PYTHON=python3.12 make ... picks the interpreter

PYTHON ?= python3
MODEL ?= smollm2
PROMPT ?=

VENV := .venv
BIN := $(VENV)/bin
# What an installed package is made of; Python sources are not listed because the install is editable.
NATIVE := src/paceline/native
BUILD := pyproject.toml constraints.txt $(wildcard setup.py MANIFEST.in $(NATIVE)/*.cpp $(NATIVE)/*.h)

# Engine, policy, layout, the walk and the basics of drafters; the rest, and long enumerations, are left to `make test`.
QUICK := tests/core tests/engine tests/verify/test_walk.py tests/verify/test_metadata.py \
	tests/drafters/test_methods.py tests/drafters/lookup/test_tree.py tests/drafters/lookup/test_suffix.py \
	tests/drafters/test_contract.py::test_greedy_and_seeded_output_is_the_plain_one \
	tests/project/test_imports.py tests/project/test_structure.py
QUICK_WITHOUT := joint_distribution or highest_sum or through_the_real_coins or within_five_per_cent

# A worker for each usable core; one that has run out of tests takes over half of another's.
SIDE_BY_SIDE := --numprocesses auto --maxprocesses 8 --dist worksteal

.PHONY: demo test quick docs-check sanitize wheel clean

demo: $(VENV)/.installed-demo
	$(BIN)/paceline pull $(MODEL)
	$(BIN)/paceline demo --model $(MODEL) $(if $(PROMPT),"$(PROMPT)")

test: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src
	$(BIN)/python -m pytest $(SIDE_BY_SIDE)

quick: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(QUICK) -k 'not ($(QUICK_WITHOUT))'

docs-check: $(VENV)/.installed-dev
	DOCS_CHECK=1 $(BIN)/python -m pytest tests/project/test_docs_commands.py tests/project/test_readme.py

sanitize: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.sanitize

# auditwheel refuses what an older system lacks; native/glibc.h keeps it out.
wheel: $(VENV)/.installed-dev
	rm -rf build dist
	$(BIN)/python -m build --wheel --outdir build/wheel
	PATH="$(abspath $(BIN)):$$PATH" auditwheel repair --plat manylinux_2_28_$$(uname -m) --wheel-dir dist build/wheel/*.whl

$(VENV)/.installed-dev: EXTRA := [dev]
$(VENV)/.installed-demo $(VENV)/.installed-dev: $(BUILD) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.$(EXTRA)'
	@touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
	find src -name '*.so' -delete
