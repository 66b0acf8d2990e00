# `make serve` and `make test` do all the set-up on a fresh machine.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: setup serve test check format bench lock clean

setup: $(VENV)/.installed

# The interpreter must be 3.11 or newer; everything else is installed by hash from requirements/dev.txt.
$(VENV)/.installed: requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "headrace needs Python 3.11 or newer; set PYTHON=")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	@# setuptools warns of folders that shadow packages; the banned bare names in pyproject.toml see to that
	@PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

serve: setup
	@exec $(BIN)/headrace serve $(ARGS)

test: setup
	$(BIN)/python -m pytest $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	@exec $(BIN)/headrace bench $(ARGS)

# What is installed, with hashes and without the index's address; run it after a change of pyproject.toml.
lock:
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
		--no-annotate --extra llamacpp --output-file requirements/base.txt pyproject.toml
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
		--no-annotate --extra llamacpp --extra dev --constraint requirements/base.txt \
		--output-file requirements/dev.txt pyproject.toml requirements/build.in
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
		--no-annotate --constraint requirements/base.txt --output-file requirements/api.txt requirements/api.in
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
		--no-annotate --output-file requirements/wheel.txt requirements/wheel.in
	$(BIN)/uv pip compile --quiet --python-platform x86_64-manylinux_2_28 --python-version 3.11 --generate-hashes \
		--no-emit-index-url --no-header --no-annotate --extra vllm --output-file requirements/vllm.txt pyproject.toml

clean:
	rm -rf $(VENV) .headrace .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
