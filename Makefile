# make help says what there is. All of it works in .venv, which merit_lab/bootstrap.py sets up and repairs.

# The first Python that is new enough; `make PYTHON=/path/to/python …` names another.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

BIN := .venv/bin
SHELL := /bin/sh
# Else, where it is set, each process compiles torch's source again: three times as long to start.
export PYTHONDONTWRITEBYTECODE =
.DEFAULT_GOAL := help
.PHONY: help lab test notebooks bench sweep evidence gpu lint doctor setup text clean

help: ## this list
	@echo "make TARGET, where TARGET is one of"
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-12s %s\n", $$1, $$2 }'
	@echo "The first call sets up .venv (some minutes, needs the network); later ones take seconds."

lab: setup text ## open JupyterLab on the first notebook (PORT=8888; HEADLESS=1 opens no browser)
	@$(BIN)/jupyter lab --ServerApp.ip=127.0.0.1 --ServerApp.port=$(or $(PORT),8888) \
		$(if $(PORT),--ServerApp.port_retries=0) \
		$(if $(filter-out 0,$(HEADLESS)),--no-browser) \
		$(if $(filter 0,$(shell id -u)),--allow-root) \
		--LabApp.news_url=None --LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate \
		--LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb

# One thread a worker: two workers share two cores. The notebooks' stored outputs were made so too.
test: setup text lint ## lint, tests and notebooks (a part: make test ARGS="tests/test_files.py")
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadscope --nbval $(or $(ARGS),tests notebooks)

notebooks: setup text ## execute the notebooks, store them, show what changed (NAMES="02_lamb 03_merit")
	@OMP_NUM_THREADS=1 $(BIN)/python -m merit_lab.notebooks run $(NAMES)

bench: setup text ## time, memory and traffic beside named peers, and what looking costs; writes data/bench/ (ARGS=steps)
	@$(BIN)/python -m merit_lab.bench $(ARGS)

# Without setup: such a machine often has its own torch, and no network.
SWEEPS := ladder forward fused noise batch_nano batch_micro habits longer

sweep: setup text ## make the recorded sweeps anew, in results/sweeps (hours; a second call goes on where it was)
	@$(BIN)/python -m merit_lab sweep $(SWEEPS:%=data/sweeps/%.toml) --out results/sweeps $(ARGS)
	@$(BIN)/python -m merit_lab.one_step --out results/sweeps
	@echo 'Now they are the evidence: make evidence ARGS="--runs results/sweeps --out results/evidence"'

evidence: setup ## ledger, tables and figures from the recorded sweeps; no run is made
	@$(BIN)/python -m merit_lab.evidence $(ARGS)

gpu: ## on a CUDA machine, in 8 minutes: GPU tests, a benchmark, larger runs; writes data/runs/gpu/
	@$(or $(wildcard $(BIN)/python),$(PYTHON),python3) -m merit_lab.gpu $(ARGS)

lint: setup ## check the style of all Python, the notebooks' too
	@$(BIN)/ruff check

doctor: setup ## is this environment fit? each line says [ok] or what to do
	@$(BIN)/python -m merit_lab doctor

setup: ## set up or repair .venv alone
	@python="$(PYTHON)"; \
	if [ -z "$$python" ]; then \
		echo "No Python >= 3.11 was found. Install one, or name one: make PYTHON=/path/to/python"; exit 1; fi; \
	if ! $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
		echo "$$python does not run or is older than 3.11. Name another: make PYTHON=/path/to/python"; exit 1; fi; \
	$$python -P merit_lab/bootstrap.py

text: setup
	@$(BIN)/python -m merit_lab text shakespeare

clean: ## remove .venv, caches and prepared texts (recorded runs and results stay)
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist data/cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
