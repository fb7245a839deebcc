# Two commands matter: `make demo` and `make test`. Each sets up all it needs; a second run does not reinstall.
PY := .venv/bin/python
SHELL := bash
.DEFAULT_GOAL := help

.PHONY: help gpu-check setup setup-core demo demo-quick dumps test test-quick check fuzz-plan fuzz-wire bench-plan bench-costs bench-ttft bench-verify load-routers rolling-upgrade mutants format faults soak model-check test-vllm test-release contract

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 16

setup:  ## install all into .venv, vLLM for the CPU among it; the targets below do it by themselves
	@scripts/setup.sh full

setup-core:  ## the same without vLLM
	@scripts/setup.sh core

demo: setup  ## real vLLM prefill and decode engines joined by kvferry, compared with one engine
	@start=$$SECONDS; $(PY) -m kvferry.cli demo; rc=$$?; echo "make demo took $$((SECONDS - start)) s"; exit $$rc

demo-quick: setup-core  ## the same job in seconds, without vLLM
	@$(PY) -m kvferry.cli demo --no-vllm

check: setup  ## lint, types, import contracts
	@.venv/bin/ruff check . && .venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports --no-logo 2>/dev/null || .venv/bin/lint-imports

format:  ## lint fixes and formatting, in place
	@.venv/bin/ruff check --fix . ; .venv/bin/ruff format .

test: setup  ## everything: checks, unit, property, conformance and real-vLLM tests
	@start=$$SECONDS; $(MAKE) --no-print-directory check && $(PY) -m pytest --durations=20; rc=$$?; \
	  echo "make test took $$((SECONDS - start)) s"; exit $$rc

test-quick: setup  ## without the real-vLLM tests
	@$(PY) -m pytest -m "not vllm"

# Modes on the support page. (Not all: a line there names the command for what this run leaves out.)
MODE_TESTS := $(addprefix tests/vllm/,test_rare_caches.py test_replicas.py test_pipeline.py test_modes.py test_modes_live.py \
  test_requests_live.py test_small_pools.py test_both_roles.py test_verify.py test_aborts.py test_abort_storm.py \
  test_prefill_gone.py test_shutdown.py test_scheduler.py test_startup.py test_releases.py \
  layouts/test_families.py layouts/test_extract.py)
test-vllm: setup .venv-router/bin/vllm-router  ## pairs of real engines over the whole covering array, then docs/support.md from the results
	@start=$$SECONDS; mkdir -p build; rm -f build/cells.jsonl build/tests.jsonl; \
	  $(PY) -m pytest tests/vllm/test_cells.py tests/vllm/test_cells_serve.py tests/vllm/test_rolling.py \
	    tests/vllm/test_drafts.py tests/vllm/test_data_parallel.py tests/vllm/test_upstream.py \
	    tests/vllm/test_upstream_prefixes.py tests/vllm/test_upstream_pipeline.py tests/vllm/test_load_routers.py \
	    $(MODE_TESTS) \
	    --cells all --cell-results build/cells.jsonl --test-results build/tests.jsonl; rc=$$?; \
	  $(PY) scripts/make_support.py --results build/cells.jsonl --tests build/tests.jsonl && echo "make test-vllm took $$((SECONDS - start)) s"; exit $$rc

contract: setup  ## RELEASE=0.33.0: what that vLLM release asks of a connector, for tests/vllm/test_contract.py
	@$(PY) -m kvferry.testing.vllm_contract tests/vllm/contract $(RELEASE)

RELEASE ?= 0.33.0
test-release: setup  ## RELEASE=0.33.0: real engines over the Python of another vLLM release, and between it and the installed one
	@$(PY) -m kvferry.testing.vllm_overlay build $(RELEASE)
	@$(PY) -m pytest --cells all tests/vllm/test_releases_live.py
	@PYTHONPATH=$(CURDIR)/build/vllm-$(RELEASE) $(PY) -m pytest tests/vllm tests/protocol/test_upstream_wire.py

START ?= 0
COUNT ?= 100000
fuzz-plan: setup  ## random pairs against the oracle, seeds START.. (COUNT of them)
	@$(PY) -m kvferry.testing.fuzz_plan --start $(START) --count $(COUNT)

COUNT_WIRE ?= 1000000
fuzz-wire: setup  ## bad bytes into every decoder, inputs START.. (COUNT_WIRE of them)
	@$(PY) -m kvferry.testing.fuzz_wire --start $(START) --count $(COUNT_WIRE)

bench-plan: setup  ## planning speed, against vLLM's own connector
	@$(PY) -m pytest benchmarks/bench_plan.py -p no:cacheprovider --benchmark-columns=min,median,rounds -q -s

bench-costs: setup  ## what descriptors and bytes cost on this machine, for each transport
	@$(PY) benchmarks/bench_costs.py 2> /dev/null

bench-verify: setup  ## what comparing pages costs: one transfer with verify off, sample and full
	@$(PY) benchmarks/bench_verify.py 2> /dev/null

bench-ttft: setup  ## time to first token of a pair, against one engine and vLLM's own connector: docs/ttft.md
	@$(PY) benchmarks/bench_ttft.py

.venv-router/bin/vllm-router: packaging/vllm-router/requirements.txt
	@python3 -m venv .venv-router && .venv-router/bin/pip install -q -r packaging/vllm-router/requirements.txt && touch $@

load-routers: setup .venv-router/bin/vllm-router  ## 200 mixed requests through both routers, three times: kvferry at both ends, or vLLM's at one
	@$(PY) scripts/load_routers.py

rolling-upgrade: setup  ## a fleet moves from vLLM's own connector to kvferry under load, one process at a time
	@$(PY) scripts/rolling_upgrade.py

dumps: setup  ## layouts of five real vLLM models, planned by kvferry and by vLLM's own connector: docs/dumps.md
	@$(PY) scripts/dumps.py

mutants: setup  ## small faults put into plan/ and layout/, one at a time: which ones no test notices
	@nice $(PY) scripts/mutants.py

faults: setup  ## inject every fault into real processes: docs/faults.md
	@$(PY) scripts/faults.py --jobs $(or $(JOBS),3)

SECONDS_OF_SOAK ?= 600
SOAK_OVER ?= cma
soak: setup  ## ten minutes of mixed load with faults, then an audit (SECONDS_OF_SOAK=60 for one)
	@$(PY) -m kvferry.testing.soak --seconds $(SECONDS_OF_SOAK) --transport $(SOAK_OVER) --page docs/soak.md

gpu-check: setup  ## what only a GPU can show; on a machine without one it says what it skipped
	@$(PY) scripts/gpu_check.py

model-check: setup  ## small worlds of the protocol, explored without gaps: docs/model-check.md
	@$(PY) scripts/model_check.py
