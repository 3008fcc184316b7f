# make help lists the targets. Everything is built below $(BUILD), packages go into $(VENV).
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
BUILD ?= build
ARGS ?=

# Two test processes with one thread each: threads of several processes that wait for each other on the same cores are slow.
PYTEST := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 pytest -n 2

export PATH := $(abspath $(VENV))/bin:$(PATH)
export KDTREE_NB_BUILD := $(abspath $(BUILD))
export JUPYTER_PREFER_ENV_PATH := 1
export PYTHONUNBUFFERED := 1

READY := $(VENV)/.ready
EXECUTED := $(BUILD)/executed.stamp
HTML := $(BUILD)/html/index.html
NOTEBOOKS := $(wildcard book/*.ipynb)
CODE := $(shell find kdtree_nb kernels -type f -not -path '*/__pycache__/*')
PAGES := _config.yml $(shell find book -type f -not -name '*.ipynb' -not -path '*/__pycache__/*' -not -path '*/.ipynb_checkpoints/*')
DATA := $(shell find data -type f)
TOOLS := $(wildcard tests/book/*.py)

.PHONY: help env kernels capi test unit notebooks book chapter lint lab demo bench picture lock clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

env: $(READY)  ## install the locked packages into .venv

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "kdtree_nb needs Python 3.11 or newer; set PYTHON=")'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

kernels: env  ## compile the native kernels, once
	@echo 'loading the native kernels (the first time they are compiled, about a minute)'
	python -c 'from kdtree_nb import native; native.load()'

capi:  ## the C library and its example program in build/capi; needs no torch
	$(PYTHON) -m kdtree_nb.native.capi_build $(BUILD)/capi

test: env  ## everything: lint, every chapter, the book, all tests
	$(MAKE) lint
	$(MAKE) kernels
	$(MAKE) $(HTML)
	KDTREE_NB_REQUIRE_BUILD=1 $(PYTEST) $(ARGS)

unit: env  ## the tests alone; those of the book use what was built before, if anything
	$(PYTEST) $(ARGS)

$(EXECUTED): $(READY) $(NOTEBOOKS) $(CODE) $(DATA) $(TOOLS) book/conftest.py
	rm -f $@
	$(MAKE) kernels
	python -m tests.book.prepare $(BUILD)/book
	pytest --nbmake --overwrite --durations=0 -p no:cacheprovider $(BUILD)/book
	touch $@

notebooks: $(EXECUTED)  ## execute a copy of every chapter, once

# The pages come from the executed copies; what is no notebook is copied again, since it may be newer.
$(HTML): $(EXECUTED) $(PAGES)
	rm -rf $(BUILD)/sphinx $(BUILD)/html
	find book -type f -not -name '*.ipynb' -not -path '*/__pycache__/*' | sed 's|^book/||' | \
	    (cd book && xargs -I{} cp --parents {} $(abspath $(BUILD))/book)
	jupyter-book build $(BUILD)/book --config _config.yml --path-output $(BUILD)/sphinx -n -W --keep-going
	mv $(BUILD)/sphinx/_build/html $(BUILD)/html
	@echo 'the book: $(HTML)'

book: $(HTML)  ## execute every chapter and render the book to build/html/index.html
	@echo 'the book: $(HTML)'

chapter: env  ## execute, check and render one chapter: make chapter CHAPTER=03_draft_trees
	@test -f 'book/$(CHAPTER).ipynb' || { echo 'make chapter: CHAPTER: expected one of $(basename $(notdir $(NOTEBOOKS))), got "$(CHAPTER)"'; exit 1; }
	ruff check --fix book/$(CHAPTER).ipynb
	ruff format book/$(CHAPTER).ipynb
	python tests/book/nbcheck.py --fix book/$(CHAPTER).ipynb
	python -m tests.book.prepare $(BUILD)/chapter/book --chapter $(CHAPTER)
	pytest --nbmake --overwrite -p no:cacheprovider $(BUILD)/chapter/book
	KDTREE_NB_BUILD=$(abspath $(BUILD))/chapter KDTREE_NB_REQUIRE_BUILD=1 pytest -q tests/book/test_chapters.py \
	    tests/book/test_executed.py tests/book/test_mutation.py -k '$(CHAPTER)'
	rm -rf $(BUILD)/chapter/sphinx $(BUILD)/chapter/html
	jupyter-book build $(BUILD)/chapter/book --config _config.yml --path-output $(BUILD)/chapter/sphinx --keep-going
	mv $(BUILD)/chapter/sphinx/_build/html $(BUILD)/chapter/html
	@echo 'the page: $(BUILD)/chapter/html/$(CHAPTER).html (warnings of unknown documents: links to chapters that `make book` renders)'

lint: env  ## style, import contract, canonical notebooks
	ruff check
	ruff format --check
	lint-imports
	python tests/book/nbcheck.py

lab: kernels  ## the chapters in JupyterLab
	jupyter lab --notebook-dir book $$([ "$$(id -u)" != 0 ] || echo --allow-root) $(ARGS)

demo: kernels  ## AR and DDTree decoding side by side, on a real prompt
	kdtree-nb demo $(ARGS)

bench: kernels  ## record benchmarks of this machine in data/benchmarks/
	kdtree-nb bench $(ARGS)

picture: kernels  ## draw the picture of the README and the cover from data/benchmarks/
	python -m kdtree_nb.viz.result book/_static/result.svg

lock:  ## write constraints.txt from the packages in .venv
	{ echo '# Every package that `make env` installs, pinned. Written by `make lock`.'; \
	  $(VENV)/bin/python -m pip freeze --all --exclude-editable --exclude pip --exclude wheel | sed 's/+cpu$$//'; } > constraints.txt

clean:  ## remove what was built, except .venv and the kernel cache
	rm -rf $(BUILD) .pytest_cache .ruff_cache .import_linter_cache .hypothesis
