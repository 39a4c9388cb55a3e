# Two commands for a new user: `make quickstart` and `make test`.  Both set up what they need.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
SEED   ?= 0
FULL   ?=

.PHONY: setup quickstart test test-vllm lint types docs drill bench-router bench-trl bench-async bench-decode bench-learning bench-simulate bench-sync compare-peers results clean

setup: $(STAMP)

# torch first and by exact version, so that no other package chooses its build.
$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Slipstream needs Python 3.11 or newer; set PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[torch,dev]'
	touch $(STAMP)

quickstart: $(STAMP)
	$(BIN)/slipstream quickstart --seed $(SEED) $(if $(FULL),--full)

test: $(STAMP)
	$(BIN)/python -m pytest -m "not proof and not vllm"

# Builds an environment of its own for vLLM on a CPU, on first use.
test-vllm: $(STAMP)
	$(BIN)/python -m slipstream.inference.launch.vllm_env
	$(BIN)/python -m pytest -m vllm -s

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	$(BIN)/mkdocs build --strict

# Kills, hangs, tears and fills what a run depends on, at random moments; writes benchmarks/results/drill.json.
drill: $(STAMP)
	$(BIN)/python -m pytest -m proof tests -s

bench-trl: $(STAMP)
	$(BIN)/python benchmarks/vs_trl.py

# Every preset on a small task, and corrections against stale samples; writes benchmarks/results/learning.json.
bench-learning: $(STAMP)
	$(BIN)/python benchmarks/learning.py

# Synchronous against asynchronous training on two cores; writes benchmarks/results/async.json.  Needs an idle machine.
bench-async: $(STAMP)
	$(BIN)/python benchmarks/async_vs_sync.py

bench-decode: $(STAMP)
	$(BIN)/python benchmarks/decode.py

bench-sync: $(STAMP)
	$(BIN)/python benchmarks/weight_sync.py

# Routing policies over stub engines, behind the real router and simulated.
bench-router: $(STAMP)
	$(BIN)/python benchmarks/router.py

bench-simulate: $(STAMP)
	$(BIN)/python benchmarks/simulate.py

# The same random batches through this library, TRL and verl; makes an environment for the two on first use.
compare-peers: $(STAMP)
	$(BIN)/python benchmarks/compare_peers.py

# Quickstart over three seeds, short and full; rewrites docs/results.md.
results: $(STAMP)
	$(BIN)/python benchmarks/quickstart_seeds.py

clean:
	rm -rf $(VENV) site runs .pytest_cache .mypy_cache .ruff_cache
