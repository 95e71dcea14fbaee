# One virtual environment, made once and used by every target.
PYTHON ?= python3.11
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.ready

PORT ?= 30000
MODEL ?=
ARGS ?=
SSD_DIR ?= $(CURDIR)/build/ssd
SSD_SIZE ?= 512MiB

.PHONY: setup serve test lint format clean help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## build .venv (sglang, this package, the openai client, the test tools)

$(STAMP): pyproject.toml
	command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) is missing: install it or set PYTHON=..."; exit 2; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip
	$(PY) -m pip install --quiet --editable '.[test]'
	touch $@

serve: $(STAMP) ## serve the demo model, or MODEL=... on PORT=... with ARGS="..."
	mkdir -p $(dir $(SSD_DIR))
	$(PY) -m sglang_histate.launch_server $(if $(MODEL),--model-path $(MODEL),--demo) --port $(PORT) \
		--histate-ssd-dir $(SSD_DIR) --histate-ssd-size $(SSD_SIZE) $(ARGS)

test: $(STAMP) ## run all tests that this machine can run
	$(PY) -m pytest

lint: $(STAMP) ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(STAMP) ## rewrite the sources in the project's format
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean: ## remove what these targets made
	rm -rf $(VENV) build
