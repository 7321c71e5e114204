# `make help` explains every target. Targets set up what they need.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PACKAGES := topology atoll extender webhook agent controllers jobs pipelines atollctl devcluster worker
KEEP ?= 0
SITE ?= build/site
OLDEST := 1.35.4
E2E = $(sort $(patsubst %/conftest.py,%,$(shell grep -rl --include='*.py' 'mark\.e2e' tests)))
HISTORIES ?= 10000
SEED ?= 0


.PHONY: help setup tools binaries demo docs image chart release manifests simulate test test-unit test-e2e test-long lint fmt \
	verify lock bench clean

help: ## Show this text
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-z0-9-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

##@ Use it
demo: $(READY) tools ## Run Atoll on a real Kubernetes on this machine and watch it work (KEEP=1 leaves it running; PLAY=jobs: the job service on two clusters)
	@$(BIN)/python -m devcluster.demo $(if $(PLAY),--play $(PLAY)) $(if $(filter 1,$(KEEP)),--keep)

binaries: $(READY) tools ## Build Kubernetes, etcd, containerd and what tests need beside them, Helm among it, into the cache; once, about 20 minutes
	@$(BIN)/python -m devcluster.build kwok helm s3

image: $(READY) tools ## Assemble Atoll's image without a container engine, from Debian's packages and the lock
	@$(BIN)/python -m devcluster.atoll_image dist/atoll-0.1.0.tar

docs: $(READY) ## Build the documentation as a site in build/site; a broken link fails the build
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir $(abspath $(SITE))
	@echo "open $(SITE)/index.html"

chart: $(READY) tools ## Package the Helm chart
	@$(BIN)/python -m devcluster.chart --package dist

release: image chart ## Image and chart with bill of materials, provenance, digests and sums in dist/
	@$(BIN)/python -m devcluster.release dist

##@ Develop
setup: $(READY) ## Create .venv from the hash-locked requirements

test: $(READY) tools binaries ## Everything that CI runs: lint, types, contracts, unit and end-to-end tests
	@$(MAKE) --no-print-directory lint verify test-unit test-e2e

test-unit: $(READY) tools ## Tests that need no cluster, on all cores
	$(BIN)/pytest -m "not e2e and not long" -n auto -q

test-e2e: $(READY) tools binaries ## Tests on the real control plane and real nodes (root on Linux)
	$(BIN)/pytest $(E2E) -m "e2e and not long" -n 2 --dist loadscope --durations=20 -q

test-long: $(READY) tools binaries ## Soaks, many seeds, fresh examples, and bind, release and doors on the oldest Kubernetes
	$(BIN)/pytest -m "hypothesis and not e2e" --hypothesis-profile=search -n auto -q
	$(BIN)/python -m devcluster.build kueue owners
	$(BIN)/pytest -m "long" -q
	ATOLL_HISTORIES=10000 $(BIN)/pytest -n 2 -q tests/simulation/test_simulation.py -k promises
	ATOLL_HISTORIES=2000 $(BIN)/pytest -n 2 -q tests/jobservice/test_histories.py
	$(BIN)/python -m devcluster.build $(OLDEST)
	ATOLL_KUBERNETES=$(OLDEST) $(BIN)/pytest -m "e2e and not long" -q tests/extender tests/webhook tests/deploy \
		tests/controllers tests/e2e/test_one_pod.py tests/e2e/test_release.py tests/e2e/test_scheduler_facts.py

simulate: $(READY) ## Break everything, many times, in a simulated cluster (HISTORIES=n SEED=s); a failing seed shrinks
	@$(BIN)/python -m tests.simulation --histories $(HISTORIES) --seed $(SEED)

lint: $(READY) ## Style, types, import contracts and names that nothing uses
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports && $(BIN)/vulture

manifests: $(READY) tools ## Render the plain manifests in deploy/ from the Helm chart
	$(BIN)/python -m devcluster.chart

fmt: $(READY) ## Format the code
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

verify: $(READY) tools ## Fail when generated files are stale
	$(BIN)/python -m atoll.api.crds --check
	$(BIN)/python -m atoll.api.reasons --check
	$(BIN)/python -m atoll.ml.schema --check
	$(BIN)/python -m atollctl.reference --check
	$(BIN)/python -m devcluster.chart --check
	$(BIN)/python -m devcluster.rights --check

bench: $(READY) tools binaries ## Speed, as ratios measured in one run
	@for bench in extender_calls "placement speed" "placement churn --seeds 2" gang_search worst_inputs gang_admission "scale --waiting 1 100"; do \
		echo "== bench.$$bench"; $(BIN)/python -m bench.$$bench || exit 1; done

lock: ## Write requirements.lock anew from pyproject.toml
	$(PYTHON) -m venv build/uv && build/uv/bin/pip install -q uv
	build/uv/bin/uv pip compile -q --generate-hashes --no-emit-index-url --no-header --universal \
		--python-version 3.11 --group dev --extra fast --extra jobs pyproject.toml -o requirements.lock
	build/uv/bin/uv pip compile -q --generate-hashes --no-emit-index-url --no-header --universal \
		--python-version 3.11 --extra fast --extra jobs -c requirements.lock pyproject.toml -o deploy/image/requirements.lock

clean: ## Remove what the targets made in this folder (the cache of binaries stays)
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Atoll needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

tools:
	@for tool in ip nsenter unshare mount gcc; do command -v $$tool >/dev/null || missing=1; done; \
	if [ -n "$$missing" ]; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then apt-get update -qq && apt-get install -y -qq iproute2 util-linux mount gcc libc6-dev; \
		else echo "install iproute2, util-linux, gcc and libc6-dev first (ip, nsenter, unshare, mount, gcc)"; exit 1; fi; fi
