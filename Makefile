# `make lab` opens the first lesson, `make test` runs every test. Both make .venv and install what is missing, once.
#
#   make lab PYTHON=python3.12      choose the Python (3.10 to 3.13)
#   make lab TORCH_INDEX=address    take PyTorch from another index, say its CPU builds (README, "A smaller PyTorch on Linux")

PYTHON ?=
TORCH_INDEX ?=
NOTEBOOK ?= notebooks/00_start_here.ipynb
VENV := .venv
RUN := $(VENV)/bin/python
IN_RANGE := import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))

# The kernels of this environment come before any that the user has installed for all of theirs.
export JUPYTER_PREFER_ENV_PATH := 1

.DEFAULT_GOAL := help
.PHONY: help lab test lint format notebooks exercises bench clean venv course course-with-tests

help:
	@echo "make lab        open the first lesson in JupyterLab (NOTEBOOK=... for another)"
	@echo "make test       run every test"
	@echo "make lint       look for mistakes and wrong formatting; make format mends the formatting"
	@echo "make notebooks  run the lessons and solutions and store their outputs"
	@echo "make exercises  make the exercises from the solutions"
	@echo "make bench      print the benchmarks' ratios"
	@echo "make clean      delete .venv and caches"

lab: course
	@root=; if [ "$$(id -u)" = 0 ]; then root=--allow-root; fi; exec $(RUN) -m jupyterlab $$root --ServerApp.root_dir=. "$(NOTEBOOK)"

test: course-with-tests
	@$(RUN) -m pytest

lint: course-with-tests
	@$(RUN) -m ruff check . && $(RUN) -m ruff format --check .

format: course-with-tests
	@$(RUN) -m ruff check --fix . && $(RUN) -m ruff format .

notebooks: course-with-tests
	@$(RUN) tests/store_outputs.py

exercises: course-with-tests
	@$(RUN) tests/make_exercises.py

bench: course-with-tests
	@for file in tests/benchmarks/*.py; do \
	  case "$$file" in */_*|*conftest.py) continue;; esac; echo "== $$file"; $(RUN) "$$file" || exit 1; done

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache build ./*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp holds what it was made from and where: a changed list of packages or a moved folder installs again, nothing else does.
course: venv
	@made_from="$$(pwd) $$(cat requirements.txt | cksum)"; \
	if [ "$$(cat $(VENV)/course.stamp 2>/dev/null)" = "$$made_from" ]; then exit 0; fi; \
	echo "Installing the course into $(VENV) (once; PyTorch is large, so this takes minutes)"; \
	if [ -n "$(TORCH_INDEX)" ]; then \
	  $(RUN) -m pip install --quiet --index-url "$(TORCH_INDEX)" "$$(grep '^torch' requirements.txt | sed 's/ *#.*//')" || exit 1; fi; \
	$(RUN) -m pip install --quiet -r requirements.txt && printf '%s' "$$made_from" > $(VENV)/course.stamp

course-with-tests: course
	@made_from="$$(pwd) $$(cat requirements.txt pyproject.toml | cksum)"; \
	if [ "$$(cat $(VENV)/tests.stamp 2>/dev/null)" = "$$made_from" ]; then exit 0; fi; \
	echo "Installing what the tests need into $(VENV) (once)"; \
	$(RUN) -m pip install --quiet -e ".[test]" && printf '%s' "$$made_from" > $(VENV)/tests.stamp

# An environment that stands is kept, also one that you made yourself, unless it is broken or PYTHON asks for another version.
venv:
	@same="import sys; sys.exit('%d.%d' % sys.version_info[:2] != sys.argv[1])"; \
	if $(RUN) -c "$(IN_RANGE)" 2>/dev/null; then \
	  if [ -z "$(PYTHON)" ]; then exit 0; fi; \
	  $(RUN) -c "$$same" "$$("$(PYTHON)" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" && exit 0; \
	fi; \
	found=; bare=; \
	for name in $(if $(PYTHON),"$(PYTHON)",python3 python3.12 python3.13 python3.11 python3.10 python); do \
	  "$$name" -c "$(IN_RANGE)" >/dev/null 2>&1 || continue; \
	  "$$name" -c "import venv, ensurepip" >/dev/null 2>&1 || { bare="$$name"; continue; }; \
	  found="$$name"; break; \
	done; \
	if [ -z "$$found" ] && [ -n "$$bare" ]; then \
	  echo "$$bare cannot make environments: its modules venv and ensurepip are missing."; \
	  echo "On Debian and Ubuntu: sudo apt install python3-venv   Then run this command again."; exit 1; \
	fi; \
	if [ -z "$$found" ]; then \
	  echo "No Python from 3.10 to 3.13 $(if $(PYTHON),in PYTHON=$(PYTHON),was found)."; \
	  echo "Install one, or name one that you have: make $(or $(MAKECMDGOALS),lab) PYTHON=/path/to/python3.12"; exit 1; \
	fi; \
	echo "Making $(VENV) with $$("$$found" --version)"; \
	rm -f $(VENV)/course.stamp $(VENV)/tests.stamp; \
	"$$found" -m venv --clear $(VENV)
