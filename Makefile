# Every command makes the virtual environment and installs what it needs first; stamp files inside
# the environment keep the second call fast.

VENV ?= .venv
DEMO_CONFIG ?= configs/digits.py
DEMO_KINDS ?= softmax,linear,cumulant2,cumulant3,tssa
DEMO_SEEDS ?= 0,1
DEMO_DIRECTORY ?= runs/digits
# Such as --docs docs/kernels.md, see python -m experiments.inspect_kernels --help.
INSPECT_OPTIONS ?=

python := $(VENV)/bin/python
pip_install := $(python) -m pip install --disable-pip-version-check --progress-bar off
created := $(VENV)/.created
demo_installed := $(VENV)/.demo-installed
dev_installed := $(VENV)/.dev-installed

.DEFAULT_GOAL := help
.PHONY: demo test lint format inspect-kernels clean help FORCE

## demo: compare the attention kinds on the digits; writes runs/digits/report.html
demo: $(demo_installed)
	$(python) -m experiments.compare --config $(DEMO_CONFIG) --kinds $(DEMO_KINDS) \
		--seeds $(DEMO_SEEDS) --directory $(DEMO_DIRECTORY)

## test: run every test (not those marked slow)
test: $(dev_installed)
	$(python) -m pytest -n 2

## lint: check style, formatting and types
lint: $(dev_installed)
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m pyright --pythonpath $(python)

## format: mend style and formatting where it can be done automatically
format: $(dev_installed)
	$(python) -m ruff check --fix .
	$(python) -m ruff format .

## inspect-kernels: compile every kernel for an H100 and three TPUs, none of which is needed; 6 GB
inspect-kernels: $(demo_installed)
	$(python) -m experiments.inspect_kernels $(INSPECT_OPTIONS)

## clean: remove the environments and the caches (runs stay)
clean:
	rm -rf $(VENV) .environments build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

## help: list these commands
help:
	@sed -n 's/^## \([a-z-]*\): \(.*\)/make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-22s%s\n", $$1, $$2 }'

# An environment whose interpreter is gone (an upgraded system, a moved checkout) is made anew.
$(created): .python-version $(if $(wildcard $(python)),,FORCE)
	@interpreter=$$(sh scripts/find_python.sh) && \
		echo "Creating $(VENV) with $$interpreter" && \
		"$$interpreter" -m venv --clear $(VENV) && touch $@

$(demo_installed): $(created) setup.py
	$(pip_install) --editable ".[analysis]"
	@touch $@

$(dev_installed): $(created) setup.py
	$(pip_install) --editable ".[dev]"
	@touch $(demo_installed) $@
