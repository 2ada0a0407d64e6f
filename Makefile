# `make help` lists what there is. `make demo` and `make test` install what they need on Debian or Ubuntu as root, and say
# what is missing elsewhere.
PYTHON ?= python3
BIN := .venv/bin
export ANSIBLE_CONFIG := $(CURDIR)/ansible.cfg

.PHONY: help venv demo test lint unit molecule e2e engine faults golden lock clean packages browser
.NOTPARALLEL:

help: ## this list
	@sed -nE 's/^([a-z0-9 ]+):[^#]*## (.*)/\1|\2/p' Makefile | while IFS='|' read -r name text; do \
		printf '%-34s %s\n' "make $$name" "$$text"; done

venv: .venv/.done ## Ansible and the controller's tools in .venv, at the versions of requirements.lock; needs no root
	@echo "ready: . .venv/bin/activate"

.venv/.done: requirements.lock
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("needs Python 3.11: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	touch $@

demo: packages .venv/.done ## the main job on a throwaway host: install, serve, swap (six minutes)
	$(BIN)/python scripts/demo.py

test: packages .venv/.done browser ## all stages, in two lanes side by side, as CI runs them
	$(BIN)/python scripts/test_stages.py

lint: .venv/.done ## one stage
	$(BIN)/python scripts/test_stages.py lint

unit: browser
unit molecule e2e engine: packages .venv/.done ## the same; several: make lint unit
	$(BIN)/python scripts/test_stages.py $@

faults: packages .venv/.done ## the whole fault matrix and the random swaps (77 minutes); writes docs/faults.md
	$(BIN)/python scripts/faults.py

golden: .venv/.done ## render the golden units again
	$(BIN)/python scripts/golden.py

lock: .venv/.done ## pin what requirements.in names, with hashes
	$(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
		--no-emit-find-links --no-header --no-annotate requirements.in -o requirements.lock

clean: ## remove the throwaway hosts, .venv and .artifacts
	for host in $$(ls .sandbox 2>/dev/null); do $(BIN)/python scripts/sandbox.py destroy $$host; done
	rm -rf .venv .artifacts

# What throwaway hosts need of this machine, and the virtualenv too.
packages:
	$(PYTHON) scripts/sandbox.py install

# The report's pages are tested in one.
browser:
	$(PYTHON) scripts/sandbox.py install --browser
