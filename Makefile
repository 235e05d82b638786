# Two commands do everything on a machine with Python 3.11+, pip, git and make:
#
#   make demo      virtual environment, install, the demo study
#   make test      virtual environment, install, formatting, lint, types, layers, tests
#
# Another torch build, for example an older one, or the CPU wheels of an index:
#
#   make demo TORCH="torch==2.11.0"
#   make demo TORCH="torch==2.13.0 --index-url URL"
#
# Every target may run twice; the environment is made once per TORCH and dependency list.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= $(shell sed -n 's/^\(torch==.*\)/\1/p' constraints.txt)
MINUTES ?= 1
TRIALS ?= 2

PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --no-compile
# Afterwards and by all cores; pip compiles one file after another. Some are no Python.
COMPILE := $(VENV)/bin/python -m compileall -qq -j 0 $(VENV)/lib || true
SHOAL := $(VENV)/bin/shoal

.PHONY: demo verify test install install-dev clean force
.DELETE_ON_ERROR:

demo: install
	$(SHOAL) demo --minutes $(MINUTES)

verify: install
	$(SHOAL) verify --trials $(TRIALS)

test: install-dev
	PATH="$(abspath $(VENV))/bin:$$PATH" scripts/check
	PATH="$(abspath $(VENV))/bin:$$PATH" scripts/test

install: $(VENV)/.installed

install-dev: $(VENV)/.installed-dev

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "shoal needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	       "Choose another: make PYTHON=python3.12 ..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

# Changes only when TORCH does, and then everything after it is made again.
$(VENV)/.torch-wanted: force | $(VENV)/bin/python
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@

# torch first and alone: the options of TORCH are for it only. What was installed then
# takes the place of the pin in constraints.txt, so that nothing can replace it.
$(VENV)/.torch: $(VENV)/.torch-wanted
	$(INSTALL) $(TORCH)
	sed '/^torch==/d' constraints.txt > $(VENV)/constraints.txt
	$(VENV)/bin/python -c 'from importlib.metadata import version as v; print("torch==" + v("torch"))' \
	  >> $(VENV)/constraints.txt
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml constraints.txt
	$(INSTALL) -c $(VENV)/constraints.txt -e .
	$(COMPILE)
	touch $@

$(VENV)/.installed-dev: $(VENV)/.torch pyproject.toml constraints.txt
	$(INSTALL) -c $(VENV)/constraints.txt -e '.[dev]'
	$(COMPILE)
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache
	rm -rf .hypothesis .import_linter_cache
