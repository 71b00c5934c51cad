# Two commands on a fresh machine with Python >= 3.11: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin

.PHONY: demo test pytest chaos lint format docs clean

demo: $(VENV)/demo.stamp
	$(RUN)/twistlm demo

# mypy takes a minute of one core: it runs beside the tests, a third of whose time goes into waiting for other processes
test: $(VENV)/test.stamp
	$(MAKE) --no-print-directory -j 2 lint pytest

pytest: $(VENV)/test.stamp
	$(RUN)/python -m pytest -n 3 --no-loadscope-reorder

chaos: $(VENV)/test.stamp
	$(RUN)/python -m pytest -n 2 -m chaos

lint: $(VENV)/test.stamp
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy

format: $(VENV)/test.stamp
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

docs: $(VENV)/test.stamp
	$(RUN)/python docs/config_page.py

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "twistlm needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)

# pip compiles what it installs on one core, which takes as long as the rest of its work; compileall takes all
# (and minds files that packages keep for other versions of Python: not ours to judge); hardly any test reads the third that is left out
INSTALL = $(RUN)/python -m pip install --quiet --disable-pip-version-check --no-compile
COMPILE = $(RUN)/python -m compileall -qq -j 0 -x '/(tests?|testing|models|rllib|serve|tune|networkx|pip)/' $(VENV)/lib || true

$(VENV)/demo.stamp: pyproject.toml | $(VENV)/bin/python
	$(INSTALL) -e .
	$(COMPILE)
	touch $@

$(VENV)/test.stamp: pyproject.toml | $(VENV)/bin/python
	$(INSTALL) -e '.[dev]'
	$(COMPILE)
	touch $@ $(VENV)/demo.stamp

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
