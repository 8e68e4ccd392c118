# Every target works in a fresh clone: what it needs is installed into .venv first.
#
#   make demo    a small model served with and without the cache
#   make test    check, then all tests, in JOBS processes (default 3, for two cores)
#   make test-engines  the tests with real engines, vLLM and SGLang, in .venv-engines beside .venv
#   make test-models   a small model of each supported kind on vLLM, in .venv-engines
#   make examples-peers  the examples beside other projects, NIXL and AIBrix, in .venv-peers beside .venv
#   make quick   after each change: ruff, and the tests without servers and without long ones, in 1.5 to 2 minutes
#   make check   ruff, mypy and the import layers
#   make soak    all tests, the random ones for longer: SOAK_FACTOR (default 20) times as many examples and seeds
#   make hostile some minutes (HOSTILE_MINUTES, default 10) each of hostile servers and of hostile clients: memory stays flat
#   make faults  engines and a daemon under a schedule of faults, for MINUTES (default 3); the log is in faults.log
#   make shared  shared files on two GlusterFS clients, and KILLS (default 300) kills of nodes on mounts of KIND (bindfs)
#   make docs    the documentation as a site, in build/site
#   make wheel   what an index accepts, in DIST (default dist): source and a pure wheel of both packages, and the wheel of
#                hicache with the native helper
#   make bench   the benchmarks, as ratios; PEER=DIR adds SGLang's tree core from its unpacked wheel
#   make bench-engines  beside the engines' own offloading, in .venv-engines
#   make gpu     the tests and benchmarks that need a CUDA device; GPU_PYTHON=python3 where torch is installed already
#   make clean   removes .venv, .venv-engines, .venv-peers, caches and what the demo left behind

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := test

VENV := .venv
BIN := $(VENV)/bin
ENGINES := .venv-engines
PEERS := .venv-peers
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# With this set, each process that a test starts would compile the package again.
unexport PYTHONDONTWRITEBYTECODE
SOAK_FACTOR ?= 20
HOSTILE_MINUTES ?= 10
MINUTES ?= 3
KILLS ?= 300
KIND ?= bindfs
GPU_PYTHON ?=
GPU_TESTS := tests/gpu tests/tiers tests/test_attention.py tests/controller lab/tests/engine
PYTEST_ARGS ?=
DIST ?= dist
# Tests wait for servers a quarter of their time, so for two cores there is one process more; engines always compute. A
# file of tests stays in one process, so that its module and its servers are set up once.
JOBS ?= 3
ENGINE_JOBS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
DEMO_ARGS ?=

.PHONY: demo test test-engines test-models examples-peers quick check soak hostile faults shared bench bench-engines gpu \
  docs wheel clean

demo: $(VENV)/.demo-stamp
	$(BIN)/hicache demo $(DEMO_ARGS)

test: check
	$(PYTEST) --durations=30 $(PYTEST_ARGS)

# A file of tests has its engines one after another. A few kinds of models are enough here.
test-engines: $(ENGINES)/.stamp
	$(ENGINES)/bin/python -m pytest -n $(ENGINE_JOBS) --dist loadfile --durations=30 -m "not all_models" \
	  tests/engines tests/models $(PYTEST_ARGS)

test-models: $(ENGINES)/.stamp
	$(ENGINES)/bin/python -m pytest -n $(ENGINE_JOBS) --dist load --durations=30 tests/models $(PYTEST_ARGS)

# Installed from copies, because building a package leaves files in its directory.
examples-peers: $(PEERS)/.stamp
	rm -rf $(PEERS)/examples
	mkdir $(PEERS)/examples
	cp -R examples/nixl_backend examples/aibrix_connector $(PEERS)/examples
	$(PIP_INSTALL) --no-deps --no-index --no-build-isolation --upgrade $(PEERS)/examples/* \
	  --target "$$($(PEERS)/bin/python -c 'import site; print(site.getsitepackages()[0])')"
	$(PEERS)/bin/python -m pytest --durations=5 examples/nixl_backend examples/aibrix_connector $(PYTEST_ARGS)

quick: $(VENV)/.test-stamp
	$(BIN)/ruff check .
	$(PYTEST) -q -m "not servers and not long" $(PYTEST_ARGS)

check: $(VENV)/.test-stamp
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

soak: $(VENV)/.test-stamp
	SOAK_FACTOR=$(SOAK_FACTOR) $(PYTEST) --timeout=0 $(PYTEST_ARGS)

hostile: $(VENV)/.test-stamp
	$(BIN)/python -m tests.hostile --minutes $(HOSTILE_MINUTES)
	$(BIN)/python -m tests.daemon.hostile --minutes $(HOSTILE_MINUTES)

faults: $(VENV)/.test-stamp
	$(BIN)/python -m tests.soak_faults --minutes $(MINUTES) --log faults.log

# As root, on a machine with FUSE and the packages bindfs and glusterfs-server; otherwise the tests skip and say why.
shared: $(VENV)/.test-stamp
	SHARED_KILLS=$(KILLS) SHARED_KIND=$(KIND) $(BIN)/python -m pytest -s --durations=10 tests/shared_mounts $(PYTEST_ARGS)

bench: $(VENV)/.test-stamp
	$(BIN)/python -m lab.benchmarks $(if $(PEER),--peer $(PEER))

bench-engines: $(ENGINES)/.stamp
	$(ENGINES)/bin/python -m lab.benchmarks.engines

gpu: export PYTHONPATH := lab/src
gpu: $(if $(GPU_PYTHON),,$(VENV)/.test-stamp)
	$(or $(GPU_PYTHON),$(BIN)/python) -m pytest -p no:cacheprovider -m cuda $(GPU_TESTS) $(PYTEST_ARGS)
	$(or $(GPU_PYTHON),$(BIN)/python) -m lab.benchmarks.copies --device cuda

docs: $(VENV)/.test-stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open build/site/index.html; with a search: python3 -m http.server --bind 127.0.0.1 --directory build/site 8000"

# The pure wheels are made from the source packages, so that these are known to be whole. The name of the one with the
# helper says which systems it runs on, and auditwheel refuses a name that is not true: 2_17 is the oldest glibc that
# loads it.
wheel: $(VENV)/.test-stamp
	rm -f $(DIST)/hicache*.whl $(DIST)/hicache*.tar.gz
	HICACHE_NATIVE=0 $(BIN)/python -m build --outdir $(DIST) .
	$(BIN)/python -m build --outdir $(DIST) lab
	$(BIN)/python -m build --wheel --outdir $(DIST)/native .
	for wheel in $(DIST)/native/*-linux_*.whl; do
	  if [ -e "$$wheel" ]; then
	    PATH="$$PWD/$(BIN):$(BIN):$$PATH" $(BIN)/auditwheel repair --only-plat \
	      --plat "manylinux_2_17_$$(uname -m)" --wheel-dir $(DIST) "$$wheel"
	  else
	    echo "no C compiler: there is only the pure wheel, which works the same" >&2
	  fi
	done
	rm -rf $(DIST)/native
	$(BIN)/twine check --strict $(DIST)/hicache*

clean:
	rm -rf $(VENV) $(ENGINES) $(PEERS) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist demo-data replay-data .demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.demo-stamp: pyproject.toml lab/pyproject.toml constraints.txt hatch_build.py $(wildcard native/*.c) | $(BIN)/python
	@echo "installing the dependencies into $(VENV); torch takes a few minutes the first time"
	$(PIP_INSTALL) -e . -e lab
	touch $@

# Has all that the demo needs as well.
$(VENV)/.test-stamp: pyproject.toml lab/pyproject.toml constraints.txt hatch_build.py $(wildcard native/*.c) | $(BIN)/python
	@echo "installing the dependencies into $(VENV); torch takes a few minutes the first time"
	$(PIP_INSTALL) -e ".[redis,s3,mooncake-cpu,daemon,events,compression,tracing,dev]" -e "lab[dev-servers]"
	$(BIN)/python -m hicache_lab.devservers.install_libraries || echo "the tests that need them will fail until then" >&2
	touch $@ $(VENV)/.demo-stamp

# Sees the packages of .venv, so that torch is there once, and adds those of the engines. hicache is imported from here.
$(ENGINES)/.stamp: constraints.txt $(wildcard tests/engines/requirements-*.txt) | $(VENV)/.test-stamp
	@trap '[ $$? = 0 ] || echo "the engines could not be installed into $(ENGINES): their tests did not run" >&2' EXIT
	echo "installing vLLM, SGLang and the indexer of Dynamo into $(ENGINES): 2.0 GB, some minutes the first time"
	$(BIN)/python -m venv --clear $(ENGINES)
	$(BIN)/python -c 'import os, site; print(site.getsitepackages()[0], os.path.abspath("lab/src"), sep="\n")' \
	  > "$$($(ENGINES)/bin/python -c 'import site; print(site.getsitepackages()[0])')/shared.pth"
	$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  $(patsubst %,-r %,$(filter-out constraints.txt,$^))
	touch $@

# As the environment of the engines.
$(PEERS)/.stamp: examples/requirements-peers.txt | $(VENV)/.test-stamp
	@trap '[ $$? = 0 ] || echo "NIXL and AIBrix could not be installed into $(PEERS): their tests did not run" >&2' EXIT
	echo "installing NIXL and AIBrix's KV cache into $(PEERS): 0.3 GB"
	$(BIN)/python -m venv --clear $(PEERS)
	$(BIN)/python -c 'import os, site; print(site.getsitepackages()[0], os.path.abspath("lab/src"), sep="\n")' \
	  > "$$($(PEERS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/shared.pth"
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	touch $@

# Debian and Ubuntu ship Python without the part that makes environments, and a failed attempt leaves half of one.
$(BIN)/python:
	@python=
	for candidate in $(PYTHON) python3 python3.13 python3.12 python3.11; do
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$candidate; break; fi
	done
	if [ -z "$$python" ]; then
	  echo "hicache needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3" >&2; exit 1
	fi
	if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
	    export DEBIAN_FRONTEND=noninteractive
	    apt-get update -qq </dev/null && apt-get install -y -qq python3-venv </dev/null >/dev/null
	  else
	    echo "this Python cannot make environments; run: sudo apt-get install python3-venv" >&2; exit 1
	  fi
	fi
	"$$python" -m venv --clear $(VENV)

.ONESHELL:
