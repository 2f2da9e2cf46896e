# tokrate: `make help` prints every target.
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup test lint types layers pytest demo bench clean \
	test-torchtune test-torchtitan test-ray test-integrations

help: ## Print every target
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

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

# Frameworks that do not go together with the rest: each in an environment of its own.
.venvs/%/.installed: tests/integrations/envs/%.txt tools/env.sh pyproject.toml
	@sh tools/env.sh $(@D) $<
	@touch $@

test-torchtune: .venvs/torchtune/.installed ## Train with torchtune's own recipe, in .venvs/torchtune
	.venvs/torchtune/bin/python -m pytest tests/integrations/envs/test_torchtune.py

test-torchtitan: .venvs/torchtitan/.installed ## Train with torchtitan on the CPU, in .venvs/torchtitan (5 GB)
	.venvs/torchtitan/bin/python -m pytest tests/integrations/envs/test_torchtitan.py

test-ray: .venvs/ray/.installed ## Train with Ray on two workers that fail, in .venvs/ray
	.venvs/ray/bin/python -m pytest tests/integrations/envs/test_ray.py

test-integrations: setup ## All integrations, the last three above included
	$(PY) -m pytest tests/integrations
	@$(MAKE) test-torchtune
	@$(MAKE) test-ray
	@$(MAKE) test-torchtitan

.venvs/bench/.installed: benchmarks/peers.txt tools/env.sh pyproject.toml
	@sh tools/env.sh $(@D) $<
	@touch $@

# One peer asks for another torch. Where that cannot be installed, it is left out.
.venvs/composer/.installed: benchmarks/composer.txt tools/env.sh pyproject.toml
	@sh tools/env.sh $(@D) $< || { rm -rf $(@D); mkdir -p $(@D); echo "composer is left out"; }
	@touch $@

bench: .venvs/bench/.installed .venvs/composer/.installed ## Measure beside peers, write docs/reference/performance.md
	.venvs/bench/bin/python benchmarks/performance/run.py

clean: ## Remove .venv, .venvs and what runs left behind
	rm -rf $(VENV) .venvs .pytest_cache .mypy_cache .ruff_cache .hypothesis demo-runs runs
