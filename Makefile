# Every target makes the environment that it needs; nothing has to be installed by hand.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONFIG ?= configs/digits_cnn.py

.PHONY: demo test lint types pytest bench bench-peers clean

demo: $(VENV)/.installed
	$(BIN)/jengine train $(CONFIG)

test: lint types pytest

lint: $(VENV)/.installed
	$(BIN)/ruff check jengine tests configs examples benchmarks

types: $(VENV)/.installed
	$(BIN)/mypy

pytest: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist loadfile

# Fails if a ratio is worse than the accepted one by over a tenth; ARGS=--accept makes the ratios found the accepted ones.
bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks $(ARGS)

# Other trainers, each in an environment of its own under .bench.
bench-peers: $(VENV)/.installed
	$(BIN)/python -m benchmarks.peers $(ARGS)

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "jengine needs Python 3.11 or newer; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .cache work_dirs build *.egg-info
