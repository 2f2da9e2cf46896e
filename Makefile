# tokrate: `make help` prints every target.
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup test lint types layers pytest demo bench clean

help: ## Print every target
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(STAMP) ## Build .venv with everything (skipped when it is current)

$(STAMP): pyproject.toml tools/setup.sh
	@sh tools/setup.sh $(VENV)
	@touch $@

demo: setup ## Train a small model on real text and see the four numbers
	$(VENV)/bin/tokrate demo --dir demo-runs

test: setup lint types layers pytest ## All checks

lint: setup
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check

types: setup
	$(VENV)/bin/mypy

layers: setup
	$(VENV)/bin/lint-imports

pytest: setup
	$(PY) -m pytest

bench: setup ## Measure our cost against named baselines
	@for f in benchmarks/bench_*.py; do $(PY) $$f || exit 1; done

clean: ## Remove .venv and what runs left behind
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis demo-runs runs
