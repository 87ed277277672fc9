# Two commands do everything on a fresh machine with Python 3.11 and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
SPARK_STAMP := $(VENV)/.stamp-spark
export PYTHONSAFEPATH := 1
UV := $(shell command -v uv 2>/dev/null)

JVM := build/jvm
INTEROP := build/interop

SEEDS ?= 1000
FIRST ?= 1

.PHONY: help setup setup-spark demo test lint format bench sim chaos sources fuzz interop-clients interop-jvm proto docs build clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(STAMP) ## create .venv with pinned versions and the package in it

$(STAMP): pyproject.toml setup.py constraints.txt log/kernel.py client/hot.py $(wildcard log/kernel.pxd client/hot.pxd)
ifneq ($(UV),)
	@test -x $(BIN)/python || $(UV) venv -q --python $(PYTHON) $(VENV)
	$(UV) pip install -q --python $(BIN)/python -c constraints.txt --group dev
	$(UV) pip install -q --python $(BIN)/python -c constraints.txt --no-build-isolation -e .
else
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -U "pip>=25.1"
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --group dev
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-build-isolation -e .
endif
	@touch $@

# Apart from `setup`: 456 MB. The demo's second act wants it; `make test` only if REQUIRE_SPARK is set.
setup-spark: $(SPARK_STAMP) ## PySpark into .venv: a large download, once

$(SPARK_STAMP): constraints.txt | $(STAMP)
	@$(BIN)/python -c "import pyspark" 2>/dev/null || echo "Downloading PySpark, once: 456 MB, and 490 MB on disk."
ifneq ($(UV),)
	@$(UV) pip install -q --python $(BIN)/python -c constraints.txt --group spark
else
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --group spark
endif
	@touch $@

# Without a Java nothing is downloaded, and the second act says what to install.
demo: setup ## the main job, told in plain sentences; then Spark reads it
	@$(BIN)/python -m tidelog demo
	@if $(BIN)/python -m tidelog.spark.java >/dev/null 2>&1; then $(MAKE) --no-print-directory setup-spark || true; fi
	@$(BIN)/python -m tidelog demo spark

# WORKERS=3 takes three minutes less, and starves clusters on a machine that others use, too.
test: setup interop-clients $(if $(REQUIRE_SPARK),setup-spark) ## the whole suite, some 13 minutes on 2 cores
	$(BIN)/python -m pytest -n $(or $(WORKERS),2) --dist worksteal

lint: setup ## ruff, mypy --strict, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## let ruff rewrite the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup ## benchmarks, as ratios of one run; writes build/bench.json
	PYTHONSAFEPATH= $(BIN)/python -m bench # bench/ is no installed package: found from here

fuzz: setup ## mutated bytes, a long campaign
	FUZZ_MUTATIONS=$${FUZZ_MUTATIONS:-200000} $(BIN)/python -m pytest -n 2 tests/unit/log tests/unit/kafka -k mutated --timeout 3600

# Tests of these clients are skipped, by name, where the toolchain is missing or cannot fetch them.
interop-clients: $(INTEROP)/.stamp ## Kafka clients of Go and Node.js for the tests, where these are installed

$(INTEROP)/.stamp: $(wildcard tests/interop/go/*) $(wildcard tests/interop/node/*)
	@mkdir -p $(INTEROP)/node
	@if command -v go >/dev/null; then \
		cd tests/interop/go && go build -mod=readonly -o $(CURDIR)/$(INTEROP)/go-clients . || \
			echo "make interop-clients: Go's Kafka clients could not be built; their tests are skipped"; fi
	@if command -v npm >/dev/null; then \
		cp tests/interop/node/package.json $(INTEROP)/node/ && cd $(INTEROP)/node && \
			npm install --silent --no-package-lock --no-audit --no-fund || \
			echo "make interop-clients: Node.js's Kafka clients could not be installed; their tests are skipped"; fi
	@touch $@

interop-jvm: setup $(JVM)/.stamp ## Kafka's own tools, which need Java and Maven, at a cluster; not in make test
	KAFKA_CLIENTS_JAR=$(CURDIR)/$(JVM)/definitions/kafka-clients.jar KAFKA_TOOLS=$(CURDIR)/$(JVM)/tools \
		$(BIN)/python -m pytest tests/jvm

$(JVM)/.stamp: tests/jvm/pom.xml
	@command -v java >/dev/null || { echo "make interop-jvm: there is no java here; Kafka's tools want 17 or newer"; exit 1; }
	@command -v mvn >/dev/null || { echo "make interop-jvm: there is no mvn here; Maven fetches Kafka's tools"; exit 1; }
	rm -rf $(JVM)
	mvn -B -q -f tests/jvm/pom.xml generate-resources || \
		{ echo "make interop-jvm: Maven could not fetch what tests/jvm/pom.xml names; its own words are above"; exit 1; }
	@touch $@

sim: setup ## the whole cluster in one process: SEED=n shows one run, SEEDS=n FIRST=k (or MINUTES=m) runs many
	@PYTHONPATH=tests $(BIN)/python -m simulation $(if $(SEED),--seed $(SEED),$(if $(MINUTES),--minutes $(MINUTES),--seeds $(SEEDS))) \
		--first $(FIRST) $(if $(FAULTS),--faults $(FAULTS)) $(if $(STACK),--stack $(STACK)) $(if $(DEFECTS),--defects)

chaos: setup ## real nodes and clients under kills, freezes and full disks: MINUTES=n, SEED=k repeats a plan
	@PYTHONPATH=tests:tests/cluster $(BIN)/python -m chaos --minutes $(or $(MINUTES),5) $(if $(SEED),--seed $(SEED)) \
		$(if $(TIMELINE),--timeline)

sources: setup ## which items of the source inventories are proved, decided against, open
	@$(BIN)/python tests/sources.py

proto: setup ## make the Python code and the page docs/api.md of rpc/v1/*.proto anew
	$(BIN)/python -m grpc_tools.protoc -I src --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
		--python_out=src --mypy_out=quiet:src src/tidelog/rpc/v1/*.proto
	$(BIN)/python -m tidelog.rpc.api_docs > docs/api.md

docs: setup ## make the page docs/python.md of the docstrings anew
	$(BIN)/python -m tidelog.client.api_docs > docs/python.md

build: setup ## wheel and sdist into dist/
	$(BIN)/python -m build --no-isolation

clean: ## remove what make made
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name '*.so' -not -path './.venv/*' -delete
