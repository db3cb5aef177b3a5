# Every target makes the environment that it needs; nothing has to be installed by hand.
# PYTHON and VENV choose the interpreter and where its environment goes: make test PYTHON=python3.13 VENV=.venv313
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONFIG ?= configs/digits_cnn.py
EXTRAS ?= dev

# The tested versions of all packages for the Python of the environment; none (PINS=) installs the newest.
PYTHON_TAG := import sys; print("py%d%d" % sys.version_info[:2])
PINS = $(wildcard constraints/$(shell $(BIN)/python -c '$(PYTHON_TAG)').txt)

.PHONY: demo test test-all configs processes foreign test-chips pytest-chips test-newest test-versions lint types pytest lock lock-oldest docs docs-serve bench bench-peers gpu clean

# Only what configs/ requires, unless the environment has the packages of the tests already.
demo: $(if $(wildcard $(VENV)/.installed),$(VENV)/.installed,$(VENV)/.demo)
	$(BIN)/jengine train $(CONFIG)

# The types are checked beside the first tests, which leave a part of two cores idle.
test: lint
	@$(MAKE) --no-print-directory -j2 types pytest

lint: $(VENV)/.installed
	$(BIN)/ruff check jengine tests configs examples benchmarks docs/_gen .ci
	$(BIN)/ruff format --check --quiet jengine configs examples/*.py benchmarks docs/_gen/*.py .ci

types: $(VENV)/.installed
	$(BIN)/mypy

# Tests that compare programs bit for bit run in processes that compile as for users, all others, and examples of docstrings, with quick compiles.
# Each process takes a third of the tests in their order, so most of a file share its fixtures, and at the end some of the others'.
# Three for two cores, because a third of the time of tests is spent waiting.
PYTEST := $(BIN)/python -m pytest -n 3 --dist worksteal
pytest: $(VENV)/.installed
	@$(BIN)/python .ci/versions.py
	$(PYTEST) -m "not full_optimization and not many_processes and not ports"
	$(PYTEST) -m full_optimization $$(grep -rl full_optimization tests --include='test_*.py')
	$(PYTEST) --doctest-modules -p tests.conftest jengine

# Compiles every config and example for TPUs and GPUs, with XLA's compilers for them, in an environment of its own.
test-chips:
	$(MAKE) pytest-chips VENV=$(VENV)-chips EXTRAS=dev,tpu-compiler,gpu-compiler

pytest-chips: $(VENV)/.installed
	$(PYTEST) -m chips tests/chips $(ARGS)

# 200 random runs, each in single steps, in chunks, interrupted, and on a mesh; `make test` has six of them.
configs: $(VENV)/.installed
	JENGINE_RANDOM_CONFIGS=200 $(PYTEST) -m full_optimization tests/runner/test_random_configs.py

# Trains with three and four processes, on more meshes and longer, sweeps, builds the site, runs the notebooks, the parts of the
# suite for accelerators and the whole demo, and kills one of two or three at 20 random moments; `make test` trains with two.
# Then trains and exports the runs of examples and pages again, from the configs in their work dirs; `make test` builds them.
processes: $(VENV)/.installed
	$(PYTEST) -m many_processes $$(grep -rl many_processes tests --include='test_*.py')
	JENGINE_TRAIN_AGAIN=1 $(PYTEST) tests/docs/test_code_blocks.py tests/test_docs.py tests/test_docs_recipes.py tests/hooks/test_pages.py

# The tests with PyTorch, TensorFlow, Hugging Face datasets, Haiku and Equinox as well, and those of ports of public
# training scripts, in an environment of their own; `make test` skips them. PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu avoids PyTorch's CUDA packages.
test-all: test configs processes
	$(MAKE) foreign VENV=$(VENV)-all EXTRAS=dev,interop

foreign: $(VENV)/.installed
	$(PYTEST) -m "foreign or ports"

# The same as `make test` with the newest version of every package, in an environment from scratch: what `make lock` would bring.
test-newest:
	rm -rf $(VENV)-newest
	$(MAKE) test VENV=$(VENV)-newest PINS=

# The wheel, the demo and the tests on every supported Python and with the oldest packages: hours on a small machine.
# ARGS="3.13 oldest" runs only these.
test-versions:
	$(PYTHON) .ci/test_versions.py $(ARGS)

# Pins the newest version of every package for $(PYTHON); `make test` then installs and tries them.
lock:
	venv=$$(mktemp -d) && trap 'rm -rf "$$venv"' EXIT && \
	$(MAKE) VENV="$$venv" EXTRAS=dev,interop PINS= "$$venv/.installed" && \
	pins=constraints/$$("$$venv/bin/python" -c '$(PYTHON_TAG)').txt && \
	echo '# Written by `make lock`.' > $$pins && \
	"$$venv/bin/python" -m pip freeze --exclude-editable | sed 's/+cpu$$//' >> $$pins

# Pins the oldest versions that pyproject.toml allows, with the newest of what they require, for the oldest Python.
lock-oldest:
	uv=$$(mktemp -d) && trap 'rm -rf "$$uv"' EXIT && \
	$(PYTHON) -m venv "$$uv" && "$$uv/bin/python" -m pip install --quiet --disable-pip-version-check uv && \
	echo '# Written by `make lock-oldest`.' > constraints/oldest.txt && \
	"$$uv/bin/uv" pip compile --quiet --no-header --no-annotate --python-version 3.11 --resolution lowest-direct \
		--extra dev pyproject.toml >> constraints/oldest.txt

# The documentation site in build/site; fails on a broken link or anchor, and on a notebook that does not run.
docs: $(VENV)/.installed
	$(BIN)/python docs/_gen/site_pages.py build/docs
	$(BIN)/python -m sphinx -W --keep-going -q -j auto -c docs $(ARGS) build/docs build/site

# Builds the site without running the notebooks, and shows it.
docs-serve:
	$(MAKE) docs ARGS="-D nb_execution_mode=off $(ARGS)"
	$(BIN)/python -m http.server --directory build/site --bind localhost 8000

# Fails if a ratio is worse than the accepted one by over a tenth; ARGS=--accept makes the ratios found the accepted ones.
bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks $(ARGS)

# The suite for accelerators, in eight minutes; says what is missing where there is none. ARGS="--parts card" runs a part.
gpu: $(VENV)/.installed
	$(BIN)/python -m benchmarks.accelerator --need-accelerator $(ARGS)

# Other trainers, each in an environment of its own under .bench.
bench-peers: $(VENV)/.installed
	$(BIN)/python -m benchmarks.peers $(ARGS)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "jengine needs Python 3.11 or newer; set PYTHON=")'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: EXTRAS := examples
$(VENV)/.demo $(VENV)/.installed: pyproject.toml $(wildcard constraints/*.txt) | $(BIN)/python
	$(if $(PINS),,@echo "Installing the newest versions; constraints/ pins those tested with $(basename $(notdir $(wildcard constraints/py*.txt))).")
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]' $(PINS:%=-c %)
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-* .cache work_dirs build dist *.egg-info
