# Two commands do everything on a fresh machine: `make demo` and `make test`.
VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.installed

.PHONY: demo test test-slow lint types ui clean

demo: $(READY)
	$(BIN)/workbench sweep sweeps/quickstart.yaml
	@echo
	@echo "Look at the runs: $(BIN)/workbench ui, then open the address it prints."

test: $(READY)
	$(BIN)/pytest -m "not slow" -n 2

test-slow: $(READY)
	$(BIN)/pytest -m slow

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

ui: $(READY)
	$(BIN)/workbench ui

# Machines with a GPU: install torch first, then `pip install -e .` without the constraints.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
