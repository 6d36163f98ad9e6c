# KVPool. `make help` lists what there is.
SHELL := /bin/bash
.DEFAULT_GOAL := help
export KVPOOL_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/kvpool
VENV := .venv
JOBS ?= 2
PY := $(VENV)/bin/python
BASE_PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
  $$p -c 'import sys; sys.exit(not ((3,11) <= sys.version_info < (3,14)))' 2>/dev/null && { echo $$p; break; }; done)

-include examples/demo/demo.mk
-include examples/picker.mk
-include e2e/e2e.mk
-include e2e/scale/scale.mk
-include e2e/rdma/rdma.mk
-include client/engine.mk
-include operator/operator.mk
-include sidecar/sidecar.mk
-include images.mk
-include bench/bench.mk
-include bench/soak/soak.mk
-include supply/supply.mk
-include charts/charts.mk
-include docs/docs.mk

.PHONY: help setup check test gen golden clean
help: ## show this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | awk -F'\t' '{printf "  make %-12s %s\n",$$1,$$2}'

setup: $(VENV)/.ready ## make .venv with the four distributions and the development tools (about 1 minute)

$(VENV)/.ready: requirements/dev.txt requirements/rdma.txt client/pyproject.toml sidecar/pyproject.toml operator/pyproject.toml cli/pyproject.toml
	@[ -n "$(BASE_PYTHON)" ] || { echo "KVPool needs Python 3.11, 3.12 or 3.13 on PATH (set BASE_PYTHON=/path/to/python3.x)"; exit 2; }
	@echo "setup: making $(VENV) with $(BASE_PYTHON)"
	@[ -x $(PY) ] || $(BASE_PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --disable-pip-version-check --no-deps --require-hashes -r requirements/dev.txt
	$(PY) -m pip install -q --disable-pip-version-check --no-deps --require-hashes -r requirements/rdma.txt
	$(PY) -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e client -e sidecar -e operator -e cli
	@touch $@

gen: setup ## regenerate crds/, schemas and API docs from the models
	$(PY) -m kvpool_operator.api.crdgen --write
	$(PY) docs/generate/api.py --write
	cp crds/*.kvpool.dev.yaml charts/kvpool/files/crds/
	$(PY) tests/config_reference.py --write
	$(PY) charts/dashboards.py --write
	$(PY) docs/generate/chart_values.py --write
	$(PY) tests/metrics_reference.py --write
	$(PY) docs/generate/conditions.py --write
	$(PY) docs/generate/findings.py --write
	$(PY) docs/generate/cli.py --write

check: setup ## lint, types, import rules, freshness of generated files
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy client/src
	$(VENV)/bin/mypy sidecar/src
	$(VENV)/bin/mypy sidecar/testing
	$(VENV)/bin/mypy operator/src
	$(VENV)/bin/mypy cli/src
	$(VENV)/bin/mypy -p bench
	MYPYPATH=examples/demo PYTHONPATH=examples/demo $(VENV)/bin/mypy -p kvpool_demo
	$(VENV)/bin/mypy e2e/engine/*.py
	$(VENV)/bin/lint-imports --config pyproject.toml
	$(PY) -m pytest -q -p no:cacheprovider tests/rules
	$(PY) -m kvpool_operator.api.crdgen --check
	$(PY) docs/generate/api.py --check
	$(PY) docs/generate/chart_values.py --check
	@for f in crds/*.kvpool.dev.yaml; do cmp $$f charts/kvpool/files/$$f || { echo "run make gen and commit the result"; exit 1; }; done
	$(PY) tests/config_reference.py --check
	$(PY) docs/generate/conditions.py --check
	$(PY) docs/generate/findings.py --check
	$(PY) docs/generate/cli.py --check
	@$(MAKE) --no-print-directory audit

test: setup ## unit, contract and integration tests with a real Redis and real sidecars (7 minutes on 2 processors)
	$(PY) -m pytest -n $(JOBS) --dist loadfile $(ARGS)

clean: ## remove what make made inside this clone (caches outside it stay)
	rm -rf $(VENV) out dist build wheels
