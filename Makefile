# One virtual environment, made once and used by every target.
PYTHON ?= python3.11
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.ready

PORT ?= 30000
MODEL ?=
ARGS ?=
WORKERS ?= 2
SSD_DIR ?= $(CURDIR)/build/ssd
SSD_SIZE ?= 512MiB

.PHONY: setup serve test kernels eval eval-quick lint format clean help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## build .venv (sglang, this package, the openai client, the test tools)

$(STAMP): pyproject.toml
	command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) is missing: install it or set PYTHON=..."; exit 2; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip
	@echo 'installing SGLang and the test tools: about 11 GB, some minutes'
	$(PY) -m pip install --progress-bar on --editable '.[test]'
	touch $@

serve: $(STAMP) ## serve the demo model, or MODEL=... on PORT=... with ARGS="..."
	mkdir -p $(dir $(SSD_DIR))
	$(PY) -m sglang_histate.launch_server $(if $(MODEL),--model-path $(MODEL),--demo) --port $(PORT) \
		--histate-ssd-dir $(SSD_DIR) --histate-ssd-size $(SSD_SIZE) $(ARGS)

test: $(STAMP) ## run all tests that this machine can run, WORKERS=2 at a time
	$(PY) -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder

kernels: $(STAMP) ## compile the CUDA kernels for sm_80, sm_90 and sm_100; fails if one spills registers
	$(PY) -m kernels.build

# Recorded sessions are no part of this repository: TRACES is where weka_cc/w125.json and its trace are.
# RESULTS is where tables and plots go.
TRACES ?= ../shared/traces
EVAL := build/eval
RESULTS ?= $(EVAL)/report
SHARES := 2.5 5 7.5 10
W125_RUNS := $(if $(wildcard $(TRACES)/weka_cc/w125.json),w125-60 w125-600)
EVAL_RUNS := $(W125_RUNS) codex $(addprefix rewriting-,$(SHARES))
SIMULATE = $(PY) -m eval.simulate --traces $(TRACES) --out $(EVAL)

eval: $(STAMP) ## simulate every system on every workload; tables, plots and build/eval/summary.json
	rm -rf $(addprefix $(EVAL)/,$(EVAL_RUNS))
ifdef W125_RUNS
	$(SIMULATE)/w125-60 --workload w125 --cap 60
	$(SIMULATE)/w125-600 --workload w125 --cap 600
else
	@echo "w125 is left out: there is no $(TRACES)/weka_cc/w125.json; TRACES=DIR names its folder"
endif
	$(SIMULATE)/codex --workload codex --cap 60
	for share in $(SHARES); do \
		$(SIMULATE)/rewriting-$$share --workload rewriting --share $$share --cap 60 || exit; \
	done
	$(PY) -m eval.metrics $(addprefix $(EVAL)/,$(EVAL_RUNS)) --json $(EVAL)/summary.json
	for run in $(EVAL_RUNS); do \
		$(PY) -m eval.report $(EVAL)/$$run --name $$run --out $(RESULTS) || exit; \
	done

eval-quick: $(STAMP) ## HiState against HiCache on real servers, 10 minutes on 2 cores; build/eval-quick/summary.json
	$(PY) -m eval.replay.quick --out build/eval-quick

lint: $(STAMP) ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(STAMP) ## rewrite the sources in the project's format
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean: ## remove what these targets made
	rm -rf $(VENV) build kernels/lib
