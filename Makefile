# Two commands do everything on a fresh machine with Python 3.11 and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
SPARK_STAMP := $(VENV)/.stamp-spark
FUZZ_STAMP := $(VENV)/.stamp-fuzz
export PYTHONSAFEPATH := 1
# Tests start hundreds of processes: without stored bytecode each of them compiles the whole package.
unexport PYTHONDONTWRITEBYTECODE
UV := $(shell command -v uv 2>/dev/null)

JVM := build/jvm
INTEROP := build/interop

SEEDS ?= 1000
FIRST ?= 1

.PHONY: help setup setup-spark demo test lint format bench bench-kafka sim mutants explore crashes chaos requirements fuzz interop-clients interop-jvm proto docs build clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(STAMP) ## create .venv with pinned versions and the package in it

$(STAMP): pyproject.toml setup.py constraints.txt log/kernel.py client/producer/fast_path.py $(wildcard log/kernel.pxd client/producer/fast_path.pxd)
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
setup-spark: $(SPARK_STAMP) ## install PySpark into .venv: 456 MB, once

$(SPARK_STAMP): constraints.txt | $(STAMP)
	@$(BIN)/python -c "import pyspark" 2>/dev/null || echo "Downloading PySpark, once: 456 MB, and 490 MB on disk."
ifneq ($(UV),)
	@$(UV) pip install -q --python $(BIN)/python -c constraints.txt --group spark
else
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --group spark
endif
	@touch $@

# Without a Java nothing is downloaded, and the second act says what to install.
demo: setup ## start three nodes, kill the leader, count the records; then read them with Spark
	@$(BIN)/python -m tidelog demo
	@if $(BIN)/python -m tidelog.spark.java >/dev/null 2>&1; then $(MAKE) --no-print-directory setup-spark || true; fi
	@$(BIN)/python -m tidelog demo spark

# The tests of clusters wait for most of their time. WORKERS=2 suits a machine that does other work, too.
test: setup interop-clients $(if $(REQUIRE_SPARK),setup-spark) ## the whole suite; its budget is 10 minutes on 2 quiet cores
	$(BIN)/python -m pytest -n $(or $(WORKERS),3) --dist worksteal

lint: setup ## ruff, retired words, mypy --strict, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python tests/words.py
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## format the code and apply safe fixes of ruff
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup ## run the benchmarks, as ratios within one run; writes build/bench.json
	PYTHONSAFEPATH= $(BIN)/python -m bench # bench/ is no installed package: found from here

fuzz: $(FUZZ_STAMP) ## coverage-guided fuzzing of every reader, then mutated logs and requests: MINUTES=n of each, TARGET=name
	@PYTHONPATH=tests $(BIN)/python -m fuzz $(if $(MINUTES),--minutes $(MINUTES)) $(if $(TARGET),--target $(TARGET))
	$(if $(TARGET),,FUZZ_MUTATIONS=$${FUZZ_MUTATIONS:-200000} $(BIN)/python -m pytest -n 2 tests/unit/log tests/unit/kafka -k mutated --timeout 3600)

$(FUZZ_STAMP): constraints.txt | $(STAMP)
ifneq ($(UV),)
	$(UV) pip install -q --python $(BIN)/python -c constraints.txt --group fuzz
else
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --group fuzz
endif
	@touch $@

# Tests of these clients are skipped, by name, where the toolchain is missing or cannot fetch them.
interop-clients: $(INTEROP)/.stamp ## build the Go and Node.js Kafka clients of the tests, where the toolchains are installed

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

bench-kafka: setup $(JVM)/.stamp ## compare with three nodes of Kafka 4.3.1 (Java, Maven), half an hour
	$(BIN)/python -m bench.against_kafka

interop-jvm: setup $(JVM)/.stamp ## run Kafka's own tools against a cluster (Java, Maven); not part of make test
	KAFKA_CLIENTS_JAR=$(CURDIR)/$(JVM)/definitions/kafka-clients.jar KAFKA_TOOLS=$(CURDIR)/$(JVM)/tools \
		$(BIN)/python -m pytest tests/jvm

$(JVM)/.stamp: tests/jvm/pom.xml
	@command -v java >/dev/null || { echo "make interop-jvm: there is no java here; Kafka's tools want 17 or newer"; exit 1; }
	@command -v mvn >/dev/null || { echo "make interop-jvm: there is no mvn here; Maven fetches Kafka's tools"; exit 1; }
	rm -rf $(JVM)
	mvn -B -q -f tests/jvm/pom.xml generate-resources || \
		{ echo "make interop-jvm: Maven could not fetch what tests/jvm/pom.xml names; its own words are above"; exit 1; }
	@touch $@

sim: setup ## simulate clusters: SEED=n shows one run, SEEDS=n FIRST=k (or MINUTES=m) runs many; STACK, DEFECTS
	@PYTHONPATH=tests $(BIN)/python -m simulation $(if $(SEED),--seed $(SEED),$(if $(MINUTES),--minutes $(MINUTES),--seeds $(SEEDS))) \
		--first $(FIRST) $(if $(FAULTS),--faults $(FAULTS)) $(if $(STACK),--stack $(STACK)) $(if $(DEFECTS),--defects)

crashes: setup ## strike every operation of several files at every call, with a crash, an error, a crash and another: MODE, SHARE=1/20
	@PYTHONPATH=tests $(BIN)/python -m support.crashes $(if $(MODE),--mode $(MODE)) $(if $(SHARE),--share $(SHARE))

mutants: setup ## put small defects into modules and show what notices each: MODULE, SAMPLE=n, SEED=k, SEEDS=n, BY=simulation|tests|all|recorded|reach
	@PYTHONPATH=tests $(BIN)/python -u -m mutants --module "$(MODULE)" --by $(or $(BY),all) \
		$(if $(filter command line,$(origin SEEDS)),--seeds $(SEEDS)) $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(SEED),--sample-seed $(SEED)) \
		$(if $(MATCH),--match "$(MATCH)") $(if $(TEST_SECONDS),--test-seconds $(TEST_SECONDS)) $(if $(AGAIN),--again)

explore: setup ## visit every state that the pure cores can reach within bounds: STATES=n of each exploration, ONLY=name
	@PYTHONPATH=tests $(BIN)/python -m exploration $(if $(STATES),--states $(STATES)) $(if $(ONLY),--only $(ONLY))

chaos: setup ## real nodes and clients under faults; root: installs what is missing by apt; MINUTES=n, SEED=k repeats a plan, PIPELINES=tidelog,confluent
	@tests/chaos/setup.sh
	@PYTHONPATH=tests:tests/cluster $(BIN)/python -m chaos --minutes $(or $(MINUTES),5) $(if $(SEED),--seed $(SEED)) \
		$(if $(TIMELINE),--timeline) $(if $(PIPELINES),--pipelines $(PIPELINES)) $(if $(CLIENTS),--clients $(CLIENTS)) \
		$(if $(QUIET),--quiet $(QUIET)) $(if $(PAUSE),--pause $(PAUSE)) $(if $(KINDS),--kinds $(KINDS)) $(if $(SMALL),--small)

requirements: setup ## list the requirements: proved by a test, rejected, or open
	@$(BIN)/python tests/requirements.py

proto: setup ## generate the Python code of rpc/v1/*.proto and docs/api.md
	$(BIN)/python -m grpc_tools.protoc -I src --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
		--python_out=src --mypy_out=quiet:src src/tidelog/rpc/v1/*.proto
	$(BIN)/python -m tidelog.rpc.api_docs > docs/api.md

docs: setup ## generate docs/api.md, docs/python.md and docs/requirements.md
	$(BIN)/python -m tidelog.rpc.api_docs > docs/api.md
	$(BIN)/python -m tidelog.client.api_docs > docs/python.md
	$(BIN)/python tests/requirements.py --output markdown > docs/requirements.md

build: setup ## build wheel and sdist into dist/
	$(BIN)/python -m build --no-isolation

clean: ## remove everything that make created
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name '*.so' -not -path './.venv/*' -delete
