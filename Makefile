# Commands for people and for CI. `make` alone lists them.
.DEFAULT_GOAL := help
.PHONY: help install demo demo-down test test-long unit e2e check crds image-model karpenter

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed.stamp
UV_VERSION := 0.13.9
REPORTS := .ci/reports
EXAMPLES := short

help: ## List the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## Make .venv with everything, from pinned requirements

$(STAMP): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else \
	  "error: Python 3.11 or newer is needed, %s is %d.%d; name another one: make PYTHON=python3.12" % (sys.executable, v[0], v[1]))'
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv || { echo "error: $(PYTHON) -m venv failed; on Debian and Ubuntu: apt install python3-venv"; rm -rf .venv; exit 1; }
	@test -x $(BIN)/uv || $(BIN)/pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@# Compiled once: a process that starts, and a pod that may not write here, would do it anew: 3 s of CPU for torch.
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --require-hashes -r requirements.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps -e .
	$(BIN)/python -m compileall -q operator/modelserve* worker/modelserve*
	@touch $@

demo: install ## Start a real Kubernetes, deploy a small Gemma 4, show its plan, chat with it
	@$(BIN)/python tests/cluster/demo.py up

demo-down: ## Remove the demo, its cluster and everything they created
	@if test -x $(BIN)/python; then $(BIN)/python tests/cluster/demo.py down; else echo "nothing is installed here"; fi

# The second mostly waits. What each writes is shown when it has ended.
test: ## Run every test, the end-to-end ones on the real Kubernetes beside the others
	@$(MAKE) --no-print-directory --jobs=2 --keep-going --output-sync=target unit e2e

test-long: ## Run every test, properties on all their examples, and compile every launch of a kernel
	@$(MAKE) --no-print-directory EXAMPLES=long test

# With the lower priority: what an end-to-end test waits for has a time-out.
unit: install
	@$(BIN)/python tests/cluster/cluster.py build
	nice -n 10 $(BIN)/pytest -n 2 --dist worksteal -m "not e2e" --hypothesis-profile=$(EXAMPLES) --durations=40 --junitxml=$(REPORTS)/unit.xml

e2e: install
	$(BIN)/pytest tests/cluster tests/e2e -m e2e --durations=20 --junitxml=$(REPORTS)/e2e.xml

check: install ## Run ruff, mypy and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --explicit-package-bases tests/cluster tests/e2e
	$(BIN)/lint-imports

image-model: install ## Build containerd 2 and a registry, and serve a model from an image
	@$(BIN)/python tests/cluster/image_model.py

karpenter: install ## Build Karpenter, and see it bring and remove nodes for ModelServes
	@$(BIN)/python tests/bench karpenter_nodes

crds: install ## Write crds/ and its copy in the chart from the API models
	$(BIN)/python -m modelserve.crd crds
	$(BIN)/python -m modelserve.crd charts/modelserve/crds
