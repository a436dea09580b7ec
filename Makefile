# make demo and make test do everything on a fresh machine; see `make help`.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
JOBS ?= 2
# pip, not uv: only pip finds the CPU build of torch that some machines carry on disk.
PIP := $(PY) -m pip --disable-pip-version-check install -q
# The oldest and the newest Triton that the kernels support, for ahead-of-time compilation.
TRITONS := 3.4.0 3.9.0

.DEFAULT_GOAL := help
.PHONY: help setup tritons sync build demo test test-targets test-gpu lint format publish-local bench tables tune clean

help: ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

$(VENV)/.ready: requirements-dev.txt
	@echo "installing the development set into $(VENV) (a few minutes the first time)"
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v <= (3, 13) else f"Python 3.10 to 3.13 is needed, PYTHON={sys.executable} is {v[0]}.{v[1]}")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) -r requirements-dev.txt
	touch $@

$(VENV)/triton-%/.ready: $(VENV)/.ready
	rm -rf $(@D)
	$(PIP) --no-deps --target $(@D) triton==$*
	touch $@

setup: $(VENV)/.ready ## create .venv with the locked development set

tritons: $(TRITONS:%=$(VENV)/triton-%/.ready)

sync: setup ## copy shared/ into each kernel's _shared/
	$(PY) scripts/sync_shared.py

build: setup ## build every kernel into <kernel>/build
	$(PY) scripts/build.py

demo: setup ## build, publish to a loopback Hub, load with get_kernel, compare with fp64
	$(PY) scripts/demo.py

# A process a core: threads of their own would only wait for each other. Some tests take minutes,
# so a process that has none left takes over another's.
PYTEST := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist worksteal

test: setup tritons build ## the tests that need no GPU; each GPU's code by one of two Tritons
	$(PYTEST) -m "not gpu and not whole_matrix"
	TRITON_INTERPRET=1 $(PYTEST) -m "not gpu" $(wildcard */tests)

test-targets: setup tritons ## compile for each GPU with the Triton that `make test` leaves out
	$(PYTEST) -m whole_matrix tests

test-gpu: ## the kernels' tests on the GPU at hand, with the Python at hand (PY=python3)
	$(PY) scripts/build.py
	$(PY) -m pytest $(wildcard */tests)
	@if command -v compute-sanitizer >/dev/null; then \
	  compute-sanitizer --tool memcheck --error-exitcode 1 $(PY) -m pytest -q -m kernels_ci $(wildcard */tests); \
	else echo "compute-sanitizer is not here: its check was not made"; fi

lint: setup ## ruff, mypy, and the copies of shared/
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) scripts/sync_shared.py --check
	$(PY) scripts/tables.py --check

format: setup ## let ruff rewrite what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

publish-local: setup ## publish to the Hub in .local-hub; `scripts/hub.py serve` serves it
	$(PY) scripts/hub.py run -- $(PY) scripts/publish.py --allow-dirty

bench: ## time the kernels beside their peers on the GPU at hand (PY=python3)
	$(PY) scripts/bench.py

tables: setup ## draw the measured tables of the documents from docs/results.json
	$(PY) scripts/tables.py

tune: ## search the launch configurations of this GPU (PY=python3)
	$(PY) scripts/tune.py

clean: ## remove what was built and downloaded, .venv included
	rm -rf $(VENV) .local-hub .pytest_cache .mypy_cache .ruff_cache .hypothesis $(wildcard */build)
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
