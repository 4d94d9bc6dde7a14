# Targets for people; each first makes ./.venv if it is missing.
ifndef PYTHON
PYTHON := $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
endif
VENV_PYTHON := .venv/bin/python
ARGS ?=
export NO_MKDOCS_2_WARNING := 1
unexport PYTHONDONTWRITEBYTECODE # images of containers set it; each process would compile its modules anew

.PHONY: help setup sweep test test-all test-slow test-torch fuzz docs check device clean

help:
	@echo "make sweep      set up, then sweep VGG19 over 16 budgets with every strategy"
	@echo "make test       set up, then run the short tests: every room, 3 to 6 minutes on two cores"
	@echo "make test-all   the short and the long tests: 25 minutes on two cores"
	@echo "make test-slow  the slow tests (up to an hour)"
	@echo "make test-torch TORCH=2.15.0  the tests of PyTorch with that version, in a temporary environment"
	@echo "make fuzz       test random modules, graphs, certificates and bounds against plain steps, brute force and plans (ARGS='--help' for more)"
	@echo "make check      lint and type checks"
	@echo "make docs       the documentation as a site, into site/ (.venv/bin/mkdocs serve: with search)"
	@echo "make device     planned steps on a GPU: memory, times, bits, largest batches, measured costs (ARGS='--help' for more)"
	@echo "make setup      only make the environment (PIP_ARGS='...' is passed to pip)"
	@echo "make clean      remove the environment and what was built"
	@echo "python run.py --help  every experiment: python run.py experiment=NAME (after make setup)"

setup:
	@test -n "$(PYTHON)" || { echo "setup: no Python 3.11 to 3.13 found; install one or run: make setup PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) tools/bootstrap.py

sweep: setup
	$(VENV_PYTHON) run.py model=vgg19 budget=sweep time_limit=10 $(ARGS)

test: setup
	$(VENV_PYTHON) -m pytest -n 2 --dist worksteal -m "not long and not slow" $(ARGS)

test-all: setup
	$(VENV_PYTHON) -m pytest -n 2 --dist worksteal $(ARGS)

test-slow: setup
	$(VENV_PYTHON) -m pytest -m slow $(ARGS)

test-torch:
	@test -n "$(PYTHON)" || { echo "test-torch: no Python 3.11 to 3.13 found" >&2; exit 1; }
	@$(PYTHON) tools/test_torch.py "$(TORCH)" $(ARGS)

fuzz: setup
	$(VENV_PYTHON) tests/fuzz.py $(ARGS)

docs: setup
	$(VENV_PYTHON) -m mkdocs build --strict $(ARGS)
	@echo "the site is in site/; open site/index.html"

check: setup
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .
	.venv/bin/lint-imports --no-logo --no-cache
	$(VENV_PYTHON) -m pyright

device: setup
	$(VENV_PYTHON) -m experiments.device $(ARGS)

clean:
	rm -rf .venv build dist site *.egg-info
