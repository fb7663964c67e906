# make run: the demonstration, in an environment of its own. make test: the tests. make test-all: those of minutes, too.
# The environment has weft and weft-studies. It is set up again only when a pyproject.toml or constraints.txt has changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROJECT := pyproject.toml studies/pyproject.toml constraints.txt
PIP_INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt

# setuptools comes first and builds without isolation, so that its version is a pinned one too.
define install
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) setuptools
	$(PIP_INSTALL) --no-build-isolation --editable $(1) --editable ./studies
	touch $@
endef

# Whatever the shell says: the tests start hundreds of processes, and each would compile the tree anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test test-slow test-all recipes integrations test-gpu mutate lint types size docs ledger site audit clean

run: $(VENV)/.set-up-run
	$(BIN)/weft run llama3-8b --ranks 4 --report out/

# On all cores: tests/conftest.py says by how many processes.
PYTEST := $(BIN)/python -m pytest -q -n auto --dist worksteal --durations 25

test: $(VENV)/.set-up-test
	$(PYTEST) -m "not slow"

# Of the tests that `test` leaves out, those of some folders or files. None selected (5) is right, too.
OF ?= tests
test-slow: $(VENV)/.set-up-test
	$(PYTEST) -m "slow and not gpu" $(OF) || [ $$? -eq 5 ]

# What `test` leaves out, too: campaigns, the wheel and a newcomer's environment, all kernels for all GPUs; and the mutants.
test-all: $(VENV)/.set-up-test
	WEFT_ORACLE=50000 $(PYTEST)
	$(MAKE) mutate

# The recipes with the real packages, which lie in a folder of their own.
recipes: $(VENV)/.set-up-test
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target out/recipes --requirement examples/recipes/requirements.txt
	PYTHONPATH=out/recipes $(BIN)/python -m pytest -q -m slow tests/project/test_recipes.py

# The plug-in for vLLM with the real package, which lies in a folder of its own, on CPU ranks. VLLM is a wheel or what pip calls one.
VLLM ?= vllm==0.33.0
integrations: $(VENV)/.set-up-test
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target out/integrations --requirement integrations/vllm/requirements.txt
	test -d out/integrations/vllm || $(BIN)/python -m pip install --quiet --no-deps --target out/integrations "$(VLLM)"
	PYTHONPATH=integrations/vllm:out/integrations $(BIN)/python -m pytest -q integrations/vllm/tests

# Those of tests/gpu, on a machine with two or more GPUs: two files at a time on each pair.
test-gpu: $(VENV)/.set-up-test
	$(BIN)/python tests/gpu/on_pairs.py

# Whether the tests notice the bugs of tests/mutants.
mutate: $(VENV)/.set-up-test
	$(BIN)/python tests/mutants/mutate.py

lint: $(VENV)/.set-up-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.set-up-dev
	$(BIN)/mypy

# Files, lines and code lines of each room of the package, and of the studies, tests and benchmarks.
size:
	$(PYTHON) tests/project/size.py

# The parts of README.md and docs/ that code writes: timelines, counts, the chart.
docs: $(VENV)/.set-up-run
	$(BIN)/python docs/kept_accuracy.py
	$(BIN)/python docs/generate.py

# Where each published figure is from, and how much of the code behind it has changed since.
ledger: $(VENV)/.set-up-test
	$(BIN)/python docs/ledger.py

# The documentation as a site, in out/site: nothing is fetched when it is read.
site: $(VENV)/.set-up-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# Known faults of what is installed (where the registry tells them), secrets in the tree, and wheels that can be built.
audit: $(VENV)/.set-up-audit
	$(BIN)/pip-audit --requirement constraints.txt --no-deps --disable-pip --progress-spinner off 2>&1 | tail -n 3
	$(BIN)/detect-secrets-hook $$(git ls-files -- ':!*.png' ':!*.jsonl')
	$(BIN)/python -m build --no-isolation --outdir out/dist . >out/build.log
	$(BIN)/python -m build --no-isolation --outdir out/dist studies >>out/build.log

clean:
	rm -rf $(VENV) out build dist *.egg-info studies/build studies/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.set-up-run: $(PROJECT)
	$(call install,.)

$(VENV)/.set-up-test: $(PROJECT)
	$(call install,".[test]")

$(VENV)/.set-up-dev: $(PROJECT)
	$(call install,".[dev]")

$(VENV)/.set-up-docs: $(PROJECT)
	$(call install,".[docs]")

$(VENV)/.set-up-audit: $(PROJECT)
	$(call install,".[audit]")
