# `make serve` and `make test` do all the set-up on a fresh machine.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NPM := $(or $(HEADRACE_TEST_DATA),.headrace)/npm
ARGS ?=

.PHONY: setup serve test clients check format bench lock clean

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

test: setup clients
	$(BIN)/python -m pytest $(ARGS)

# What tests/clients needs besides: heavy Python clients, and npm packages where there is an npm.
clients: $(VENV)/.clients $(NPM)/.installed

$(VENV)/.clients: requirements/clients.txt $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/clients.txt
	@touch $@

$(NPM)/.installed: tests/clients/package.json
	@mkdir -p $(NPM)
	@cp $< $(NPM)/package.json
	@if command -v npm >/dev/null; then \
		npm install --prefix $(NPM) --no-package-lock --no-audit --no-fund --loglevel=error && touch $@; \
	else echo "there is no npm: the tests of npm clients are left out"; fi

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
		--no-annotate --extra llamacpp --extra dev --extra clients --constraint requirements/dev.txt \
		--output-file requirements/clients.txt pyproject.toml requirements/build.in

clean:
	rm -rf $(VENV) .headrace .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
