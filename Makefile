# Graphfold. `make help` lists the targets; everything is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
ARGS ?=
# Tests side by side, each process with one thread: two of them with two threads on two cores crawl.
# Python keeps what it compiles even where the environment says not to: every process would compile
# all tests and app anew.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help train gpu test test-all test-sample test-gpu test-slurm test-index test-versions sbom lint types checks docs bench clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | awk -F'\t' '{printf "  make %-13s %s\n", $$1, $$2}'

train: $(VENV)/installed ## train the default model, about two minutes on two cores; ARGS="train.steps=100 …" overrides
	@$(BIN)/python train.py $(ARGS)

gpu: $(VENV)/installed-gpu ## install Transformer Engine too, for FP8, its attention and its graphs

test: $(VENV)/installed-test ## run the tests (CPU), minutes; ARGS="tests/plan -k layout" selects, ARGS="-n0 …" runs them in one process
	@$(PYTEST) $(ARGS)

test-all: $(VENV)/installed-trackers $(VENV)/installed-optuna $(VENV)/installed-slurm $(VENV)/installed-eval test ## then the exhaustive grids and the seeded random runs, an hour or two
	@$(PYTEST) -m full $(ARGS)

test-sample: $(VENV)/installed-trackers $(VENV)/installed-optuna $(VENV)/installed-slurm $(VENV)/installed-eval ## run a twentieth of what test-all has beyond test, another one each time
	@$(PYTEST) -m full --share 0.05 $(ARGS)

test-gpu: $(VENV)/installed-test ## run the tests that need a CUDA device
	@$(BIN)/python -m pytest -m gpu $(ARGS)

test-slurm: $(VENV)/installed-slurm ## run the tests that need SLURM, on a cluster of their own (Debian, as root)
	@.ci/slurm
	@CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -m slurm tests/slurm $(ARGS)

test-index: $(VENV)/installed-test ## check extras, and examples by published schemas, with packages of the index
	@$(BIN)/python -m pytest -m index tests/integration $(ARGS)

lint: $(VENV)/installed-test ## ruff, and the rules of prose
	@$(BIN)/ruff check .
	@$(BIN)/python -m pytest -m prose tests/test_prose.py

types: $(VENV)/installed-test ## mypy, strict
	@$(BIN)/mypy app graphfold

checks: lint types test ## what a change must pass before it is proposed

docs: $(VENV)/installed-docs ## build the site of docs/ into site/ and test what its pages say; fails on a broken link
	@$(BIN)/python scripts/docs_site.py
	@$(PYTEST) -m 'docs and not full' tests/integration

test-versions: ## run the tests with other Pythons and torch releases; VERSIONS="3.12:2.13.0 3.13:2.14.1" ARGS="tests/plan"
	@.ci/versions $(VERSIONS) -- $(ARGS)

# In an environment of its own, so that the list has nothing of the tool, which reads no dynamic version.
sbom: $(VENV)/installed ## write sbom.json, a CycloneDX list of all that is installed into .venv
	@test -x .cache/sbom/bin/cyclonedx-py || { $(PYTHON) -m venv .cache/sbom && .cache/sbom/bin/python -m pip install --quiet --disable-pip-version-check 'cyclonedx-bom>=7,<8'; }
	@sed "s/^dynamic = .*/$$(sed -n 's/^__version__/version/p' app/__init__.py)/" pyproject.toml > .cache/sbom/pyproject.toml
	@.cache/sbom/bin/cyclonedx-py environment --pyproject .cache/sbom/pyproject.toml --output-reproducible --validate --output-file .cache/sbom/sbom.json $(BIN)/python
	@mv .cache/sbom/sbom.json sbom.json

bench: $(VENV)/installed ## engine overhead against a plain PyTorch loop
	@$(BIN)/python bench/overhead.py $(ARGS)

clean: ## remove .venv, site/ and caches; runs/ stays
	@rm -rf $(VENV) site .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Graphfold needs Python 3.11 or newer; choose one with: make PYTHON=python3.12 …"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# Without a GPU a CPU build of torch is a tenth of the download: take it where the package index offers one.
$(VENV)/installed: pyproject.toml setup.py constraints.txt | $(VENV)/bin/python
	@echo "Installing into $(VENV) …"
	@command -v nvidia-smi >/dev/null || $(PIP) "torch==$(TORCH)+cpu" 2>/dev/null || true
	@$(PIP) "torch==$(TORCH)" && $(PIP) --editable .
	@touch $@

$(VENV)/installed-test: $(VENV)/installed
	@$(PIP) --editable '.[test]'
	@touch $@

# Bindings are built against the torch of .venv, with the headers of CUDA that it leaves out.
$(VENV)/installed-gpu: $(VENV)/installed
	@$(PIP) setuptools ninja 'cuda-toolkit[cccl,crt]' && $(PIP) --no-build-isolation 'graphfold[gpu]'
	@touch $@

$(VENV)/installed-trackers: $(VENV)/installed-test
	@$(PIP) --editable '.[test,mlflow,trackio]'
	@touch $@

$(VENV)/installed-optuna: $(VENV)/installed-test
	@$(PIP) --editable '.[test,optuna]'
	@touch $@

$(VENV)/installed-eval: $(VENV)/installed-test
	@$(PIP) --editable '.[test,eval]'
	@touch $@

$(VENV)/installed-docs: $(VENV)/installed-test
	@$(PIP) --editable '.[test,docs]'
	@touch $@

$(VENV)/installed-slurm: $(VENV)/installed-test
	@$(PIP) --editable '.[test,slurm]'
	@touch $@
