# Two commands matter: `make demo` and `make test`. Each sets up all it needs; a second run does not reinstall.
PY := .venv/bin/python
SHELL := bash
.DEFAULT_GOAL := help

.PHONY: help setup setup-core demo demo-quick test test-quick check fuzz-plan bench-plan bench-costs mutants format faults soak model-check

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 16

setup:
	@scripts/setup.sh full

setup-core:
	@scripts/setup.sh core

demo: setup  ## real vLLM prefill and decode engines joined by kvferry, compared with one engine
	@start=$$SECONDS; $(PY) -m kvferry.cli demo; rc=$$?; echo "make demo took $$((SECONDS - start)) s"; exit $$rc

demo-quick: setup-core  ## the same job in seconds, without vLLM
	@$(PY) -m kvferry.cli demo --no-vllm

check: setup  ## lint, types, import contracts
	@.venv/bin/ruff check . && .venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports --no-logo 2>/dev/null || .venv/bin/lint-imports

format:
	@.venv/bin/ruff check --fix . ; .venv/bin/ruff format .

test: setup  ## everything: checks, unit, property, conformance and real-vLLM tests
	@start=$$SECONDS; $(MAKE) --no-print-directory check && $(PY) -m pytest; rc=$$?; \
	  echo "make test took $$((SECONDS - start)) s"; exit $$rc

test-quick: setup  ## without the real-vLLM tests
	@$(PY) -m pytest -m "not vllm"

START ?= 0
COUNT ?= 100000
fuzz-plan: setup  ## random pairs against the oracle, seeds START.. (COUNT of them)
	@$(PY) -m kvferry.testing.fuzz_plan --start $(START) --count $(COUNT)

bench-plan: setup  ## planning speed, against vLLM's own connector
	@$(PY) -m pytest benchmarks/bench_plan.py -p no:cacheprovider --benchmark-columns=min,median,rounds -q -s

bench-costs: setup  ## what descriptors and bytes cost on this machine, for each transport
	@$(PY) benchmarks/bench_costs.py 2> /dev/null

dumps: setup  ## layouts of five real vLLM models, planned by kvferry and by vLLM's own connector: docs/dumps.md
	@$(PY) scripts/dumps.py

mutants: setup  ## small faults put into plan/ and layout/, one at a time: which ones no test notices
	@nice $(PY) scripts/mutants.py

faults: setup  ## inject every fault into real processes: docs/faults.md
	@$(PY) scripts/faults.py --jobs $(or $(JOBS),3)

SECONDS_OF_SOAK ?= 600
soak: setup  ## ten minutes of mixed load with faults, then an audit (SECONDS_OF_SOAK=60 for one)
	@$(PY) -m kvferry.testing.soak --seconds $(SECONDS_OF_SOAK)

model-check: setup  ## small worlds of the protocol, explored without gaps
	@$(PY) -m kvferry.testing.explore
