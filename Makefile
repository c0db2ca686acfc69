# Every task of the project by one name; `make help` lists them. The work itself is in hack/.
SHELL := /bin/bash
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
export PATH := $(PATH):/usr/local/go/bin

PYTHON := .venv/bin/python
BIN := .venv/bin
GENERATED := crds charts docs
ARGS ?=

.PHONY: help
help: ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup venv
setup: ## Install system packages and the locked Python dependencies; quick when nothing changed
	@hack/setup.sh
venv: ## Install only the locked Python dependencies (needs no root)
	@hack/setup.sh python

.PHONY: test test-fast
test: cluster-build ## Run every test, those against the local cluster too (ARGS="-k name" selects)
	@hack/test.sh -n 2 $(ARGS)
test-fast: venv ## Run the tests that need no cluster, no torchrun and little time, two at once
	@hack/test.sh -n 2 -m 'not cluster and not torchrun and not slow' $(ARGS)

.PHONY: lint format generate verify lock
lint: venv ## Check style, types, import rules, spelling and shell scripts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	git ls-files -z '*.sh' .ci/run | xargs -0 $(BIN)/shellcheck
format: venv ## Let ruff fix and format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
generate: venv ## Write what is made from code: the CRD, the chart's schema, the reference pages
	$(PYTHON) -m rtj_operator.crd --write
	$(PYTHON) hack/format_schemas.py
	$(PYTHON) hack/reference
	$(PYTHON) tests/train/combinations.py --write
	$(PYTHON) tests/operator/fault_matrix.py --write
verify: generate ## Prove that generated files and the lock match their sources
	$(PYTHON) hack/check_requirements.py
	@changed=$$(git status --porcelain -- $(GENERATED)); \
	  if [ -n "$$changed" ]; then echo "generated files differ from what is committed:"; echo "$$changed"; exit 1; fi
lock: venv ## Compile requirements/*.txt again (UPGRADE=1 takes the newest versions)
	@UPGRADE=$(UPGRADE) hack/lock.sh

.PHONY: cluster-build cluster-up cluster-down
cluster-build: setup ## Build Kubernetes, etcd, containerd and an S3 server from Go modules (once, minutes)
	@$(PYTHON) hack/cluster build
cluster-up: cluster-build ## Start the local cluster
	@$(PYTHON) hack/cluster up
cluster-down: ## Stop the local cluster and remove what it left
	@$(or $(wildcard $(PYTHON)),python3) hack/cluster down

.PHONY: demo bench soak soak-cluster drills-cluster
# The demo takes only what was typed: a CONTEXT or STORE of the environment was meant for something else. It takes that
# letter by letter, so neither make nor a shell reads it as its own language; ARGS are words of a shell, as everywhere.
typed = $(if $(filter command,$(origin $(1))),$(value $(1)))
unexport CONTEXT STORE REGISTRY NAMESPACE
demo: export RTJ_DEMO_CONTEXT := $(call typed,CONTEXT)
demo: export RTJ_DEMO_STORE := $(call typed,STORE)
demo: export RTJ_DEMO_REGISTRY := $(call typed,REGISTRY)
demo: export RTJ_DEMO_NAMESPACE := $(call typed,NAMESPACE)
demo: $(if $(call typed,CONTEXT),venv,setup) ## Lose a node, shrink, resume and prove it, on a local cluster (or yours: CONTEXT=name STORE=s3://...)
	@$(PYTHON) hack/demo $${RTJ_DEMO_CONTEXT:+"--context=$$RTJ_DEMO_CONTEXT"} $${RTJ_DEMO_STORE:+"--store=$$RTJ_DEMO_STORE"} \
	  $${RTJ_DEMO_REGISTRY:+"--registry=$$RTJ_DEMO_REGISTRY"} $${RTJ_DEMO_NAMESPACE:+"--namespace=$$RTJ_DEMO_NAMESPACE"} $(ARGS)
bench: venv ## Measure saves, restores, relaunches and a thousand jobs (ARGS="scale relaunch --kills 20")
	@$(PYTHON) bench $(ARGS)
soak: venv ## Kill sidecars and ranks in 1000 random schedules on a real S3 server (ARGS="--schedules 20", "--outage 300")
	@$(PYTHON) hack/soak $(ARGS)
soak-cluster: setup ## API server and store away for five minutes each, then half an hour of chaos (ARGS="--minutes 30 --seed 7")
	@RTJ_API_OUTAGE_SECONDS=300 RTJ_STORE_OUTAGE_SECONDS=300 hack/test.sh \
	  tests/operator/test_operator_trouble_on_cluster.py tests/cluster/test_cluster_sealed_save.py
	@$(PYTHON) hack/chaos $(ARGS)
drills-cluster: setup ## The fault drills D1 to D10 on the local cluster (ARGS="D3 D9"); report in drills-out/
	@$(PYTHON) hack/fault_drills.py $(ARGS)

.PHONY: docs docs-serve audit
docs: export NO_MKDOCS_2_WARNING := 1
docs: venv ## Build the documentation as a site into site/; a link or anchor to nowhere is an error
	$(BIN)/mkdocs build --strict
docs-serve: venv ## Show the documentation on http://127.0.0.1:8000 while you write it
	$(BIN)/mkdocs serve
audit: venv ## Ask PyPI for known vulnerabilities of all locked versions (needs a network)
	@$(PYTHON) hack/audit.py $(ARGS)

.PHONY: dist
dist: venv ## Build wheel, sdist and the images' bills of materials into dist/
	$(BIN)/hatchling build -d dist -t sdist -t wheel
	for image in operator sidecar trainer; do \
	  $(PYTHON) -m hack.release.sbom requirements/$$image.txt --name rtj-$$image > dist/rtj-$$image.cdx.json || exit 1; done

.PHONY: clean
clean: cluster-down ## Stop the cluster and remove what tools and runs have written
	rm -rf build dist site demo-out chaos-out drills-out bench/out .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
