# `make demo` runs the main job on a throwaway host, `make test` all tests. Both install what they need on Debian or
# Ubuntu as root, and say what is missing elsewhere.
PYTHON ?= python3
BIN := .venv/bin
export ANSIBLE_CONFIG := $(CURDIR)/ansible.cfg

.PHONY: demo test lint unit cases molecule e2e engine faults golden lock clean browser

.venv/.done: requirements.lock
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("needs Python 3.11: make PYTHON=/path/to/python3.11")'
	$(PYTHON) scripts/sandbox.py install
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	touch $@

demo: .venv/.done
	$(BIN)/python scripts/demo.py

test: .venv/.done browser
	$(BIN)/python scripts/test_stages.py

unit: browser
lint unit cases molecule e2e engine: .venv/.done
	$(BIN)/python scripts/test_stages.py $@

faults: .venv/.done
	$(BIN)/python scripts/faults.py

# The report's pages are tested in one.
browser:
	$(PYTHON) scripts/sandbox.py install --browser

golden: .venv/.done
	$(BIN)/python scripts/golden.py

lock: .venv/.done
	$(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
		--no-emit-find-links --no-header --no-annotate requirements.in -o requirements.lock

clean:
	for host in $$(ls .sandbox 2>/dev/null); do $(BIN)/python scripts/sandbox.py destroy $$host; done
	rm -rf .venv .artifacts
