# Each target works on a fresh machine: it makes .venv first if it is not there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# PyTorch's CUDA build on an emulated device, of the version TORCH; see docs/without_a_gpu.md
PINNED := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH ?= $(PINNED)
STACK := .venv-cuda-stack$(patsubst %,-%,$(filter-out $(PINNED),$(TORCH)))
# What torch.compile makes kernels with, of the version that this torch asks for.
TRITON_OF_TORCH := "from importlib.metadata import requires; print(*(one.partition(';')[0] for one in requires('torch') if one.startswith('triton')))"
# Each process of that environment loads the emulated CUDA before torch.
STACK_HOOK := import adaptive_batch.emulate.process; adaptive_batch.emulate.process.install()

.PHONY: compare demo demo-lora demo-dpo test test-all nightly check docs notebooks measure format test-install test-readme test-browser cuda-stack cuda-stack-all test-versions

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[recipes,report,docs,dev]"
	touch $@

# The demo needs less than the tests do: what is installed for these serves it too.
DEMO := $(or $(wildcard $(INSTALLED)),$(VENV)/.installed-demo)

$(VENV)/.installed-demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[recipes,report]"
	touch $@

demo: $(DEMO)  ## find the largest batch, train, grow, compare the tuned model with the base
	$(BIN)/python examples/demo

demo-lora: $(DEMO)  ## adapters on the model that the demo has tuned, which comes first
	test -d adaptive_batch_demo/tuned/epoch_2 || $(BIN)/python examples/demo
	$(BIN)/python examples/demo --lora

demo-dpo: $(DEMO)  ## preference pairs on the model that the demo has tuned, which comes first
	test -d adaptive_batch_demo/tuned/epoch_2 || $(BIN)/python examples/demo
	$(BIN)/python examples/demo --dpo

PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal
ELSEWHERE := gpu or cuda_stack or readme or browser or install

test: $(INSTALLED)  ## some of everything that needs no GPU, in minutes
	$(PYTEST) -m "not (slow or nightly or $(ELSEWHERE))"

test-all: $(INSTALLED)  ## what CI runs of what needs no GPU, neither a browser nor the pages' commands
	$(PYTEST) -m "not (nightly or $(ELSEWHERE))"

nightly: $(INSTALLED) cuda-stack-all  ## what CI leaves out: more cases of what it runs, and more random examples
	HYPOTHESIS_PROFILE=nightly $(PYTEST) -m "nightly or hypothesis"

$(STACK)/.installed: constraints.txt
	test -x $(STACK)/bin/python || $(PYTHON) -m venv $(STACK)
	grep -v '^torch==' constraints.txt > $(STACK)/others.txt
	$(STACK)/bin/python -m pip install --quiet --no-deps "torch===$(TORCH)" --requirement $(STACK)/others.txt
	$(STACK)/bin/python -c $(TRITON_OF_TORCH) | xargs $(STACK)/bin/python -m pip install --quiet --no-deps
	$(STACK)/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

$(STACK)/.built: $(STACK)/.installed adaptive_batch/emulate/process.py
	echo "$(STACK_HOOK)" > $$($(STACK)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/cuda_stack.pth
	$(STACK)/bin/python -c "import torch"
	touch $@

cuda-stack: $(STACK)/.built  ## what PyTorch's CUDA build does, on a machine without a GPU; a minute or two of setting up, 2.3 GB
	$(STACK)/bin/python -m pytest -n 2 --dist worksteal -m "cuda_stack and not slow"

cuda-stack-all: $(STACK)/.built
	$(STACK)/bin/python -m pytest -m cuda_stack

test-versions: $(INSTALLED)  ## the core's tests on each version of torch and Python that is declared; a venv of 2 GB for each
	$(BIN)/python tests/support/torch_versions.py

check: $(INSTALLED)  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-install: $(INSTALLED)  ## the wheel in a new environment; a minute or two of downloading
	$(BIN)/python -m pytest -m install tests/project/test_packaging.py

test-readme: $(INSTALLED)  ## each command and Python block of the pages
	$(PYTEST) -m readme

test-browser: $(INSTALLED)  ## the report in headless Chromium, which must be on PATH
	$(BIN)/python -m pytest -m browser

notebooks: $(INSTALLED)  ## run the notebooks of examples/, and write what they print into them
	$(BIN)/python docs/tools/notebooks.py

docs: $(INSTALLED)  ## the site, into site/, with every link checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# DeepSpeed, whose functions are run from their source: without its dependencies, and kept apart.
PEERS := .venv-peers
DEEPSPEED := 0.19.8

$(PEERS)/.deepspeed-$(DEEPSPEED):
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --no-deps deepspeed==$(DEEPSPEED)
	touch $@

compare: $(INSTALLED) $(PEERS)/.deepspeed-$(DEEPSPEED)  ## peers and this project on the same tasks; draws docs/comparison.md; five minutes on two cores
	$(BIN)/python benchmarks/compare.py

measure: $(INSTALLED) $(STACK)/.built  ## the long benchmarks, beside what they compare with; writes benchmarks/results/
	$(BIN)/python examples/demo
	for name in search traceless parity faults throughput step_overhead kills parity_adapters parity_tasks parity_on_ranks faults_on_ranks resume_across_ranks published search_in_trainers split_check; do $(BIN)/python benchmarks/$$name.py || exit 1; done
	for name in traceless faults; do $(BIN)/python benchmarks/$$name.py --adapters && $(BIN)/python benchmarks/$$name.py --tasks || exit 1; done
	$(BIN)/python benchmarks/parity_adapters.py --ranks
	$(STACK)/bin/python benchmarks/cuda_stack.py --only cases
	$(STACK)/bin/python benchmarks/cuda_stack.py --only compiled
